"""softmax_loss: losses and gradients of rows of logits at their gates; ties, weights of zero, any width and threads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from rwkv_spec.errors import KernelError
from rwkv_spec.ops.softmax_loss import SOFTMAX_LOSS, softmax_loss, softmax_loss_reference
from tests.ops.cases import GATE, build_changed, compiled, error_ratio

L2WRAP = 0.3


def _case(rows: int, width: int, *, dtype: torch.dtype, scale: float = 4.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + width)
    logits = (scale * torch.randn(rows, width, generator=generator)).to(dtype)
    targets = torch.randint(width, (rows,), generator=generator)
    targets[0], targets[-1] = 0, width - 1
    return logits, targets, torch.rand(rows, generator=generator) + 0.1


def _wanted(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    wide = logits.double()
    loss = softmax_loss_reference(wide, targets, weights.double(), l2wrap=L2WRAP, want_gradient=True)
    return loss, wide


def test_the_reference_is_autograds_gradient_of_torchs_loss() -> None:
    logits, targets, weights = _case(9, 21, dtype=torch.float64)
    logits.requires_grad_()
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none") * weights
    pull = 0.5 * L2WRAP * logits.max(dim=1).values.square() * weights
    (gradient,) = torch.autograd.grad((losses + pull).sum(), [logits])
    loss, got = _wanted(logits.detach(), targets, weights.double())
    torch.testing.assert_close(loss, losses.detach())
    torch.testing.assert_close(got, gradient)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("width", [1, 2, 15, 16, 17, 361, 65536])
@pytest.mark.parametrize("rows", [1, 7, 17])
def test_loss_and_gradient_are_those_of_the_reference(rows: int, width: int, dtype: torch.dtype) -> None:
    logits, targets, weights = _case(rows, width, dtype=dtype)
    want_loss, want_gradient = _wanted(logits, targets, weights)
    loss = softmax_loss(logits, targets, weights, l2wrap=L2WRAP, want_gradient=True, backend="cpu")
    assert error_ratio(loss, want_loss) < 1e-6
    assert error_ratio(logits, want_gradient) < GATE[dtype]


@compiled
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_without_a_gradient_the_logits_stay(backend: str) -> None:
    logits, targets, weights = _case(9, 37, dtype=torch.float32)
    kept = logits.clone()
    loss = softmax_loss(logits, targets, weights, l2wrap=L2WRAP, want_gradient=False, backend=backend)
    assert torch.equal(logits, kept)
    assert error_ratio(loss, _wanted(kept, targets, weights)[0]) < 1e-6


@compiled
@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_a_row_of_weight_zero_adds_nothing_whatever_it_holds(garbage: float, backend: str) -> None:
    logits, targets, weights = _case(9, 37, dtype=torch.float32)
    logits[4], weights[4] = garbage, 0.0
    loss = softmax_loss(logits, targets, weights, l2wrap=L2WRAP, want_gradient=True, backend=backend)
    assert float(loss[4]) == 0.0 and not logits[4].any()
    assert bool(torch.isfinite(loss).all()) and bool(torch.isfinite(logits).all())


@compiled
@pytest.mark.parametrize("foreign", [-100, -1, 37, 1 << 40])
def test_a_target_outside_its_row_is_refused_before_anything_is_written(foreign: int) -> None:
    logits, targets, weights = _case(9, 37, dtype=torch.float32)
    kept = logits.clone()
    targets[4] = foreign
    with pytest.raises(KernelError, match=f"from 0 to 36, got {foreign}"):
        softmax_loss(logits, targets, weights, l2wrap=L2WRAP, want_gradient=True, backend="cpu")
    assert torch.equal(logits, kept)
    weights[4] = 0.0
    loss = softmax_loss(logits, targets, weights, l2wrap=L2WRAP, want_gradient=True, backend="cpu")
    assert float(loss[4]) == 0.0 and not logits[4].any()


@compiled
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_what_is_no_number_is_seen_in_the_loss(backend: str) -> None:
    for garbage in (float("nan"), float("inf")):
        logits, targets, weights = _case(3, 37, dtype=torch.float32)
        logits[1, 36] = garbage
        loss = softmax_loss(logits, targets, weights, l2wrap=L2WRAP, want_gradient=True, backend=backend)
        assert torch.isfinite(loss).tolist() == [True, False, True]


@compiled
@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("target", [0, 5, 30])
def test_the_first_of_the_largest_logits_is_pulled(target: int, backend: str) -> None:
    logits = torch.zeros(1, 37)
    logits[0, [5, 20, 36]] = 2.0
    targets, weights = torch.tensor([target]), torch.tensor([0.5])
    plain = logits.clone()
    softmax_loss(plain, targets, weights, l2wrap=0.0, want_gradient=True, backend=backend)
    softmax_loss(logits, targets, weights, l2wrap=L2WRAP, want_gradient=True, backend=backend)
    moved = (logits - plain)[0]
    assert moved.nonzero().tolist() == [[5]]
    assert float(moved[5]) == pytest.approx(0.5 * L2WRAP * 2.0, rel=1e-6)


@compiled
def test_large_logits_neither_overflow_nor_vanish() -> None:
    logits = torch.tensor([[3e4, -3e4, 0.0], [-3e4, -3e4, -3e4]])
    targets, weights = torch.tensor([1, 0]), torch.ones(2)
    loss = softmax_loss(logits, targets, weights, l2wrap=0.0, want_gradient=True, backend="cpu")
    assert loss.tolist() == pytest.approx([6e4, 1.0986123])
    assert logits[0].tolist() == pytest.approx([1.0, -1.0, 0.0])


@compiled
def test_no_bit_depends_on_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            logits, targets, weights = _case(65, 333, dtype=torch.float32)
            loss = softmax_loss(logits, targets, weights, l2wrap=L2WRAP, want_gradient=True, backend="cpu")
            results.append((loss, logits))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


MUTANTS = {
    "no maximum taken away": ("weight * (std::log(sum) + (largest - own))", "weight * (std::log(sum) - own)"),
    "the last columns left out": ("if (n < length) sum +=", "if (n > length) sum +="),
    "no target in the gradient": (" / sum - 1.0f)", " / sum)"),
    "no regulariser": ("const float pull = weight * l2wrap * largest;", "const float pull = 0.0f * l2wrap;"),
    "the weight left out of the gradient": ("largest, weight / sum);", "largest, 1.0f / sum);"),
}


@compiled
@pytest.mark.parametrize("right, wrong", list(MUTANTS.values()), ids=list(MUTANTS))
def test_a_build_that_computes_wrong_numbers_is_refused(right: str, wrong: str, tmp_path: Path) -> None:
    with pytest.raises(KernelError, match="computes wrong numbers"):
        build_changed("softmax_loss", tmp_path, right, wrong, SOFTMAX_LOSS.check)
