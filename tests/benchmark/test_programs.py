"""Programs that are timed: processes of their own, none of which stays, and whose failures are told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rwkv_spec.benchmark.programs import (
    PEERS,
    Program,
    ProgramFailed,
    busy_core,
    chosen_peers,
    own_program,
    peer_program,
)
from rwkv_spec.benchmark.timed import OwnTimes, Times
from rwkv_spec.errors import UserError
from tests.benchmark.workloads import tiny_workload

START = "import json, sys, runpy; runpy.run_path(sys.argv[2])['main'](json.loads(open(sys.argv[1]).read()))"


def program(folder: Path, body: str, *, limit_seconds: float | None = None) -> Program:
    """A program whose main(request) has this body."""
    script = folder / "script.py"
    script.write_text("import json, os, subprocess, sys, time\ndef main(request):\n    " + body.replace("\n", "\n    "))
    return Program("test", (sys.executable, "-c", START, str(script)), {"mark": 7}, limit_seconds)


def test_a_program_gets_its_request_and_hands_its_times_back(tmp_path: Path) -> None:
    body = "open(request['result'], 'w').write(json.dumps({'mark': request['mark'], 'detailed': request['detailed']}))"
    assert program(tmp_path, body).measure(detailed=True) == {"mark": 7, "detailed": True}


def test_what_a_failed_program_said_is_told(tmp_path: Path) -> None:
    body = (
        "print('loading')\ntry:\n    raise ValueError('no such shape')\nfinally:\n    print('set DEBUG=1', flush=True)"
    )
    with pytest.raises(ProgramFailed, match="status 1: ValueError: no such shape"):
        program(tmp_path, body).measure()
    with pytest.raises(ProgramFailed, match="status 3: it said nothing"):
        program(tmp_path, "os._exit(3)").measure()


def test_an_error_that_a_user_can_fix_stays_one(tmp_path: Path) -> None:
    body = "open(request['result'], 'w').write(json.dumps({'error': 'choose another'}))"
    with pytest.raises(UserError, match="choose another"):
        program(tmp_path, body).measure()


@pytest.mark.skipif(os.name != "posix", reason="sessions of processes are POSIX")
def test_a_program_that_takes_too_long_is_ended_with_all_it_started(tmp_path: Path) -> None:
    note = tmp_path / "child"
    body = (
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(note)!r}, 'w').write(str(child.pid))\ntime.sleep(600)"
    )
    with pytest.raises(ProgramFailed, match="not done after 3 s"):
        program(tmp_path, body, limit_seconds=3).measure()
    assert ends(int(note.read_text()))


def test_the_busy_process_ends_with_the_measurement_and_with_its_parent() -> None:
    code = (
        "import subprocess; from rwkv_spec.benchmark import programs\n"
        "real = subprocess.Popen\n"
        "class Noted(real):\n"
        "    def __init__(self, *given, **named):\n"
        "        super().__init__(*given, **named); print(self.pid, flush=True)\n"
        "subprocess.Popen = Noted\n"
        "with programs.busy_core(): import os; os._exit(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ends(int(done.stdout))
    with pytest.raises(ZeroDivisionError), busy_core():
        raise ZeroDivisionError


@pytest.mark.parametrize("type", ["x052", "x070"])
def test_our_own_process_measures_and_tells_where_the_time_goes(type: str) -> None:
    workload = tiny_workload(type, backend="torch")
    times = OwnTimes(**own_program(workload, num_steps=2).measure(detailed=True))  # type: ignore[arg-type]
    assert len(times.seconds) == len(times.wait_seconds) == 2
    assert all(0 < wait < second for wait, second in zip(times.wait_seconds, times.seconds, strict=True))
    assert sum(times.shares.values()) == pytest.approx(1.0)
    assert times.forward_seconds > 0 and times.backward_seconds > 0 and times.product_rate > 0


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the high-water mark is Linux's")
def test_memory_is_that_of_the_measuring_process_alone() -> None:
    ballast = bytearray(os.urandom(1 << 20)) * 1500
    times = Times(**gpt().measure())  # type: ignore[arg-type]
    assert len(ballast) > 1.5e9
    assert times.peak_memory_bytes is not None and 1e7 < times.peak_memory_bytes < 1.2e9


def test_a_gpt_is_about_as_large_as_an_x070() -> None:
    times = Times(**gpt().measure())  # type: ignore[arg-type]
    workload = tiny_workload()
    assert len(times.seconds) == 2
    assert 0.5 < times.num_parameters / workload.num_parameters < 1.5


def test_the_gpt_sees_no_later_token() -> None:
    import torch

    from rwkv_spec.benchmark.peers import GPT

    torch.manual_seed(0)
    model = GPT(n_layer=2, n_embd=32, num_heads=2, vocab_size=11, ctx_len=16).double()
    ids_BT = torch.randint(0, 11, (2, 16))
    other_BT = ids_BT.clone()
    other_BT[:, 9:] = (other_BT[:, 9:] + 1) % 11
    same = model(ids_BT)[:, :9] - model(other_BT)[:, :9]
    assert same.abs().max() < 1e-12
    assert (model(ids_BT)[:, 9:] - model(other_BT)[:, 9:]).abs().min(dim=-1).values.max() > 1e-6


def test_peers_are_chosen_by_name_and_what_cannot_run_says_why(tmp_path: Path) -> None:
    workload = tiny_workload()
    bare = tmp_path / "python"
    assert chosen_peers(["compile", "gpt"], workload, None) == ["gpt", "compile"]
    with pytest.raises(UserError, match=r"no peer lstm; choose rwkv-trainer, gpt, compile or all"):
        chosen_peers(["lstm"], workload, None)
    with pytest.raises(UserError, match="cannot be started"):
        chosen_peers(["rwkv-trainer"], workload, bare)
    with pytest.raises(UserError, match="has no package rwkv_trainer"):
        chosen_peers(["rwkv-trainer"], workload, without_packages(tmp_path))
    assert chosen_peers(["all"], workload, without_packages(tmp_path)) == ["gpt", "compile"]


def without_packages(folder: Path) -> Path:
    """A python that sees the standard library alone."""
    path = folder / "bare"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    path.chmod(0o755)
    return path


def test_the_trainer_is_run_through_its_own_pipeline_and_script(tmp_path: Path) -> None:
    # Its interface in small: what the real package's pipeline and callback have, and nothing else.
    package = tmp_path / "rwkv_trainer"
    (package / "trainer").mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import sys; sys.path.insert(0, __path__[0])\n"
        "from types import SimpleNamespace as ModelConfig, SimpleNamespace as TrainingConfig\n"
        "from types import SimpleNamespace as DataConfig\n"
        "class IntegerTokenizer:\n"
        "    def __init__(self, max_value): self.max_value = max_value\n"
        "class RWKVTrainingPipeline:\n"
        "    def __init__(self, work_dir, *, model_config, training_config, data_config, tokenizer):\n"
        "        self.model, self.tokenizer = model_config, tokenizer\n"
        "    def prepare_data(self, data):\n"
        "        assert data.shape[1] == self.model.ctx_len and data.max() <= self.tokenizer.max_value\n"
        "    def initialize_model(self, random_seed): pass\n"
        "    def _build_train_command(self, stage, num_epochs):\n"
        "        return [sys.executable, __path__[0] + '/train.py', '--model', self.model.model_type]\n"
    )
    (package / "trainer" / "__init__.py").write_text("")
    (package / "trainer" / "trainer_module.py").write_text(
        "class train_callback:\n"
        "    def __init__(self, args): self.args = args\n"
        "    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx): pass\n"
    )
    (package / "train.py").write_text(
        "import sys, time, torch\nfrom trainer.trainer_module import train_callback\n"
        "assert __name__ == '__main__' and sys.argv[1:] == ['--model', 'x070']\n"
        "callback = train_callback(None)\n"
        "for step in range(10**6):\n"
        "    time.sleep(0.01)\n"
        "    callback.on_train_batch_end(None, torch.nn.Linear(3, 5), None, None, step)\n"
    )
    trainer = peer("rwkv-trainer")
    planted = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {trainer.command[2]}"
    times = Times(**replace(trainer, command=(*trainer.command[:2], planted, trainer.command[3])).measure())  # type: ignore[arg-type]
    assert len(times.seconds) == 2 and min(times.seconds) >= 0.01 and times.num_parameters == 20


@pytest.mark.slow
def test_our_model_can_be_compiled_by_torch() -> None:
    times = Times(**peer("compile").measure())  # type: ignore[arg-type]
    assert len(times.seconds) == 2


def test_requests_travel_as_json() -> None:
    for name in PEERS:
        assert json.loads(json.dumps(peer(name).request)) == peer(name).request


def gpt() -> Program:
    return peer("gpt")


def peer(name: str) -> Program:
    return peer_program(name, tiny_workload(), num_steps=2, limit_seconds=600, peer_python=None)


def ends(pid: int) -> bool:
    """Whether a process is gone, or ended and not yet waited for by its new parent, within some seconds."""
    for _ in range(200):
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (ProcessLookupError, FileNotFoundError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False
