"""token_mix(): x060's five mixed inputs, whose shares of the previous token depend on the token."""

from __future__ import annotations

import torch
from torch import Tensor


def token_mix(
    x_BTC: Tensor,
    added_5RC: Tensor,
    shares_5C: Tensor,
    *,
    first_BC: Tensor | None,
    starts_BT: Tensor | None,
    backend: str,
) -> tuple[Tensor, ...]:
    """x + (x of the token before - x) * (share_m + added_m) for five m, each in x's dtype."""
    wide_BTC = x_BTC.to(shares_5C.dtype)
    first_BC = torch.zeros_like(wide_BTC[:, 0]) if first_BC is None else first_BC.to(wide_BTC.dtype)
    before_BTC = torch.cat((first_BC.unsqueeze(1), wide_BTC[:, :-1]), dim=1)
    if starts_BT is not None:
        before_BTC = before_BTC.masked_fill(starts_BT.unsqueeze(-1), 0.0)
    delta_BTC = before_BTC - wide_BTC
    shares_5BTC = shares_5C.view(5, 1, 1, -1) + added_5RC.view(5, *x_BTC.shape)
    return tuple(torch.addcmul(wide_BTC, delta_BTC, share_BTC).to(x_BTC.dtype) for share_BTC in shares_5BTC.unbind())
