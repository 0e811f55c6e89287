"""What RWKV-5.2 and RWKV-6 share: the gated ends of both halves in both forms, and the start of the decay.

The state is [key, value] as published; a token is read before it is taken in, with a bonus of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rwkv_spec.model.initial import Ramps
from rwkv_spec.ops.gated_norm import gated_norm
from rwkv_spec.ops.reference import wkv6_reference
from rwkv_spec.ops.relu2 import relu2
from rwkv_spec.ops.sigmoid_gate import sigmoid_gate


def gated_output(y_RC: Tensor, gate_RC: Tensor, *, ln_x: nn.GroupNorm, output: nn.Linear, backend: str) -> Tensor:
    """The end of the time-mix: group norm, SiLU gate, output matrix."""
    gated_RC = gated_norm(
        y_RC, gate_RC, ln_x.weight, ln_x.bias, bonus=None, num_heads=ln_x.num_groups, eps=ln_x.eps, backend=backend
    )
    out_RC: Tensor = output(gated_RC)
    return out_RC


def step_gated(
    products_BC: Sequence[Tensor],
    *,
    u_HN: Tensor,
    ln_x: nn.GroupNorm,
    output: nn.Linear,
    state_BHNN: Tensor,
    new_state_BHNN: Tensor,
    backend: str,
) -> Tensor:
    """The end of one token's time-mix from r, w_raw, k, v and the gate before its SiLU; fills new_state."""
    *vectors_BC, gate_BC = products_BC
    one_token = (gate_BC.shape[0], 1, *u_HN.shape)
    # A decay that all sequences share has none of its own for each.
    r, w_raw, k, v = (x.view(-1, 1, *u_HN.shape).expand(one_token) for x in vectors_BC)
    with torch.autocast(gate_BC.device.type, enabled=False):
        y, after_BHNN = wkv6_reference(r, w_raw, k, v, u_HN, state_BHNN)
    new_state_BHNN.copy_(after_BHNN)
    return gated_output(y.reshape(gate_BC.shape), gate_BC, ln_x=ln_x, output=output, backend=backend)


def gated_channels(
    mixed_k: Tensor, mixed_r: Tensor, *, key: nn.Linear, receptance: nn.Linear, value: nn.Linear, backend: str
) -> Tensor:
    """The channel-mix of mixed inputs [..., C]: squared ReLU, and a sigmoid gate on what comes out."""
    return sigmoid_gate(receptance(mixed_r), value(relu2(key(mixed_k), backend=backend)), backend=backend)


def head_vectors_dtype(r: Tensor) -> torch.dtype:
    """The dtype in which the recurrence takes its vectors a head, and keeps its state."""
    return torch.float64 if r.dtype == torch.float64 else torch.float32


def initial_decay(depth: Ramps) -> Tensor:
    """time_decay [C]: slow channels first, and more of them the deeper the block lies."""
    return -6 + 5 * depth.ramp_C ** (0.7 + 1.3 * depth.upward)


def initial_bonus(depth: Ramps) -> Tensor:
    """time_faaaa [C]: a falling ramp and a pattern of three."""
    return depth.upward * (1 - depth.ramp_C) + 0.1 * ((depth.channel_C + 1) % 3 - 1)
