"""RWKV-5.2 (x052): time-mix and channel-mix with fixed mixing weights and decay, and their published initialisation.

A mixing weight is the share of the present token: x * weight + previous * (1 - weight).
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
from rwkv_spec.model.shapes import ModelShape
from rwkv_spec.ops.wkv import wkv5


class TimeMix5(nn.Module):
    """The recurrent half of a block."""

    def __init__(self, shape: ModelShape, *, backend: str) -> None:
        super().__init__()
        width, heads = shape.n_embd, (shape.num_heads, shape.head_size)
        self.backend = backend
        self.time_mix_k = nn.Parameter(torch.empty(1, 1, width))
        self.time_mix_v = nn.Parameter(torch.empty(1, 1, width))
        self.time_mix_r = nn.Parameter(torch.empty(1, 1, width))
        self.time_mix_g = nn.Parameter(torch.empty(1, 1, width))
        self.time_decay = nn.Parameter(torch.empty(heads))
        self.time_faaaa = nn.Parameter(torch.empty(heads))
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
        B, T, C = mixed_BTC[0].shape
        r_BTC, k_BTC, v_BTC, gate_BTC = self._project(mixed_BTC)
        heads = (B, T, *self.time_decay.shape)
        dtype = head_vectors_dtype(r_BTC)
        # The recurrence keeps float32 states whatever the matrix products around it compute in.
        with torch.autocast(r_BTC.device.type, enabled=False):
            y_BTHN, state_BHNN = wkv5(
                r_BTC.view(heads),
                k_BTC.view(heads),
                v_BTC.view(heads),
                self.time_decay.to(dtype),
                self.time_faaaa.to(dtype),
                state_BHNN,
                starts_BT=starts_BT,
                backend=self.backend,
            )
        out_RC = self._finish(y_BTHN.reshape(-1, C), gate_BTC.view(-1, C))
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
        mixed_BC = mix_once(x_BC, shift_BC, self.shares())
        r_BC, k_BC, v_BC, gate_BC = self._project(mixed_BC)
        products_BC = (r_BC, self.time_decay, k_BC, v_BC, gate_BC)
        out_BC = step_gated(
            products_BC,
            u_HN=self.time_faaaa,
            ln_x=self.ln_x,
            output=self.output,
            state_BHNN=state_BHNN,
            new_state_BHNN=new_state_BHNN,
            backend=self.backend,
        )
        return out_BC, v_first_BC

    def shares(self) -> Tensor:
        return 1 - stacked(self.time_mix_r, self.time_mix_k, self.time_mix_v, self.time_mix_g)

    def _project(self, mixed: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """From the four mixed inputs to r, k, v and the gate before its SiLU; both forms share it."""
        mixed_r, mixed_k, mixed_v, mixed_g = mixed
        return self.receptance(mixed_r), self.key(mixed_k), self.value(mixed_v), self.gate(mixed_g)

    def _finish(self, y_RC: Tensor, gate_RC: Tensor) -> Tensor:
        return gated_output(y_RC, gate_RC, ln_x=self.ln_x, output=self.output, backend=self.backend)


class ChannelMix5(nn.Module):
    """The feed-forward half of a block: squared ReLU, gated by the receptance."""

    def __init__(self, shape: ModelShape, *, backend: str) -> None:
        super().__init__()
        self.backend = backend
        self.time_mix_k = nn.Parameter(torch.empty(1, 1, shape.n_embd))
        self.time_mix_r = nn.Parameter(torch.empty(1, 1, shape.n_embd))
        self.key = nn.Linear(shape.n_embd, shape.dim_ffn, bias=False)
        self.receptance = nn.Linear(shape.n_embd, shape.n_embd, bias=False)
        self.value = nn.Linear(shape.dim_ffn, shape.n_embd, bias=False)

    def forward(self, mixed: tuple[Tensor, ...]) -> Tensor:
        mixed_k, mixed_r = mixed
        return gated_channels(
            mixed_k, mixed_r, key=self.key, receptance=self.receptance, value=self.value, backend=self.backend
        )

    def shares(self) -> Tensor:
        return 1 - stacked(self.time_mix_k, self.time_mix_r)


def initial_start(
    name: str, sizes: tuple[int, ...], *, shape: ModelShape, layer: int, generator: torch.Generator
) -> Tensor:
    """The published start of a block's tensor that is this generation's own. Nothing of it is random."""
    depth = ramps(shape, layer=layer)
    match name:
        case "att.time_mix_k" | "ffn.time_mix_k" | "ffn.time_mix_r":
            value_C = depth.share_C**depth.downward
        case "att.time_mix_v":
            value_C = depth.share_C**depth.downward + 0.3 * depth.upward
        case "att.time_mix_r" | "att.time_mix_g":
            value_C = depth.share_C ** (0.5 * depth.downward)
        case "att.time_decay":
            value_C = initial_decay(depth)
        case "att.time_faaaa":
            value_C = initial_bonus(depth)
        case _:
            raise AssertionError(f"no published start is known for {name}")
    return value_C.float().reshape(sizes)
