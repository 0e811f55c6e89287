"""A lock is held by one living process, and never outlives it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from rwkv_spec.lock import Lock, Locked, alive, this_process

HOLDER = """
import sys, pathlib
from rwkv_spec.lock import Lock
Lock(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""

CONTENDER = """
import sys, pathlib
from rwkv_spec.lock import Lock, Locked
try:
    Lock(pathlib.Path(sys.argv[1]))
    print("got", flush=True)
    sys.stdin.read()
except Locked:
    print("refused", flush=True)
"""


def start(script: str, path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_a_living_process_keeps_its_lock_and_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    with start(HOLDER, path) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(Locked) as caught:
            Lock(path)
        assert caught.value.owner.pid == holder.pid
        assert str(holder.pid) in str(caught.value) and this_process().host in str(caught.value)
        holder.communicate("")


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    with start(HOLDER, path) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        holder.kill()
    Lock(path).release()
    assert not path.exists()


def test_of_many_that_find_a_stale_lock_one_gets_it(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    path.write_text(json.dumps(asdict(replace(this_process(), pid=2**22 - 1))))
    contenders = [start(CONTENDER, path) for _ in range(6)]
    words = []
    for contender in contenders:
        assert contender.stdout is not None
        words.append(contender.stdout.readline().strip())
    for contender in contenders:
        contender.communicate("")
    assert sorted(words) == ["got"] + ["refused"] * 5


def test_a_reused_process_number_is_not_the_owner(tmp_path: Path) -> None:
    owner = this_process()
    assert alive(owner)
    if not owner.birth:
        pytest.skip("this system does not tell when a process started")
    assert not alive(replace(owner, birth="another boot:1"))


def test_a_lock_of_another_host_is_never_taken(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    path.write_text(json.dumps(asdict(replace(this_process(), host="elsewhere", pid=1))))
    with pytest.raises(Locked, match="elsewhere"):
        Lock(path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"host": 1}', "\x00\x00"])
def test_a_broken_lock_file_does_not_hang_or_block(tmp_path: Path, content: str) -> None:
    path = tmp_path / "run.lock"
    path.write_text(content)
    Lock(path).release()


def test_releasing_leaves_another_ones_lock_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    lock = Lock(path)
    path.write_text("somebody else")
    lock.release()
    assert path.read_text() == "somebody else"
