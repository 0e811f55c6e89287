"""On a GPU the same spec gives the same training, in plain torch: CUDA kernels are not part of this version."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import rwkv_spec
from rwkv_spec.ops.dropout import dropout
from tests.tiny import tiny_spec

pytestmark = pytest.mark.gpu


def test_a_run_on_a_gpu_gives_the_losses_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gpu", "cpu"):
        (tmp_path / name).mkdir()
    on_gpu = rwkv_spec.run(tiny_spec(tmp_path / "gpu"))
    assert on_gpu.plan.backend == "torch" and next(on_gpu.model.parameters()).is_cuda
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    on_cpu = rwkv_spec.run(tiny_spec(tmp_path / "cpu"))
    for left, right in zip(on_gpu.metrics, on_cpu.metrics, strict=True):
        assert left.loss == pytest.approx(right.loss, rel=1e-4), left.step


def test_dropout_drops_the_same_elements_on_gpu_and_cpu() -> None:
    x, seeds = torch.ones(3, 50, 64), torch.tensor([1, 2, 3])
    on_gpu = dropout(x.cuda(), p=0.3, seed_B=seeds.cuda(), site=4)
    assert torch.equal(on_gpu.cpu(), dropout(x, p=0.3, seed_B=seeds, site=4))
