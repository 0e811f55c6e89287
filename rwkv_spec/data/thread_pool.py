"""Encodes line ranges in threads of this process: compiled code works in each, while Python waits.

Promise: progress and errors reach the caller in its own thread, and no thread outlives the call.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from rwkv_spec.data.part import Job, Part, Progress, encode_range
from rwkv_spec.data.rows import MAX_FAULTS
from rwkv_spec.tokenizer.protocol import Tokenizer


class _Stopped(Exception):
    """The caller wants no more parts."""


def run_in_threads(jobs: Sequence[Job], tokenizer: Tokenizer, *, threads: int, progress: Progress) -> list[Part]:
    """The parts in the order of the jobs. After more faults than anyone reads, later jobs are left out."""
    work = _Work(jobs, tokenizer)
    with ThreadPoolExecutor(threads) as executor:
        try:
            for _ in range(min(threads, len(jobs))):
                executor.submit(work.do).add_done_callback(work.events.put)
            return work.collect(min(threads, len(jobs)), progress)
        finally:
            work.stopped.set()


class _Work:
    """What the threads share. Jobs are taken in order, so that all before the last one taken get done."""

    def __init__(self, jobs: Sequence[Job], tokenizer: Tokenizer) -> None:
        self._jobs, self._tokenizer = jobs, tokenizer
        self._next = self._num_faults = 0
        self._lock = threading.Lock()
        # A number of bytes read, a job's number and its part, or a thread that has ended.
        self.events: queue.SimpleQueue[int | tuple[int, Part] | Future[None]] = queue.SimpleQueue()
        self.stopped = threading.Event()

    def do(self) -> None:
        """What each thread does."""
        while (number := self._take()) is not None:
            part = encode_range(self._jobs[number], self._tokenizer, self._progress)
            with self._lock:
                self._num_faults += part.num_faults
            self.events.put((number, part))

    def _take(self) -> int | None:
        with self._lock:
            if self._next == len(self._jobs) or self._num_faults >= MAX_FAULTS or self.stopped.is_set():
                return None
            self._next += 1
            return self._next - 1

    def _progress(self, num_bytes: int) -> None:
        if self.stopped.is_set():
            raise _Stopped
        self.events.put(num_bytes)

    def collect(self, num_threads: int, progress: Progress) -> list[Part]:
        """Waits for all that the threads report; raises what ended one of them."""
        parts: dict[int, Part] = {}
        while num_threads:
            event = self.events.get()
            if isinstance(event, Future):
                event.result()
                num_threads -= 1
            elif isinstance(event, int):
                progress(event)
            else:
                parts[event[0]] = event[1]
        return [parts[number] for number in sorted(parts)]
