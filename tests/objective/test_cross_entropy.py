"""Cross-entropy as a weighted sum: torch's numbers, weights taken at their word, L2Wrap in the gradient alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import rwkv_spec.objective.cross_entropy as module
from rwkv_spec.objective.cross_entropy import cross_entropy


def _case(*, dtype: torch.dtype = torch.float64, vocab_size: int = 13) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = (4 * torch.randn(3, 5, vocab_size, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()
    targets = torch.randint(vocab_size, (3, 5), generator=generator)
    weights = torch.rand(3, 5, generator=generator)
    weights[0, 2:] = 0.0
    return logits, targets, weights


def _plain(logits: Tensor, targets: Tensor, weights: Tensor, l2wrap: float) -> tuple[Tensor, Tensor]:
    """The value that is reported, and one whose gradient has the regulariser: half its square, the place held fixed."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    value = (losses * weights).sum()
    largest = wide.gather(-1, wide.argmax(dim=-1, keepdim=True)).squeeze(-1)
    return value, value + (0.5 * l2wrap * largest.square() * weights).sum()


@pytest.mark.parametrize("l2wrap", [0.0, 0.3])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
@pytest.mark.parametrize("piece", [1 << 21, 30, 1])
@pytest.mark.parametrize("leaf", [True, False])
def test_value_and_gradient_are_the_plain_ones(
    monkeypatch: pytest.MonkeyPatch, l2wrap: float, dtype: torch.dtype, tolerance: float, piece: int, leaf: bool
) -> None:
    monkeypatch.setattr(module, "_PIECE", piece)
    logits, targets, weights = _case(dtype=dtype)
    value, weight = cross_entropy(logits if leaf else logits * 1, targets, weights, l2wrap=l2wrap)
    (grad,) = torch.autograd.grad(value * 0.7, [logits])
    plain_value, regularised = _plain(logits, targets, weights.double(), l2wrap)
    (plain_grad,) = torch.autograd.grad(regularised * 0.7, [logits])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert value.dtype == weight.dtype == wide
    assert grad.dtype == dtype
    assert float(value.detach()) == pytest.approx(float(plain_value.detach()), rel=min(tolerance, 1e-6))
    assert float(weight) == pytest.approx(float(weights.double().sum()), rel=1e-6)
    torch.testing.assert_close(grad.double(), plain_grad.double(), rtol=tolerance, atol=tolerance * 0.1)


def test_gradient_agrees_with_finite_differences() -> None:
    logits, targets, weights = _case()
    assert torch.autograd.gradcheck(lambda x: cross_entropy(x, targets, weights.double())[0], (logits,))


def test_l2wrap_pulls_the_first_largest_logit_and_leaves_the_value() -> None:
    logits = torch.tensor([[[1.0, 3.0, 3.0, 0.0]]], dtype=torch.float64, requires_grad=True)
    targets, weights = torch.tensor([[0]]), torch.tensor([[0.5]])
    plain, _ = cross_entropy(logits, targets, weights)
    wrapped, _ = cross_entropy(logits, targets, weights, l2wrap=0.1)
    assert float(plain.detach()) == float(wrapped.detach())
    (plain_grad,), (wrapped_grad,) = torch.autograd.grad(plain, [logits]), torch.autograd.grad(wrapped, [logits])
    assert (wrapped_grad - plain_grad).flatten().tolist() == pytest.approx([0.0, 3.0 * 0.1 * 0.5, 0.0, 0.0], abs=1e-15)


def test_the_first_of_many_equal_logits_is_pulled() -> None:
    logits = torch.full((1, 2, 5000), 2.0, requires_grad=True)
    value, _ = cross_entropy(logits, torch.full((1, 2), 4000), torch.ones(1, 2), l2wrap=1.0)
    (grad,) = torch.autograd.grad(value, [logits])
    assert (grad > 1.0).nonzero().tolist() == [[0, 0, 0], [0, 1, 0]]


@pytest.mark.parametrize("garbage", [1e30, float("nan"), float("inf")])
@pytest.mark.parametrize("leaf", [True, False])
def test_rows_of_weight_zero_are_not_looked_at(garbage: float, leaf: bool) -> None:
    logits, targets, weights = _case(dtype=torch.float32)
    with torch.no_grad():
        logits[0, 2:] = garbage
        logits[0, 3, 0] = -3e38
    targets[0, 2:] = -100
    value, _ = cross_entropy(logits if leaf else logits * 1, targets, weights, l2wrap=1e-4)
    (grad,) = torch.autograd.grad(value, [logits])
    kept, _ = cross_entropy(logits[:, :2], targets[:, :2], weights[:, :2])
    rest, _ = cross_entropy(logits[1:, 2:], targets[1:, 2:], weights[1:, 2:])
    assert float(value.detach()) == pytest.approx(float((kept + rest).detach()), rel=1e-6)
    assert bool((grad[0, 2:] == 0).all())
    assert bool(torch.isfinite(grad).all())


def test_a_batch_without_weight_gives_zero_and_no_nan() -> None:
    logits, targets, weights = _case()
    value, weight = cross_entropy(logits, targets, weights * 0)
    (grad,) = torch.autograd.grad(value, [logits])
    assert float(value.detach()) == float(weight) == 0.0
    assert bool((grad == 0).all())


def test_sums_of_parts_are_the_sum_of_the_whole() -> None:
    logits, targets, weights = _case()
    whole, weight = cross_entropy(logits, targets, weights)
    parts = [cross_entropy(logits[i : i + 1], targets[i : i + 1], weights[i : i + 1]) for i in range(3)]
    assert float(whole.detach()) == pytest.approx(sum(float(part.detach()) for part, _ in parts), rel=1e-12)
    assert float(weight) == pytest.approx(sum(float(w) for _, w in parts), rel=1e-12)


def test_very_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[[3e4, -3e4, 0.0]]], requires_grad=True)
    value, _ = cross_entropy(logits, torch.tensor([[1]]), torch.ones(1, 1))
    assert float(value.detach()) == pytest.approx(6e4)


def test_no_gradient_is_needed_for_an_evaluation() -> None:
    logits, targets, weights = _case()
    kept = logits.detach().clone()
    with torch.no_grad():
        cross_entropy(logits, targets, weights)
    assert torch.equal(logits, kept)


def test_a_leafs_values_survive_and_overwritten_logits_are_refused() -> None:
    logits, targets, weights = _case()
    kept = logits.detach().clone()
    cross_entropy(logits, targets, weights)[0].backward()
    assert torch.equal(logits, kept)
    made = logits * 1
    value, _ = cross_entropy(made, targets, weights)
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_shapes_that_do_not_belong_together_are_value_errors() -> None:
    with pytest.raises(ValueError, match="do not belong together"):
        cross_entropy(torch.zeros(2, 3, 5), torch.zeros(2, 4, dtype=torch.int64), torch.ones(2, 3))
