"""RWKV-6 (x060): time-mix and channel-mix with mixing weights and decay that depend on the token, and their start.

A mixing weight is the share of the previous token: x + (previous - x) * weight. The low-rank pairs are used as
x @ first @ second; time_maa_w1 and time_maa_w2 hold five pairs side by side, for w, k, v, r and g in this order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rwkv_spec.model.block import GROUP_NORM_EPS, mix_once, stacked
from rwkv_spec.model.gated import (
    gated_channels,
    gated_output,
    head_vectors_dtype,
    initial_bonus,
    initial_decay,
    step_gated,
)
from rwkv_spec.model.initial import ramps
from rwkv_spec.model.shapes import NUM_MIXED, ModelShape
from rwkv_spec.ops.token_mix import token_mix
from rwkv_spec.ops.wkv import wkv6

# The published start of the second matrix of each low-rank pair; the first one starts as zeros.
_SECOND_BOUND = 0.01


class TimeMix6(nn.Module):
    """The recurrent half of a block."""

    def __init__(self, shape: ModelShape, *, backend: str) -> None:
        super().__init__()
        width = shape.n_embd
        self.backend = backend
        self.time_maa_x = nn.Parameter(torch.empty(1, 1, width))
        self.time_maa_w = nn.Parameter(torch.empty(1, 1, width))
        self.time_maa_k = nn.Parameter(torch.empty(1, 1, width))
        self.time_maa_v = nn.Parameter(torch.empty(1, 1, width))
        self.time_maa_r = nn.Parameter(torch.empty(1, 1, width))
        self.time_maa_g = nn.Parameter(torch.empty(1, 1, width))
        self.time_maa_w1 = nn.Parameter(torch.empty(width, NUM_MIXED * shape.rank_mix))
        self.time_maa_w2 = nn.Parameter(torch.empty(NUM_MIXED, shape.rank_mix, width))
        self.time_decay = nn.Parameter(torch.empty(1, 1, width))
        self.time_decay_w1 = nn.Parameter(torch.empty(width, shape.rank_decay))
        self.time_decay_w2 = nn.Parameter(torch.empty(shape.rank_decay, width))
        self.time_faaaa = nn.Parameter(torch.empty(shape.num_heads, shape.head_size))
        self.receptance = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, width, bias=False)
        self.ln_x = nn.GroupNorm(shape.num_heads, width, eps=GROUP_NORM_EPS)

    def forward(
        self,
        mixed_BTC: tuple[Tensor, ...],
        v_first_BTC: Tensor | None,
        *,
        shift_BC: Tensor | None,
        state_BHNN: Tensor | None,
        starts_BT: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Returns (output, v_first as it was given, state after the last token)."""
        x_BTC, mixed_x_BTC = mixed_BTC
        B, T, C = x_BTC.shape
        mixed_BTC = token_mix(
            x_BTC,
            self._added_shares(mixed_x_BTC.view(-1, C)),
            self._fixed_shares(),
            first_BC=shift_BC,
            starts_BT=starts_BT,
            backend=self.backend,
        )
        r_RC, w_raw_RC, k_RC, v_RC, gate_RC = self._project([mixed.view(-1, C) for mixed in mixed_BTC])
        heads = (B, T, *self.time_faaaa.shape)
        # The recurrence keeps float32 states whatever the matrix products around it compute in.
        with torch.autocast(x_BTC.device.type, enabled=False):
            y_BTHN, state_BHNN = wkv6(
                r_RC.view(heads),
                # The operator takes one dtype for all four: what the matrix products gave, bf16 under autocast.
                w_raw_RC.to(r_RC.dtype).view(heads),
                k_RC.view(heads),
                v_RC.view(heads),
                self.time_faaaa.to(head_vectors_dtype(r_RC)),
                state_BHNN,
                starts_BT=starts_BT,
                backend=self.backend,
            )
        out_RC = self._finish(y_BTHN.reshape(-1, C), gate_RC)
        return out_RC.view(B, T, C), v_first_BTC, state_BHNN

    def step(
        self,
        x_BC: Tensor,
        v_first_BC: Tensor | None,
        *,
        shift_BC: Tensor,
        state_BHNN: Tensor,
        new_state_BHNN: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """One token, with a recurrence of its own."""
        out_BC = step_gated(
            self._project(self._mixed_once(x_BC, shift_BC)),
            u_HN=self.time_faaaa,
            ln_x=self.ln_x,
            output=self.output,
            state_BHNN=state_BHNN,
            new_state_BHNN=new_state_BHNN,
            backend=self.backend,
        )
        return out_BC, v_first_BC

    def shares(self) -> Tensor:
        """Zeros, which leave the token as it is, and those of the input that the five others follow from."""
        return stacked(torch.zeros_like(self.time_maa_x), self.time_maa_x)

    def _fixed_shares(self) -> Tensor:
        """Of the previous token in the inputs for w, k, v, r and g, for all tokens alike: [5, C]."""
        return stacked(self.time_maa_w, self.time_maa_k, self.time_maa_v, self.time_maa_r, self.time_maa_g)

    def _added_shares(self, mixed_x_RC: Tensor) -> Tensor:
        """What the token adds to these: [5, R, C]."""
        low_R5D = (mixed_x_RC @ self.time_maa_w1).tanh_().view(len(mixed_x_RC), NUM_MIXED, -1)
        added_5RC: Tensor = low_R5D.transpose(0, 1) @ self.time_maa_w2
        return added_5RC

    def _mixed_once(self, x_BC: Tensor, shift_BC: Tensor) -> tuple[Tensor, ...]:
        """The five mixed inputs of one token."""
        _, mixed_x_BC = mix_once(x_BC, shift_BC, self.shares())
        shares_5BC = self._fixed_shares().unsqueeze(1) + self._added_shares(mixed_x_BC)
        return mix_once(x_BC, shift_BC, shares_5BC)

    def _project(self, mixed_RC: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """From the five mixed inputs to r, w_raw, k, v and the gate before its SiLU."""
        mixed_w_RC, mixed_k_RC, mixed_v_RC, mixed_r_RC, mixed_g_RC = mixed_RC
        low_RD = (mixed_w_RC @ self.time_decay_w1).tanh_()
        w_raw_RC = self.time_decay.view(-1) + low_RD @ self.time_decay_w2
        r_RC, k_RC, v_RC = self.receptance(mixed_r_RC), self.key(mixed_k_RC), self.value(mixed_v_RC)
        return r_RC, w_raw_RC, k_RC, v_RC, self.gate(mixed_g_RC)

    def _finish(self, y_RC: Tensor, gate_RC: Tensor) -> Tensor:
        return gated_output(y_RC, gate_RC, ln_x=self.ln_x, output=self.output, backend=self.backend)


class ChannelMix6(nn.Module):
    """The feed-forward half of a block: squared ReLU, gated by the receptance."""

    def __init__(self, shape: ModelShape, *, backend: str) -> None:
        super().__init__()
        self.backend = backend
        self.time_maa_k = nn.Parameter(torch.empty(1, 1, shape.n_embd))
        self.time_maa_r = nn.Parameter(torch.empty(1, 1, shape.n_embd))
        self.key = nn.Linear(shape.n_embd, shape.dim_ffn, bias=False)
        self.receptance = nn.Linear(shape.n_embd, shape.n_embd, bias=False)
        self.value = nn.Linear(shape.dim_ffn, shape.n_embd, bias=False)

    def forward(self, mixed: tuple[Tensor, ...]) -> Tensor:
        mixed_k, mixed_r = mixed
        return gated_channels(
            mixed_k, mixed_r, key=self.key, receptance=self.receptance, value=self.value, backend=self.backend
        )

    def shares(self) -> Tensor:
        return stacked(self.time_maa_k, self.time_maa_r)


def initial_start(
    name: str, sizes: tuple[int, ...], *, shape: ModelShape, layer: int, generator: torch.Generator
) -> Tensor:
    """The published start of a block's tensor that is this generation's own."""
    depth = ramps(shape, layer=layer)
    match name:
        case "att.time_maa_w1" | "att.time_decay_w1":
            return torch.zeros(sizes)
        case "att.time_maa_w2" | "att.time_decay_w2":
            return torch.empty(sizes).uniform_(-_SECOND_BOUND, _SECOND_BOUND, generator=generator)
        case "att.time_maa_x" | "att.time_maa_w" | "att.time_maa_k":
            value_C = 1 - depth.share_C**depth.downward
        case "att.time_maa_v":
            value_C = 1 - (depth.share_C**depth.downward + 0.3 * depth.upward)
        case "att.time_maa_r" | "att.time_maa_g":
            value_C = 1 - depth.share_C ** (0.5 * depth.downward)
        case "ffn.time_maa_k" | "ffn.time_maa_r":
            value_C = 1 - depth.share_C ** (depth.downward**3)
        case "att.time_decay":
            value_C = initial_decay(depth)
        case "att.time_faaaa":
            value_C = initial_bonus(depth)
        case _:
            raise AssertionError(f"no published start is known for {name}")
    return value_C.float().reshape(sizes)
