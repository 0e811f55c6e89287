"""The elementwise parts of the models, with backward passes written by hand: fewer passes over memory than autograd.

Each function is plain torch, takes any floating dtype and any device, and keeps the dtype promises of its docstring.
Products and sums are made in the wider dtype of the inputs; a test holds every gradient equal to autograd's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

NORMALIZE_EPS: Final = 1e-12


def mix_with_previous(
    x_BTC: Tensor,
    weights_11C: Sequence[Tensor],
    *,
    first_BC: Tensor | None,
    starts_BT: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """x + (previous token - x) * weight for every weight, each in `dtype`.

    `first_BC` stands before the first token, zero if None; zero stands before every token that `starts_BT` marks.
    Saves the differences to the previous token.
    """
    mixed: tuple[Tensor, ...] = _MixWithPrevious.apply(  # type: ignore[no-untyped-call]
        x_BTC, first_BC, starts_BT, dtype, *weights_11C
    )
    return mixed


class _MixWithPrevious(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BTC: Tensor,
        first_BC: Tensor | None,
        starts_BT: Tensor | None,
        dtype: torch.dtype,
        *weights_11C: Tensor,
    ) -> tuple[Tensor, ...]:
        delta_BTC = _difference(x_BTC, first_BC, starts_BT)
        ctx.save_for_backward(delta_BTC, starts_BT, *weights_11C)
        ctx.first_dtype = None if first_BC is None else first_BC.dtype
        return tuple(torch.addcmul(x_BTC, delta_BTC, weight_11C).to(dtype) for weight_11C in weights_11C)

    @staticmethod
    def backward(ctx: Any, *grads_BTC: Tensor) -> tuple[Tensor | None, ...]:
        delta_BTC, starts_BT, *weights_11C = ctx.saved_tensors
        # What a token gets itself as if nothing were mixed, and the part that moves on to the token before.
        total_BTC = torch.zeros_like(delta_BTC)
        moved_BTC = torch.zeros_like(delta_BTC)
        product_BTC = torch.empty_like(delta_BTC)
        weight_grads_11C = []
        for grad_BTC, weight_11C in zip(grads_BTC, weights_11C, strict=True):
            # Widened once: an operation on two dtypes would widen its argument anew each time.
            wide_BTC = grad_BTC.to(delta_BTC.dtype)
            total_BTC.add_(wide_BTC)
            moved_BTC.addcmul_(wide_BTC, weight_11C)
            torch.mul(wide_BTC, delta_BTC, out=product_BTC)
            weight_grads_11C.append(product_BTC.sum(dim=(0, 1), keepdim=True))
        x_grad_BTC = total_BTC - moved_BTC
        first_grad_BC = _move_to_previous(moved_BTC, x_grad_BTC, starts_BT, ctx.first_dtype)
        return x_grad_BTC, first_grad_BC, None, None, *weight_grads_11C


def difference_to_previous(x_BTC: Tensor, *, first_BC: Tensor | None, starts_BT: Tensor | None) -> Tensor:
    """Previous token - x, with `first_BC` and `starts_BT` as in mix_with_previous."""
    delta_BTC: Tensor = _DifferenceToPrevious.apply(x_BTC, first_BC, starts_BT)  # type: ignore[no-untyped-call]
    return delta_BTC


class _DifferenceToPrevious(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTC: Tensor, first_BC: Tensor | None, starts_BT: Tensor | None) -> Tensor:
        ctx.save_for_backward(starts_BT)
        ctx.first_dtype = None if first_BC is None else first_BC.dtype
        return _difference(x_BTC, first_BC, starts_BT)

    @staticmethod
    def backward(ctx: Any, *grads_BTC: Tensor) -> tuple[Tensor | None, ...]:
        (starts_BT,) = ctx.saved_tensors
        x_grad_BTC = -grads_BTC[0]
        # The gradient that autograd hands in is not ours to change.
        moved_BTC = grads_BTC[0] if starts_BT is None else grads_BTC[0].clone()
        first_grad_BC = _move_to_previous(moved_BTC, x_grad_BTC, starts_BT, ctx.first_dtype)
        return x_grad_BTC, first_grad_BC, None


def _difference(x_BTC: Tensor, first_BC: Tensor | None, starts_BT: Tensor | None) -> Tensor:
    delta_BTC = torch.empty_like(x_BTC)
    torch.sub(x_BTC[:, :-1], x_BTC[:, 1:], out=delta_BTC[:, 1:])
    if first_BC is None:
        torch.neg(x_BTC[:, 0], out=delta_BTC[:, 0])
    else:
        torch.sub(first_BC.to(x_BTC.dtype), x_BTC[:, 0], out=delta_BTC[:, 0])
    if starts_BT is not None:
        delta_BTC[starts_BT] = -x_BTC[starts_BT]
    return delta_BTC


def _move_to_previous(
    moved_BTC: Tensor, x_grad_BTC: Tensor, starts_BT: Tensor | None, first_dtype: torch.dtype | None
) -> Tensor | None:
    """Adds each token's part for the token before it to `x_grad`; the part of what stood before the first one."""
    if starts_BT is not None:
        moved_BTC[starts_BT] = 0.0
    x_grad_BTC[:, :-1] += moved_BTC[:, 1:]
    return None if first_dtype is None else moved_BTC[:, 0].to(first_dtype)


def key_and_removal(
    key_RC: Tensor, rate_RC: Tensor, k_k_C: Tensor, k_a_C: Tensor, *, head_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(key * (1 + (rate - 1) * k_a), -kappa, kappa * rate), with kappa = key * k_k normalised in each head.

    All in the dtype of `key`, computed in that of `rate`. A head whose norm is below 1e-12 is divided by 1e-12 instead.
    Saves key, rate, -kappa and one number a head.
    """
    result: tuple[Tensor, Tensor, Tensor] = _KeyAndRemoval.apply(  # type: ignore[no-untyped-call]
        key_RC, rate_RC, k_k_C, k_a_C, head_size
    )
    return result


class _KeyAndRemoval(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, key_RC: Tensor, rate_RC: Tensor, k_k_C: Tensor, k_a_C: Tensor, head_size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = (-1, key_RC.shape[-1] // head_size, head_size)
        wide_key_RC = key_RC.to(rate_RC.dtype)
        direction_RC = wide_key_RC * k_k_C
        inverse_RH1 = torch.linalg.vector_norm(direction_RC.view(heads), dim=-1, keepdim=True)
        inverse_RH1 = inverse_RH1.clamp_min_(NORMALIZE_EPS).reciprocal_()
        minus_kappa_RC = (direction_RC.view(heads) * -inverse_RH1).view(key_RC.shape)
        replaced_RC = direction_RC.view(heads).mul_(inverse_RH1).view(key_RC.shape).mul_(rate_RC)
        new_key_RC = torch.addcmul(1 - k_a_C, rate_RC, k_a_C).mul_(wide_key_RC)
        ctx.save_for_backward(key_RC, rate_RC, k_k_C, k_a_C, minus_kappa_RC, inverse_RH1)
        return new_key_RC.to(key_RC.dtype), minus_kappa_RC.to(key_RC.dtype), replaced_RC.to(key_RC.dtype)

    @staticmethod
    def backward(ctx: Any, *grads_RC: Tensor) -> tuple[Tensor | None, ...]:
        key_RC, rate_RC, k_k_C, k_a_C, minus_kappa_RC, inverse_RH1 = ctx.saved_tensors
        new_key_grad_RC, minus_kappa_grad_RC, replaced_grad_RC = (grad_RC.to(rate_RC.dtype) for grad_RC in grads_RC)
        wide_key_RC = key_RC.to(rate_RC.dtype)
        heads = (*inverse_RH1.shape[:2], -1)
        # Of -kappa: the part through kappa * rate has the other sign.
        grad_RC = torch.addcmul(minus_kappa_grad_RC, replaced_grad_RC, rate_RC, value=-1.0)
        # A norm's gradient has no part along the direction itself, unless the norm was replaced by the floor.
        along_RH1 = (grad_RC * minus_kappa_RC).view(heads).sum(dim=-1, keepdim=True)
        along_RH1 = along_RH1.masked_fill_(inverse_RH1 >= 1 / NORMALIZE_EPS, 0.0)
        grad_RHN = grad_RC.view(heads).addcmul_(minus_kappa_RC.view(heads), along_RH1, value=-1.0)
        direction_grad_RC = grad_RHN.mul_(-inverse_RH1).view(key_RC.shape)
        weighted_RC = new_key_grad_RC * wide_key_RC
        rate_grad_RC = torch.mul(weighted_RC, k_a_C).addcmul_(replaced_grad_RC, minus_kappa_RC, value=-1.0)
        k_a_grad_C = weighted_RC.mul_(rate_RC - 1).sum(dim=0)
        k_k_grad_C = torch.mul(direction_grad_RC, wide_key_RC).sum(dim=0)
        key_grad_RC = torch.addcmul(1 - k_a_C, rate_RC, k_a_C).mul_(new_key_grad_RC)
        key_grad_RC = key_grad_RC.addcmul_(direction_grad_RC, k_k_C)
        return key_grad_RC.to(key_RC.dtype), rate_grad_RC, k_k_grad_C, k_a_grad_C, None


def squared_relu(hidden_RF: Tensor) -> Tensor:
    """max(hidden, 0) squared. The argument is overwritten; saves the rectified values."""
    _, squared_RF = _SquaredRelu.apply(hidden_RF)  # type: ignore[no-untyped-call]
    result_RF: Tensor = squared_RF
    return result_RF


class _SquaredRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_RF: Tensor) -> tuple[Tensor, Tensor]:
        ctx.mark_dirty(hidden_RF)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden_RF.relu_())
        return hidden_RF, hidden_RF * hidden_RF

    @staticmethod
    def backward(ctx: Any, *grads_RF: Tensor | None) -> Tensor | None:
        (rectified_RF,) = ctx.saved_tensors
        grad_RF = grads_RF[1]
        # One pass for 2 * rectified * grad, with a zero of no size to add to.
        return None if grad_RF is None else torch.addcmul(grad_RF.new_zeros(()), rectified_RF, grad_RF, value=2.0)
