"""Names, shapes, groups and ranks of x070 as published."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rwkv_spec.model.shapes import (
    DECAY,
    DOUBLE,
    PLAIN,
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


def test_names_come_in_the_published_order() -> None:
    golden = json.loads((GOLDEN / "x070_mini.json").read_text(encoding="utf-8"))["grad_ce"]
    shape = fresh_shape("x070", n_layer=2, n_embd=128, head_size=64, vocab_size=32)
    assert list(parameter_shapes(shape)) == list(golden)


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
