"""Another number of vocabulary rows for given weights: what exists is kept, what is beyond cut, what is new fresh.

Only embedding and head have such rows. What is new starts as published, drawn from the seed and the tensor's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from rwkv_spec.checkpoint.detect import detect_model
from rwkv_spec.checkpoint.format import tensor_infos
from rwkv_spec.checkpoint.published import open_weights
from rwkv_spec.model.build import initial_value
from rwkv_spec.model.shapes import ModelShape

_WITH_ROWS = ("emb.weight", "head.weight")


def starting_weights(path: Path, *, shape: ModelShape, seed: int) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors for a model of this shape, which may differ in the number of vocabulary rows only."""
    weights = open_weights(path)
    detect_model(tensor_infos(weights), where=path)
    return with_vocabulary(weights, shape=shape, seed=seed)


def with_vocabulary(weights: Mapping[str, torch.Tensor], *, shape: ModelShape, seed: int) -> dict[str, torch.Tensor]:
    """The same tensors with shape.vocab_size rows in embedding and head."""
    resized = dict(weights)
    for name in _WITH_ROWS:
        old = weights[name]
        kept = min(len(old), shape.vocab_size)
        if len(old) == shape.vocab_size:
            continue
        rows = [old[:kept]]
        if kept < shape.vocab_size:
            rows.append(initial_value(name, (shape.vocab_size, shape.n_embd), shape=shape, seed=seed)[kept:])
        resized[name] = torch.cat(rows)
    return resized
