"""Every generation trains from a spec: the loss falls, a stopped run goes on to the same bytes, the plan counts it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import rwkv_spec
from rwkv_spec import api
from rwkv_spec.checkpoint.state import list_states
from rwkv_spec.model.shapes import TYPES, fresh_shape, num_parameters
from tests.tiny import outputs, tiny_spec


def spec_of(type: str, folder: Path, *, steps: int, **sections: Any) -> dict[str, object]:
    return tiny_spec(folder, model={"type": type}, train={"steps": steps}, **sections)


@pytest.mark.parametrize("type", TYPES)
def test_the_loss_falls_with_dropout_on(type: str, tmp_path: Path) -> None:
    spec = spec_of(type, tmp_path, steps=40, optimizer={"lr": 1e-2})
    run = rwkv_spec.run(spec)
    rows = [json.loads(line) for line in (run.dir / "out" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[0] > 2.0
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("type", TYPES)
def test_a_run_that_goes_on_gives_the_same_bytes(type: str, tmp_path: Path) -> None:
    spec = spec_of(type, tmp_path, steps=8)
    whole = outputs(rwkv_spec.run(spec).dir)
    newest = list_states(tmp_path / "run" / "state")[-1]
    assert newest.name.endswith("8")
    shutil.rmtree(newest)
    for name in ("rwkv-final.pth", "rwkv-step8.pth"):
        (tmp_path / "run" / "out" / name).unlink()
    again = rwkv_spec.run(spec, resume="must")
    assert outputs(again.dir) == whole


@pytest.mark.parametrize("type", TYPES)
def test_a_plan_and_the_initial_weights_are_of_the_type_asked_for(type: str, tmp_path: Path) -> None:
    spec = spec_of(type, tmp_path, steps=8)
    planned = str(api.planned(spec))
    shape = fresh_shape(type, n_layer=2, n_embd=32, head_size=16, vocab_size=11)
    counts = num_parameters(shape)
    assert f"{type}, 2 layers" in planned and f"{sum(counts.values()):,}" in planned
    info = rwkv_spec.inspect(rwkv_spec.initialize(spec))
    assert (info.type, info.n_layer, info.n_embd, info.head_size) == (type, 2, 32, 16)
    assert info.num_parameters == sum(counts.values())


@pytest.mark.parametrize("type", TYPES)
def test_bench_measures_every_type(type: str, tmp_path: Path) -> None:
    report = api.bench(spec_of(type, tmp_path, steps=8), num_steps=1)
    assert report.shape.startswith(f"{type} L2 D32 ") and report.tokens_per_s > 0


def test_another_type_drops_the_keys_it_has_not_and_the_resolved_spec_is_one(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, model={"type": "x070", "ranks": "older"}, train={"steps": 2})
    run = rwkv_spec.run(spec, overrides=["model.type=x060"])
    again = rwkv_spec.check(run.dir / "configs" / "resolved.yaml")
    assert again.model is not None
    assert (again.model.type, again.model.ranks) == ("x060", None)
