"""WKV-7 in plain torch: the oracle that the compiled kernels are held to, and the fallback where nothing is compiled.

`wkv7_reference` is the recurrence as published, token by token, in float64 for float64 inputs and in float32 otherwise,
differentiated by autograd. `wkv7_torch` is the same maths in checkpointed chunks, so that a long window fits in memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

DECAY_RATE = math.exp(-0.5)
CHUNK_LENGTH = 16


def wkv7_reference(
    r_BTHN: Tensor,
    w_raw_BTHN: Tensor,
    k_BTHN: Tensor,
    v_BTHN: Tensor,
    a_BTHN: Tensor,
    b_BTHN: Tensor,
    state_BHNN: Tensor | None = None,
    *,
    starts_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y [B, T, H, N] in r's dtype and the last state [B, H, value, key]; every step's state is kept for autograd."""
    B, T, H, N = r_BTHN.shape
    dtype = torch.float64 if r_BTHN.dtype == torch.float64 else torch.float32
    r, w_raw, k, v, a, b = (x.to(dtype) for x in (r_BTHN, w_raw_BTHN, k_BTHN, v_BTHN, a_BTHN, b_BTHN))
    state = r.new_zeros(B, H, N, N) if state_BHNN is None else state_BHNN.to(dtype)
    w_log_BTHN = -DECAY_RATE * torch.sigmoid(w_raw)
    decay_BTHN = torch.exp(w_log_BTHN)
    outputs = []
    for t in range(T):
        if starts_BT is not None:
            state = torch.where(starts_BT[:, t, None, None, None], torch.zeros_like(state), state)
        sa_BHN = torch.einsum("bhij,bhj->bhi", state, a[:, t])
        state = (
            state * decay_BTHN[:, t, :, None, :]
            + torch.einsum("bhi,bhj->bhij", sa_BHN, b[:, t])
            + torch.einsum("bhi,bhj->bhij", v[:, t], k[:, t])
        )
        outputs.append(torch.einsum("bhij,bhj->bhi", state, r[:, t]))
    y_BTHN = torch.stack(outputs, dim=1) if outputs else r.new_zeros(B, 0, H, N)
    return y_BTHN.to(r_BTHN.dtype), state


def wkv7_torch(
    r_BTHN: Tensor,
    w_raw_BTHN: Tensor,
    k_BTHN: Tensor,
    v_BTHN: Tensor,
    a_BTHN: Tensor,
    b_BTHN: Tensor,
    state_BHNN: Tensor | None = None,
    *,
    starts_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As wkv7_reference, keeping for the backward only the inputs and the state before each chunk of 16 tokens."""
    B, T, H, N = r_BTHN.shape
    dtype = torch.float64 if r_BTHN.dtype == torch.float64 else torch.float32
    state = r_BTHN.new_zeros(B, H, N, N, dtype=dtype) if state_BHNN is None else state_BHNN.to(dtype)
    inputs = (r_BTHN, w_raw_BTHN, k_BTHN, v_BTHN, a_BTHN, b_BTHN)
    differentiate = torch.is_grad_enabled() and (state.requires_grad or any(x.requires_grad for x in inputs))
    keep_BT = None if starts_BT is None else torch.logical_not(starts_BT).to(dtype)
    outputs = []
    for first in range(0, T, CHUNK_LENGTH):
        pieces = [x[:, first : first + CHUNK_LENGTH] for x in inputs]
        keep = None if keep_BT is None else keep_BT[:, first : first + CHUNK_LENGTH]
        if differentiate:
            y, state = checkpoint(_chunk, pieces, state, keep, use_reentrant=False, preserve_rng_state=False)
        else:
            y, state = _chunk(pieces, state, keep)
        outputs.append(y)
    return torch.cat(outputs, dim=1) if outputs else torch.empty_like(r_BTHN), state


def _chunk(inputs: Sequence[Tensor], state: Tensor, keep_BT: Tensor | None) -> tuple[Tensor, Tensor]:
    """A few tokens; heads first, so that each product with the state is one batched matrix product."""
    B, T, H, N = inputs[0].shape
    r, w_raw, k, v, a, b = (x.to(state.dtype).permute(1, 0, 2, 3).reshape(T, B * H, N, 1).unbind(0) for x in inputs)
    S = state.reshape(B * H, N, N)
    outputs = []
    for t in range(T):
        if keep_BT is not None:
            S = S * keep_BT[:, t].repeat_interleave(H)[:, None, None]
        decay = torch.exp(-DECAY_RATE * torch.sigmoid(w_raw[t])).transpose(1, 2)
        # sa b^T + v k^T as one product of [N, 2] with [2, N].
        columns = torch.cat((torch.bmm(S, a[t]), v[t]), dim=2)
        S = torch.baddbmm(S * decay, columns, torch.cat((b[t], k[t]), dim=2).transpose(1, 2))
        outputs.append(torch.bmm(S, r[t]))
    y = torch.stack(outputs).reshape(T, B, H, N).permute(1, 0, 2, 3)
    return y.to(inputs[0].dtype), S.reshape(B, H, N, N)
