"""The recurrences in plain torch: the oracle that the compiled kernels are held to, and the fallback without any.

`*_reference` is a recurrence as published, token by token, in float64 for float64 inputs and in float32 otherwise,
differentiated by autograd. `*_torch` is the same maths in checkpointed chunks, so that a long window fits in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

DECAY_RATE = math.exp(-0.5)
CHUNK_LENGTH = 16

# A few tokens: inputs [T, B * H, N, 1], the state [B * H, N, N], what is kept of it before each token [T, B * H, 1, 1].
Chunk = Callable[[Sequence[Tensor], Tensor, Tensor | None], tuple[list[Tensor], Tensor]]


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
    dtype = _wide(r_BTHN)
    r, w_raw, k, v, a, b = (x.to(dtype) for x in (r_BTHN, w_raw_BTHN, k_BTHN, v_BTHN, a_BTHN, b_BTHN))
    state = _first_state(r_BTHN, state_BHNN)
    decay_BTHN = torch.exp(-DECAY_RATE * torch.sigmoid(w_raw))
    outputs = []
    for t in range(r.shape[1]):
        state = _restarted(state, starts_BT, t)
        sa_BHN = torch.einsum("bhij,bhj->bhi", state, a[:, t])
        state = (
            state * decay_BTHN[:, t, :, None, :]
            + torch.einsum("bhi,bhj->bhij", sa_BHN, b[:, t])
            + torch.einsum("bhi,bhj->bhij", v[:, t], k[:, t])
        )
        outputs.append(torch.einsum("bhij,bhj->bhi", state, r[:, t]))
    y_BTHN = torch.stack(outputs, dim=1) if outputs else r.new_zeros(r.shape)
    return y_BTHN.to(r_BTHN.dtype), state


def wkv6_reference(
    r_BTHN: Tensor,
    w_raw_BTHN: Tensor,
    k_BTHN: Tensor,
    v_BTHN: Tensor,
    u_HN: Tensor,
    state_BHNN: Tensor | None = None,
    *,
    starts_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y [B, T, H, N] in r's dtype and the last state [B, H, key, value]; the read sees the state before the update."""
    dtype = _wide(r_BTHN)
    r, w_raw, k, v, u = (x.to(dtype) for x in (r_BTHN, w_raw_BTHN, k_BTHN, v_BTHN, u_HN))
    state = _first_state(r_BTHN, state_BHNN)
    decay_BTHN = _decay6(w_raw)
    outputs = []
    for t in range(r.shape[1]):
        state = _restarted(state, starts_BT, t)
        kv_BHNN = torch.einsum("bhj,bhi->bhji", k[:, t], v[:, t])
        outputs.append(torch.einsum("bhj,bhji->bhi", r[:, t], state + u[None, :, :, None] * kv_BHNN))
        state = state * decay_BTHN[:, t, :, :, None] + kv_BHNN
    y_BTHN = torch.stack(outputs, dim=1) if outputs else r.new_zeros(r.shape)
    return y_BTHN.to(r_BTHN.dtype), state


def wkv5_reference(
    r_BTHN: Tensor,
    k_BTHN: Tensor,
    v_BTHN: Tensor,
    w_raw_HN: Tensor,
    u_HN: Tensor,
    state_BHNN: Tensor | None = None,
    *,
    starts_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As wkv6_reference with one decay for each channel, whatever the token."""
    w_raw_BTHN = w_raw_HN.expand(r_BTHN.shape)
    return wkv6_reference(r_BTHN, w_raw_BTHN, k_BTHN, v_BTHN, u_HN, state_BHNN, starts_BT=starts_BT)


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
    inputs = (r_BTHN, w_raw_BTHN, k_BTHN, v_BTHN, a_BTHN, b_BTHN)
    return _in_chunks(_chunk7, inputs, state_BHNN, starts_BT)


def wkv6_torch(
    r_BTHN: Tensor,
    w_raw_BTHN: Tensor,
    k_BTHN: Tensor,
    v_BTHN: Tensor,
    u_HN: Tensor,
    state_BHNN: Tensor | None = None,
    *,
    starts_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As wkv6_reference, keeping for the backward only the inputs and the state before each chunk of 16 tokens."""
    inputs = (r_BTHN, w_raw_BTHN, k_BTHN, v_BTHN, u_HN.expand(r_BTHN.shape))
    return _in_chunks(_chunk6, inputs, state_BHNN, starts_BT)


def wkv5_torch(
    r_BTHN: Tensor,
    k_BTHN: Tensor,
    v_BTHN: Tensor,
    w_raw_HN: Tensor,
    u_HN: Tensor,
    state_BHNN: Tensor | None = None,
    *,
    starts_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As wkv5_reference, keeping for the backward only the inputs and the state before each chunk of 16 tokens."""
    w_raw_BTHN = w_raw_HN.expand(r_BTHN.shape)
    return wkv6_torch(r_BTHN, w_raw_BTHN, k_BTHN, v_BTHN, u_HN, state_BHNN, starts_BT=starts_BT)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _decay6(w_raw: Tensor) -> Tensor:
    """exp(-exp(w_raw)). Long before the bound it is 0, and so is its gradient, which an infinite exp would make NaN."""
    return torch.exp(-torch.exp(w_raw.clamp(max=30.0)))


def _first_state(r_BTHN: Tensor, state_BHNN: Tensor | None) -> Tensor:
    if state_BHNN is not None:
        return state_BHNN.to(_wide(r_BTHN))
    B, _, H, N = r_BTHN.shape
    return r_BTHN.new_zeros(B, H, N, N, dtype=_wide(r_BTHN))


def _restarted(state: Tensor, starts_BT: Tensor | None, t: int) -> Tensor:
    if starts_BT is None:
        return state
    return torch.where(starts_BT[:, t, None, None, None], torch.zeros_like(state), state)


def _in_chunks(
    chunk: Chunk, inputs: Sequence[Tensor], state_BHNN: Tensor | None, starts_BT: Tensor | None
) -> tuple[Tensor, Tensor]:
    r_BTHN = inputs[0]
    state = _first_state(r_BTHN, state_BHNN)
    differentiate = torch.is_grad_enabled() and (state.requires_grad or any(x.requires_grad for x in inputs))
    keep_BT = None if starts_BT is None else torch.logical_not(starts_BT).to(state.dtype)
    outputs = []
    for first in range(0, r_BTHN.shape[1], CHUNK_LENGTH):
        pieces = [x[:, first : first + CHUNK_LENGTH] for x in inputs]
        keep = None if keep_BT is None else keep_BT[:, first : first + CHUNK_LENGTH]
        if differentiate:
            # Tensors one by one: those in a list would be held on to, where a whole block is computed again.
            y, state = checkpoint(_a_chunk, chunk, state, keep, *pieces, use_reentrant=False, preserve_rng_state=False)
        else:
            y, state = _a_chunk(chunk, state, keep, *pieces)
        outputs.append(y)
    return torch.cat(outputs, dim=1) if outputs else torch.empty_like(r_BTHN), state


def _a_chunk(chunk: Chunk, state: Tensor, keep_BT: Tensor | None, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """A few tokens; heads first, so that each product with the state is one batched matrix product."""
    B, T, H, N = inputs[0].shape
    columns = [x.to(state.dtype).permute(1, 0, 2, 3).reshape(T, B * H, N, 1) for x in inputs]
    keep = None if keep_BT is None else keep_BT.t().repeat_interleave(H, dim=1)[:, :, None, None]
    outputs, S = chunk(columns, state.reshape(B * H, N, N), keep)
    y = torch.stack(outputs).reshape(T, B, H, N).permute(1, 0, 2, 3)
    return y.to(inputs[0].dtype), S.reshape(B, H, N, N)


def _chunk7(columns: Sequence[Tensor], S: Tensor, keep: Tensor | None) -> tuple[list[Tensor], Tensor]:
    r, w_raw, k, v, a, b = (x.unbind(0) for x in columns)
    outputs = []
    for t in range(len(r)):
        if keep is not None:
            S = S * keep[t]
        decay = torch.exp(-DECAY_RATE * torch.sigmoid(w_raw[t])).transpose(1, 2)
        # sa b^T + v k^T as one product of [N, 2] with [2, N].
        pair = torch.cat((torch.bmm(S, a[t]), v[t]), dim=2)
        S = torch.baddbmm(S * decay, pair, torch.cat((b[t], k[t]), dim=2).transpose(1, 2))
        outputs.append(torch.bmm(S, r[t]))
    return outputs, S


def _chunk6(columns: Sequence[Tensor], S: Tensor, keep: Tensor | None) -> tuple[list[Tensor], Tensor]:
    r, w_raw, k, v, u = (x.unbind(0) for x in columns)
    outputs = []
    for t in range(len(r)):
        if keep is not None:
            S = S * keep[t]
        bonus = (r[t] * u[t] * k[t]).sum(dim=1, keepdim=True)
        outputs.append(torch.bmm(S.transpose(1, 2), r[t]) + bonus * v[t])
        S = torch.baddbmm(S * _decay6(w_raw[t]), k[t], v[t].transpose(1, 2))
    return outputs, S
