"""The run folder: where files lie, who owns it, and a run.json that anybody can read at any time."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import rwkv_spec
from rwkv_spec.atomic import temporary_sibling
from rwkv_spec.errors import CheckpointError
from rwkv_spec.run_folder import RunFolder
from tests.tiny import tiny_spec


def test_asking_for_paths_creates_nothing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert folder.numbered_weights("pth") == [] and folder.read_status() == {}
    assert folder.weights("rwkv-final", "pth") == tmp_path / "run" / "out" / "rwkv-final.pth"
    assert not folder.work_dir.exists()


def test_numbered_weights_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """By name, rwkv-step1000 would come before rwkv-step200; init, best and final are no numbers."""
    folder = RunFolder(tmp_path)
    folder.out.mkdir()
    for name in ("step1000", "step200", "step30", "init", "best", "final", "step", "stepx", "step4.bak"):
        (folder.out / f"rwkv-{name}.pth").touch()
    (folder.out / "rwkv-step7.safetensors").touch()
    assert [path.stem for path in folder.numbered_weights("pth")] == ["rwkv-step30", "rwkv-step200", "rwkv-step1000"]
    assert [path.stem for path in folder.numbered_weights("safetensors")] == ["rwkv-step7"]


def test_a_run_removes_what_a_kill_left_half_written_and_nothing_else(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    left = [temporary_sibling(path) for path in (folder.weights("rwkv-final", "pth"), folder.metrics,
                                                 folder.train_log, folder.run_file, folder.resolved_spec)]  # fmt: skip
    kept = [folder.out / name for name in (".mine.tmp", ".notes.12-0123abcd.tmp", "rwkv-final.pth.tmp")]
    for path in (*left, *kept):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
    rwkv_spec.run(tiny_spec(tmp_path))
    assert [path.name for path in left if path.exists()] == []
    assert all(path.read_bytes() == b"half" for path in kept)


def test_the_status_says_who_and_how_far(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.write_status("running", step=3, total_steps=9)
    status = folder.read_status()
    assert (status["status"], status["step"], status["total_steps"]) == ("running", 3, 9)
    assert (status["host"], status["pid"]) == (socket.gethostname(), os.getpid()) and "note" not in status
    folder.mark_failed("no space left")
    assert (
        json.loads(folder.run_file.read_text()).items()
        >= {"status": "failed", "step": 3, "note": "no space left"}.items()
    )


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe"])
def test_a_damaged_run_file_is_no_obstacle(tmp_path: Path, content: bytes) -> None:
    folder = RunFolder(tmp_path)
    folder.run_file.write_bytes(content)
    assert folder.read_status() == {}
    folder.mark_failed("whatever")
    assert folder.read_status()["status"] == "failed"


def test_a_folder_in_use_names_the_process_that_has_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    lock = folder.claim()
    with pytest.raises(CheckpointError) as caught:
        folder.claim()
    assert f"process {os.getpid()} on host {socket.gethostname()}" in str(caught.value)
    assert "another work_dir" in str(caught.value)
    lock.release()
    folder.claim().release()


def test_a_folder_of_a_killed_run_is_free(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from rwkv_spec.run_folder import RunFolder\n"
        "RunFolder(Path(sys.argv[1])).claim(); os._exit(9)"
    )
    root = Path(__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], cwd=root).returncode == 9
    assert (tmp_path / "run" / "run.lock").exists()
    RunFolder(tmp_path / "run").claim().release()


def test_a_fault_of_any_kind_leaves_no_run_that_seems_to_go_on(tmp_path: Path) -> None:
    """run.json said `running`: whoever looks at it must not wait for a run that ended by an error of ours."""

    class Breaks:
        vocab_size, fingerprint = 12, "breaks"

        def encode(self, text: str) -> list[int]:
            return [int(value) + 1 for value in text.split()]

        def decode(self, ids: object) -> str:
            raise ZeroDivisionError("not a UserError")

    spec = tiny_spec(tmp_path, tokenizer=None)
    with pytest.raises(ZeroDivisionError):
        rwkv_spec.run(spec, tokenizer=Breaks())
    status = RunFolder(tmp_path / "run").read_status()
    assert status["status"] == "failed" and "not a UserError" in str(status["note"])
    assert not (tmp_path / "run" / "run.lock").exists()


def test_a_failed_run_starts_again(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path)
    good = (tmp_path / "values.txt").read_text()
    (tmp_path / "values.txt").write_text(good + "1 2 x\n")
    with pytest.raises(rwkv_spec.DataError, match=r"values\.txt:7"):
        rwkv_spec.run(spec)
    assert RunFolder(tmp_path / "run").read_status()["status"] == "failed"
    (tmp_path / "values.txt").write_text(good)
    rwkv_spec.run(spec)
    assert RunFolder(tmp_path / "run").read_status()["status"] == "done"


@pytest.mark.parametrize("status", ["done", "stopped"])
def test_a_refused_attempt_leaves_the_status_of_a_run_that_stands(tmp_path: Path, status: str) -> None:
    folder = RunFolder(tmp_path)
    folder.write_status(status, step=8, total_steps=8)
    folder.mark_failed("other settings")
    assert folder.read_status()["status"] == status
