"""The breakdown of a step: known names, every microsecond once, forward and backward apart."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from rwkv_spec.benchmark.breakdown import PYTHON, breakdown, name_of
from rwkv_spec.model.build import build_model
from rwkv_spec.model.shapes import fresh_shape
from tests.model.models import loss_of

BACKWARD = "autograd::engine::evaluate_function: "


@pytest.mark.parametrize(
    ("chain", "name"),
    [
        (["aten::mm", "aten::matmul", "aten::linear"], "matrix products forward"),
        (["aten::mm", "MmBackward0", f"{BACKWARD}MmBackward0"], "matrix products backward"),
        (["aten::mm", "_NormMixBackward", f"{BACKWARD}_NormMixBackward"], "matrix products backward"),
        (["_NormMix"], "norm mix forward"),
        (["aten::empty", "_NormMixBackward", f"{BACKWARD}_NormMixBackward"], "norm mix backward"),
        (["rwkv_spec::wkv7_forward", "GeneratedBackwardFor_rwkv_spec_wkv7_forward_default"], "wkv7 forward"),
        (
            ["rwkv_spec::wkv6_backward", f"{BACKWARD}GeneratedBackwardFor_rwkv_spec_wkv6_forward_default"],
            "wkv6 backward",
        ),
        (["rwkv_spec::dropout"], "dropout forward"),
        (["aten::embedding_dense_backward", f"{BACKWARD}EmbeddingBackward0"], "embedding"),
        (
            ["aten::fill_", "aten::zero_", "aten::embedding_dense_backward", f"{BACKWARD}EmbeddingBackward0"],
            "embedding",
        ),
        (["aten::native_layer_norm", "aten::layer_norm"], "norms"),
        (["aten::_fused_adamw_", "Optimizer.step#AdamW.step"], "optimizer and clipping"),
        (["aten::linalg_vector_norm", "aten::_foreach_norm"], "optimizer and clipping"),
        (["aten::copy_", "aten::_to_copy", "aten::to"], "copies and fills"),
        (["aten::mul"], "other operators"),
    ],
)
def test_an_operator_bears_the_name_that_a_person_knows(chain: list[str], name: str) -> None:
    assert name_of(chain) == name


def test_shares_sum_to_one_and_name_what_a_step_does() -> None:
    model = build_model(fresh_shape("x070", n_layer=1, n_embd=32, head_size=16, vocab_size=11))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids_BT = torch.arange(32).view(2, 16) % 11

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss, _ = loss_of(model, ids_BT, ids_BT, torch.ones(2, 16))
        loss.backward()
        optimizer.step()

    step()
    shares = breakdown(step)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    wanted = {"matrix products forward", "matrix products backward", "embedding", "optimizer and clipping", PYTHON}
    assert wanted <= shares.keys() and all(0 <= share <= 1 for share in shares.values())
    assert {name for name in shares if name.startswith(("wkv", "matrix"))} >= wanted - {"embedding", PYTHON} - {
        "optimizer and clipping"
    }


def test_what_runs_outside_the_work_is_not_counted() -> None:
    with profile(activities=[ProfilerActivity.CPU]):
        torch.ones(4).exp()
    shares = breakdown(lambda: torch.ones(200, 200) @ torch.ones(200, 200))
    assert "matrix products forward" in shares and not any("exp" in name for name in shares)
