"""The hand-written backward passes agree with autograd of the plain formula, and with finite differences."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rwkv_spec.model.elementwise import (
    difference_to_previous,
    key_and_removal,
    mix_with_previous,
    squared_relu,
)

HEAD_SIZE = 4


def _random(*sizes: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sizes, dtype=torch.float64, generator=generator).requires_grad_()


def _plain_mix(x: Tensor, weights: list[Tensor], first: Tensor | None, starts: Tensor | None) -> list[Tensor]:
    first = torch.zeros_like(x[:, 0]) if first is None else first
    previous = torch.cat([first[:, None], x[:, :-1]], dim=1)
    if starts is not None:
        previous = previous.masked_fill(starts[..., None], 0.0)
    return [x + (previous - x) * weight for weight in weights]


@pytest.mark.parametrize("num_weights", [1, 2, 6])
@pytest.mark.parametrize("has_first", [False, True])
@pytest.mark.parametrize("has_starts", [False, True])
@pytest.mark.parametrize("length", [1, 5])
def test_mixing_equals_the_plain_formula(num_weights: int, has_first: bool, has_starts: bool, length: int) -> None:
    x = _random(2, length, 8)
    weights = [_random(1, 1, 8, seed=1 + i) for i in range(num_weights)]
    first = _random(2, 8, seed=20) if has_first else None
    starts = torch.zeros(2, length, dtype=torch.bool)
    starts[0, 0] = starts[1, length // 2] = True
    marks = starts if has_starts else None
    ours = mix_with_previous(x, weights, first_BC=first, starts_BT=marks, dtype=torch.float64)
    plain = _plain_mix(x, weights, first, marks)
    leaves = [x, *weights, *([first] if first is not None else [])]
    upstream = [_random(2, length, 8, seed=40 + i).detach() for i in range(num_weights)]
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    for one, other in zip(
        torch.autograd.grad(ours, leaves, upstream), torch.autograd.grad(plain, leaves, upstream), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("has_first", [False, True])
@pytest.mark.parametrize("has_starts", [False, True])
@pytest.mark.parametrize("length", [1, 5])
def test_the_difference_equals_mixing_with_weight_one(has_first: bool, has_starts: bool, length: int) -> None:
    x, first = _random(2, length, 8), _random(2, 8, seed=20) if has_first else None
    starts = torch.zeros(2, length, dtype=torch.bool)
    starts[0, 0] = starts[1, length // 2] = True
    marks = starts if has_starts else None
    leaves = [x] if first is None else [x, first]
    upstream = _random(2, length, 8, seed=40).detach()
    before = upstream.clone()
    ours = difference_to_previous(x, first_BC=first, starts_BT=marks)
    (plain,) = _plain_mix(x, [torch.ones(1, 1, 8, dtype=torch.float64)], first, marks)
    torch.testing.assert_close(ours, plain - x, rtol=1e-12, atol=1e-12)
    for one, other in zip(
        torch.autograd.grad(ours, leaves, upstream), torch.autograd.grad(plain - x, leaves, upstream), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert torch.equal(upstream, before)


def _plain_keys(key: Tensor, rate: Tensor, k_k: Tensor, k_a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    kappa = F.normalize((key * k_k).view(-1, 2, HEAD_SIZE), dim=-1, eps=1e-12).view(key.shape)
    return key * (1 + (rate - 1) * k_a), -kappa, kappa * rate


@pytest.mark.parametrize("scale", [1.0, 1e-14])
def test_keys_and_removal_equal_the_plain_formula(scale: float) -> None:
    key = (_random(5, 8) * scale).detach().requires_grad_()
    rate, k_k, k_a = _random(5, 8, seed=1), _random(8, seed=2), _random(8, seed=3)
    leaves = [key, rate, k_k, k_a]
    ours = key_and_removal(key, rate, k_k, k_a, head_size=HEAD_SIZE)
    plain = _plain_keys(*leaves)
    upstream = [_random(5, 8, seed=40 + i).detach() for i in range(3)]
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    for one, other in zip(
        torch.autograd.grad(ours, leaves, upstream), torch.autograd.grad(plain, leaves, upstream), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_a_key_of_zeros_gives_no_nan() -> None:
    key = torch.zeros(3, 8, dtype=torch.float64, requires_grad=True)
    outputs = key_and_removal(key, _random(3, 8), _random(8, seed=1), _random(8, seed=2), head_size=HEAD_SIZE)
    (grad,) = torch.autograd.grad(outputs, [key], [torch.ones(3, 8, dtype=torch.float64)] * 3)
    assert all(bool((output == 0).all()) for output in outputs)
    assert bool(torch.isfinite(grad).all())


def test_squared_relu_equals_the_plain_formula() -> None:
    hidden = _random(4, 6)
    upstream = _random(4, 6, seed=1).detach()
    (ours,) = torch.autograd.grad(squared_relu(hidden * 1.0), [hidden], upstream)
    (plain,) = torch.autograd.grad(torch.relu(hidden) ** 2, [hidden], upstream)
    torch.testing.assert_close(ours, plain, rtol=1e-14, atol=0)
    assert bool((ours[hidden < 0] == 0).all())


def test_gradients_agree_with_finite_differences() -> None:
    x, weight, first = _random(2, 3, 4), _random(1, 1, 4, seed=1), _random(2, 4, seed=2)
    starts = torch.tensor([[False, True, False], [True, False, False]])
    assert torch.autograd.gradcheck(
        lambda *t: mix_with_previous(t[0], [t[1]], first_BC=t[2], starts_BT=starts, dtype=torch.float64),
        (x, weight, first),
    )
    assert torch.autograd.gradcheck(
        lambda *t: difference_to_previous(t[0], first_BC=t[1], starts_BT=starts), (x, first)
    )
    assert torch.autograd.gradcheck(
        lambda *t: key_and_removal(*t, head_size=HEAD_SIZE),
        (_random(2, 8), _random(2, 8, seed=1), _random(8, seed=2), _random(8, seed=3)),
    )


def test_outputs_and_gradients_keep_the_promised_dtypes() -> None:
    x, weight = torch.randn(2, 3, 8, requires_grad=True), torch.randn(1, 1, 8, requires_grad=True)
    (mixed,) = mix_with_previous(x, [weight], first_BC=None, starts_BT=None, dtype=torch.bfloat16)
    assert mixed.dtype == torch.bfloat16
    mixed.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32
    key = torch.randn(3, 8, dtype=torch.bfloat16, requires_grad=True)
    rate = torch.rand(3, 8, requires_grad=True)
    k_k = torch.ones(8, requires_grad=True)
    outputs = key_and_removal(key, rate, k_k, k_k, head_size=HEAD_SIZE)
    assert {output.dtype for output in outputs} == {torch.bfloat16}
    torch.stack(outputs).sum().backward()
    assert key.grad is not None and key.grad.dtype == torch.bfloat16
    assert rate.grad is not None and rate.grad.dtype == torch.float32
