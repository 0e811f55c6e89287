"""A signal is a request: the step is finished first. A second Ctrl-C, and only that, ends the process at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from rwkv_spec.interrupt import StopRequest
from tests.tiny import tiny_spec

ROOT = Path(__file__).parents[1]

# Works until it is asked to stop and then goes on for ever: only what ends it at once can end it.
STUBBORN = """
import time
from rwkv_spec.interrupt import StopRequest
with StopRequest() as stop:
    print("ready", flush=True)
    while not stop.requested():
        time.sleep(0.01)
    print("requested", flush=True)
    while True:
        time.sleep(0.01)
"""
# Its child outlives it and tells when it noticed.
LAUNCHER = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]])
print(child.pid, flush=True)
child.wait()
"""
CHILD = """
import sys, time
from rwkv_spec.interrupt import StopRequest
stop = StopRequest()
open(sys.argv[1] + ".ready", "w").close()
with stop:
    for _ in range(2000):
        if stop.requested():
            open(sys.argv[1], "w").close()
            break
        time.sleep(0.01)
"""
posix_only = pytest.mark.skipif(os.name != "posix", reason="Windows delivers no signals to other processes")


def start(code: str, *words: str, marks: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE", "TORCHEL"))}
    environment |= dict.fromkeys(marks, "no") | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", code, *words],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@posix_only
@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_ends_the_process_at_once(first: signal.Signals) -> None:
    process = start(STUBBORN)
    assert heard(process) == "ready"
    process.send_signal(first)
    assert heard(process) == "requested"
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in error and process.returncode != 0


@posix_only
def test_a_second_sigterm_is_no_second_ctrl_c() -> None:
    """Cluster software repeats SIGTERM; the state that is being written must not be lost to it."""
    process = start(STUBBORN)
    assert heard(process) == "ready"
    for _ in range(3):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    assert heard(process) == "requested" and process.poll() is None
    process.kill()
    process.communicate()


def test_handlers_are_given_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with StopRequest() as stop:
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] != before
        assert not stop.requested()
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_in_another_thread_it_leaves_signals_alone() -> None:
    """Python allows handlers in the main thread only; a notebook or a server may train in another one."""
    before, seen = signal.getsignal(signal.SIGINT), []

    def train() -> None:
        with StopRequest() as stop:
            seen.append((signal.getsignal(signal.SIGINT), stop.requested()))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert seen == [(before, False)]


@posix_only
def test_a_run_ended_by_a_second_ctrl_c_leaves_a_free_folder_that_says_so(tmp_path: Path) -> None:
    """The plain operators on long windows make a step of seconds: time enough to lose patience."""
    spec = tiny_spec(tmp_path, train={"ctx_len": 256, "batch_size": 64, "steps": 1000}, kernels="torch")
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    process = start(
        "import sys; from rwkv_spec.cli import main; sys.exit(main(sys.argv[1:]))", str(tmp_path / "spec.yaml")
    )
    metrics = tmp_path / "run" / "out" / "metrics.jsonl"
    until = time.monotonic() + 120
    while not (metrics.is_file() and metrics.stat().st_size):
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in error and "Traceback" not in error
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"
    assert not (tmp_path / "run" / "run.lock").exists()


@posix_only
@pytest.mark.parametrize("mark", ["ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID", None])
def test_a_launcher_that_is_gone_counts_and_a_shell_that_is_gone_does_not(tmp_path: Path, mark: str | None) -> None:
    noticed = tmp_path / "noticed"
    launcher = start(LAUNCHER, CHILD, str(noticed), marks=() if mark is None else (mark,))
    child = int(heard(launcher))
    until = time.monotonic() + 60
    while not Path(f"{noticed}.ready").exists():
        assert time.monotonic() < until and launcher.poll() is None
        time.sleep(0.01)
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    while mark is not None and not noticed.exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    if mark is None:
        # nohup and `&` leave processes without a parent on purpose.
        time.sleep(0.5)
        assert not noticed.exists()
        os.kill(child, signal.SIGKILL)
    launcher.stdout.close(), launcher.stderr.close()  # type: ignore[union-attr]
