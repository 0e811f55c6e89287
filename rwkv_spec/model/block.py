"""A block of any generation: norms, residual sums, dropout and what is carried from token to token.

The two halves are given: a time-mix and a channel-mix, each with a parallel form over [B, T, C] and a step form over
[B, C]. Both forms take and give the same LayerState, and a test holds them equal.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from rwkv_spec.ops.dropout import dropout
from rwkv_spec.ops.norm_mix import Mixed, norm_mix

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

    def shares(self) -> Tensor:
        """The shares of the previous token in the mixed inputs, [M, C]."""

    def __call__(
        self,
        mixed_BTC: tuple[Tensor, ...],
        v_first_BTC: Tensor | None,
        *,
        shift_BC: Tensor | None,
        state_BHNN: Tensor | None,
        starts_BT: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """From the M mixed inputs: returns (output, v_first, state after the last token)."""

    def step(
        self,
        x_BC: Tensor,
        v_first_BC: Tensor | None,
        *,
        shift_BC: Tensor,
        state_BHNN: Tensor,
        new_state_BHNN: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """One token, before it is mixed: returns (output, v_first) and fills new_state."""


class ChannelMix(Protocol):
    """The feed-forward half."""

    def shares(self) -> Tensor:
        """The shares of the previous token in the mixed inputs, [M, C]."""

    def __call__(self, mixed: tuple[Tensor, ...]) -> Tensor:
        """The output [..., C] from the M mixed inputs."""


class Block(nn.Module):
    """One layer: x += att(ln1(x)); x += ffn(ln2(x)), with dropout on both sums. Block 0 norms the embedding first.

    What the feed-forward half adds is handed on beside x: the next norm adds it, in one pass over both.
    """

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
        added_BTC: Tensor | None,
        v_first_BTC: Tensor | None,
        *,
        state: LayerState | None,
        starts_BT: Tensor | None,
        dropout_seed_B: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None, LayerState]:
        """Takes and returns (x, what is to be added to x, v_first), and what is carried from token to token."""
        if self.ln0 is not None:
            x_BTC = self.ln0(x_BTC)
        shift_BC = None if state is None else state.att_shift_BC
        before_att = self._mixed(x_BTC, added_BTC, self.ln1, self.att.shares(), first_BC=shift_BC, starts_BT=starts_BT)
        att_BTC, v_first_BTC, wkv_BHNN = self.att(
            before_att.mixed_BTC,
            v_first_BTC,
            shift_BC=shift_BC,
            state_BHNN=None if state is None else state.wkv_BHNN,
            starts_BT=starts_BT,
        )
        before_ffn = self._mixed(
            before_att.sum_BTC,
            self._dropped(att_BTC, dropout_seed_B, site=2 * self.layer),
            self.ln2,
            self.ffn.shares(),
            first_BC=None if state is None else state.ffn_shift_BC,
            starts_BT=starts_BT,
        )
        ffn_BTC = self._dropped(self.ffn(before_ffn.mixed_BTC), dropout_seed_B, site=2 * self.layer + 1)
        return before_ffn.sum_BTC, ffn_BTC, v_first_BTC, LayerState(before_att.last_BC, wkv_BHNN, before_ffn.last_BC)

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
        x_BC = x_BC + self.ffn(mix_once(ffn_in_BC, state.ffn_shift_BC, self.ffn.shares()))
        new_state.att_shift_BC.copy_(att_in_BC)
        new_state.ffn_shift_BC.copy_(ffn_in_BC)
        return x_BC, v_first_BC

    def _mixed(
        self,
        x_BTC: Tensor,
        added_BTC: Tensor | None,
        norm: nn.LayerNorm,
        shares_MC: Tensor,
        *,
        first_BC: Tensor | None,
        starts_BT: Tensor | None,
    ) -> Mixed:
        return norm_mix(
            x_BTC,
            added_BTC,
            norm.weight,
            norm.bias,
            shares_MC,
            first_BC=first_BC,
            starts_BT=starts_BT,
            dtype=product_dtype(x_BTC),
            eps=norm.eps,
            backend=self.backend,
        )

    def _dropped(self, x_BTC: Tensor, seed_B: Tensor | None, *, site: int) -> Tensor:
        if seed_B is None or self.dropout == 0.0:
            return x_BTC
        return dropout(x_BTC, p=self.dropout, seed_B=seed_B, site=site, backend=self.backend)


def final_norm(x_BTC: Tensor, added_BTC: Tensor | None, norm: nn.LayerNorm, *, backend: str) -> Tensor:
    """The norm of x + added, in the dtype of the matrix products."""
    # A share of zeros mixes nothing in.
    return norm_mix(
        x_BTC,
        added_BTC,
        norm.weight,
        norm.bias,
        torch.zeros_like(norm.weight).unsqueeze(0),
        first_BC=None,
        starts_BT=None,
        dtype=product_dtype(x_BTC),
        eps=norm.eps,
        backend=backend,
    ).mixed_BTC[0]


def mix_once(x_BC: Tensor, previous_BC: Tensor, shares: Tensor) -> tuple[Tensor, ...]:
    """x + (previous - x) * share for every share, [M, C] or [M, B, C]: the mixed inputs of one token."""
    delta_BC = previous_BC - x_BC
    return tuple(torch.addcmul(x_BC, delta_BC, share) for share in shares.unbind())


def product_dtype(x_BTC: Tensor) -> torch.dtype:
    """What matrix products compute in here: mixing straight into it saves each of them a cast of its own."""
    device = x_BTC.device.type
    dtype: torch.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_BTC.dtype
    return dtype


def stacked(*shares: Tensor) -> Tensor:
    """Published vectors [1, 1, C] as [M, C]."""
    return torch.cat([share.view(1, -1) for share in shares])
