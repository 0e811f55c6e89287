"""Cross-entropy as a weighted sum: torch's numbers, weights taken at their word, L2Wrap in the gradient alone.

Most cases take the identity for the head, so that the hidden vectors are the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import rwkv_spec.objective.cross_entropy as module
from rwkv_spec.objective.cross_entropy import cross_entropy


def _of_logits(logits: Tensor, targets: Tensor, weights: Tensor, *, l2wrap: float = 0.0) -> tuple[Tensor, Tensor]:
    head = torch.eye(logits.shape[-1], dtype=logits.dtype)
    return cross_entropy(logits, head, targets, weights, l2wrap=l2wrap)


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
@pytest.mark.parametrize("piece", [1 << 21, 30, 1], ids=["whole", "two rows", "one row"])
def test_value_and_gradient_are_the_plain_ones(
    monkeypatch: pytest.MonkeyPatch, l2wrap: float, dtype: torch.dtype, tolerance: float, piece: int
) -> None:
    monkeypatch.setattr(module, "_LOGITS", piece)
    logits, targets, weights = _case(dtype=dtype)
    value, weight = _of_logits(logits, targets, weights, l2wrap=l2wrap)
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
    (grad,) = torch.autograd.grad(_of_logits(logits, targets, weights)[0], [logits])
    for place in ((0, 0, 3), (1, 2, int(targets[1, 2])), (2, 4, 12)):
        values = []
        for step in (1e-5, -1e-5):
            moved = logits.detach().clone()
            moved[place] += step
            values.append(float(_of_logits(moved, targets, weights)[0]))
        assert float(grad[place]) == pytest.approx((values[0] - values[1]) / 2e-5, abs=1e-8)


def test_l2wrap_pulls_the_first_largest_logit_and_leaves_the_value() -> None:
    logits = torch.tensor([[[1.0, 3.0, 3.0, 0.0]]], dtype=torch.float64, requires_grad=True)
    targets, weights = torch.tensor([[0]]), torch.tensor([[0.5]])
    plain, _ = _of_logits(logits, targets, weights)
    wrapped, _ = _of_logits(logits, targets, weights, l2wrap=0.1)
    assert float(plain.detach()) == float(wrapped.detach())
    (plain_grad,), (wrapped_grad,) = torch.autograd.grad(plain, [logits]), torch.autograd.grad(wrapped, [logits])
    assert (wrapped_grad - plain_grad).flatten().tolist() == pytest.approx([0.0, 3.0 * 0.1 * 0.5, 0.0, 0.0], abs=1e-15)


def test_the_first_of_many_equal_logits_is_pulled() -> None:
    logits = torch.full((1, 2, 5000), 2.0, requires_grad=True)
    value, _ = _of_logits(logits, torch.full((1, 2), 4000), torch.ones(1, 2), l2wrap=1.0)
    (grad,) = torch.autograd.grad(value, [logits])
    assert (grad > 1.0).nonzero().tolist() == [[0, 0, 0], [0, 1, 0]]


@pytest.mark.parametrize("garbage", [1e30, float("nan"), float("inf")])
def test_rows_of_weight_zero_are_not_looked_at(garbage: float) -> None:
    logits, targets, weights = _case(dtype=torch.float32)
    with torch.no_grad():
        logits[0, 2:] = garbage
        logits[0, 3, 0] = -3e38
    targets[0, 2:] = -100
    value, _ = _of_logits(logits, targets, weights, l2wrap=1e-4)
    (grad,) = torch.autograd.grad(value, [logits])
    kept, _ = _of_logits(logits[:, :2], targets[:, :2], weights[:, :2])
    rest, _ = _of_logits(logits[1:, 2:], targets[1:, 2:], weights[1:, 2:])
    assert float(value.detach()) == pytest.approx(float((kept + rest).detach()), rel=1e-6)
    assert bool((grad[0, 2:] == 0).all())
    assert bool(torch.isfinite(grad).all())


def test_a_batch_without_weight_gives_zero_and_no_nan() -> None:
    logits, targets, weights = _case()
    value, weight = _of_logits(logits, targets, weights * 0)
    (grad,) = torch.autograd.grad(value, [logits])
    assert float(value.detach()) == float(weight) == 0.0
    assert bool((grad == 0).all())


def test_sums_of_parts_are_the_sum_of_the_whole() -> None:
    logits, targets, weights = _case()
    whole, weight = _of_logits(logits, targets, weights)
    parts = [_of_logits(logits[i : i + 1], targets[i : i + 1], weights[i : i + 1]) for i in range(3)]
    assert float(whole.detach()) == pytest.approx(sum(float(part.detach()) for part, _ in parts), rel=1e-12)
    assert float(weight) == pytest.approx(sum(float(w) for _, w in parts), rel=1e-12)


def test_very_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[[3e4, -3e4, 0.0]]], requires_grad=True)
    value, _ = _of_logits(logits, torch.tensor([[1]]), torch.ones(1, 1))
    assert float(value.detach()) == pytest.approx(6e4)


def test_no_gradient_is_needed_for_an_evaluation() -> None:
    logits, targets, weights = _case()
    kept = logits.detach().clone()
    with torch.no_grad():
        _of_logits(logits, targets, weights)
    assert torch.equal(logits, kept)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_no_gradient_is_made_where_none_is_wanted(
    monkeypatch: pytest.MonkeyPatch, context: Callable[[], AbstractContextManager[None]]
) -> None:
    wanted: list[bool] = []
    whole = module.softmax_loss

    def watched(logits_PV: Tensor, *others: Tensor, want_gradient: bool, **settings: bool) -> Tensor:
        wanted.append(want_gradient)
        return whole(logits_PV, *others, want_gradient=want_gradient, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "softmax_loss", watched)
    logits, targets, weights = _case()
    with context():
        value, _ = _of_logits(logits, targets, weights)
    _of_logits(logits.detach(), targets, weights)
    again, _ = _of_logits(logits, targets, weights)
    assert wanted == [False, False, True]
    assert float(value) == float(again.detach())


def test_autocast_does_not_reach_into_it() -> None:
    logits, targets, weights = _case(dtype=torch.float32)
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            value, _ = _of_logits(logits, targets, weights, l2wrap=0.3)
        results.append((value.detach(), *torch.autograd.grad(value, [logits])))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_the_given_vectors_survive_and_a_second_backward_pass_is_refused() -> None:
    logits, targets, weights = _case()
    kept = logits.detach().clone()
    value, _ = _of_logits(logits, targets, weights)
    value.backward(retain_graph=True)
    assert torch.equal(logits, kept)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 3e-6), (torch.bfloat16, 2e-2)]
)
def test_the_heads_gradient_is_the_plain_one_in_pieces_too(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tolerance: float, backend: str
) -> None:
    monkeypatch.setattr(module, "_ROWS", 4)
    generator = torch.Generator().manual_seed(9)
    hidden = torch.randn(3, 5, 8, generator=generator).to(dtype).requires_grad_()
    head = torch.randn(13, 8, generator=generator).to(torch.float64 if dtype == torch.float64 else torch.float32)
    head.requires_grad_()
    _, targets, weights = _case()
    value, _ = cross_entropy(hidden, head, targets, weights, l2wrap=0.3, backend=backend)
    got = torch.autograd.grad(value * 0.7, [hidden, head])
    wide_hidden, wide_head = (x.detach().double().requires_grad_() for x in (hidden, head.to(dtype)))
    plain_value, regularised = _plain(wide_hidden @ wide_head.t(), targets, weights.double(), 0.3)
    want = torch.autograd.grad(regularised * 0.7, [wide_hidden, wide_head])
    assert float(value.detach()) == pytest.approx(float(plain_value.detach()), rel=tolerance)
    assert [x.dtype for x in got] == [hidden.dtype, head.dtype]
    for ours, theirs in zip(got, want, strict=True):
        assert float((ours.double() - theirs).norm() / theirs.norm()) < tolerance


def test_no_more_logits_are_made_at_once_than_a_piece_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOGITS", 2 * 13)
    sizes: list[int] = []
    whole = module.softmax_loss

    def watched(logits_PV: Tensor, *others: Tensor, **settings: bool) -> Tensor:
        sizes.append(len(logits_PV))
        return whole(logits_PV, *others, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "softmax_loss", watched)
    logits, targets, weights = _case()
    _of_logits(logits, targets, weights)
    assert sizes == [2] * 7 + [1]


def test_shapes_that_do_not_belong_together_are_value_errors() -> None:
    with pytest.raises(ValueError, match="do not belong together"):
        _of_logits(torch.zeros(2, 3, 5), torch.zeros(2, 4, dtype=torch.int64), torch.ones(2, 3))
