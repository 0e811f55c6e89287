"""A run that was stopped, killed or lengthened goes on as if nothing had happened, or says in words why it does not."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

import rwkv_spec
from rwkv_spec.checkpoint.state import list_states
from rwkv_spec.errors import CheckpointError
from tests.tiny import outputs, tiny_spec

# Enough steps and saves that a kill falls into training, evaluating, saving and rotating alike.
LONG = {"train": {"steps": 40}, "save": {"every": {"steps": 3}, "keep": 2}, "eval": {"every": {"steps": 5}}}


def start(tmp_path: Path, *words: str, cwd: Path | None = None) -> subprocess.Popen[str]:
    spec = tiny_spec(tmp_path, **LONG)
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(spec))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "rwkv_spec", str(path), *words],
        cwd=cwd or Path(__file__).parents[1],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(tmp_path: Path, *words: str) -> tuple[int, str]:
    process = start(tmp_path, *words)
    text, _ = process.communicate(timeout=300)
    return process.returncode, text


def wait_for_state(work_dir: Path, process: subprocess.Popen[str]) -> None:
    while not list_states(work_dir / "state"):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    tmp_path = tmp_path_factory.mktemp("unbroken")
    code, text = finish(tmp_path)
    assert code == 0, text
    return outputs(tmp_path / "run")


def same_bytes(left: dict[str, bytes], right: dict[str, bytes]) -> bool:
    """All files equal; the log's first lines name the folder of the run, which differs here."""

    def strip(files: dict[str, bytes]) -> dict[str, bytes]:
        return {**files, "train_log.txt": b"\n".join(files["train_log.txt"].splitlines()[2:])}

    return strip(left) == strip(right)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_says_so_and_the_same_command_goes_on(
    tmp_path: Path, unbroken: dict[str, bytes], number: signal.Signals
) -> None:
    process = start(tmp_path)
    wait_for_state(tmp_path / "run", process)
    process.send_signal(number)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 75, text
    assert "stopped by a signal" in text and "start the same command again" in text
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "stopped"
    code, text = finish(tmp_path)
    assert code == 0 and "going on after step" in text
    assert same_bytes(outputs(tmp_path / "run"), unbroken)


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_with_the_same_bytes(tmp_path: Path, unbroken: dict[str, bytes]) -> None:
    generator = random.Random(11)
    kills = 0
    while True:
        process = start(tmp_path)
        # The interpreter and torch take a few seconds; the whole training is about as long.
        try:
            text, _ = process.communicate(timeout=generator.uniform(2.0, 8.0))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            kills += 1
            continue
        assert process.returncode == 0, text
        if kills >= 20:
            break
        # It came to its end too soon for twenty kills: begin anew, in the same folder.
        import shutil

        shutil.rmtree(tmp_path / "run")
    assert same_bytes(outputs(tmp_path / "run"), unbroken)


def test_killed_while_it_trains_it_ends_with_the_same_bytes(tmp_path: Path, unbroken: dict[str, bytes]) -> None:
    process = start(tmp_path)
    wait_for_state(tmp_path / "run", process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    code, text = finish(tmp_path)
    assert code == 0, text
    assert same_bytes(outputs(tmp_path / "run"), unbroken)


def test_a_second_run_in_the_same_folder_is_refused_by_name(tmp_path: Path) -> None:
    # Long enough that the first one still trains when the second one has started up.
    process = start(tmp_path, "train.steps=100000")
    wait_for_state(tmp_path / "run", process)
    code, text = finish(tmp_path, "train.steps=100000")
    process.send_signal(signal.SIGTERM)
    first, _ = process.communicate(timeout=120)
    assert code == 2 and str(process.pid) in text and "another work_dir" in text, text
    assert process.returncode == 75, first


def test_a_longer_run_goes_on_from_the_end_of_a_shorter_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = rwkv_spec.run(tiny_spec(tmp_path))
    run = rwkv_spec.run(tiny_spec(tmp_path, train={"steps": 12}))
    printed = capsys.readouterr().out
    assert "going on after step 8 of 12" in printed
    assert f"goes from {first.metrics[-1].lr:.3e} to " in printed
    assert run.metrics[-1].step == 12
    with pytest.raises(CheckpointError, match="only be made longer"):
        rwkv_spec.run(tiny_spec(tmp_path, train={"steps": 4}))


@pytest.mark.parametrize("first", [False, True])
def test_gradient_checkpoints_may_be_switched_and_change_no_byte(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], first: bool
) -> None:
    folders = [tmp_path / "switched", tmp_path / "as it was"]
    for folder, second in zip(folders, (not first, first), strict=True):
        folder.mkdir()
        rwkv_spec.run(tiny_spec(folder, train={"grad_checkpoint": first}))
        run = rwkv_spec.run(tiny_spec(folder, train={"steps": 12, "grad_checkpoint": second}))
        assert run.model.grad_checkpoint is second and run.metrics[-1].step == 12
        resolved = yaml.safe_load((run.dir / "configs" / "resolved.yaml").read_text())
        assert resolved["train"]["grad_checkpoint"] is second
        assert "going on after step 8 of 12" in capsys.readouterr().out
    assert same_bytes(*(outputs(folder / "run") for folder in folders))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": {"lr": 2e-3}}, "optimizer.lr: 0.001 → 0.002"),
        ({"train": {"ctx_len": 32}}, "train.ctx_len: 16 → 32"),
        ({"model": {"n_layer": 1}}, "model.n_layer: 2 → 1"),
        ({"seed": 7}, "seed: 42 → 7"),
        ({"data": {"order": "sequential"}}, "data.order: shuffle → sequential"),
        ({"train": {"precision": "bf16"}}, "train.precision: fp32 → bf16"),
    ],
    ids=str,
)
def test_what_may_not_change_is_refused_with_old_and_new(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, object], words: str
) -> None:
    tmp_path = tmp_path_factory.getbasetemp() / "stopped"
    if not tmp_path.exists():
        tmp_path.mkdir()
        rwkv_spec.run(tiny_spec(tmp_path))
    with pytest.raises(CheckpointError) as caught:
        rwkv_spec.run(tiny_spec(tmp_path, **changes))
    assert words in str(caught.value) and "another work_dir" in str(caught.value)


def test_changed_data_is_refused_and_moved_data_is_not(tmp_path: Path) -> None:
    rwkv_spec.run(tiny_spec(tmp_path))
    moved = tmp_path / "elsewhere.txt"
    (tmp_path / "values.txt").rename(moved)
    rwkv_spec.run(tiny_spec(tmp_path, data={"train": str(moved)}))
    moved.write_text("1 2 3\n" * 60)
    with pytest.raises(CheckpointError, match=r"data \(contents\)"):
        rwkv_spec.run(tiny_spec(tmp_path, data={"train": str(moved)}))


def test_resume_never_and_must_do_what_they_say(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no state to resume from"):
        rwkv_spec.run(tiny_spec(tmp_path), resume="must")
    rwkv_spec.run(tiny_spec(tmp_path), resume="never")
    with pytest.raises(CheckpointError, match="holds a run already"):
        rwkv_spec.run(tiny_spec(tmp_path), resume="never")
    rwkv_spec.run(tiny_spec(tmp_path), resume="must")


def test_weights_without_a_state_are_never_trained_over(tmp_path: Path) -> None:
    import shutil

    rwkv_spec.run(tiny_spec(tmp_path))
    shutil.rmtree(tmp_path / "run" / "state")
    with pytest.raises(CheckpointError, match="a finished run lies here"):
        rwkv_spec.run(tiny_spec(tmp_path))


def test_a_flipped_byte_in_the_newest_state_is_found_and_the_one_before_works(tmp_path: Path) -> None:
    run = rwkv_spec.run(tiny_spec(tmp_path))
    before = outputs(run.dir)
    older, newest = list_states(run.dir / "state")
    damaged = newest / "optimizer.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-3] ^= 4
    damaged.write_bytes(content)
    with pytest.raises(CheckpointError, match=older.name):
        rwkv_spec.run(tiny_spec(tmp_path))
    import shutil

    shutil.rmtree(newest)
    rwkv_spec.run(tiny_spec(tmp_path))
    assert outputs(run.dir) == before


def test_a_loss_that_is_not_finite_ends_the_run_with_its_documents(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, optimizer={"lr": 1000}, train={"grad_clip": 0})
    with pytest.raises(CheckpointError) as caught:
        rwkv_spec.run(spec)
    words = str(caught.value)
    assert "step " in words and "training documents" in words and "state" in words
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"
