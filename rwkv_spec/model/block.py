"""A block of any generation: norms, residual sums, dropout and what is carried from token to token.

The two halves are given: a time-mix and a channel-mix, each with a parallel form over [B, T, C] and a step form over
[B, C]. Both forms take and give the same LayerState, and a test holds them equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rwkv_spec.ops.dropout import dropout

# The published group norm: 1e-5 times the square of the head divisor 8, whatever the head size is. x052 divides by 8
# and adds 1e-5, which is the same.
GROUP_NORM_EPS: Final = 64e-5


class LayerState(NamedTuple):
    """What one block carries from token to token: its two last normed inputs and the wkv state."""

    att_shift_BC: Tensor
    wkv_BHNN: Tensor
    ffn_shift_BC: Tensor


class TimeMix(Protocol):
    """The recurrent half. `v_first` is x070's value of block 0; other generations hand on what they are given."""

    def __call__(
        self,
        x_BTC: Tensor,
        v_first_BTC: Tensor | None,
        *,
        shift_BC: Tensor | None,
        state_BHNN: Tensor | None,
        starts_BT: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Returns (output, v_first, state after the last token)."""

    def step(
        self,
        x_BC: Tensor,
        v_first_BC: Tensor | None,
        *,
        shift_BC: Tensor,
        state_BHNN: Tensor,
        new_state_BHNN: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """One token: returns (output, v_first) and fills new_state."""


class ChannelMix(Protocol):
    """The feed-forward half."""

    def __call__(self, x_BTC: Tensor, *, shift_BC: Tensor | None, starts_BT: Tensor | None) -> Tensor:
        """The output [B, T, C]."""

    def step(self, x_BC: Tensor, *, shift_BC: Tensor) -> Tensor:
        """The same for one token."""


class Block(nn.Module):
    """One layer: x += att(ln1(x)); x += ffn(ln2(x)), with dropout on both sums. Block 0 norms the embedding first."""

    def __init__(self, n_embd: int, *, att: TimeMix, ffn: ChannelMix, layer: int, dropout: float, backend: str) -> None:
        super().__init__()
        self.layer = layer
        self.dropout = dropout
        self.backend = backend
        self.ln1 = nn.LayerNorm(n_embd)
        self.ln2 = nn.LayerNorm(n_embd)
        self.ln0 = nn.LayerNorm(n_embd) if layer == 0 else None
        self.att = att
        self.ffn = ffn

    def forward(
        self,
        x_BTC: Tensor,
        v_first_BTC: Tensor | None,
        *,
        state: LayerState | None,
        starts_BT: Tensor | None,
        dropout_seed_B: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, LayerState]:
        if self.ln0 is not None:
            x_BTC = self.ln0(x_BTC)
        normed_BTC = self.ln1(x_BTC)
        att_BTC, v_first_BTC, wkv_BHNN = self.att(
            normed_BTC,
            v_first_BTC,
            shift_BC=None if state is None else state.att_shift_BC,
            state_BHNN=None if state is None else state.wkv_BHNN,
            starts_BT=starts_BT,
        )
        att_shift_BC = normed_BTC[:, -1]
        x_BTC = x_BTC + self._dropped(att_BTC, dropout_seed_B, site=2 * self.layer)
        normed_BTC = self.ln2(x_BTC)
        ffn_BTC = self.ffn(normed_BTC, shift_BC=None if state is None else state.ffn_shift_BC, starts_BT=starts_BT)
        x_BTC = x_BTC + self._dropped(ffn_BTC, dropout_seed_B, site=2 * self.layer + 1)
        return x_BTC, v_first_BTC, LayerState(att_shift_BC, wkv_BHNN, normed_BTC[:, -1])

    def step(
        self, x_BC: Tensor, v_first_BC: Tensor | None, state: LayerState, *, new_state: LayerState
    ) -> tuple[Tensor, Tensor | None]:
        """One token: returns (x, v_first) and fills new_state."""
        if self.ln0 is not None:
            x_BC = self.ln0(x_BC)
        att_in_BC = self.ln1(x_BC)
        att_BC, v_first_BC = self.att.step(
            att_in_BC,
            v_first_BC,
            shift_BC=state.att_shift_BC,
            state_BHNN=state.wkv_BHNN,
            new_state_BHNN=new_state.wkv_BHNN,
        )
        x_BC = x_BC + att_BC
        ffn_in_BC = self.ln2(x_BC)
        x_BC = x_BC + self.ffn.step(ffn_in_BC, shift_BC=state.ffn_shift_BC)
        new_state.att_shift_BC.copy_(att_in_BC)
        new_state.ffn_shift_BC.copy_(ffn_in_BC)
        return x_BC, v_first_BC

    def _dropped(self, x_BTC: Tensor, seed_B: Tensor | None, *, site: int) -> Tensor:
        if seed_B is None or self.dropout == 0.0:
            return x_BTC
        return dropout(x_BTC, p=self.dropout, seed_B=seed_B, site=site, backend=self.backend)


def mix_once(x_BC: Tensor, previous_BC: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """x + (previous - x) * weight for every weight of C numbers: mix_with_previous for one token."""
    delta_BC = previous_BC - x_BC
    return [torch.addcmul(x_BC, delta_BC, weight.view(-1)) for weight in weights]


def product_dtype(x_BTC: Tensor) -> torch.dtype:
    """What matrix products compute in here: mixing straight into it saves each of them a cast of its own."""
    device = x_BTC.device.type
    dtype: torch.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_BTC.dtype
    return dtype


def norm_heads(y_RC: Tensor, ln_x: nn.GroupNorm) -> Tensor:
    """The group norm of rows [R, C], in the dtype of its scales.

    A layer norm over each head, then the scales: what a group norm of single rows gives, several times faster.
    """
    wide_RC = y_RC.to(ln_x.weight.dtype)
    head_size = y_RC.shape[-1] // ln_x.num_groups
    normed_RHN = F.layer_norm(wide_RC.view(-1, ln_x.num_groups, head_size), (head_size,), eps=ln_x.eps)
    return torch.addcmul(ln_x.bias, normed_RHN.view(y_RC.shape), ln_x.weight)
