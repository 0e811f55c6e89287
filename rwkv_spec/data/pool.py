"""Encodes line ranges on all cores: by threads where compiled code does the work, else by child processes for big
inputs; by this process alone for small ones or a user's tokenizer.

The parts come back in the order of their ranges, so that the store's bytes do not depend on the number of processes.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict

from rwkv_spec.data.compiled_lines import SMALL_BYTES, can_read_plainly
from rwkv_spec.data.part import Job, Part, Progress, encode_range
from rwkv_spec.data.rows import MAX_FAULTS
from rwkv_spec.data.thread_pool import run_in_threads
from rwkv_spec.errors import DataError
from rwkv_spec.tokenizer.build import Recipe, recipe_of
from rwkv_spec.tokenizer.protocol import Tokenizer

# The child takes over the parent's import path; `-m` would put the current folder in front of it.
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from rwkv_spec.data.worker import main; main()"
# Child processes take a second to start; in that time this one has encoded some thirty megabytes of integers.
_SMALL_BYTES = 32 << 20
_JOB_BYTES = 16 << 20
Event = tuple[int, dict[str, object]]


def num_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def job_bytes(total_bytes: int, processes: int) -> int:
    """The size of a job: one for all where one process does the work, else several for each process."""
    if processes == 1 or total_bytes < SMALL_BYTES:
        return max(total_bytes, 1)
    return max(1 << 20, min(_JOB_BYTES, total_bytes // (4 * processes)))


def run_jobs(jobs: Sequence[Job], tokenizer: Tokenizer, *, processes: int, progress: Progress) -> list[Part]:
    """The parts in the order of the jobs. After more faults than anyone reads, later jobs are left out."""
    recipe = recipe_of(tokenizer)
    total_bytes = sum(job.stop - job.start for job in jobs)
    if recipe is None or processes == 1 or len(jobs) == 1:
        return _run_here(jobs, tokenizer, progress)
    if can_read_plainly(tokenizer, num_bytes=total_bytes):
        return run_in_threads(jobs, tokenizer, threads=processes, progress=progress)
    if not sys.executable or total_bytes < _SMALL_BYTES:
        return _run_here(jobs, tokenizer, progress)
    pool = _Pool(jobs, recipe, tokenizer.fingerprint, min(processes, len(jobs)))
    try:
        return pool.collect(progress)
    finally:
        pool.stop()


def _run_here(jobs: Sequence[Job], tokenizer: Tokenizer, progress: Progress) -> list[Part]:
    parts: list[Part] = []
    for job in jobs:
        parts.append(encode_range(job, tokenizer, progress))
        if sum(part.num_faults for part in parts) >= MAX_FAULTS:
            break
    return parts


class _Pool:
    """One thread serves one child; the caller's thread collects what they report."""

    def __init__(self, jobs: Sequence[Job], recipe: Recipe, fingerprint: str, processes: int) -> None:
        self._jobs = jobs
        self._next = 0
        self._num_faults = 0
        self._lock = threading.Lock()
        self._events: queue.Queue[Event] = queue.Queue()
        self._greeting = json.dumps({"recipe": asdict(recipe), "fingerprint": fingerprint}) + "\n"
        self._children = [self._start() for _ in range(processes)]
        self._threads = [threading.Thread(target=self._serve, args=(c,), daemon=True) for c in self._children]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
        )

    def _take(self) -> int | None:
        """The next job's number. Jobs are taken in order, so that all before the last one taken get done."""
        with self._lock:
            if self._next == len(self._jobs) or self._num_faults >= MAX_FAULTS:
                return None
            self._next += 1
            return self._next - 1

    def _serve(self, child: subprocess.Popen[str]) -> None:
        assert child.stdin is not None and child.stdout is not None
        number = -1
        try:
            child.stdin.write(self._greeting)
            child.stdin.flush()
            while (taken := self._take()) is not None:
                number = taken
                child.stdin.write(json.dumps(asdict(self._jobs[number])) + "\n")
                child.stdin.flush()
                for line in child.stdout:
                    message = json.loads(line)
                    self._events.put((number, message))
                    if "bytes" not in message:
                        break
                else:
                    raise OSError("it ended")
                if "error" in message:
                    return
        except (OSError, ValueError):
            status = child.wait()
            why = f"a process that was preparing data ended with status {status}"
            hint = "; too little memory is the usual reason" if status in (-9, 137) else ""
            self._events.put((number, {"error": why + hint}))
        finally:
            self._events.put((-1, {}))

    def collect(self, progress: Progress) -> list[Part]:
        parts: dict[int, Part] = {}
        open_threads = len(self._threads)
        while open_threads:
            number, message = self._events.get()
            if "error" in message:
                raise DataError(str(message["error"]))
            if not message:
                open_threads -= 1
            elif "bytes" in message:
                progress(int(str(message["bytes"])))
            else:
                part = _part(message["part"])
                parts[number] = part
                with self._lock:
                    self._num_faults += part.num_faults
        return [parts[number] for number in sorted(parts)]

    def stop(self) -> None:
        """End every child, whether it is done or not, and leave no pipe open."""
        for child in self._children:
            child.kill()
        for thread in self._threads:
            thread.join()
        for child in self._children:
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    _close_quietly(pipe.close)


def _close_quietly(close: Callable[[], None]) -> None:
    try:
        close()
    except BrokenPipeError:
        # The child was gone before it read all that was written to it; that is no loss here.
        return


def _part(fields: object) -> Part:
    assert isinstance(fields, dict)
    return Part(**{**fields, "faults": [(line, column, text) for line, column, text in fields["faults"]]})
