"""gated_norm(): the end of every time-mix, from the recurrence to the input of the output matrix, in one pass."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rwkv_spec.ops.fused import (
    ROWS_OF_A_PIECE,
    FusedOperator,
    call,
    contiguous,
    normal,
    num_pieces,
    rows_of_a_piece,
    try_build,
)


class Bonus(NamedTuple):
    """x070's bonus of the present token: v times the sum over a head of r * k * r_k. r, k, v: [R, C]; r_k: [H, N]."""

    r_RC: Tensor
    k_RC: Tensor
    v_RC: Tensor
    r_k_HN: Tensor


def gated_norm(
    y_RC: Tensor,
    gate_RC: Tensor,
    weight_C: Tensor,
    bias_C: Tensor,
    *,
    bonus: Bonus | None,
    num_heads: int,
    eps: float,
    backend: str,
) -> Tensor:
    """(group norm of y by heads + bonus) * gate; without a bonus the gate is SiLU(gate). [R, C] in gate's dtype.

    The norm is over each head of each row, then weight and bias as a GroupNorm has them. Saved for the backward: the
    inputs.
    """
    vectors = (None, None, None, None) if bonus is None else bonus
    library = GATED_NORM.library(
        backend,
        y_RC.device,
        rows=(y_RC, gate_RC, *vectors[:3]),
        dtype=gate_RC.dtype,
        wide=(weight_C, bias_C, vectors[3]),
        channels=y_RC.shape[-1] // num_heads,
    )
    if library is None:
        return gated_norm_reference(y_RC, gate_RC, weight_C, bias_C, bonus=bonus, num_heads=num_heads, eps=eps)
    out_RC: Tensor = _GatedNorm.apply(  # type: ignore[no-untyped-call]
        library, num_heads, eps, y_RC, gate_RC, weight_C, bias_C, *vectors
    )
    return out_RC


def gated_norm_reference(
    y_RC: Tensor,
    gate_RC: Tensor,
    weight_C: Tensor,
    bias_C: Tensor,
    *,
    bonus: Bonus | None,
    num_heads: int,
    eps: float,
) -> Tensor:
    """The same in plain torch, computed in the dtype of the weight, for any dtype and device."""
    heads = (-1, num_heads, y_RC.shape[-1] // num_heads)
    with torch.autocast(y_RC.device.type, enabled=False):
        wide_RHN = y_RC.to(weight_C.dtype).view(heads)
        # A layer norm over each head, then the scales: what a group norm of single rows gives, several times faster.
        normed_RHN = F.layer_norm(wide_RHN, heads[-1:], eps=eps)
        y_RHN = torch.addcmul(bias_C.view(heads[1:]), normed_RHN, weight_C.view(heads[1:]))
        if bonus is None:
            return (y_RHN.view(y_RC.shape) * F.silu(gate_RC.to(weight_C.dtype))).to(gate_RC.dtype)
        r_RHN, k_RHN, v_RHN = (x.to(weight_C.dtype).view(heads) for x in bonus[:3])
        share_RH1 = (r_RHN * k_RHN * bonus.r_k_HN).sum(dim=-1, keepdim=True)
        return (torch.addcmul(y_RHN, share_RH1, v_RHN).view(y_RC.shape) * gate_RC).to(gate_RC.dtype)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        library: ctypes.CDLL,
        num_heads: int,
        eps: float,
        y_RC: Tensor,
        gate_RC: Tensor,
        weight_C: Tensor,
        bias_C: Tensor,
        r_RC: Tensor | None,
        k_RC: Tensor | None,
        v_RC: Tensor | None,
        r_k_HN: Tensor | None,
    ) -> Tensor:
        rows, width = y_RC.shape
        given = tuple(contiguous(x) for x in (y_RC, gate_RC, r_RC, k_RC, v_RC, weight_C, bias_C, r_k_HN))
        out_RC = torch.empty_like(gate_RC, memory_format=torch.contiguous_format)
        sizes = (rows, num_heads, width // num_heads, rows_of_a_piece(y_RC.device))
        call(library, "gated_norm_forward", sizes, gate_RC.dtype, (*given, out_RC), scalars=(eps,))
        ctx.save_for_backward(*given)
        ctx.library, ctx.sizes, ctx.eps = library, sizes, eps
        return out_RC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        given = ctx.saved_tensors
        y_RC, gate_RC, r_RC, k_RC, v_RC, weight_C, _, r_k_HN = given
        # In the order of y, gate, r, k, v.
        rows = [None if x is None else torch.empty_like(x) for x in (y_RC, gate_RC, r_RC, k_RC, v_RC)]
        sums = weight_C.new_empty((num_pieces(len(y_RC), ctx.sizes[3]), 3, len(weight_C)))
        call(
            ctx.library,
            "gated_norm_backward",
            ctx.sizes,
            gate_RC.dtype,
            (*given, contiguous(grads[0]), *rows, sums),
            scalars=(ctx.eps,),
        )
        dweight_C, dbias_C, dr_k_C = sums.sum(dim=0)
        dr_k_HN = None if r_k_HN is None else dr_k_C.view(r_k_HN.shape)
        return None, None, None, rows[0], rows[1], dweight_C, dbias_C, *rows[2:], dr_k_HN


def _check(library: ctypes.CDLL, device: str = "cpu") -> None:
    R, H, N = ROWS_OF_A_PIECE + 3, 2, 48
    rows, channels = (R, H * N), (H * N,)
    inputs = normal(2, rows, rows, channels, channels, rows, rows, rows, (H, N))

    def compiled(library: ctypes.CDLL, *x: Tensor) -> tuple[Tensor]:
        absent = (None,) * (8 - len(x))
        return (_GatedNorm.apply(library, H, 1e-3, *x, *absent),)  # type: ignore[no-untyped-call]

    def reference(*x: Tensor) -> tuple[Tensor]:
        bonus = Bonus(*x[4:]) if len(x) > 4 else None
        return (gated_norm_reference(*x[:4], bonus=bonus, num_heads=H, eps=1e-3),)

    for count in (4, 8):
        try_build("gated_norm", library, inputs[:count], compiled, reference, device)


GATED_NORM = FusedOperator("gated_norm", _check)
