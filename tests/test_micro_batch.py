"""The search for the fastest micro-batch: it ends in time, is made once a machine, and never stands in a run's way."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import rwkv_spec
import rwkv_spec.api
from rwkv_spec.checkpoint.state import list_states, read_manifest
from rwkv_spec.micro_batch import (
    Work,
    compared,
    find_choice,
    noted_choice,
    notes_folder,
    pass_timer,
    read_note,
    settled,
    write_note,
)
from rwkv_spec.model.shapes import fresh_shape
from rwkv_spec.ops.build import cache_folder
from rwkv_spec.planning import Planned
from rwkv_spec.train.engine import Engine
from tests.tiny import outputs, tiny_spec

SIZES = (1, 2, 4, 8, 16)
SHAPE = fresh_shape("x070", n_layer=1, n_embd=32, head_size=16, vocab_size=11)
WORK = Work(
    shape=SHAPE,
    ctx_len=5,
    share=4,
    sizes=(1, 2, 4),
    precision="fp32",
    backend="torch",
    num_threads=1,
    dropout=0.1,
    l2wrap=0.0,
)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    built = Engine(precision="fp32", trackers=(), log_dir=tmp_path, threads=1)
    yield built
    built.end()


class Passes:
    """Seconds as a machine would take them, and what was asked for. `each` gives the seconds of one sequence."""

    def __init__(self, each: Callable[[int, int], float]) -> None:
        self._each = each
        self.asked: list[int] = []
        self.seconds = 0.0

    def __call__(self, size: int) -> float:
        self.asked.append(size)
        seconds = size * self._each(size, len(self.asked))
        self.seconds += seconds
        return seconds


def test_a_size_that_is_hopeless_ends_the_search_and_is_no_choice() -> None:
    passes = Passes(lambda size, _: {1: 1.0, 2: 0.5, 4: 0.9}[size])
    assert compared(SIZES, passes, share=16, most_seconds=1e6) == {2: 0.5}
    assert 8 not in passes.asked


def test_one_disturbed_pass_decides_nothing() -> None:
    quiet = compared(SIZES, Passes(lambda size, _: 1 + size / 16), share=16, most_seconds=1e6)
    # Passes 1 to 6 try the sizes out; the ninth is one of the three that are timed of size 4.
    passes = Passes(lambda size, number: 50.0 if number == 9 else 1 + size / 16)
    disturbed = compared(SIZES, passes, share=16, most_seconds=1e6)
    assert passes.asked[8] == 4 and disturbed == quiet and quiet is not None


def test_filler_is_work() -> None:
    found = compared((1, 2, 3), Passes(lambda size, _: 1.0), share=3, most_seconds=1e6)
    assert found == {1: 1.0, 2: pytest.approx(4 / 3), 3: 1.0}
    # The filler of size 2 makes it hopeless for the run, but not the sizes beyond it.
    found = compared((1, 2, 3), Passes(lambda size, _: {1: 1.0, 2: 1.2, 3: 0.7}[size]), share=3, most_seconds=1e6)
    assert found is not None and found[3] == pytest.approx(0.7)


@pytest.mark.parametrize("most_seconds", [0.5, 3.0, 10.0, 50.0, 100.0])
def test_a_search_ends_in_the_time_it_has(most_seconds: float) -> None:
    passes = Passes(lambda size, _: 1.0)
    compared(SIZES, passes, share=16, most_seconds=most_seconds)
    # How long a first pass takes cannot be known before.
    assert passes.seconds <= max(most_seconds, 1.0)


def test_a_pass_that_takes_too_long_is_made_once() -> None:
    passes = Passes(lambda size, _: 30.0)
    assert compared(SIZES, passes, share=16, most_seconds=10.0) is None
    assert passes.asked == [1]


def test_a_search_cut_while_larger_is_still_faster_decides_nothing() -> None:
    def falling(size: int, _: int) -> float:
        return 1.0 + 1.0 / size

    assert compared(SIZES, Passes(falling), share=16, most_seconds=12.0) is None


def test_a_search_cut_when_larger_is_not_faster_any_more_decides() -> None:
    passes = Passes(lambda size, _: {1: 0.9, 2: 0.8, 4: 1.0}[size])
    found = compared(SIZES, passes, share=16, most_seconds=22.0)
    assert found == {1: 0.9, 2: 0.8, 4: 1.0} and 8 not in passes.asked


# ---- measuring and noting ----


def test_a_search_measures_real_passes_and_moves_no_random_state(engine: Engine, tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    choice = find_choice(WORK, engine, notes=tmp_path / "notes")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert choice.size in WORK.sizes and choice.reason.startswith(f"micro-batch {choice.size} of 4: ")
    (path,) = (tmp_path / "notes").iterdir()
    seconds = json.loads(path.read_text())["seconds_a_sequence"]
    assert 0 < len(seconds) <= 3 and all(value > 0 for value in seconds.values())


def test_a_pass_runs_the_training_loop_on_the_rows_of_a_micro_batch(engine: Engine) -> None:
    # What only a forward pass through the blocks can meet.
    timer = pass_timer(dataclasses.replace(WORK, backend="nothing of that name"), engine)
    with pytest.raises(Exception, match="nothing of that name"):
        timer(2)


def test_a_measurement_that_fails_leaves_the_largest_that_fits(engine: Engine, tmp_path: Path) -> None:
    work = dataclasses.replace(WORK, backend="cuda")
    choice = find_choice(work, engine, notes=tmp_path / "notes")
    assert choice.size == 4 and "the largest that fits: comparing it with smaller ones failed (" in choice.reason
    assert not (tmp_path / "notes").exists()


def test_what_was_measured_before_is_taken_without_measuring(engine: Engine, tmp_path: Path) -> None:
    for seconds, size in (({1: 1e9, 2: 9e8, 4: 1e9}, 2), ({1: 1e9, 4: 1e9}, 4)):
        write_note(WORK, seconds, notes=tmp_path / "notes")
        (path,) = (tmp_path / "notes").iterdir()
        noted = path.read_bytes()
        assert find_choice(WORK, engine, notes=tmp_path / "notes").size == size
        assert path.read_bytes() == noted


@pytest.mark.parametrize(
    "change",
    [
        {"ctx_len": 6},
        {"share": 8},
        {"sizes": (1, 2)},
        {"precision": "bf16"},
        {"backend": "cpu"},
        {"num_threads": 2},
        {"dropout": 0.0},
        {"l2wrap": 1e-4},
        {"shape": fresh_shape("x060", n_layer=1, n_embd=32, head_size=16, vocab_size=11)},
    ],
    ids=str,
)
def test_other_work_is_measured_for_itself(change: dict[str, object], tmp_path: Path) -> None:
    write_note(WORK, {1: 1.0, 2: 2.0, 4: 2.0}, notes=tmp_path)
    assert read_note(WORK, notes=tmp_path) is not None
    assert read_note(dataclasses.replace(WORK, dropout=0.7), notes=tmp_path) is not None
    assert read_note(dataclasses.replace(WORK, **change), notes=tmp_path) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe nothing",
        b"[" * 100_000,
        b"[1]",
        b'{"measured": {}, "seconds_a_sequence": {"1": 1.0, "2": 1.0, "4": 9.0}}',
        {},
        [1.0],
        {"3": 1.0},
        {"1": 1.0, "5": 1.0},
        {"1": 1.0, "4": float("nan")},
        {"1": 1.0, "4": float("inf")},
        {"1": 1.0, "4": -1.0},
        {"1": 1.0, "4": True},
        {"1": 1.0, "4": "2"},
        {"1": 1.0, "4": None},
    ],
    ids=lambda content: repr(content)[:30],
)
def test_a_note_that_is_damaged_or_foreign_is_measured_anew(content: object, engine: Engine, tmp_path: Path) -> None:
    write_note(WORK, {1: 1.0, 2: 2.0, 4: 2.0}, notes=tmp_path)
    (path,) = tmp_path.glob("*.json")
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(json.dumps({**json.loads(path.read_text()), "seconds_a_sequence": content}))
    assert read_note(WORK, notes=tmp_path) is None
    assert find_choice(WORK, engine, notes=tmp_path).size in WORK.sizes
    assert read_note(WORK, notes=tmp_path) is not None


def test_a_note_that_cannot_be_written_costs_only_the_measurement(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    assert find_choice(WORK, engine, notes=tmp_path / "file" / "notes").size in WORK.sizes
    write_note(WORK, {1: 1.0}, notes=tmp_path / "other")
    (path,) = (tmp_path / "other").iterdir()
    path.unlink()
    path.mkdir()
    assert find_choice(WORK, engine, notes=tmp_path / "other").size in WORK.sizes


# ---- in a run ----


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for notes of this test alone, beside the operators that are there."""
    place = tmp_path / "cache" / "rwkv_spec"
    place.mkdir(parents=True)
    cache_folder().mkdir(parents=True, exist_ok=True)
    (place / "kernels").symlink_to(cache_folder(), target_is_directory=True)
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.setenv(name, str(tmp_path / "cache"))
    return notes_folder()


def long_spec(tmp_path: Path, **train: object) -> dict[str, object]:
    """Long enough for sizes 1 and 2 to be compared, which takes twelve sequences."""
    return tiny_spec(
        tmp_path,
        kernels="torch",
        model={"n_layer": 1},
        train={"ctx_len": 3, "batch_size": 2, "steps": 300, "precision": "fp32", **train},
        eval={"every": {"steps": 300}, "continuations": 0},
        save={"every": {"steps": 150}},
        log={"every": {"steps": 100}},
    )


def rewrite(notes: Path, seconds: dict[str, float]) -> None:
    (path,) = notes.iterdir()
    path.write_text(json.dumps({**json.loads(path.read_text()), "seconds_a_sequence": seconds}))


def other(size: int) -> int:
    return 3 - size


def test_a_run_measures_plan_does_not_and_a_resume_takes_what_was_recorded(
    tmp_path: Path, notes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreseen = rwkv_spec.plan(long_spec(tmp_path))
    assert foreseen.micro_batch_size == 2 and not notes.exists()
    assert foreseen.notes == (
        "micro-batch 2 of 2, unless a smaller one turns out faster: measured at the start of the run",
    )
    run = rwkv_spec.run(long_spec(tmp_path))
    size = run.plan.micro_batch_size
    assert size in (1, 2) and run.plan.accumulate * size == 2
    assert capsys.readouterr().out.count(run.plan.notes[0]) == 1
    assert f"micro_batch_size: {size}  # derived" in (run.dir / "configs" / "resolved.yaml").read_text()
    unbroken = outputs(run.dir)
    older, newest = list_states(run.dir / "state")
    record = read_manifest(older)["record"]
    assert isinstance(record, dict) and record["resolved"]["micro_batch_size"] == size
    # From now on this machine is faster with the other one.
    rewrite(notes, {str(size): 1.31, str(other(size)): 1.0})
    assert rwkv_spec.plan(long_spec(tmp_path)).micro_batch_size == other(size)
    shutil.rmtree(newest)
    again = rwkv_spec.run(long_spec(tmp_path))
    assert again.plan.micro_batch_size == size and not again.plan.compares_sizes
    assert outputs(run.dir) == unbroken


def planned_of(spec: dict[str, object]) -> Planned:
    return rwkv_spec.api.planned(spec)


def test_a_run_takes_what_was_noted_and_writes_nothing(tmp_path: Path, engine: Engine) -> None:
    notes, planned = tmp_path / "notes", planned_of(long_spec(tmp_path))
    settled(planned, SHAPE, engine, notes=notes)
    rewrite(notes, {"1": 1.0, "2": 1.31})
    (path,) = notes.iterdir()
    noted = path.read_bytes()
    found = settled(planned, SHAPE, engine, notes=notes).plan
    assert (found.micro_batch_size, found.accumulate) == (1, 2) and path.read_bytes() == noted
    assert found.notes == ("micro-batch 1 of 2: measured 1.31 times as fast as 2",)
    assert noted_choice(planned, SHAPE, notes=notes).plan == found


@pytest.mark.parametrize("train", [{"steps": 299}, {"micro_batch_size": 2}, {"batch_size": 1}], ids=str)
def test_short_runs_given_sizes_and_single_sequences_neither_measure_nor_look(
    train: dict[str, object], tmp_path: Path, engine: Engine
) -> None:
    notes = tmp_path / "notes"
    settled(planned_of(long_spec(tmp_path)), SHAPE, engine, notes=notes)
    rewrite(notes, {"1": 1.0, "2": 2.0})
    planned = planned_of(long_spec(tmp_path, **train))
    for found in (settled(planned, SHAPE, engine, notes=notes), noted_choice(planned, SHAPE, notes=notes)):
        assert found is planned and found.plan.accumulate == 1
    assert len(list(notes.iterdir())) == 1
