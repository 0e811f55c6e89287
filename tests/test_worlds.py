"""Two processes train what one trains; one of them speaks; and what goes wrong ends all of them, launcher included."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

import rwkv_spec
from rwkv_spec.checkpoint.state import list_states
from rwkv_spec.lock import Lock
from rwkv_spec.report.metrics import read_rows
from tests.tiny import tiny_spec

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
SECONDS = 240


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def launch_config(tmp_path: Path, *, num_processes: int, mixed_precision: str = "no") -> Path:
    """What `accelerate config` would have written. MULTI_GPU with use_cpu picks the launcher that starts processes."""
    config: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if num_processes > 1 else "NO",
        "use_cpu": True,
        "num_machines": 1,
        "machine_rank": 0,
        "num_processes": num_processes,
        "mixed_precision": mixed_precision,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
    }
    if num_processes > 1:
        config |= {"main_process_ip": "127.0.0.1", "main_process_port": free_port()}
    path = tmp_path / f"launch{num_processes}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def start(spec: Path, config: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"),
            *("--config_file", str(config), "-m", "rwkv_spec", str(spec), *words),
        ],
        cwd=spec.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, error = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, error = process.communicate()
        pytest.fail(f"still running after {SECONDS} s\n{out}\n{error}")
    return process.returncode, out, error


def write_spec(folder: Path, **sections: object) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(tiny_spec(folder, **sections)))
    return path


# 205 tokens in windows of 16 are 13; two epochs are 26 sequences: five steps of 5, and one of 1, which leaves the
# second process nothing but filler. 5 does not divide by two either.
UNEVEN = {
    "train": {"ctx_len": 16, "batch_size": 5, "epochs": 2, "precision": "fp32"},
    "model": {"dropout": 0.2},
    "eval": {"every": {"steps": 2}},
    "log": {"every": {"steps": 1}},
}


def uneven(folder: Path, **sections: object) -> Path:
    path = write_spec(folder, **{**UNEVEN, **sections})
    spec = yaml.safe_load(path.read_text())
    del spec["train"]["steps"]
    path.write_text(yaml.safe_dump(spec))
    return path


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path, str]]:
    """The same spec trained by one process and by two: their work_dirs, and all that the two printed."""
    tmp_path = tmp_path_factory.mktemp("worlds")
    rwkv_spec.run(uneven(tmp_path / "one"))
    code, out, error = finish(start(uneven(tmp_path / "two"), launch_config(tmp_path, num_processes=2)))
    assert code == 0, out + error
    yield tmp_path / "one" / "run", tmp_path / "two" / "run", out + error


def test_two_processes_have_the_losses_of_one(both: tuple[Path, Path, str]) -> None:
    one, two, out = both
    assert "2 processes, each" in out and "engine ddp" in out
    alone, together = (read_rows(work_dir / "out" / "metrics.jsonl") for work_dir in (one, two))
    assert [row.step for row in together] == [1, 2, 3, 4, 5, 6]
    assert alone[-1].tokens - alone[-2].tokens < 17, "the last step was meant to be short"
    for left, right in zip(alone, together, strict=True):
        assert right.loss == pytest.approx(left.loss, rel=1e-6)
        assert right.grad_norm == pytest.approx(left.grad_norm, rel=1e-5)
        assert (right.tokens, right.lr, right.epoch) == (left.tokens, left.lr, left.epoch)
        assert (right.eval_loss is None) == (left.eval_loss is None)
        if left.eval_loss is not None:
            assert right.eval_loss == pytest.approx(left.eval_loss, rel=1e-6)


@pytest.mark.parametrize("name", ["rwkv-init.pth", "rwkv-best.pth", "rwkv-final.pth"])
def test_two_processes_leave_the_weights_of_one(both: tuple[Path, Path, str], name: str) -> None:
    one, two, _ = both
    alone, together = (torch.load(work_dir / "out" / name, weights_only=True) for work_dir in (one, two))
    assert alone.keys() == together.keys()
    for key, tensor in alone.items():
        error = float((together[key] - tensor).norm() / tensor.norm().clamp_min(1e-12))
        assert error < 1e-5, f"{key}: {error:.1e}"


@pytest.mark.parametrize("type", ["x052", "x060"])
def test_the_other_generations_have_the_losses_of_one_process_too(type: str, tmp_path: Path) -> None:
    sections = {"model": {"type": type, "dropout": 0.2}}
    alone = rwkv_spec.run(uneven(tmp_path / "one", **sections)).metrics
    spec = uneven(tmp_path / "two", **sections)
    code, out, error = finish(start(spec, launch_config(tmp_path, num_processes=2)))
    assert code == 0, out + error
    together = read_rows(tmp_path / "two" / "run" / "out" / "metrics.jsonl")
    assert len(alone) == len(together) == 6
    for left, right in zip(alone, together, strict=True):
        assert right.loss == pytest.approx(left.loss, rel=1e-6)
        assert right.grad_norm == pytest.approx(left.grad_norm, rel=1e-5)
        if left.eval_loss is not None:
            assert right.eval_loss == pytest.approx(left.eval_loss, rel=1e-6)


def test_blocks_computed_again_by_two_processes_have_the_losses_of_one(
    both: tuple[Path, Path, str], tmp_path: Path
) -> None:
    """Without it, by one: the gradients of a block that is computed again are exchanged as all others are."""
    # In several micro-batches, of which the last alone is followed by an exchange.
    spec = uneven(tmp_path, train={**UNEVEN["train"], "grad_checkpoint": True, "micro_batch_size": 1})
    code, out, error = finish(start(spec, launch_config(tmp_path, num_processes=2)))
    assert code == 0 and "Warning" not in out + error, out + error
    alone, together = (read_rows(run / "out" / "metrics.jsonl") for run in (both[0], tmp_path / "run"))
    assert len(alone) == len(together) == 6
    for left, right in zip(alone, together, strict=True):
        assert right.loss == pytest.approx(left.loss, rel=1e-6)
        assert right.grad_norm == pytest.approx(left.grad_norm, rel=1e-5)


def test_two_processes_bring_no_warnings(both: tuple[Path, Path, str]) -> None:
    assert "Warning" not in both[2]


def test_the_files_of_two_processes_are_those_of_one(both: tuple[Path, Path, str]) -> None:
    one, two, _ = both
    names = [sorted(str(path.relative_to(d)) for path in d.rglob("*") if path.is_file()) for d in (one, two)]
    assert names[0] == names[1]
    assert json.loads((two / "run.json").read_text())["status"] == "done"


def test_only_the_first_process_prints(both: tuple[Path, Path, str]) -> None:
    lines = both[2].splitlines()
    assert sum(line.startswith("done: 6 steps") for line in lines) == 1
    assert sum(line.startswith("eval at step 2:") for line in lines) == 1
    # The other process may have prepared it.
    assert sum(line.startswith(("data prepared:", "data unchanged,")) for line in lines) == 1


def test_a_run_of_two_goes_on_as_one_with_another_micro_batch(both: tuple[Path, Path, str], tmp_path: Path) -> None:
    """Another number of processes is another launch config, never another spec."""
    import shutil

    shutil.copytree(both[1].parent, tmp_path / "copy")
    path = uneven(tmp_path / "copy")
    spec = yaml.safe_load(path.read_text())
    spec["train"] |= {"epochs": 3, "micro_batch_size": 1}
    path.write_text(yaml.safe_dump(spec))
    run = rwkv_spec.run(path)
    assert run.metrics[-1].step == 8 and run.plan.accumulate == 5


AGREE = """
import json
import sys
from pathlib import Path

import rwkv_spec.api
from rwkv_spec.micro_batch import settled
from rwkv_spec.model.shapes import fresh_shape
from rwkv_spec.train.engine import Engine

folder = Path(sys.argv[1])
engine = Engine(precision="fp32", trackers=(), log_dir=folder, threads=1)
shape = fresh_shape("x070", n_layer=2, n_embd=32, head_size=16, vocab_size=11)
found = []
for path in ("long.yaml", "short.yaml"):
    planned = rwkv_spec.api.planned(folder / path, num_processes=2)
    for notes in (folder / f"notes{engine.rank}", folder / ("notes0" if engine.rank == 0 else "nothing")):
        found.append(settled(planned, shape, engine, notes=notes).plan.micro_batch_size)
        for note in notes.glob("*.json"):
            # The next time each process would choose for itself: the first one 1, the other one 4.
            seconds = {"1": 1.0, "4": 2.0} if engine.rank == 0 else {"1": 2.0, "4": 1.0}
            note.write_text(json.dumps({**json.loads(note.read_text()), "seconds_a_sequence": seconds}))
(folder / f"found{engine.rank}.json").write_text(json.dumps(found))
engine.end()
"""


def test_a_world_has_the_micro_batch_of_its_first_process(tmp_path: Path) -> None:
    """Each process has notes of its own, as on machines of their own; and a short run waits for nobody."""
    for name, steps in (("long", 800), ("short", 20)):
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(tiny_spec(tmp_path, train={"batch_size": 8, "steps": steps}, kernels="torch")))
    script = tmp_path / "agree.py"
    script.write_text(AGREE)
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    command += ["--config_file", str(launch_config(tmp_path, num_processes=2)), str(script), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    first, second = (json.loads((tmp_path / f"found{rank}.json").read_text()) for rank in (0, 1))
    assert first == second and first[0] in (1, 2, 4) and first[1:] == [1, 4, 4]
    assert not (tmp_path / "notes1").exists() and not (tmp_path / "nothing").exists()


def test_a_long_run_of_two_tells_its_micro_batch_once(tmp_path: Path) -> None:
    path = write_spec(tmp_path / "long", train={"batch_size": 4, "steps": 320}, save={"every": {"steps": 320}})
    code, out, error = finish(start(path, launch_config(tmp_path, num_processes=2)))
    assert code == 0, out + error
    assert len(re.findall(r"^micro-batch [12] of 2: ", out, re.MULTILINE)) <= 1
    assert len(re.findall(r"micro-batch [12] of 2: ", out)) >= 1


def test_a_wrong_spec_is_told_once_and_ends_every_process(tmp_path: Path) -> None:
    path = write_spec(tmp_path / "wrong", model={"n_layers": 3})
    code, out, error = finish(start(path, launch_config(tmp_path, num_processes=2)))
    assert code != 0
    assert error.count("model.n_layers") == 1 and f"{path}:" in error
    assert "1 problem in the spec" in error and "plan" not in out
    assert not (tmp_path / "wrong" / "run").exists()


def test_an_error_that_one_other_process_alone_meets_is_not_lost(tmp_path: Path) -> None:
    """As on a second machine without the files. Process 0 of this world is the test, which ended long ago."""
    path = write_spec(tmp_path / "alone", model={"n_layers": 3})
    finished = subprocess.run(
        [sys.executable, "-m", "rwkv_spec", "check", str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "RANK": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert finished.returncode == 2 and finished.stderr.startswith("process 1 alone: ")
    assert finished.stderr.count("model.n_layers") == 1


def test_a_batch_smaller_than_the_world_is_told_once(tmp_path: Path) -> None:
    path = write_spec(tmp_path / "small", train={"batch_size": 1})
    code, _, error = finish(start(path, launch_config(tmp_path, num_processes=2)))
    assert code != 0 and error.count("train.batch_size:") == 1 and "2 processes" in error


def test_bad_data_is_told_once_and_ends_every_process(tmp_path: Path) -> None:
    path = write_spec(tmp_path / "bad")
    (tmp_path / "bad" / "values.txt").write_text("1 2 3\n4 5 x\n")
    code, _, error = finish(start(path, launch_config(tmp_path, num_processes=2)))
    assert code != 0 and error.count("values.txt:2") == 1
    assert json.loads((tmp_path / "bad" / "run" / "run.json").read_text())["status"] == "failed"


def test_a_folder_in_use_ends_every_process_though_one_alone_sees_it(tmp_path: Path) -> None:
    path = write_spec(tmp_path / "used")
    lock = Lock(tmp_path / "used" / "run" / "run.lock")
    try:
        code, _, error = finish(start(path, launch_config(tmp_path, num_processes=2)))
    finally:
        lock.release()
    assert code != 0 and error.count("trains here since") == 1 and str(os.getpid()) in error


def test_a_contradiction_with_the_launch_config_names_both(tmp_path: Path) -> None:
    path = write_spec(tmp_path / "contradiction")
    config = launch_config(tmp_path, num_processes=1, mixed_precision="bf16")
    code, _, error = finish(start(path, config))
    assert code != 0 and "train.precision is fp32" in error and "mixed_precision is bf16" in error


# Long enough that the signal comes while it trains.
LONG = {"train": {"steps": 4000}, "save": {"every": {"steps": 20}}, "eval": {"every": {"steps": 4000}}}


def wait_for_state(work_dir: Path, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + SECONDS
    while not list_states(work_dir / "state"):
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        time.sleep(0.05)


def status_when_ended(work_dir: Path) -> dict[str, object]:
    """run.json once nobody trains there any more."""
    until = time.monotonic() + SECONDS
    while True:
        status = json.loads((work_dir / "run.json").read_text())
        if status["status"] != "running" and not (work_dir / "run.lock").exists():
            return status
        assert time.monotonic() < until, status
        time.sleep(0.05)


def test_a_launcher_that_is_gone_is_a_request_to_stop(tmp_path: Path) -> None:
    """SIGTERM to a launcher of one process ends the launcher alone: nothing is passed on."""
    path = write_spec(tmp_path / "orphan", **LONG)
    process = start(path, launch_config(tmp_path, num_processes=1))
    wait_for_state(tmp_path / "orphan" / "run", process)
    process.send_signal(signal.SIGTERM)
    finish(process)
    status = status_when_ended(tmp_path / "orphan" / "run")
    assert status["status"] == "stopped" and 0 < status["step"] < 4000
    newest = list_states(tmp_path / "orphan" / "run" / "state")[-1]
    assert newest.name == f"step-{status['step']:08d}"


def test_sigterm_to_the_launcher_of_two_saves_one_state(tmp_path: Path) -> None:
    path = write_spec(tmp_path / "pair", **LONG)
    process = start(path, launch_config(tmp_path, num_processes=2))
    wait_for_state(tmp_path / "pair" / "run", process)
    process.send_signal(signal.SIGTERM)
    finish(process)
    status = status_when_ended(tmp_path / "pair" / "run")
    assert status["status"] == "stopped" and 0 < status["step"] < 4000


def test_the_first_state_of_two_may_be_the_one_of_the_signal(tmp_path: Path) -> None:
    """The second process writes nothing itself: it waits for the state that the first one writes."""
    path = write_spec(tmp_path / "early", **{**LONG, "save": {"every": {"steps": 4000}}})
    process = start(path, launch_config(tmp_path, num_processes=2))
    metrics = tmp_path / "early" / "run" / "out" / "metrics.jsonl"
    until = time.monotonic() + SECONDS
    while not (metrics.is_file() and metrics.stat().st_size):
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, out, error = finish(process)
    assert "AssertionError" not in error and out.count("stopped by a signal") == 1, error
    assert status_when_ended(tmp_path / "early" / "run")["status"] == "stopped"


def test_a_process_that_is_killed_takes_the_others_with_it_and_the_run_can_go_on(tmp_path: Path) -> None:
    """Rank 1 is killed outright; rank 0 must not wait for it for ever, and the last state stays usable."""
    path = write_spec(tmp_path / "killed", **{**LONG, "train": {"steps": 400}})
    process = start(path, launch_config(tmp_path, num_processes=2))
    work_dir = tmp_path / "killed" / "run"
    wait_for_state(work_dir, process)
    main_pid = json.loads((work_dir / "run.json").read_text())["pid"]
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not children.is_file():
        process.kill()
        pytest.skip("this system does not tell the children of a process")
    (other,) = {int(child) for child in children.read_text().split()} - {main_pid}
    os.kill(other, signal.SIGKILL)
    code, _, _ = finish(process)
    assert code != 0
    run = rwkv_spec.run(path, resume="must")
    assert run.metrics[-1].step == 400
