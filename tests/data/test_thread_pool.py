"""Line ranges in threads: the same parts as from one; progress and errors come to the caller, and no thread stays."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rwkv_spec.data import compiled_lines, thread_pool
from rwkv_spec.data.build_store import _ranges
from rwkv_spec.data.part import Job, Part, encode_range
from rwkv_spec.data.rows import MAX_FAULTS
from rwkv_spec.data.thread_pool import run_in_threads
from rwkv_spec.tokenizer.integer import AngleTokenizer
from tests.tokenizer.vocabularies import compiled

pytestmark = compiled


@pytest.fixture(autouse=True)
def no_thread_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compiled_lines, "SMALL_BYTES", 0)
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def jobs_of(tmp_path: Path, lines: list[str], job_bytes: int) -> list[Job]:
    source = tmp_path / "a.txt"
    source.write_text("".join(f"{line}\n" for line in lines))
    ranges = _ranges(source, job_bytes)
    size = source.stat().st_size
    return [
        Job(str(source), "txt", start, stop, "text", None, str(tmp_path / f"part{number}"), size)
        for number, (start, stop) in enumerate(ranges)
    ]


def files_of(part: Part) -> list[bytes]:
    return [Path(f"{part.out}.{name}").read_bytes() for name in ("ids", "sizes", "marks")]


def test_the_parts_are_those_of_one_thread(tmp_path: Path) -> None:
    jobs = jobs_of(tmp_path, [" ".join(map(str, range(n % 360))) for n in range(900)], 10_000)
    alone = [encode_range(job, AngleTokenizer(), lambda count: None) for job in jobs]
    want = [files_of(part) for part in alone]
    for threads in (1, 2, 5, 1000):
        counts: list[int] = []
        callers: set[threading.Thread] = set()

        def progress(count: int) -> None:
            counts.append(count)  # noqa: B023
            callers.add(threading.current_thread())  # noqa: B023

        parts = run_in_threads(jobs, AngleTokenizer(), threads=threads, progress=progress)
        assert parts == alone and [files_of(part) for part in parts] == want
        assert sum(counts) == jobs[-1].stop and callers == {threading.current_thread()}


def test_after_more_faults_than_anyone_reads_later_jobs_are_left_out(tmp_path: Path) -> None:
    jobs = jobs_of(tmp_path, ["1 x"] * 5000, 200)
    parts = run_in_threads(jobs, AngleTokenizer(), threads=2, progress=lambda count: None)
    assert sum(part.num_faults for part in parts) >= MAX_FAULTS and len(parts) < len(jobs)
    assert [part.out for part in parts] == [job.out for job in jobs[: len(parts)]]


def test_an_error_in_a_thread_is_the_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = jobs_of(tmp_path, ["1 2 3"] * 5000, 1000)

    def no_room(job: Job, *others: object) -> Part:
        if job.out.endswith("part3"):
            raise OSError(28, "No space left on device")
        return encode_range(job, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(thread_pool, "encode_range", no_room)
    with pytest.raises(OSError, match="No space left"):
        run_in_threads(jobs, AngleTokenizer(), threads=2, progress=lambda count: None)
    assert not (tmp_path / f"part{len(jobs) - 1}.ids").exists()


def test_an_interrupt_of_the_caller_ends_the_threads(tmp_path: Path) -> None:
    jobs = jobs_of(tmp_path, ["1 2 3"] * 20_000, 1000)

    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_in_threads(jobs, AngleTokenizer(), threads=2, progress=interrupt)
    assert not (tmp_path / f"part{len(jobs) - 1}.ids").exists()
