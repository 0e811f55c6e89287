"""RWKV-7 (x070): time-mix, channel-mix and their published initialisation.

Weights bear the published names; the low-rank pairs are used as x @ first @ second.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rwkv_spec.model.block import GROUP_NORM_EPS, mix_once, stacked
from rwkv_spec.model.initial import orthogonal, ramps
from rwkv_spec.model.shapes import ModelShape
from rwkv_spec.ops.gated_norm import Bonus, gated_norm
from rwkv_spec.ops.reference import wkv7_reference
from rwkv_spec.ops.relu2 import relu2
from rwkv_spec.ops.wkv import wkv7
from rwkv_spec.ops.wkv7_prepare import Prepared, Residual, wkv7_prepare


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
        mixed_BTC: tuple[Tensor, ...],
        v_first_BTC: Tensor | None,
        *,
        shift_BC: Tensor | None,
        state_BHNN: Tensor | None,
        starts_BT: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (output, value of block 0, state after the last token). Block 0 takes v_first None and makes it."""
        B, T, C = mixed_BTC[0].shape
        v_first_RC = None if v_first_BTC is None else v_first_BTC.view(-1, C)
        r_RC, prepared, gate_RC = self._project([mixed.view(-1, C) for mixed in mixed_BTC], v_first_RC)
        heads = (B, T, self.num_heads, self.head_size)
        # The recurrence keeps float32 states whatever the matrix products around it compute in.
        with torch.autocast(r_RC.device.type, enabled=False):
            y_BTHN, state_BHNN = wkv7(
                r_RC.view(heads),
                prepared.w_raw_RC.view(heads),
                prepared.k_RC.view(heads),
                prepared.v_RC.view(heads),
                prepared.a_RC.view(heads),
                prepared.b_RC.view(heads),
                state_BHNN,
                starts_BT=starts_BT,
                backend=self.backend,
            )
        out_RC = self._finish(y_BTHN.reshape(-1, C), r_RC, prepared, gate_RC)
        v_first_BTC = prepared.v_RC.view(B, T, C) if v_first_BTC is None else v_first_BTC
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
        r_BC, prepared, gate_BC = self._project(mix_once(x_BC, shift_BC, self.shares()), v_first_BC)
        one_token = (x_BC.shape[0], 1, self.num_heads, self.head_size)
        with torch.autocast(x_BC.device.type, enabled=False):
            r, w_raw, k, v, a, b = (x.view(one_token) for x in (r_BC, *prepared))
            y_B1HN, after_BHNN = wkv7_reference(r, w_raw, k, v, a, b, state_BHNN)
        new_state_BHNN.copy_(after_BHNN)
        out_BC = self._finish(y_B1HN.reshape(x_BC.shape), r_BC, prepared, gate_BC)
        return out_BC, prepared.v_RC if v_first_BC is None else v_first_BC

    def shares(self) -> Tensor:
        return stacked(self.x_r, self.x_w, self.x_k, self.x_v, self.x_a, self.x_g)

    def _project(self, mixed_RC: Sequence[Tensor], v_first_RC: Tensor | None) -> tuple[Tensor, Prepared, Tensor]:
        """From the six mixed inputs to r, what the recurrence takes beside it, and the gate. R: rows of any kind."""
        width = mixed_RC[0].shape[-1]
        mixed_r_RC, mixed_w_RC, mixed_k_RC, mixed_v_RC, mixed_a_RC, mixed_g_RC = mixed_RC
        residual = None
        if v_first_RC is not None:
            residual = Residual((mixed_v_RC @ self.v1) @ self.v2, v_first_RC, self.v0.view(width))
        prepared = wkv7_prepare(
            (mixed_w_RC @ self.w1).tanh_() @ self.w2,
            (mixed_a_RC @ self.a1) @ self.a2,
            self.key(mixed_k_RC),
            self.value(mixed_v_RC),
            residual,
            w0_C=self.w0.view(width),
            a0_C=self.a0.view(width),
            k_k_C=self.k_k.view(width),
            k_a_C=self.k_a.view(width),
            head_size=self.head_size,
            backend=self.backend,
        )
        gate_RC = (mixed_g_RC @ self.g1).sigmoid_() @ self.g2
        return self.receptance(mixed_r_RC), prepared, gate_RC

    def _finish(self, y_RC: Tensor, r_RC: Tensor, prepared: Prepared, gate_RC: Tensor) -> Tensor:
        """Group norm, the bonus of the present token, the gate and the output matrix."""
        gated_RC = gated_norm(
            y_RC,
            gate_RC,
            self.ln_x.weight,
            self.ln_x.bias,
            bonus=Bonus(r_RC, prepared.k_RC, prepared.v_RC, self.r_k),
            num_heads=self.num_heads,
            eps=self.ln_x.eps,
            backend=self.backend,
        )
        out_RC: Tensor = self.output(gated_RC)
        return out_RC


class ChannelMix7(nn.Module):
    """The feed-forward half of a block: squared ReLU over the mixed input, no gate."""

    def __init__(self, shape: ModelShape, *, backend: str) -> None:
        super().__init__()
        self.backend = backend
        self.x_k = nn.Parameter(torch.empty(1, 1, shape.n_embd))
        self.key = nn.Linear(shape.n_embd, shape.dim_ffn, bias=False)
        self.value = nn.Linear(shape.dim_ffn, shape.n_embd, bias=False)

    def forward(self, mixed: tuple[Tensor, ...]) -> Tensor:
        out: Tensor = self.value(relu2(self.key(mixed[0]), backend=self.backend))
        return out

    def shares(self) -> Tensor:
        return stacked(self.x_k)


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
