"""The estimate of a step's memory is near what autograd really keeps, and never below it, for all generations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rwkv_spec.model.build import build_model
from rwkv_spec.model.shapes import TYPES, ModelShape, fresh_shape
from rwkv_spec.objective.cross_entropy import cross_entropy
from rwkv_spec.spec.memory import activation_bytes


def kept_bytes(shape: ModelShape, *, dropout: float) -> int:
    """Bytes of all different tensors, but the weights, that a forward pass over 4 x 64 tokens keeps in float32."""
    model = build_model(shape, backend="torch", dropout=dropout)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    # The tensors themselves are held, or an address could be given out twice.
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.zeros(4, 64, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(
            ids,
            dropout_seed_B=torch.arange(4) if dropout else None,
            loss=lambda hidden, head: cross_entropy(hidden, head, ids, torch.ones(4, 64), l2wrap=1e-4),
        )
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("type", TYPES)
def test_the_estimate_is_near_what_is_kept_and_not_below_it(type: str, dropout: float) -> None:
    shape = fresh_shape(type, n_layer=3, n_embd=256, head_size=64, vocab_size=300)
    estimate = activation_bytes(
        4 * 64,
        type=type,
        n_layer=3,
        n_embd=256,
        head_size=64,
        vocab_size=300,
        precision="fp32",
        dropout=dropout > 0,
    )
    assert 0.65 < kept_bytes(shape, dropout=dropout) / estimate < 0.95
