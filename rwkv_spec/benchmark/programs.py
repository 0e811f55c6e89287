"""The programs that can be timed, ours and its peers, each as a process of its own with a request and a result.

Promises: whatever becomes of a program, no process of it is left; what it says when it fails is told, not swallowed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rwkv_spec.benchmark.timed import WARMUP_STEPS
from rwkv_spec.benchmark.workload import Workload
from rwkv_spec.errors import UserError

PEERS = ("rwkv-trainer", "gpt", "compile")
# What its script divides an epoch into steps by.
_TRAINER_EPOCH = 40320
_START_OURS = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from rwkv_spec.benchmark.worker import main; main(sys.argv[1])"
)
_START_FILE = "import runpy, sys; runpy.run_path(sys.argv[2])['main'](sys.argv[1])"
_HAS_TRAINER = "import importlib.util, sys; sys.exit(importlib.util.find_spec('rwkv_trainer') is None)"
# Whose parent it is it is told: that could be gone before it asks.
_KEEP_BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass"


_ERROR = re.compile(r"[\w.]*(Error|Exception|Unsupported|Interrupt)\b:?")


class ProgramFailed(Exception):
    """A program gave no times; the text says why, as a clause."""


@dataclass(frozen=True)
class Program:
    """How a program is started. `limit_seconds`: it is ended after so long; None: never."""

    name: str
    command: tuple[str, ...]
    request: dict[str, object]
    limit_seconds: float | None = None

    def measure(self, *, detailed: bool = False) -> dict[str, object]:
        """The times it wrote. UserError for what it says a user can fix; ProgramFailed for all else."""
        with tempfile.TemporaryDirectory(prefix="rwkv_spec-bench-", ignore_cleanup_errors=True) as folder:
            request, result = Path(folder, "request.json"), Path(folder, "result.json")
            values = {**self.request, "detailed": detailed, "result": str(result)}
            request.write_text(json.dumps(values), encoding="utf-8")
            command = [*self.command[:3], str(request), *self.command[3:]]
            said = _run(command, Path(folder, "said.txt"), self.limit_seconds)
            if not result.exists():
                raise ProgramFailed(said)
            times: dict[str, object] = json.loads(result.read_text(encoding="utf-8"))
        if "error" in times:
            raise UserError(str(times["error"]))
        return times


def own_program(workload: Workload, *, num_steps: int) -> Program:
    return _ours("own", workload, num_steps=num_steps, limit_seconds=None)


def split_program(workload: Workload, sizes: tuple[int, ...]) -> Program:
    """Finds the fastest of these micro-batch sizes; gives `size` and `reason`."""
    program = _ours("split", workload, num_steps=0, limit_seconds=None)
    return replace(program, request={**program.request, "sizes": sizes})


def peer_program(
    name: str, workload: Workload, *, num_steps: int, limit_seconds: float, peer_python: Path | None
) -> Program:
    """One of PEERS."""
    if name != "rwkv-trainer":
        return _ours(name, workload, num_steps=num_steps, limit_seconds=limit_seconds)
    shape = workload.shape
    request: dict[str, object] = {
        "num_threads": workload.num_threads,
        "num_steps": num_steps,
        "warmup_steps": WARMUP_STEPS,
        "type": shape.type,
        "n_layer": shape.n_layer,
        "n_embd": shape.n_embd,
        "head_size": shape.head_size,
        "vocab_size": shape.vocab_size,
        "ctx_len": workload.ctx_len,
        "batch_size": workload.batch_size,
        "precision": workload.precision,
    }
    script = str(Path(__file__).with_name("rwkv_trainer_steps.py"))
    command = (str(peer_python or sys.executable), "-c", _START_FILE, script)
    return Program(name, command, request, limit_seconds)


def chosen_peers(against: Sequence[str], workload: Workload, peer_python: Path | None) -> list[str]:
    """The peers that are asked for, `all` being those that can run here. UserError for one that cannot."""
    everything = "all" in against
    unknown = [name for name in against if name not in (*PEERS, "all")]
    if unknown:
        raise UserError(
            f"--against {','.join(against)}: there is no peer {unknown[0]}; choose {', '.join(PEERS)} or all"
        )
    names = [name for name in PEERS if everything or name in against]
    if "rwkv-trainer" in names:
        hindrance = _hindrance_of_trainer(workload, peer_python)
        if hindrance and not everything:
            raise UserError(f"--against rwkv-trainer: {hindrance}")
        if hindrance:
            names.remove("rwkv-trainer")
    return names


def _hindrance_of_trainer(workload: Workload, peer_python: Path | None) -> str:
    if peer_python is None:
        if importlib.util.find_spec("rwkv_trainer") is None:
            return (
                "the package is not installed; pip install rwkv-trainer, best into an environment of its own, whose "
                "python --peer-python names"
            )
    else:
        try:
            found = subprocess.run([str(peer_python), "-c", _HAS_TRAINER], stdin=subprocess.DEVNULL, check=False)
        except OSError as error:
            raise UserError(f"--peer-python {peer_python}: cannot be started: {error.strerror or error}") from error
        if found.returncode != 0:
            return f"{peer_python} has no package rwkv_trainer; name the python of the environment that has it"
    if _TRAINER_EPOCH % workload.batch_size:
        return f"it takes batches that divide {_TRAINER_EPOCH}, and train.batch_size is {workload.batch_size}"
    if workload.precision == "fp64":
        return "it has no fp64"
    return ""


def _ours(name: str, workload: Workload, *, num_steps: int, limit_seconds: float | None) -> Program:
    request: dict[str, object] = {"program": name, "workload": workload.as_dict(), "num_steps": num_steps}
    return Program(name, (sys.executable, "-c", _START_OURS, json.dumps(sys.path)), request, limit_seconds)


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """A process beside ours that keeps one core busy; it ends with this one, however that ends."""
    child = subprocess.Popen([sys.executable, "-S", "-c", _KEEP_BUSY, str(os.getpid())], stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        child.kill()
        child.wait()


def _run(command: Sequence[str], said: Path, limit_seconds: float | None) -> str:
    """Wait for a program and give the last line that it said, or why it was ended."""
    with said.open("wb") as out:
        # A session of its own: its children end with it.
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=os.name == "posix"
        )
        try:
            status = child.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            return f"it was not done after {limit_seconds:,.0f} s"
        finally:
            _end(child)
    lines = [line.strip() for line in said.read_text(encoding="utf-8", errors="replace").splitlines()]
    # A traceback may be followed by advice; its own last line begins with the name of the error.
    told = [line for line in lines if _ERROR.match(line)] or [line for line in lines if line] or ["it said nothing"]
    return f"it ended with status {status}: {told[-1][:300]}"


def _end(child: subprocess.Popen[bytes]) -> None:
    if os.name == "posix":
        # All of its session, also those that it left behind itself.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
    else:
        child.kill()
    child.wait()
