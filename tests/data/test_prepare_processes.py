"""A preparation by several processes, at once or one killed: the same bytes, one store, memory that does not grow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from rwkv_spec.data import build_store
from rwkv_spec.data import prepare as prepare_module
from rwkv_spec.data.holdout import EvalRule
from rwkv_spec.data.prepare import LOCK
from rwkv_spec.data.store import Store, open_store
from rwkv_spec.errors import DataError
from rwkv_spec.lock import Lock
from rwkv_spec.tokenizer.vocab import VocabTokenizer
from tests.data.stores import ROOT, make, snapshot, tokens, write
from tests.tokenizer.vocabularies import has_compiler, world


def use(workers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads need compiled code, which so little data is not worth; processes are for where there is none."""
    if workers == "threads" and not has_compiler():
        pytest.skip("no C++ compiler on this machine")
    monkeypatch.setattr("rwkv_spec.data.pool._SMALL_BYTES", 1)
    monkeypatch.setattr("rwkv_spec.data.compiled_lines.SMALL_BYTES", 1 if workers == "threads" else 1 << 60)


@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_any_number_of_processes_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: str
) -> None:
    use(workers, monkeypatch)
    monkeypatch.setattr(build_store, "job_bytes", lambda total, processes: 10_000 if processes > 1 else total)
    rng = np.random.default_rng(0)
    rows = [{"m": int(m), "text": " ".join(map(str, rng.integers(0, 360, m * 7)))} for m in rng.integers(1, 30, 400)]
    a = write(tmp_path / "a.jsonl", "\ufeff" + "".join(json.dumps(row) + "\n" for row in rows))
    b = write(tmp_path / "b.jsonl", "\n".join(json.dumps({"m": 3, "text": str(i)}) for i in range(300)))
    for number, rule in enumerate([None, EvalRule(where={"m": [3, 4]}), EvalRule(fraction=0.2)]):
        stores = [make(tmp_path, a, b, eval_rule=rule, store=tmp_path / f"s{number}{n}", processes=n) for n in (1, 3)]
        contents = [snapshot(store.dir) for store in stores]
        assert contents[0] == contents[1]
        assert stores[0].manifest.sources[0].lines == 400
    text = a.read_text(encoding="utf-8").splitlines(keepends=True)
    text[377] = '{"text": "361", "m": 1}\n'
    write(a, "".join(text))
    with pytest.raises(DataError, match=r"a\.jsonl:378:11: text: 361 is outside"):
        make(tmp_path, a, b, processes=3)
    assert list((tmp_path / "store").glob(".preparing-*")) == []


@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_world_tokens_are_the_same_from_any_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: str
) -> None:
    use(workers, monkeypatch)
    monkeypatch.setattr(build_store, "job_bytes", lambda total, processes: 2000 if processes > 1 else total)
    lines = [f"Zeile {i}: 你好, мир, \\t {'é' * (i % 40)}" for i in range(500)]
    source = write(tmp_path / "a.txt", "\n".join(lines))
    stores = [make(tmp_path, source, tokenizer=world(), store=tmp_path / f"s{n}", processes=n) for n in (1, 3)]
    assert snapshot(stores[0].dir) == snapshot(stores[1].dir)
    assert stores[0].manifest.vocab_size == 65536
    assert tokens(stores[0]) == [token for line in lines for token in [*world().encode(line), 0]]


def test_a_vocabulary_changed_meanwhile_stops_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use("processes", monkeypatch)
    monkeypatch.setattr(build_store, "job_bytes", lambda total, processes: 100)
    vocab = write(tmp_path / "v.txt", "1 'a' 1\n2 '1' 1\n")
    tokenizer = VocabTokenizer(vocab)
    source = write(tmp_path / "a.txt", "a1\n" * 200)
    write(vocab, "2 'a' 1\n1 '1' 1\n")
    with pytest.raises(DataError, match="vocabulary was changed"):
        make(tmp_path, source, tokenizer=tokenizer, processes=2)
    vocab.unlink()
    with pytest.raises(DataError, match="no such vocabulary"):
        make(tmp_path, source, tokenizer=tokenizer, processes=2)


def test_progress_is_reported_to_the_end(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    make(tmp_path, write(tmp_path / "a.txt", "1 2\n" * 1000), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0 and seen == sorted(seen)


def test_a_second_process_waits_and_then_uses_the_same_store(tmp_path: Path) -> None:
    source = write(tmp_path / "a.txt", "1 2\n")
    lock = Lock(tmp_path / "store" / LOCK)
    said: list[str] = []
    found: list[Store] = []
    waiter = threading.Thread(target=lambda: found.append(make(tmp_path, source, notify=said.append)))
    waiter.start()
    time.sleep(0.7)
    assert waiter.is_alive() and len(said) == 1 and "waiting" in said[0] and str(os.getpid()) in said[0]
    lock.release()
    waiter.join(10)
    assert tokens(found[0]) == [2, 3, 0] and len(said) == 1


def test_a_silent_holder_on_another_host_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store").mkdir()
    record = {"host": "elsewhere", "pid": 1, "birth": "", "since": "2020"}
    write(tmp_path / "store" / LOCK, json.dumps(record))
    monkeypatch.setattr(prepare_module, "_PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(prepare_module, "_POLL_SECONDS", 0.05)
    with pytest.raises(Exception, match="held by process 1 on host elsewhere"):
        make(tmp_path, [1])


PREPARE = """
import sys
from rwkv_spec.data.prepare import prepare
from rwkv_spec.tokenizer.integer import AngleTokenizer
store = prepare(sources=[sys.argv[1]], tokenizer=AngleTokenizer(), store=sys.argv[2], processes=int(sys.argv[3]))
print(store.hash)
"""


def run(source: Path, store: Path, processes: int = 1) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PREPARE, str(source), str(store), str(processes)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_two_at_once_make_one_store(tmp_path: Path) -> None:
    source = write(tmp_path / "a.txt", "1 2 3 4 5 6 7 8\n" * 100_000)
    both = [run(source, tmp_path / "store") for _ in range(2)]
    answers = [process.communicate(timeout=60)[0] for process in both]
    assert answers[0] == answers[1] and [process.returncode for process in both] == [0, 0]
    assert sorted(p.name for p in (tmp_path / "store").iterdir()) == [
        "manifest.json",
        "train.bin",
        "train.idx",
        "vocab.txt",
    ]


def test_a_killed_preparation_is_begun_again(tmp_path: Path) -> None:
    source = write(tmp_path / "a.txt", "1 2 3 4 5 6 7 8\n" * 1_000_000)
    for processes in (1, 2):
        child = run(source, tmp_path / "store", processes)
        while not list((tmp_path / "store").glob(".preparing-*/part*")):
            time.sleep(0.01)
            assert child.poll() is None
        child.kill()
        child.communicate()
        with pytest.raises(DataError):
            open_store(tmp_path / "store")
    assert (tmp_path / "store" / LOCK).exists()
    store = make(tmp_path, source)
    assert store.train.num_tokens == 9_000_000 and not list((tmp_path / "store").glob(".preparing*"))


MEASURE = """
import resource, sys
from rwkv_spec.data.prepare import prepare
from rwkv_spec.tokenizer.integer import AngleTokenizer
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
prepare(sources=[sys.argv[1]], tokenizer=AngleTokenizer(), store=sys.argv[2], processes=int(sys.argv[3]))
children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, children)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="getrusage is POSIX")
@pytest.mark.parametrize("kind", ["jsonl", "txt", "npy"])
@pytest.mark.parametrize("compiler", ["any", "none"])
def test_memory_does_not_grow_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, compiler: str
) -> None:
    if compiler == "none":
        monkeypatch.setenv("CXX", "no-such-compiler")
    used = {}
    for megabytes in (10, 200):
        source = tmp_path / f"{megabytes}.{kind}"
        if kind == "npy":
            np.save(source, np.full((megabytes * 1250, 100), 7, np.int64))
        else:
            line = " ".join(map(str, range(100, 350)))
            line = json.dumps({"text": line}) if kind == "jsonl" else line
            with source.open("w") as file:
                for _ in range(megabytes):
                    file.write(f"{line}\n" * (1_000_000 // len(line)))
        for processes in (1, 2):
            command = [
                sys.executable,
                "-c",
                MEASURE,
                str(source),
                str(tmp_path / f"{megabytes}{processes}"),
                str(processes),
            ]
            before, own, children = map(
                int, subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.split()
            )
            used[megabytes, processes] = max(own - before, children - before)
        source.unlink()
    # Kilobytes (bytes on macOS, where this only gets easier to pass): the larger file costs next to nothing more.
    for processes in (1, 2):
        assert used[200, processes] < 80_000 and used[200, processes] < used[10, processes] + 20_000, used
