"""A fresh model starts as published, wherever it is built; given weights are taken whole or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rwkv_spec.errors import CheckpointError
from rwkv_spec.model.build import build_model, initial_value, load_state, weights
from rwkv_spec.model.shapes import TYPES, UNTRAINED, ModelShape, fresh_shape, parameter_groups, parameter_shapes

GOLDEN = Path(__file__).parents[1] / "golden"
SHAPES = [fresh_shape(type, n_layer=2, n_embd=32, head_size=16, vocab_size=9) for type in TYPES]
SHAPE = SHAPES[TYPES.index("x070")]


def test_the_start_is_the_published_one() -> None:
    golden = torch.load(GOLDEN / "x070_init_L3-D128-V256.pth", weights_only=True)
    ours = weights(build_model(fresh_shape("x070", n_layer=3, n_embd=128, head_size=64, vocab_size=256), seed=3))
    assert ours.keys() == golden.keys()
    num_equal = 0
    for name, theirs in golden.items():
        random = name == "emb.weight" or (theirs.dim() == 2 and bool(theirs.any()) and not name.endswith("r_k"))
        if random:
            assert float(ours[name].norm()) == pytest.approx(float(theirs.norm()), rel=0.01), name
            assert float(ours[name].abs().max()) <= max(1.4 * float(theirs.abs().max()), 1e-4), name
            assert not torch.equal(ours[name], theirs)
        else:
            torch.testing.assert_close(ours[name], theirs, rtol=1e-6, atol=1e-6)
            num_equal += 1
    assert num_equal > 60


def test_orthogonal_matrices_are_orthogonal() -> None:
    shape = fresh_shape("x070", n_layer=1, n_embd=64, head_size=16, vocab_size=256)
    model = weights(build_model(shape))
    head = model["head.weight"].double()
    torch.testing.assert_close(head.T @ head, torch.eye(64, dtype=torch.float64) * 0.25 * 4, rtol=1e-5, atol=1e-5)
    second = model["blocks.0.att.w2"].double()
    torch.testing.assert_close(second @ second.T, torch.eye(32, dtype=torch.float64) * 0.01, rtol=1e-5, atol=1e-6)


def test_a_rank_above_the_width_scales_its_matrix() -> None:
    shape = fresh_shape("x070", n_layer=1, n_embd=8, head_size=8, vocab_size=4)
    second = weights(build_model(shape))["blocks.0.att.w2"].double()
    torch.testing.assert_close(second.T @ second, torch.eye(8, dtype=torch.float64) * 0.01 * 4, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("n_layer", "n_embd", "head_size"), [(1, 64, 64), (1, 16, 16), (2, 32, 8), (1, 2, 1)])
@pytest.mark.parametrize("type", TYPES)
def test_every_shape_starts_finite(type: str, n_layer: int, n_embd: int, head_size: int) -> None:
    shape = fresh_shape(type, n_layer=n_layer, n_embd=n_embd, head_size=head_size, vocab_size=3)
    model = build_model(shape)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights(model).values())
    assert bool(torch.isfinite(model(torch.zeros(1, 4, dtype=torch.int64))).all())


@pytest.mark.parametrize("shape", SHAPES, ids=TYPES)
def test_a_start_depends_on_seed_and_name_alone(shape: ModelShape) -> None:
    one, same, other = (weights(build_model(shape, seed=seed)) for seed in (4, 4, 5))
    for name, parameter in parameter_shapes(shape).items():
        assert torch.equal(one[name], same[name])
        assert torch.equal(one[name], initial_value(name, parameter.shape, shape=shape, seed=4))
    assert not torch.equal(one["head.weight"], other["head.weight"])
    assert not torch.equal(one["blocks.0.att.receptance.weight"], one["blocks.1.att.receptance.weight"])


@pytest.mark.parametrize("shape", SHAPES, ids=TYPES)
def test_the_modules_hold_exactly_the_table_of_shapes(shape: ModelShape) -> None:
    model = build_model(shape)
    table = parameter_shapes(shape)
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    assert {name: tuple(tensor.shape) for name, tensor in held.items()} == {n: p.shape for n, p in table.items()}
    assert list(weights(model)) == list(table)
    assert {name for name, _ in model.named_buffers()} == {n for n, p in table.items() if p.group == UNTRAINED}
    assert set(parameter_groups(shape)) == set(model.state_dict())


def test_weights_round_trip_with_and_without_the_unused_ones() -> None:
    given = weights(build_model(SHAPE, seed=8))
    model = build_model(SHAPE, seed=None)
    load_state(model, given)
    assert all(torch.equal(tensor, given[name]) for name, tensor in weights(model).items())
    model = build_model(SHAPE, seed=9)
    kept = weights(model)["blocks.0.att.v0"].clone()
    load_state(
        model, {name: tensor for name, tensor in given.items() if "blocks.0.att.v" not in name or "value" in name}
    )
    assert torch.equal(weights(model)["blocks.0.att.v0"], kept)
    assert torch.equal(weights(model)["blocks.0.att.value.weight"], given["blocks.0.att.value.weight"])


def test_weights_are_the_models_own_tensors() -> None:
    model = build_model(SHAPE)
    weights(model)["head.weight"].zero_()
    assert bool((model.head.weight == 0).all())
    assert not weights(model)["head.weight"].requires_grad


def test_weights_of_another_dtype_are_cast() -> None:
    given = {name: tensor.to(torch.bfloat16) for name, tensor in weights(build_model(SHAPE)).items()}
    model = build_model(SHAPE, seed=None)
    load_state(model, given)
    assert model.head.weight.dtype == torch.float32
    assert torch.equal(model.head.weight, given["head.weight"].float())


def test_weights_that_do_not_fit_change_nothing_and_are_all_named() -> None:
    given = {name: tensor.clone() for name, tensor in weights(build_model(SHAPE, seed=8)).items()}
    del given["ln_out.bias"]
    given["blocks.2.ln1.weight"] = torch.zeros(32)
    given["emb.weight"] = torch.zeros(10, 32)
    given["blocks.1.att.k_a"] = torch.zeros(1, 1, 32, dtype=torch.int64)
    model = build_model(SHAPE, seed=2)
    with pytest.raises(CheckpointError) as error:
        load_state(model, given)
    for part in (
        "ln_out.bias is missing",
        "blocks.2.ln1.weight is not known",
        "emb.weight has shape [10, 32], not [9, 32]",
        "blocks.1.att.k_a holds torch.int64",
    ):
        assert part in str(error.value)
    assert torch.equal(model.head.weight, build_model(SHAPE, seed=2).head.weight)


@pytest.mark.parametrize("dropout", [-0.1, 1.0, float("nan")])
def test_an_impossible_dropout_is_a_value_error(dropout: float) -> None:
    with pytest.raises(ValueError, match="dropout must be"):
        build_model(SHAPE, dropout=dropout)


@pytest.mark.parametrize("type", ["x052", "x060"])
def test_the_earlier_generations_may_lack_nothing(type: str) -> None:
    shape = SHAPES[TYPES.index(type)]
    given = dict(weights(build_model(shape, seed=8)))
    del given["blocks.1.att.time_faaaa"]
    with pytest.raises(CheckpointError, match=rf"this {type} model: blocks.1.att.time_faaaa is missing"):
        load_state(build_model(shape, seed=None), given)
