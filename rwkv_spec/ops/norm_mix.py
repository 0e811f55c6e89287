"""norm_mix(): residual sum, layer norm and token shift in one pass, as every half of a block begins."""

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

# How many mixed outputs the compiled form is made for.
_COMPILED_COUNTS = (1, 2, 4, 6)


class Mixed(NamedTuple):
    """The residual sum [B, T, C], the mixed outputs, each [B, T, C], and the norm of the last token [B, C]."""

    sum_BTC: Tensor
    mixed_BTC: tuple[Tensor, ...]
    last_BC: Tensor


def norm_mix(
    x_BTC: Tensor,
    added_BTC: Tensor | None,
    weight_C: Tensor,
    bias_C: Tensor,
    shares_MC: Tensor,
    *,
    first_BC: Tensor | None,
    starts_BT: Tensor | None,
    dtype: torch.dtype,
    eps: float,
    backend: str,
) -> Mixed:
    """sum = x + added, n = layer norm of sum, mixed_m = n + (n of the token before - n) * share_m, in `dtype`.

    `first_BC` stands before the first token, zeros if None; zeros stand before every token that `starts_BT` marks (no
    gradient crosses them). Sum and last are in x's dtype. A share of zeros gives the norm itself. Saved for the
    backward: the sum and two numbers a token.
    """
    library = NORM_MIX.library(
        backend,
        x_BTC.device,
        rows=(added_BTC,),
        dtype=dtype,
        wide=(x_BTC, weight_C, bias_C, shares_MC, first_BC),
        channels=x_BTC.shape[-1],
    )
    if library is None or len(shares_MC) not in _COMPILED_COUNTS:
        return norm_mix_reference(
            x_BTC, added_BTC, weight_C, bias_C, shares_MC, first_BC=first_BC, starts_BT=starts_BT, dtype=dtype, eps=eps
        )
    return _compiled(library, x_BTC, added_BTC, weight_C, bias_C, shares_MC, first_BC, starts_BT, dtype, eps)


def _compiled(library: ctypes.CDLL, x_BTC: Tensor, *others: object) -> Mixed:
    sum_BTC, last_BC, *mixed_BTC = _NormMix.apply(library, x_BTC, *others)  # type: ignore[no-untyped-call]
    # What is not added to is handed on as it was.
    return Mixed(x_BTC if others[0] is None else sum_BTC, tuple(mixed_BTC), last_BC)


def norm_mix_reference(
    x_BTC: Tensor,
    added_BTC: Tensor | None,
    weight_C: Tensor,
    bias_C: Tensor,
    shares_MC: Tensor,
    *,
    first_BC: Tensor | None,
    starts_BT: Tensor | None,
    dtype: torch.dtype,
    eps: float,
) -> Mixed:
    """The same in plain torch, for any dtype and device."""
    sum_BTC = x_BTC if added_BTC is None else x_BTC + added_BTC
    with torch.autocast(x_BTC.device.type, enabled=False):
        normed_BTC = F.layer_norm(sum_BTC, sum_BTC.shape[-1:], weight_C, bias_C, eps)
    first_BC = torch.zeros_like(normed_BTC[:, 0]) if first_BC is None else first_BC.to(normed_BTC.dtype)
    before_BTC = torch.cat((first_BC.unsqueeze(1), normed_BTC[:, :-1]), dim=1)
    if starts_BT is not None:
        before_BTC = before_BTC.masked_fill(starts_BT.unsqueeze(-1), 0.0)
    delta_BTC = before_BTC - normed_BTC
    mixed_BTC = tuple(torch.addcmul(normed_BTC, delta_BTC, share_C).to(dtype) for share_C in shares_MC.unbind())
    return Mixed(sum_BTC, mixed_BTC, normed_BTC[:, -1])


class _NormMix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        library: ctypes.CDLL,
        x_BTC: Tensor,
        added_BTC: Tensor | None,
        weight_C: Tensor,
        bias_C: Tensor,
        shares_MC: Tensor,
        first_BC: Tensor | None,
        starts_BT: Tensor | None,
        dtype: torch.dtype,
        eps: float,
    ) -> tuple[Tensor, ...]:
        B, T, C = x_BTC.shape
        M = len(shares_MC)
        x_BTC, *parameters = (contiguous(x) for x in (x_BTC, weight_C, bias_C, shares_MC))
        first_BC, starts_BT = contiguous(first_BC), contiguous(starts_BT)
        sum_BTC = None if added_BTC is None else torch.empty_like(x_BTC)
        stats_BT2, last_BC = x_BTC.new_empty((B, T, 2)), x_BTC.new_empty((B, C))
        run = rows_of_a_piece(x_BTC.device)
        work = None if x_BTC.is_cuda else x_BTC.new_empty((B * num_pieces(T, run), 2, C))
        mixed_BTC = tuple(x_BTC.new_empty(x_BTC.shape, dtype=dtype) for _ in range(M))
        given = (x_BTC, contiguous(added_BTC), *parameters, first_BC, starts_BT)
        sizes = (B, T, C, M, run)
        outputs = (sum_BTC, stats_BT2, last_BC, work, *mixed_BTC)
        call(library, "norm_mix_forward", sizes, dtype, (*given, *outputs), scalars=(eps,))
        ctx.save_for_backward(x_BTC if sum_BTC is None else sum_BTC, stats_BT2, *parameters, first_BC, starts_BT)
        ctx.library, ctx.dtype, ctx.sizes, ctx.adds = library, dtype, sizes, added_BTC is not None
        ctx.set_materialize_grads(False)
        # Without a sum there is nothing to hand out in its place.
        return x_BTC.new_empty(0) if sum_BTC is None else sum_BTC, last_BC, *mixed_BTC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        sum_BTC, stats_BT2, weight_C, bias_C, shares_MC, first_BC, starts_BT = ctx.saved_tensors
        B, T, C, M, run = ctx.sizes
        dsum_BTC = contiguous(grads[0]) if ctx.adds else None
        dlast_BC = contiguous(grads[1])
        mixed = [torch.zeros_like(sum_BTC, dtype=ctx.dtype) if x is None else contiguous(x) for x in grads[2:]]
        dx_BTC = torch.empty_like(sum_BTC)
        # In float32 what is added has the gradient of x itself.
        is_own = ctx.adds and ctx.dtype != torch.float32
        dadded_BTC = torch.empty_like(sum_BTC, dtype=ctx.dtype) if is_own else None
        dfirst_BC = None if first_BC is None else torch.empty_like(first_BC)
        pieces = B * num_pieces(T, run)
        sums = sum_BTC.new_empty((pieces, M + 2, C))
        # A piece is one thread's on the CPU; where it is many threads' they keep in registers what they work on.
        work = None if sums.is_cuda else sum_BTC.new_empty((pieces, 4, C))
        given = (sum_BTC, stats_BT2, weight_C, bias_C, shares_MC, first_BC, starts_BT, dsum_BTC, dlast_BC)
        outputs = (dx_BTC, dadded_BTC, dfirst_BC, sums, work)
        call(ctx.library, "norm_mix_backward", ctx.sizes, ctx.dtype, (*given, *outputs, *mixed))
        sums_KC = sums.sum(dim=0)
        if ctx.adds and not is_own:
            dadded_BTC = dx_BTC
        dshares_MC, dweight_C, dbias_C = sums_KC[:M], sums_KC[M], sums_KC[M + 1]
        return None, dx_BTC, dadded_BTC, dweight_C, dbias_C, dshares_MC, dfirst_BC, None, None, None


def _check(library: ctypes.CDLL, device: str = "cpu") -> None:
    B, T, C = 2, ROWS_OF_A_PIECE + 6, 48
    # What inference mode makes could not be saved.
    with torch.inference_mode(False):
        starts = torch.zeros(B, T, dtype=torch.bool, device=device)
    starts[0, ROWS_OF_A_PIECE] = starts[1, 5] = True
    for M in _COMPILED_COUNTS:
        inputs = normal(1, (B, T, C), (B, T, C), (C,), (C,), (M, C), (B, C))

        def compiled(library: ctypes.CDLL, *x: Tensor) -> tuple[Tensor, ...]:
            mixed = _compiled(library, *x, starts, torch.float32, 1e-3)
            return mixed.sum_BTC, *mixed.mixed_BTC, mixed.last_BC

        def reference(*x: Tensor) -> tuple[Tensor, ...]:
            *before, first = x
            mixed = norm_mix_reference(*before, first_BC=first, starts_BT=starts, dtype=torch.float64, eps=1e-3)
            return mixed.sum_BTC, *mixed.mixed_BTC, mixed.last_BC

        try_build("norm_mix", library, inputs, compiled, reference, device)


NORM_MIX = FusedOperator("norm_mix", _check)
