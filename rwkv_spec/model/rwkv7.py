"""RWKV-7 (x070): time-mix, channel-mix and their published initialisation.

Weights bear the published names; the low-rank pairs are used as x @ first @ second.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rwkv_spec.model.block import GROUP_NORM_EPS, mix_once, norm_heads, product_dtype
from rwkv_spec.model.elementwise import key_and_removal, mix_with_previous, squared_relu
from rwkv_spec.model.initial import orthogonal, ramps
from rwkv_spec.model.shapes import ModelShape
from rwkv_spec.ops.reference import wkv7_reference
from rwkv_spec.ops.wkv import wkv7


class TimeMix7(nn.Module):
    """The recurrent half of a block. Block 0's v0, v1, v2 are buffers: files hold them, nothing trains or uses them."""

    v0: Tensor
    v1: Tensor
    v2: Tensor

    def __init__(self, shape: ModelShape, *, layer: int, backend: str) -> None:
        super().__init__()
        width = shape.n_embd
        self.layer = layer
        self.num_heads = shape.num_heads
        self.head_size = shape.head_size
        self.backend = backend
        self.x_r = nn.Parameter(torch.empty(1, 1, width))
        self.x_w = nn.Parameter(torch.empty(1, 1, width))
        self.x_k = nn.Parameter(torch.empty(1, 1, width))
        self.x_v = nn.Parameter(torch.empty(1, 1, width))
        self.x_a = nn.Parameter(torch.empty(1, 1, width))
        self.x_g = nn.Parameter(torch.empty(1, 1, width))
        self.w1 = nn.Parameter(torch.empty(width, shape.rank_decay))
        self.w2 = nn.Parameter(torch.empty(shape.rank_decay, width))
        self.w0 = nn.Parameter(torch.empty(1, 1, width))
        self.a1 = nn.Parameter(torch.empty(width, shape.rank_iclr))
        self.a2 = nn.Parameter(torch.empty(shape.rank_iclr, width))
        self.a0 = nn.Parameter(torch.empty(1, 1, width))
        for name, sizes in (
            ("v1", (width, shape.rank_value)),
            ("v2", (shape.rank_value, width)),
            ("v0", (1, 1, width)),
        ):
            if layer == 0:
                self.register_buffer(name, torch.empty(sizes))
            else:
                self.register_parameter(name, nn.Parameter(torch.empty(sizes)))
        self.g1 = nn.Parameter(torch.empty(width, shape.rank_gate))
        self.g2 = nn.Parameter(torch.empty(shape.rank_gate, width))
        self.k_k = nn.Parameter(torch.empty(1, 1, width))
        self.k_a = nn.Parameter(torch.empty(1, 1, width))
        self.r_k = nn.Parameter(torch.empty(shape.num_heads, shape.head_size))
        self.receptance = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.ln_x = nn.GroupNorm(shape.num_heads, width, eps=GROUP_NORM_EPS)

    def forward(
        self,
        x_BTC: Tensor,
        v_first_BTC: Tensor | None,
        *,
        shift_BC: Tensor | None,
        state_BHNN: Tensor | None,
        starts_BT: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (output, value of block 0, state after the last token). Block 0 takes v_first None and makes it."""
        B, T, C = x_BTC.shape
        mixed_BTC = mix_with_previous(
            x_BTC, self._mix_weights(), first_BC=shift_BC, starts_BT=starts_BT, dtype=product_dtype(x_BTC)
        )
        mixed_RC = [mixed.view(-1, C) for mixed in mixed_BTC]
        v_first_RC = None if v_first_BTC is None else v_first_BTC.view(-1, C)
        r_RC, w_raw_RC, k_RC, v_RC, a_RC, b_RC, gate_RC = self._project(mixed_RC, v_first_RC)
        # The operator takes one dtype for all six: what the matrix products gave, bf16 under autocast.
        r_BTHN, w_raw_BTHN, k_BTHN, v_BTHN, a_BTHN, b_BTHN = (
            tensor.to(r_RC.dtype).view(B, T, self.num_heads, self.head_size)
            for tensor in (r_RC, w_raw_RC, k_RC, v_RC, a_RC, b_RC)
        )
        # The recurrence keeps float32 states whatever the matrix products around it compute in.
        with torch.autocast(x_BTC.device.type, enabled=False):
            y_BTHN, state_BHNN = wkv7(
                r_BTHN,
                w_raw_BTHN,
                k_BTHN,
                v_BTHN,
                a_BTHN,
                b_BTHN,
                state_BHNN,
                starts_BT=starts_BT,
                backend=self.backend,
            )
        out_RC = self._finish(y_BTHN.reshape(-1, C), r_RC, k_RC, v_RC, gate_RC)
        v_first_BTC = v_RC.view(B, T, C) if v_first_BTC is None else v_first_BTC
        return out_RC.view(B, T, C), v_first_BTC, state_BHNN

    def step(
        self,
        x_BC: Tensor,
        v_first_BC: Tensor | None,
        *,
        shift_BC: Tensor,
        state_BHNN: Tensor,
        new_state_BHNN: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """One token, with a recurrence of its own: the read follows the update, as in the parallel form."""
        mixed_BC = mix_once(x_BC, shift_BC, self._mix_weights())
        r_BC, w_raw_BC, k_BC, v_BC, a_BC, b_BC, gate_BC = self._project(mixed_BC, v_first_BC)
        one_token = (x_BC.shape[0], 1, self.num_heads, self.head_size)
        with torch.autocast(x_BC.device.type, enabled=False):
            r, w_raw, k, v, a, b = (x.view(one_token) for x in (r_BC, w_raw_BC, k_BC, v_BC, a_BC, b_BC))
            y_B1HN, after_BHNN = wkv7_reference(r, w_raw, k, v, a, b, state_BHNN)
        new_state_BHNN.copy_(after_BHNN)
        out_BC = self._finish(y_B1HN.reshape(x_BC.shape), r_BC, k_BC, v_BC, gate_BC)
        return out_BC, v_BC if v_first_BC is None else v_first_BC

    def _mix_weights(self) -> tuple[Tensor, ...]:
        return self.x_r, self.x_w, self.x_k, self.x_v, self.x_a, self.x_g

    def _project(self, mixed_RC: Sequence[Tensor], v_first_RC: Tensor | None) -> tuple[Tensor, ...]:
        """From the six mixed inputs to r, w_raw, k, v, a, b and the gate; both forms share it. R: rows of any kind."""
        width = mixed_RC[0].shape[-1]
        mixed_r_RC, mixed_w_RC, mixed_k_RC, mixed_v_RC, mixed_a_RC, mixed_g_RC = mixed_RC
        r_RC = self.receptance(mixed_r_RC)
        k_RC = self.key(mixed_k_RC)
        v_RC = self.value(mixed_v_RC)
        w_raw_RC = self.w0.view(width) + torch.tanh(mixed_w_RC @ self.w1) @ self.w2
        if v_first_RC is not None:
            share_RC = torch.sigmoid(self.v0.view(width) + (mixed_v_RC @ self.v1) @ self.v2)
            v_RC = torch.lerp(v_RC, v_first_RC, share_RC.to(v_RC.dtype))
        rate_RC = torch.sigmoid(self.a0.view(width) + (mixed_a_RC @ self.a1) @ self.a2)
        gate_RC = torch.sigmoid(mixed_g_RC @ self.g1) @ self.g2
        k_RC, a_RC, b_RC = key_and_removal(
            k_RC, rate_RC, self.k_k.view(width), self.k_a.view(width), head_size=self.head_size
        )
        return r_RC, w_raw_RC, k_RC, v_RC, a_RC, b_RC, gate_RC

    def _finish(self, y_RC: Tensor, r_RC: Tensor, k_RC: Tensor, v_RC: Tensor, gate_RC: Tensor) -> Tensor:
        """Group norm, the bonus of the present token, the gate and the output matrix."""
        heads = (-1, self.num_heads, self.head_size)
        normed_RC = norm_heads(y_RC, self.ln_x)
        bonus_RH1 = (r_RC.view(heads) * k_RC.view(heads) * self.r_k).sum(dim=-1, keepdim=True)
        y_RHN = torch.addcmul(normed_RC.view(heads), bonus_RH1, v_RC.view(heads).to(bonus_RH1.dtype))
        out_RC: Tensor = self.output(y_RHN.view(y_RC.shape) * gate_RC)
        return out_RC


class ChannelMix7(nn.Module):
    """The feed-forward half of a block: squared ReLU over the mixed input, no gate."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.x_k = nn.Parameter(torch.empty(1, 1, shape.n_embd))
        self.key = nn.Linear(shape.n_embd, shape.dim_ffn, bias=False)
        self.value = nn.Linear(shape.dim_ffn, shape.n_embd, bias=False)

    def forward(self, x_BTC: Tensor, *, shift_BC: Tensor | None, starts_BT: Tensor | None) -> Tensor:
        (mixed_BTC,) = mix_with_previous(
            x_BTC, (self.x_k,), first_BC=shift_BC, starts_BT=starts_BT, dtype=product_dtype(x_BTC)
        )
        return self._channels(mixed_BTC)

    def step(self, x_BC: Tensor, *, shift_BC: Tensor) -> Tensor:
        (mixed_BC,) = mix_once(x_BC, shift_BC, (self.x_k,))
        return self._channels(mixed_BC)

    def _channels(self, mixed_RC: Tensor) -> Tensor:
        out_RC: Tensor = self.value(squared_relu(self.key(mixed_RC)))
        return out_RC


def initial_start(
    name: str, sizes: tuple[int, ...], *, shape: ModelShape, layer: int, generator: torch.Generator
) -> Tensor:
    """The published start of a block's tensor that is this generation's own."""
    if name in ("att.w1", "att.a1", "att.v1", "att.g1"):
        return torch.zeros(sizes)
    if name in ("att.w2", "att.a2", "att.v2", "att.g2"):
        rows, columns = sizes
        return orthogonal(sizes, gain=0.1 * max(1.0, rows / columns) ** 0.5, generator=generator)
    return _initial_vector(name, shape=shape, layer=layer).float().reshape(sizes)


def _initial_vector(name: str, *, shape: ModelShape, layer: int) -> Tensor:
    width, head_size = shape.n_embd, shape.head_size
    depth = ramps(shape, layer=layer)
    upward, downward, share, ramp = depth.upward, depth.downward, depth.share_C, depth.ramp_C
    centred = ramp - 0.5
    middle = (head_size - 1) / 2
    zigzag = (depth.channel_C % head_size - middle) / max(0.5, middle)
    zigzag = zigzag * zigzag.abs()
    match name:
        case "att.x_r" | "att.x_g":
            return 1 - share ** (0.2 * downward)
        case "att.x_w" | "att.x_a":
            return 1 - share ** (0.9 * downward)
        case "att.x_k" | "att.x_v":
            return 1 - share ** (0.7 * downward)
        case "ffn.x_k":
            return 1 - share ** (downward**4)
        case "att.w0":
            return 6 * ramp.pow(1 + upward**0.3) - 5.5 + 2.5 * zigzag
        case "att.a0":
            return -0.19 + 0.3 * zigzag + 0.4 * centred
        case "att.v0":
            return 0.73 - 0.4 * centred
        case "att.k_k":
            return 0.71 - 0.1 * centred
        case "att.k_a":
            return torch.full((width,), 1.02, dtype=torch.float64)
        case "att.r_k":
            return torch.full((width,), -0.04, dtype=torch.float64)
    raise AssertionError(f"no published start is known for {name}")
