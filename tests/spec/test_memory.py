"""The estimate of a step's memory is near what a step really takes, and never below it, for all generations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rwkv_spec.model.build import build_model
from rwkv_spec.model.shapes import TYPES, ModelShape, fresh_shape, num_parameters
from rwkv_spec.objective.cross_entropy import cross_entropy
from rwkv_spec.spec.memory import activation_bytes, resident_bytes
from tests.live import LiveBytes, zero_gradients
from tests.ops.cases import compiled

# Enough tokens in a row that the chunk which plain torch computes again is a small part of them.
B, T = 4, 64
LIVING = {"n_layer": 3, "n_embd": 128, "head_size": 32, "vocab_size": 100}

either_backend = pytest.mark.parametrize("backend", [pytest.param("cpu", marks=compiled), "torch"])


def kept_bytes(shape: ModelShape, *, dropout: float, backend: str, precision: str, grad_checkpoint: bool) -> int:
    """Bytes of all different tensors, but the weights, that a forward pass over 4 x 64 tokens keeps."""
    model = build_model(shape, backend=backend, dropout=dropout, grad_checkpoint=grad_checkpoint)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    # The tensors themselves are held, or an address could be given out twice.
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.zeros(4, 64, dtype=torch.int64)
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"),
    ):
        model(
            ids,
            dropout_seed_B=torch.arange(4) if dropout else None,
            loss=lambda hidden, head: cross_entropy(hidden, head, ids, torch.ones(4, 64), l2wrap=1e-4),
        )
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def estimated_bytes(*, type: str, dropout: float, backend: str, precision: str, grad_checkpoint: bool) -> int:
    return activation_bytes(
        4 * 64,
        type=type,
        n_layer=3,
        n_embd=256,
        head_size=64,
        vocab_size=300,
        precision=precision,
        dropout=dropout > 0,
        compiled=backend == "cpu",
        grad_checkpoint=grad_checkpoint,
    )


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@either_backend
@pytest.mark.parametrize("type", TYPES)
def test_the_estimate_is_near_what_is_kept_and_not_below_it(type: str, backend: str, dropout: float) -> None:
    shape = fresh_shape(type, n_layer=3, n_embd=256, head_size=64, vocab_size=300)
    kept = kept_bytes(shape, dropout=dropout, backend=backend, precision="fp32", grad_checkpoint=False)
    estimate = estimated_bytes(type=type, dropout=dropout, backend=backend, precision="fp32", grad_checkpoint=False)
    # The rest is left for the gradients that live at once in the backward pass.
    assert 0.65 < kept / estimate < 0.95


@compiled
@pytest.mark.parametrize("type", TYPES)
def test_the_estimate_for_bf16_is_not_below_what_compiled_operators_keep(type: str) -> None:
    shape = fresh_shape(type, n_layer=3, n_embd=256, head_size=64, vocab_size=300)
    kept = kept_bytes(shape, dropout=0.0, backend="cpu", precision="bf16", grad_checkpoint=False)
    # Casts of the weights are kept too, which so few tokens do not outweigh.
    casts = 2 * sum(numel for numel in num_parameters(shape).values())
    estimate = estimated_bytes(type=type, dropout=0.0, backend="cpu", precision="bf16", grad_checkpoint=False)
    assert 0.6 < (kept - casts) / estimate < 0.95


@either_backend
@pytest.mark.parametrize("type", TYPES)
def test_gradient_checkpoints_keep_the_inputs_of_the_blocks_alone(type: str, backend: str) -> None:
    shape = fresh_shape(type, n_layer=3, n_embd=256, head_size=64, vocab_size=300)
    kept = kept_bytes(shape, dropout=0.1, backend=backend, precision="fp32", grad_checkpoint=True)
    tensor = 4 * 64 * 256 * 4
    # x and what is added to it for each block and the end, x070's first value, the gradients of the head's ends.
    assert kept < (2 * 4 + 2) * tensor + 300 * 256 * 4 + tensor
    estimate = estimated_bytes(type=type, dropout=0.1, backend=backend, precision="fp32", grad_checkpoint=True)
    assert (
        kept
        < estimate
        < estimated_bytes(type=type, dropout=0.1, backend=backend, precision="fp32", grad_checkpoint=False)
    )


def living_bytes(shape: ModelShape, *, backend: str, precision: str, grad_checkpoint: bool) -> tuple[int, int]:
    """Bytes of all tensors but weights and gradients: before head and loss, and at the height of the step."""
    model = build_model(shape, backend=backend, dropout=0.1, grad_checkpoint=grad_checkpoint)
    ids, before_loss = torch.zeros(B, T, dtype=torch.int64), 0
    live = LiveBytes([*model.parameters(), *zero_gradients(model)])

    def loss(hidden: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal before_loss
        before_loss = live.now
        return cross_entropy(hidden, head, ids, torch.ones(B, T), l2wrap=1e-4, backend=backend)

    with live:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            value, _ = model(ids, dropout_seed_B=torch.arange(B), loss=loss)
        value.backward()
    return before_loss, live.peak


@either_backend
@pytest.mark.parametrize("grad_checkpoint", [False, True], ids=["kept", "computed again"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("type", TYPES)
def test_no_more_lives_at_once_than_was_foreseen(
    type: str, precision: str, grad_checkpoint: bool, backend: str
) -> None:
    shape = fresh_shape(type, **LIVING)
    _, peak = living_bytes(shape, backend=backend, precision=precision, grad_checkpoint=grad_checkpoint)
    activations = activation_bytes(
        B * T,
        type=type,
        **LIVING,
        precision=precision,
        dropout=True,
        compiled=backend == "cpu",
        grad_checkpoint=grad_checkpoint,
    )
    weights = sum(num_parameters(shape).values())
    whole = resident_bytes(weights, 0, activations=activations, precision=precision)
    # The mode does not count weights and gradients, and there is no optimizer.
    foreseen = whole.total - 4 * weights - whole.gradients - whole.moments
    assert 0.5 * foreseen < peak < foreseen


@either_backend
@pytest.mark.parametrize("type", TYPES)
def test_gradient_checkpoints_leave_nothing_alive_but_the_inputs_of_the_blocks(type: str, backend: str) -> None:
    """What autograd is not told of lives on unseen: tensors in a list, or what a block hands on."""
    shape = fresh_shape(type, **LIVING)
    before_loss, _ = living_bytes(shape, backend=backend, precision="fp32", grad_checkpoint=True)
    tensor = B * T * LIVING["n_embd"] * 4
    # x and what is added to it, of each block but the first and of the end; the first x; the last sum and its norm;
    # x070's first value; and small ones.
    assert before_loss < (2 * LIVING["n_layer"] + 3 + (type == "x070") + 0.5) * tensor
