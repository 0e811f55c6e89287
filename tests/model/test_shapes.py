"""Names, shapes, groups and ranks of the three generations as published."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rwkv_spec.model.shapes import (
    DECAY,
    DOUBLE,
    OPERATORS,
    PLAIN,
    TYPES,
    UNTRAINED,
    ModelShape,
    Ranks,
    fresh_shape,
    low_ranks,
    num_parameters,
    parameter_groups,
    parameter_shapes,
)

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize(
    ("n_embd", "rule", "ranks"),
    [
        (512, "current", (64, 64, 32, 128)),
        (512, "older", (32, 32, 32, 96)),
        (768, "current", (64, 64, 32, 128)),
        (768, "older", (64, 64, 32, 128)),
        (1024, "current", (64, 64, 64, 160)),
        (1024, "older", (64, 64, 32, 160)),
        (2048, "current", (128, 128, 64, 224)),
        (2048, "older", (96, 96, 64, 256)),
        (2560, "current", (128, 128, 96, 256)),
        (2560, "older", (96, 96, 64, 320)),
        (4096, "current", (160, 160, 96, 320)),
        (4096, "older", (128, 128, 96, 480)),
        (16, "current", (32, 32, 32, 32)),
    ],
)
def test_fresh_ranks_follow_both_published_rules(n_embd: int, rule: str, ranks: tuple[int, int, int, int]) -> None:
    assert low_ranks(n_embd, rule=rule) == Ranks(*ranks)


def test_parameter_count_is_the_published_one() -> None:
    shape = ModelShape("x070", 24, 1024, 64, 65536, 64, 64, 32, 128, 4096)
    counts = num_parameters(shape)
    assert sum(counts.values()) == 450_834_432
    assert sum(counts.values()) - counts[UNTRAINED] == 450_767_872


def test_groups_are_those_of_the_published_trainer() -> None:
    golden = json.loads((GOLDEN / "x070_train_trace.json").read_text(encoding="utf-8"))["groups"]
    groups = parameter_groups(fresh_shape("x070", n_layer=3, n_embd=128, head_size=64, vocab_size=256))
    untrained = {f"blocks.0.att.v{i}" for i in range(3)}
    assert {name for name, group in groups.items() if group == UNTRAINED} == untrained
    assert {name for name, group in groups.items() if group == PLAIN} == set(golden["1x"]) - untrained
    assert {name for name, group in groups.items() if group == DOUBLE} == set(golden["2x"])
    assert {name for name, group in groups.items() if group == DECAY} == set(golden["decay"])


@pytest.mark.parametrize("type", ["x052", "x060"])
def test_groups_of_the_earlier_generations_are_those_of_their_published_trainer(type: str) -> None:
    """Decay on large matrices alone, the decay bias at twice the rate, low-rank pairs and the bonus without either."""
    groups = parameter_groups(fresh_shape(type, n_layer=2, n_embd=128, head_size=64, vocab_size=32))
    matrices = {"emb.weight", "head.weight"}
    for layer in range(2):
        matrices |= {f"blocks.{layer}.att.{m}.weight" for m in ("receptance", "key", "value", "output", "gate")}
        matrices |= {f"blocks.{layer}.ffn.{m}.weight" for m in ("receptance", "key", "value")}
    assert {name for name, group in groups.items() if group == DECAY} == matrices
    decays = {f"blocks.{layer}.att.time_decay" for layer in range(2)}
    assert {name for name, group in groups.items() if group == DOUBLE} == decays
    assert {group for name, group in groups.items() if name not in matrices | decays} == {PLAIN}


@pytest.mark.parametrize("type", TYPES)
def test_names_come_in_the_published_order(type: str) -> None:
    golden = json.loads((GOLDEN / f"{type}_mini.json").read_text(encoding="utf-8"))["grad_ce"]
    shape = fresh_shape(type, n_layer=2, n_embd=128, head_size=64, vocab_size=32)
    assert list(parameter_shapes(shape)) == list(golden)


@pytest.mark.parametrize("type", TYPES)
def test_shapes_are_those_of_the_published_weights(type: str) -> None:
    weights = torch.load(GOLDEN / f"{type}_mini_L2-D128-V32.pth", weights_only=True)
    shape = fresh_shape(type, n_layer=2, n_embd=128, head_size=64, vocab_size=32)
    table = {name: parameter.shape for name, parameter in parameter_shapes(shape).items()}
    assert table == {name: tuple(tensor.shape) for name, tensor in weights.items()}


@pytest.mark.parametrize(
    ("type", "n_embd", "dim_ffn"),
    [
        ("x052", 768, 2688),
        ("x052", 1024, 3584),
        ("x060", 2048, 7168),
        ("x060", 2560, 8960),
        ("x060", 4096, 14336),
        ("x060", 48, 160),
        ("x052", 16, 32),
        ("x052", 2, 32),
        ("x070", 768, 3072),
    ],
)
def test_the_inner_width_is_the_published_one(type: str, n_embd: int, dim_ffn: int) -> None:
    assert fresh_shape(type, n_layer=1, n_embd=n_embd, head_size=1, vocab_size=9).dim_ffn == dim_ffn


def test_ranks_that_a_generation_has_none_of_are_0() -> None:
    found = {type: fresh_shape(type, n_layer=1, n_embd=768, head_size=64, vocab_size=9).ranks for type in TYPES}
    assert found == {"x052": Ranks(0, 0, 0, 0), "x060": Ranks(64, 0, 0, 0, 32), "x070": Ranks(64, 64, 32, 128)}
    assert set(OPERATORS) == set(TYPES)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ({"type": "x052", "rank_decay": 64}, "rank_decay must be 0, as x052 has no such matrices, got 64"),
        ({"type": "x060", "rank_gate": 1}, "rank_gate must be 0, as x060 has no such matrices, got 1"),
        ({"type": "x060", "rank_mix": 0}, "rank_mix must be a whole number of at least 1, got 0"),
        ({"type": "x070", "rank_value": 0}, "rank_value must be a whole number of at least 1, got 0"),
        ({"type": "x070", "rank_mix": 32}, "rank_mix must be 0, as x070 has no such matrices, got 32"),
    ],
)
def test_ranks_of_another_generation_are_value_errors(ranks: dict[str, object], message: str) -> None:
    numbers = vars(fresh_shape(str(ranks["type"]), n_layer=1, n_embd=64, head_size=64, vocab_size=9))
    with pytest.raises(ValueError, match=message):
        ModelShape(**{**numbers, **ranks})


@pytest.mark.parametrize("rank_mix", [32, 64])
def test_published_files_of_x060_may_have_other_ranks(rank_mix: int) -> None:
    shape = ModelShape("x060", 1, 64, 64, 9, 128, 0, 0, 0, 224, rank_mix)
    table = parameter_shapes(shape)
    assert table["blocks.0.att.time_maa_w1"].shape == (64, 5 * rank_mix)
    assert table["blocks.0.att.time_maa_w2"].shape == (5, rank_mix, 64)
    assert table["blocks.0.att.time_decay_w1"].shape == (64, 128)


def test_only_the_first_block_norms_the_embedding() -> None:
    names = parameter_shapes(fresh_shape("x070", n_layer=2, n_embd=64, head_size=32, vocab_size=7))
    assert "blocks.0.ln0.weight" in names
    assert "blocks.1.ln0.weight" not in names
    assert names["blocks.1.att.r_k"].shape == (2, 32)
    assert names["blocks.1.ffn.key.weight"].shape == (256, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_embd": 700}, "n_embd 700 is not a multiple of head_size 64; nearest: 640 or 704"),
        ({"n_embd": 32}, "nearest: 64"),
        ({"n_layer": 0}, "n_layer must be a whole number of at least 1, got 0"),
        ({"vocab_size": 2.5}, "vocab_size must be a whole number of at least 1, got 2.5"),
        ({"type": "x999"}, "model type 'x999' is not known; known: x052, x060, x070"),
        ({"ranks": "newest"}, "rank rule 'newest' is not known; known: current, older"),
        ({"n_embd": -1}, "n_embd must be a whole number of at least 1, got -1"),
    ],
)
def test_impossible_shapes_are_value_errors_in_words(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"type": "x070", "n_layer": 2, "n_embd": 128, "head_size": 64, "vocab_size": 9}
    arguments |= change
    with pytest.raises(ValueError, match=message):
        fresh_shape(arguments.pop("type"), **arguments)  # type: ignore[arg-type]


def test_shapes_need_no_torch() -> None:
    code = "import sys, rwkv_spec.model.shapes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).parents[2]).returncode == 0
