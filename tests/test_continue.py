"""Training goes on from any checkpoint: its weights, a fresh optimizer, and the ways out where something misfits."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import rwkv_spec
from rwkv_spec.checkpoint.format import read_weights, write_weights
from rwkv_spec.checkpoint.published import checkpoint_sha256
from rwkv_spec.checkpoint.state import list_states, read_manifest
from rwkv_spec.errors import CheckpointError, SpecError
from rwkv_spec.model.build import initial_value
from tests.checkpoint.layouts import golden_file, golden_weights, in_layout_of_rwkv7, write_folder
from tests.tiny import tiny_spec

GENERATIONS = ("x052", "x060", "x070")
# The golden files have 32 rows: an integer tokenizer with as many ids.
FITTING = {"type": "integer", "max_value": 30}


def spec_from(tmp_path: Path, source: Path, *, resize: bool = False, **sections: object) -> dict[str, object]:
    sections = {"tokenizer": FITTING, "model": None, "train": {"steps": 4}, **sections}
    checkpoint = {"path": str(source), "dropout": 0.1, "resize_vocab": resize}
    return {**tiny_spec(tmp_path, **sections), "checkpoint": checkpoint}


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_run_begins_with_the_weights_of_the_checkpoint(tmp_path: Path, generation: str) -> None:
    source = golden_file(generation)
    run = rwkv_spec.run(spec_from(tmp_path, source))
    given, init = read_weights(source), read_weights(run.dir / "out" / "rwkv-init.pth")
    assert init.keys() == given.keys()
    assert all(torch.equal(init[name], given[name].float()) for name in given)
    info = rwkv_spec.inspect(run.checkpoint)
    assert (info.type, info.vocab_size, info.n_layer) == (generation, 32, 2)
    assert run.metrics[-1].loss < run.metrics[0].loss
    record = read_manifest(list_states(run.dir / "state")[-1])["record"]
    assert record["resolved"]["checkpoint_hash"] == checkpoint_sha256(source)  # type: ignore[index]


def test_a_huggingface_folder_begins_the_same_run_as_the_file(tmp_path: Path) -> None:
    weights = golden_weights("x070")
    write_weights(tmp_path / "a.pth", weights, format="pth", dtype=None)
    folder = write_folder(tmp_path / "hf", in_layout_of_rwkv7(weights), num_shards=2)
    finals = []
    for number, source in enumerate((tmp_path / "a.pth", folder)):
        spec = spec_from(tmp_path, source, work_dir=str(tmp_path / f"run{number}"))
        finals.append(read_weights(rwkv_spec.run(spec).checkpoint))
    assert all(torch.equal(finals[0][name], finals[1][name]) for name in finals[0])


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("num_ids", [11, 42])
def test_a_vocabulary_is_resized_when_asked(tmp_path: Path, generation: str, num_ids: int) -> None:
    source = golden_file(generation)
    sections = {"tokenizer": {"type": "integer", "max_value": num_ids - 2}, "seed": 5}
    spec = spec_from(tmp_path, source, resize=True, **sections)
    planned = str(rwkv_spec.api.planned(spec))
    words = "the first 11 of the checkpoint's 32 rows kept, 21 cut" if num_ids == 11 else "32 rows kept, 10 made fresh"
    assert words in planned and f"{num_ids} ids" in planned
    init = read_weights(rwkv_spec.initialize(spec))
    given, kept = read_weights(source), min(num_ids, 32)
    shape = rwkv_spec.load(tmp_path / "run" / "out" / "rwkv-init.pth").shape
    for name in ("emb.weight", "head.weight"):
        assert init[name].shape == (num_ids, 128)
        assert torch.equal(init[name][:kept], given[name][:kept].float())
        fresh = initial_value(name, (num_ids, 128), shape=shape, seed=5)
        assert torch.equal(init[name][kept:], fresh[kept:])
    (tmp_path / "run" / "out" / "rwkv-init.pth").rename(tmp_path / "init.pth")
    run = rwkv_spec.run(spec)
    assert (run.dir / "out" / "rwkv-init.pth").read_bytes() == (tmp_path / "init.pth").read_bytes()
    assert rwkv_spec.inspect(run.checkpoint).vocab_size == num_ids
    # A resume keeps the resized shape, and nothing is left to do.
    assert torch.equal(rwkv_spec.run(spec).model.head.weight, run.model.head.weight)


@pytest.mark.parametrize("max_value", [9, 359])
def test_another_vocabulary_names_both_numbers_and_the_ways_out(tmp_path: Path, max_value: int) -> None:
    weights = golden_weights("x060")
    rows = 600 if max_value < 300 else 32
    for name in ("emb.weight", "head.weight"):
        weights[name] = torch.zeros(rows, 128)
    write_weights(tmp_path / "a.pth", weights, format="pth", dtype="bf16")
    spec = spec_from(tmp_path, tmp_path / "a.pth", tokenizer={"type": "integer", "max_value": max_value})
    with pytest.raises(SpecError) as caught:
        rwkv_spec.check(spec)
    message = str(caught.value)
    assert f"has {rows} vocabulary rows and the tokenizer {max_value + 2} ids" in message
    assert "checkpoint.resize_vocab: true" in message and "model: for fresh weights" in message
    assert ("the first 11 rows alone" if rows == 600 else "these rows and 329 fresh ones") in message


def test_rows_to_the_next_multiple_of_256_are_taken_as_they_are(tmp_path: Path) -> None:
    spec = spec_from(tmp_path, golden_file("x070"), tokenizer={"type": "integer", "max_value": 9})
    planned = rwkv_spec.api.planned(spec)
    assert planned.sizes.vocab_size == 32 and "vocabulary:" not in str(planned)


def test_a_resume_refuses_another_source_and_another_choice(tmp_path: Path) -> None:
    source = shutil.copy(golden_file("x052"), tmp_path / "a.pth")
    spec = spec_from(tmp_path, source, save={"every": {"steps": 2}})
    rwkv_spec.run(spec)
    longer = spec_from(tmp_path, source, save={"every": {"steps": 2}}, train={"steps": 6})
    with pytest.raises(CheckpointError, match=r"checkpoint\.resize_vocab: False → True"):
        rwkv_spec.run(spec_from(tmp_path, source, resize=True, save={"every": {"steps": 2}}, train={"steps": 6}))
    weights = read_weights(golden_file("x052"))
    weights["ln_out.bias"] = weights["ln_out.bias"] + 1
    Path(source).unlink()
    write_weights(Path(source), weights, format="pth", dtype=None)
    with pytest.raises(CheckpointError, match=r"checkpoint \(contents\): \w{12} → \w{12}"):
        rwkv_spec.run(longer)
    shutil.copy(golden_file("x052"), source)
    assert rwkv_spec.run(longer).plan.total_steps == 6


def test_an_initial_state_is_not_lost_silently(tmp_path: Path) -> None:
    weights = golden_weights("x060") | {f"blocks.{layer}.att.time_state": torch.ones(2, 64, 64) for layer in (0, 1)}
    write_weights(tmp_path / "a.pth", weights, format="pth", dtype="bf16")
    assert "initial state" in str(rwkv_spec.inspect(tmp_path / "a.pth"))
    with pytest.raises(SpecError, match="initial state from state tuning"):
        rwkv_spec.check(spec_from(tmp_path, tmp_path / "a.pth"))
    for use in (rwkv_spec.load, lambda path: rwkv_spec.convert(path, tmp_path / "b.pth")):
        with pytest.raises(CheckpointError, match="initial state from state tuning"):
            use(tmp_path / "a.pth")


def test_a_missing_or_hostile_source_is_a_problem_of_the_spec(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "no.pth", "does not exist"), (tmp_path, "is a folder")):
        with pytest.raises(SpecError, match=words):
            rwkv_spec.check(spec_from(tmp_path, path))
