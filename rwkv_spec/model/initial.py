"""The published start that all generations share: norms, large matrices, and the ramps that vectors are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from rwkv_spec.model.shapes import ModelShape

# Gains of the square and feed-forward matrices; 0 starts as zeros. They override the layer's own start, as published.
_MATRIX_GAINS: Final = {
    "att.receptance.weight": 1.0,
    "att.key.weight": 0.1,
    "att.value.weight": 1.0,
    "att.gate.weight": 0.1,
    "att.output.weight": 0.0,
    "ffn.key.weight": 1.0,
    "ffn.receptance.weight": 0.0,
    "ffn.value.weight": 0.0,
}


@dataclass(frozen=True, eq=False)
class Ramps:
    """Over the depth: `upward` from 0 to 1, `downward` from 1 to nearly 0. Over the channels (float64): the channel's
    index, `share` from 0 to below 1, `ramp` from 0 to 1.
    """

    upward: float
    downward: float
    channel_C: Tensor
    share_C: Tensor
    ramp_C: Tensor


def ramps(shape: ModelShape, *, layer: int) -> Ramps:
    """Those of one block. A single layer is the first one."""
    channel_C = torch.arange(shape.n_embd, dtype=torch.float64)
    return Ramps(
        upward=layer / (shape.n_layer - 1) if shape.n_layer > 1 else 0.0,
        downward=1.0 - layer / shape.n_layer,
        channel_C=channel_C,
        share_C=channel_C / shape.n_embd,
        ramp_C=channel_C / max(1, shape.n_embd - 1),
    )


def shared_start(
    name: str, sizes: tuple[int, ...], *, shape: ModelShape, layer: int, generator: torch.Generator
) -> Tensor | None:
    """A block's norm or large matrix, or None for the rest; `name` is the part after `blocks.<layer>.`."""
    if name.startswith("ln") or name == "att.ln_x.bias":
        return torch.ones(sizes) if name.endswith("weight") else torch.zeros(sizes)
    if name == "att.ln_x.weight":
        return torch.full(sizes, ((1 + layer) / shape.n_layer) ** 0.7)
    if name in _MATRIX_GAINS:
        return orthogonal(sizes, gain=_MATRIX_GAINS[name], generator=generator)
    return None


def orthogonal(sizes: tuple[int, ...], *, gain: float, generator: torch.Generator) -> Tensor:
    """A random orthogonal matrix times `gain`."""
    if gain == 0.0:
        return torch.zeros(sizes)
    return nn.init.orthogonal_(torch.empty(sizes), gain=gain, generator=generator)
