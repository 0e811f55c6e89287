"""wkv7_prepare(): what x070's recurrence takes, from what the matrix products gave, in one pass."""

from __future__ import annotations

import ctypes
from typing import Any, Final, NamedTuple

import torch
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

# A head whose norm is smaller is divided by this instead.
NORMALIZE_EPS: Final = 1e-12


class Residual(NamedTuple):
    """What mixes block 0's value into a later block's: v_low, v_first [R, C], v0 [C]."""

    v_low_RC: Tensor
    v_first_RC: Tensor
    v0_C: Tensor


class Prepared(NamedTuple):
    """Each [R, C]: the raw decay, the key, the value, and the removal's two vectors."""

    w_raw_RC: Tensor
    k_RC: Tensor
    v_RC: Tensor
    a_RC: Tensor
    b_RC: Tensor


def wkv7_prepare(
    w_low_RC: Tensor,
    a_low_RC: Tensor,
    k_RC: Tensor,
    v_RC: Tensor,
    residual: Residual | None,
    *,
    w0_C: Tensor,
    a0_C: Tensor,
    k_k_C: Tensor,
    k_a_C: Tensor,
    head_size: int,
    backend: str,
) -> Prepared:
    """w_raw = w0 + w_low; rate = sigmoid(a0 + a_low); k (1 + (rate - 1) k_a); -kappa and kappa * rate; the value.

    kappa is k * k_k normalised in each head; the value is v + (v_first - v) * sigmoid(v0 + v_low), or v itself without
    a residual. All in k's dtype, computed in that of the parameters. Saved for the backward: the inputs but w_low.
    """
    v_low_RC, v_first_RC, v0_C = (None, None, None) if residual is None else residual
    library = WKV7_PREPARE.library(
        backend,
        k_RC.device,
        rows=(w_low_RC, a_low_RC, k_RC, v_RC, v_low_RC, v_first_RC),
        dtype=k_RC.dtype,
        wide=(w0_C, a0_C, v0_C, k_k_C, k_a_C),
        channels=head_size,
    )
    if library is None:
        return wkv7_prepare_reference(
            w_low_RC,
            a_low_RC,
            k_RC,
            v_RC,
            residual,
            w0_C=w0_C,
            a0_C=a0_C,
            k_k_C=k_k_C,
            k_a_C=k_a_C,
            head_size=head_size,
        )
    rows = (w_low_RC, a_low_RC, k_RC, None if residual is None else v_RC, v_low_RC, v_first_RC)
    return _compiled(library, head_size, v_RC, *rows, w0_C, a0_C, v0_C, k_k_C, k_a_C)


def _compiled(library: ctypes.CDLL, head_size: int, v_RC: Tensor, *inputs: Tensor | None) -> Prepared:
    w_raw_RC, k_RC, a_RC, b_RC, *mixed = _Wkv7Prepare.apply(library, head_size, *inputs)  # type: ignore[no-untyped-call]
    return Prepared(w_raw_RC, k_RC, mixed[0] if mixed else v_RC, a_RC, b_RC)


def wkv7_prepare_reference(
    w_low_RC: Tensor,
    a_low_RC: Tensor,
    k_RC: Tensor,
    v_RC: Tensor,
    residual: Residual | None,
    *,
    w0_C: Tensor,
    a0_C: Tensor,
    k_k_C: Tensor,
    k_a_C: Tensor,
    head_size: int,
) -> Prepared:
    """The same in plain torch, for any dtype and device."""
    dtype, heads = k_RC.dtype, (len(k_RC), -1, head_size)
    with torch.autocast(k_RC.device.type, enabled=False):
        wide_k_RC = k_RC.to(k_k_C.dtype)
        rate_RC = torch.sigmoid(a0_C + a_low_RC)
        direction_RHN = (wide_k_RC * k_k_C).view(heads)
        kappa_RC = torch.nn.functional.normalize(direction_RHN, dim=-1, eps=NORMALIZE_EPS).view(k_RC.shape)
        new_k_RC = wide_k_RC * torch.addcmul(1 - k_a_C, rate_RC, k_a_C)
        if residual is not None:
            share_RC = torch.sigmoid(residual.v0_C + residual.v_low_RC)
            v_RC = torch.lerp(v_RC.to(share_RC.dtype), residual.v_first_RC.to(share_RC.dtype), share_RC)
        results = (w0_C + w_low_RC, new_k_RC, v_RC, -kappa_RC, kappa_RC * rate_RC)
        return Prepared(*(x.to(dtype) for x in results))


class _Wkv7Prepare(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        library: ctypes.CDLL,
        head_size: int,
        w_low_RC: Tensor,
        a_low_RC: Tensor,
        k_RC: Tensor,
        v_RC: Tensor | None,
        v_low_RC: Tensor | None,
        v_first_RC: Tensor | None,
        w0_C: Tensor,
        a0_C: Tensor,
        v0_C: Tensor | None,
        k_k_C: Tensor,
        k_a_C: Tensor,
    ) -> tuple[Tensor, ...]:
        rows, width = k_RC.shape
        given = [contiguous(x) for x in (w_low_RC, a_low_RC, k_RC, v_RC, v_low_RC, v_first_RC)]
        parameters = [contiguous(x) for x in (w0_C, a0_C, v0_C, k_k_C, k_a_C)]
        w_raw_RC, new_k_RC, a_RC, b_RC = (k_RC.new_empty(k_RC.shape) for _ in range(4))
        mixed_RC = None if v_RC is None else k_RC.new_empty(k_RC.shape)
        sizes = (rows, width // head_size, head_size, rows_of_a_piece(k_RC.device))
        outputs = (w_raw_RC, new_k_RC, mixed_RC, a_RC, b_RC)
        call(library, "wkv7_prepare_forward", sizes, k_RC.dtype, (*given, *parameters, *outputs))
        ctx.save_for_backward(*given[1:], *parameters[1:])
        ctx.library, ctx.sizes = library, sizes
        return w_raw_RC, new_k_RC, a_RC, b_RC, *(() if mixed_RC is None else (mixed_RC,))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        given = ctx.saved_tensors
        k_RC, v_RC = given[1], given[2]
        dw_raw_RC, dnew_k_RC, da_RC, db_RC, *dmixed = (contiguous(x) for x in grads)
        da_low_RC, dk_RC = torch.empty_like(k_RC), torch.empty_like(k_RC)
        dv_RC, dv_low_RC, dv_first_RC = (None if v_RC is None else torch.empty_like(v_RC) for _ in range(3))
        width = k_RC.shape[1]
        sums = k_RC.new_empty((num_pieces(len(k_RC), ctx.sizes[3]), 5, width), dtype=torch.float32)
        into = (dw_raw_RC, dnew_k_RC, dmixed[0] if dmixed else None, da_RC, db_RC)
        outputs = (da_low_RC, dk_RC, dv_RC, dv_low_RC, dv_first_RC, sums)
        call(ctx.library, "wkv7_prepare_backward", ctx.sizes, k_RC.dtype, (*given, *into, *outputs))
        dw0_C, da0_C, dv0_C, dk_k_C, dk_a_C = sums.sum(dim=0)
        rows = (dw_raw_RC, da_low_RC, dk_RC, dv_RC, dv_low_RC, dv_first_RC)
        return None, None, *rows, dw0_C, da0_C, None if v_RC is None else dv0_C, dk_k_C, dk_a_C


def _check(library: ctypes.CDLL, device: str = "cpu") -> None:
    R, H, N = ROWS_OF_A_PIECE + 3, 2, 48
    rows, parameters = normal(3, *6 * [(R, H * N)]), normal(4, *5 * [(H * N,)])

    def compiled(library: ctypes.CDLL, *x: Tensor) -> Prepared:
        if len(x) == 11:
            return _compiled(library, N, x[3], *x)
        return _compiled(library, N, x[3], *x[:3], None, None, None, *x[4:6], None, *x[6:])

    def reference(w_low: Tensor, a_low: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Prepared:
        residual = Residual(others[0], others[1], others[4]) if len(others) == 7 else None
        w0, a0 = others[2:4] if residual else others[:2]
        k_k, k_a = others[-2:]
        return wkv7_prepare_reference(w_low, a_low, k, v, residual, w0_C=w0, a0_C=a0, k_k_C=k_k, k_a_C=k_a, head_size=N)

    try_build("wkv7_prepare", library, [*rows, *parameters], compiled, reference, device)
    without = [*rows[:4], *parameters[:2], *parameters[3:]]
    try_build("wkv7_prepare", library, without, compiled, reference, device)


WKV7_PREPARE = FusedOperator("wkv7_prepare", _check)
