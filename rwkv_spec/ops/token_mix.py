"""token_mix(): x060's token shift, whose shares depend on the token, in one pass."""

from __future__ import annotations

import ctypes
from typing import Any, Final

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

# How many mixed outputs there are: for w, k, v, r and g.
NUM_OUTPUTS: Final = 5


def token_mix(
    x_BTC: Tensor,
    added_5RC: Tensor,
    shares_5C: Tensor,
    *,
    first_BC: Tensor | None,
    starts_BT: Tensor | None,
    backend: str,
) -> tuple[Tensor, ...]:
    """mixed_m = x + (x of the token before - x) * (share_m + added_m), five of them, [B, T, C] in x's dtype.

    R is B * T. `first_BC` stands before the first token, zeros if None; zeros stand before every token that `starts_BT`
    marks (no gradient crosses them). Computed in the dtype of the shares. Saved for the backward: the inputs.
    """
    library = TOKEN_MIX.library(
        backend,
        x_BTC.device,
        rows=(x_BTC, added_5RC),
        dtype=x_BTC.dtype,
        wide=(shares_5C, first_BC),
        channels=x_BTC.shape[-1],
    )
    if library is None:
        return token_mix_reference(x_BTC, added_5RC, shares_5C, first_BC=first_BC, starts_BT=starts_BT)
    mixed_BTC: tuple[Tensor, ...] = _TokenMix.apply(  # type: ignore[no-untyped-call]
        library, x_BTC, added_5RC, shares_5C, first_BC, starts_BT
    )
    return mixed_BTC


def token_mix_reference(
    x_BTC: Tensor, added_5RC: Tensor, shares_5C: Tensor, *, first_BC: Tensor | None, starts_BT: Tensor | None
) -> tuple[Tensor, ...]:
    """The same in plain torch, for any dtype and device."""
    wide_BTC = x_BTC.to(shares_5C.dtype)
    first_BC = torch.zeros_like(wide_BTC[:, 0]) if first_BC is None else first_BC.to(wide_BTC.dtype)
    before_BTC = torch.cat((first_BC.unsqueeze(1), wide_BTC[:, :-1]), dim=1)
    if starts_BT is not None:
        before_BTC = before_BTC.masked_fill(starts_BT.unsqueeze(-1), 0.0)
    delta_BTC = before_BTC - wide_BTC
    return tuple(
        torch.addcmul(wide_BTC, delta_BTC, (share_C + added_RC).view(x_BTC.shape)).to(x_BTC.dtype)
        for share_C, added_RC in zip(shares_5C.unbind(), added_5RC.unbind(), strict=True)
    )


class _TokenMix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        library: ctypes.CDLL,
        x_BTC: Tensor,
        added_5RC: Tensor,
        shares_5C: Tensor,
        first_BC: Tensor | None,
        starts_BT: Tensor | None,
    ) -> tuple[Tensor, ...]:
        given = tuple(contiguous(x) for x in (x_BTC, added_5RC, shares_5C, first_BC, starts_BT))
        mixed_BTC = tuple(x_BTC.new_empty(x_BTC.shape) for _ in range(NUM_OUTPUTS))
        sizes = (*x_BTC.shape, NUM_OUTPUTS, rows_of_a_piece(x_BTC.device))
        call(library, "token_mix_forward", sizes, x_BTC.dtype, (*given, *mixed_BTC))
        ctx.save_for_backward(*given)
        ctx.library, ctx.sizes = library, sizes
        ctx.set_materialize_grads(False)
        return mixed_BTC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        given = ctx.saved_tensors
        x_BTC, added_5RC, shares_5C, first_BC, _ = given
        into = [torch.zeros_like(x_BTC) if x is None else contiguous(x) for x in grads]
        dx_BTC, dadded_5RC = torch.empty_like(x_BTC), torch.empty_like(added_5RC)
        dfirst_BC = None if first_BC is None else torch.empty_like(first_BC)
        B, T, C, _, run = ctx.sizes
        sums = shares_5C.new_empty((B * num_pieces(T, run), NUM_OUTPUTS + 1, C))
        outputs = (dx_BTC, dadded_5RC, dfirst_BC, sums)
        call(ctx.library, "token_mix_backward", ctx.sizes, x_BTC.dtype, (*given, *outputs, *into))
        return None, dx_BTC, dadded_5RC, sums[:, :NUM_OUTPUTS].sum(dim=0), dfirst_BC, None


def _check(library: ctypes.CDLL, device: str = "cpu") -> None:
    B, T, C = 2, ROWS_OF_A_PIECE + 6, 48
    # What inference mode makes could not be saved.
    with torch.inference_mode(False):
        starts = torch.zeros(B, T, dtype=torch.bool, device=device)
    starts[0, ROWS_OF_A_PIECE] = starts[1, 5] = True
    inputs = normal(6, (B, T, C), (NUM_OUTPUTS, B * T, C), (NUM_OUTPUTS, C), (B, C))

    def compiled(library: ctypes.CDLL, *x: Tensor) -> tuple[Tensor, ...]:
        mixed: tuple[Tensor, ...] = _TokenMix.apply(library, *x, starts)  # type: ignore[no-untyped-call]
        return mixed

    def reference(*x: Tensor) -> tuple[Tensor, ...]:
        return token_mix_reference(*x[:3], first_BC=x[3], starts_BT=starts)

    try_build("token_mix", library, inputs, compiled, reference, device)


TOKEN_MIX = FusedOperator("token_mix", _check)
