"""Failures that users of comparable trainers met, where no other test stands against them: each one as a whole run."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import rwkv_spec
from rwkv_spec.errors import CheckpointError, UserError
from tests.tiny import VALUES, outputs, tiny_spec

ROOT = Path(__file__).parents[1]


def defaults_only(tmp_path: Path, **train: object) -> dict[str, object]:
    """What a first spec looks like: no warm-up, no periods of logging, saving or evaluating."""
    spec = tiny_spec(tmp_path, train={"steps": None, **train})
    spec["train"] = {key: value for key, value in spec["train"].items() if value is not None}  # type: ignore[attr-defined]
    for section in ("eval", "save", "log", "optimizer"):
        del spec[section]
    return spec


@pytest.mark.parametrize("length", [{"steps": 1}, {"epochs": 1}, {"tokens": 64}], ids=str)
def test_a_run_shorter_than_every_period_still_trains_logs_evaluates_and_saves(
    tmp_path: Path, length: dict[str, int]
) -> None:
    """Seen: zero steps trained, nothing logged, nothing saved, `complete` printed and status 0."""
    run = rwkv_spec.run(defaults_only(tmp_path, **length))
    assert run.plan.total_steps >= 1 and run.metrics[-1].step == run.plan.total_steps
    assert run.metrics[0].step == 1 and run.metrics[-1].eval_loss is not None
    before = torch.load(run.dir / "out" / "rwkv-init.pth", weights_only=True)
    after = torch.load(run.checkpoint, weights_only=True)
    assert not torch.equal(before["head.weight"], after["head.weight"])


@pytest.mark.parametrize("epochs", [1, 2, 2.5])
def test_epochs_mean_how_often_each_token_is_trained(tmp_path: Path, epochs: float) -> None:
    """Seen: epochs accepted and ignored, data repeated three times unasked, 1.5 % of the data used."""
    run = rwkv_spec.run(defaults_only(tmp_path, epochs=epochs))
    targets = 5 * 41 - 1  # five documents of 40 values and their ends; the first token of all is nobody's target
    if epochs == int(epochs):
        # Batches are full across epochs, so that the last epoch may be cut by less than one batch at most.
        assert run.metrics[-1].tokens == epochs * targets
    assert epochs * targets - 64 <= run.metrics[-1].tokens <= epochs * targets + 64
    assert run.metrics[-1].epoch == pytest.approx(epochs, abs=4 / 13)


def test_the_largest_value_and_the_last_id_are_in_and_the_next_are_out(tmp_path: Path) -> None:
    """Seen: the last id off by one against the vocabulary's size, in either direction."""
    spec = tiny_spec(tmp_path, train={"steps": 1}, eval=None)
    spec["data"] = {}
    run = rwkv_spec.run(spec | {"work_dir": str(tmp_path / "a")}, data=[[0, 9]] * 3)
    assert run.plan.vocab_size == 11
    with pytest.raises(UserError, match="10"):
        rwkv_spec.run(spec | {"work_dir": str(tmp_path / "b")}, data=[[0, 10]] * 3)
    spec["tokenizer"] = {"type": "ids", "vocab_size": 5}
    assert rwkv_spec.run(spec | {"work_dir": str(tmp_path / "c")}, data=[[1, 4]] * 3).plan.vocab_size == 5
    with pytest.raises(UserError, match="5"):
        rwkv_spec.run(spec | {"work_dir": str(tmp_path / "d")}, data=[[1, 5]] * 3)


def test_values_beyond_16_bits_come_back_whole_from_a_run(tmp_path: Path) -> None:
    """Seen: tokens past 65,535 wrapped to 0 in a 16-bit store."""
    spec = tiny_spec(tmp_path, tokenizer={"max_value": 70_000}, model={"n_layer": 1}, train={"steps": 1}, eval=None)
    spec["data"] = {}
    values = [[65_534, 65_535, 65_536, 70_000]]
    store = rwkv_spec.prepare(spec, data=values)
    assert store.train.read(0, 5).tolist() == [65_535, 65_536, 65_537, 70_001, 0]


@pytest.mark.parametrize("content", ["2 1 0 9\n", "1 2 3\n4 5\n"], ids=["same size", "another size"])
def test_an_edit_in_place_is_noticed_by_the_next_run(tmp_path: Path, content: str) -> None:
    """Seen: a stale store trained on, with a loss near 10 as the only sign."""
    source = tmp_path / "mine.txt"
    source.write_text("1 2 3 4\n")
    spec = tiny_spec(tmp_path, data=None, eval=None, train={"steps": 1})
    spec["data"] = {"train": str(source)}
    first = rwkv_spec.prepare(spec).train
    assert first.read(0, 4).tolist() == [2, 3, 4, 5]
    source.write_text(content)
    os.utime(source, ns=(1, source.stat().st_mtime_ns + 10**9))
    expected = [int(value) + 1 for value in content.splitlines()[0].split()]
    assert rwkv_spec.prepare(spec).train.read(0, len(expected)).tolist() == expected


def test_the_split_into_micro_batches_changes_no_row(tmp_path: Path) -> None:
    """Seen: the rate and the epochs ignored accumulation, and short rows weighed as much as full ones."""
    rows = {}
    for micro in (1, 3, 5):
        spec = defaults_only(tmp_path, epochs=2, batch_size=5, micro_batch_size=micro)
        spec |= {"work_dir": str(tmp_path / f"run{micro}"), "log": {"every": {"steps": 1}}}
        rows[micro] = rwkv_spec.run(spec).metrics
    assert len(rows[1]) == 6
    for micro in (1, 3):
        for left, right in zip(rows[micro], rows[5], strict=True):
            assert (left.step, left.epoch, left.tokens, left.lr) == (right.step, right.epoch, right.tokens, right.lr)
            assert left.loss == pytest.approx(right.loss, rel=1e-5)
            assert left.grad_norm == pytest.approx(right.grad_norm, rel=1e-4)


def test_warmup_zero_is_no_warmup_and_one_is_one(tmp_path: Path) -> None:
    """Seen: 0 treated as unset, 1 silently made 2."""
    first_rates = []
    for number, warmup in enumerate((0, 1, 2)):
        spec = tiny_spec(tmp_path, work_dir=str(tmp_path / str(number)), scheduler={"warmup_steps": warmup})
        spec |= {"log": {"every": {"steps": 1}}, "train": {**spec["train"], "steps": 40}}  # type: ignore[dict-item]
        assert rwkv_spec.plan(spec).warmup_steps == warmup
        spec["train"] = {**spec["train"], "steps": 3}  # type: ignore[dict-item]
        first_rates.append([row.lr for row in rwkv_spec.run(spec).metrics[:3]])
    assert first_rates[0][0] == 1e-3
    # With a warm-up the published schedule starts at a hundredth of the rate.
    assert first_rates[1][0] < 5e-4 < first_rates[1][1]
    assert first_rates[2][0] < first_rates[2][1] < first_rates[2][2] or first_rates[2][1] > first_rates[2][0]


def test_an_older_run_in_the_folder_is_not_silently_preferred_to_a_checkpoint(tmp_path: Path) -> None:
    """Seen: the external checkpoint of the spec ignored, because a run lay in the folder already."""
    others = [
        rwkv_spec.initialize(tiny_spec(tmp_path, work_dir=str(tmp_path / f"other{seed}"), seed=seed)) for seed in (1, 2)
    ]
    rwkv_spec.run(tiny_spec(tmp_path, train={"steps": 1}))
    spec = tiny_spec(tmp_path, train={"steps": 1}, model=None, checkpoint={"path": str(others[0])})
    with pytest.raises(CheckpointError, match=r"model\.n_layer: 2 → none") as caught:
        rwkv_spec.run(spec)
    assert "another work_dir" in str(caught.value)
    spec |= {"work_dir": str(tmp_path / "from the first")}
    rwkv_spec.run(spec)
    # The same path with other weights in it is another checkpoint.
    others[0].write_bytes(others[1].read_bytes())
    with pytest.raises(CheckpointError, match="checkpoint"):
        rwkv_spec.run(spec)


def test_the_weights_of_a_resume_are_those_of_its_newest_state_not_of_init(tmp_path: Path) -> None:
    """Seen: `init`, or the last name in the alphabet, taken for the latest."""
    rwkv_spec.run(tiny_spec(tmp_path, train={"steps": 10}, save={"every": {"steps": 1}, "keep": 20}))
    for name in ("rwkv-init.pth", "rwkv-step9.pth", "rwkv-step10.pth", "rwkv-final.pth", "rwkv-best.pth"):
        (tmp_path / "run" / "out" / name).write_bytes(b"never read by a resume")
    run = rwkv_spec.run(tiny_spec(tmp_path, train={"steps": 12}, save={"every": {"steps": 1}, "keep": 20}))
    straight = tiny_spec(tmp_path, work_dir=str(tmp_path / "straight"), train={"steps": 12})
    assert [row.step for row in run.metrics][-1] == 12
    assert run.metrics[-1].loss < rwkv_spec.run(straight).metrics[0].loss


def test_a_save_that_fails_ends_the_run_in_words(tmp_path: Path) -> None:
    """Seen: errors while saving printed and swallowed."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "state").write_text("a file where the states should go")
    with pytest.raises(CheckpointError, match=r"cannot save the state of step 2.*start the same command again"):
        rwkv_spec.run(tiny_spec(tmp_path))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"


@pytest.mark.parametrize("name", ["out", "configs", "data"])
def test_a_file_where_a_folder_of_the_run_should_be_is_said_in_words(tmp_path: Path, name: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("in the way")
    with pytest.raises(UserError) as caught:
        rwkv_spec.run(tiny_spec(tmp_path))
    assert str(tmp_path / "run" / name) in str(caught.value)
    assert (tmp_path / "run" / name).read_text() == "in the way"


def test_a_spec_that_trains_is_good_for_every_other_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Seen: a key that is valid for training refused by export or chat."""
    from rwkv_spec.cli import main

    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(tiny_spec(tmp_path, scheduler={"type": "constant"}, kernels="torch", seed=3)))
    resolved = tmp_path / "run" / "configs" / "resolved.yaml"
    assert main(["run", str(path), "train.steps=2"]) == 0
    for spec in (path, resolved):
        for verb in ("check", "plan", "prepare"):
            assert main([verb, str(spec)]) == 0, capsys.readouterr().err
    assert main(["generate", str(tmp_path / "run"), "--prompt", "1", "--max-new-tokens", "2"]) == 0


def test_a_resume_keeps_the_spec_that_the_folder_shows(tmp_path: Path) -> None:
    """Seen: the resume line of the manual reset the stored configuration."""
    run = rwkv_spec.run(tiny_spec(tmp_path))
    first = (run.dir / "configs" / "resolved.yaml").read_bytes()
    rwkv_spec.run(tiny_spec(tmp_path))
    assert (run.dir / "configs" / "resolved.yaml").read_bytes() == first
    rwkv_spec.run(run.dir / "configs" / "resolved.yaml")
    values = yaml.safe_load((run.dir / "configs" / "resolved.yaml").read_text())
    assert values == yaml.safe_load(first)


def test_no_file_of_the_user_is_changed_or_deleted(tmp_path: Path) -> None:
    """Seen: a demonstration script that deleted checkpoints."""
    work_dir = tmp_path / "run"
    (work_dir / "out").mkdir(parents=True)
    mine = {"out/notes.md": b"mine", "out/rwkv-7-published.pth": b"weights", "notes.txt": b"mine", "out/best.pth": b"w"}
    for name, content in mine.items():
        (work_dir / name).write_bytes(content)
    rwkv_spec.run(tiny_spec(tmp_path, save={"every": {"steps": 1}, "keep": 1}))
    assert {name: (work_dir / name).read_bytes() for name in mine} == mine


NO_NETWORK = """
import json, socket, sys
class Refused(socket.socket):
    def connect(self, address):
        if self.family != getattr(socket, "AF_UNIX", None):
            raise SystemExit(f"connected to {address}")
    connect_ex = connect
socket.socket = Refused
def lookup(*words, **more):
    raise SystemExit(f"looked up {words}")
socket.getaddrinfo = socket.gethostbyname = socket.create_connection = lookup
import rwkv_spec
run = rwkv_spec.run(json.loads(sys.argv[1]))
rwkv_spec.generate(run.dir, ["1"], max_new_tokens=1)
"""


def test_nothing_is_sent_anywhere(tmp_path: Path) -> None:
    """Seen: telemetry by default, and uploads set off by words in a path."""
    name = "telemetry upload wandb huggingface hub"
    spec = tiny_spec(tmp_path, work_dir=str(tmp_path / name), train={"steps": 1})
    finished = subprocess.run(
        [sys.executable, "-c", NO_NETWORK, json.dumps(spec)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert finished.returncode == 0, finished.stderr


def test_the_global_random_states_play_no_part(tmp_path: Path) -> None:
    """Seen: the order of the data not covered by the seed. And a user's own random numbers stay theirs."""
    import random

    results = []
    for number in (1, 2):
        np.random.seed(number), torch.manual_seed(number), random.seed(number)
        before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
        spec = tiny_spec(tmp_path, train={"steps": 4}, work_dir=str(tmp_path / f"run{number}"))
        rwkv_spec.run(spec)
        after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
        assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
        results.append({k: v for k, v in outputs(tmp_path / f"run{number}").items() if k != "train_log.txt"})
    assert results[0] == results[1]


@pytest.mark.parametrize("ctx_len", [1, 15, 17, 100])
def test_any_window_length_trains_the_same_targets(tmp_path: Path, ctx_len: int) -> None:
    """Seen: kernels and loaders that need a multiple of 16, and what was left over silently dropped."""
    run = rwkv_spec.run(defaults_only(tmp_path, epochs=1, ctx_len=ctx_len, batch_size=8))
    assert run.metrics[-1].tokens == 5 * 41 - 1 and math.isfinite(run.metrics[-1].loss)


def test_the_state_crosses_chunks_when_it_is_evaluated_and_documents_do_not_mix(tmp_path: Path) -> None:
    """Seen: state and token shift leaking into the next document of an evaluation."""
    losses = []
    for number, held_out in enumerate(([VALUES[0], VALUES[1]], [VALUES[1], VALUES[0]], [VALUES[0]], [VALUES[1]])):
        spec = tiny_spec(tmp_path, work_dir=str(tmp_path / str(number)), train={"steps": 1})
        spec["data"] = {}
        losses.append(rwkv_spec.run(spec, data=VALUES, eval_data=held_out).metrics[-1].eval_loss)
    both, swapped, first, second = losses
    assert both == pytest.approx(swapped, rel=1e-6)
    assert both == pytest.approx((first + second) / 2, rel=1e-6)
