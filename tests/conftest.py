"""What all tests share: GPU tests skip where there is no GPU, and hypothesis draws the same examples on every run."""

from __future__ import annotations

import pytest
from hypothesis import settings

from rwkv_spec.process import wait_briefly

# Before anything imports torch, as the command line does: on a busy machine tests would else wait at every barrier.
wait_briefly()
settings.register_profile("same", derandomize=True, deadline=None, database=None)
settings.load_profile("same")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))
