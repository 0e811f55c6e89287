"""What a training step keeps for its backward: no activation twice; or, if asked, the inputs of each block alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rwkv_spec.model.build import build_model
from rwkv_spec.model.language_model import LanguageModel
from rwkv_spec.model.shapes import TYPES, fresh_shape
from rwkv_spec.objective.cross_entropy import cross_entropy
from tests.model.models import random_ids
from tests.ops.cases import compiled

B, T, C = 2, 48, 32


def _saved(model: LanguageModel, *, precision: str) -> list[Tensor]:
    """One tensor for each piece of memory that is kept and holds at least a row of channels for every token."""
    kept: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        if x.numel() >= B * T * C:
            kept.setdefault(x.untyped_storage().data_ptr(), x)
        return x

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"),
    ):
        model(random_ids(B, T), dropout_seed_B=torch.arange(B))
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return [x for address, x in kept.items() if address not in weights]


@compiled
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("type", TYPES)
def test_no_activation_is_kept_twice(type: str, precision: str) -> None:
    shape = fresh_shape(type, n_layer=2, n_embd=C, head_size=16, vocab_size=40)
    model = build_model(shape, dropout=0.2, backend="cpu", seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            # From the published start many activations are zeros, and equal to each other.
            parameter += torch.randn(parameter.shape, generator=generator) * 0.3
    saved = _saved(model, precision=precision)
    assert len(saved) > 20
    values = [x.detach().float().flatten()[: B * T * C] for x in saved]
    twice = [
        (saved[i].shape, saved[i].dtype, saved[j].shape, saved[j].dtype)
        for i in range(len(saved))
        for j in range(i)
        # Wide enough for what was rounded to bfloat16 in one of the two.
        if torch.allclose(values[i], values[j], atol=1e-6, rtol=0.02)
    ]
    assert not twice


@pytest.mark.parametrize("backend", [pytest.param("cpu", marks=compiled), "torch"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("type", TYPES)
def test_blocks_computed_again_change_no_bit(type: str, precision: str, backend: str) -> None:
    shape = fresh_shape(type, n_layer=3, n_embd=C, head_size=16, vocab_size=40)
    ids, starts = random_ids(B, T), torch.zeros(B, T, dtype=torch.bool)
    starts[1, 7] = True
    results = []
    for grad_checkpoint in (False, True):
        model = build_model(shape, dropout=0.2, backend=backend, grad_checkpoint=grad_checkpoint, seed=1)
        assert model.grad_checkpoint is grad_checkpoint
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            value, _ = model(
                ids,
                starts_BT=starts,
                dropout_seed_B=torch.arange(B),
                loss=lambda hidden, head: cross_entropy(hidden, head, ids, torch.ones(B, T)),
            )
        value.backward()
        results.append((value.detach(), {name: x.grad for name, x in model.named_parameters()}))
    (value, grads), (again, grads_again) = results
    assert torch.equal(value, again)
    for name, grad in grads.items():
        other = grads_again[name]
        assert grad is not None and other is not None and torch.equal(grad, other), name
