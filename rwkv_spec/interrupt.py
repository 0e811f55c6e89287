"""A request to stop: SIGTERM, Ctrl-C, or a launcher that is gone. The run finishes its step, saves, and ends.

What is no run, and has nothing to save, ends at once, but removes what it has half written.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

# Both launchers leave one of these in the environment of the processes that they start.
_LAUNCHER_MARKS = ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID")

_Handler = Callable[[int, FrameType | None], object] | int | None


class StopRequest:
    """Within its `with` block, signals set a flag instead of ending the process; a second Ctrl-C ends it at once."""

    def __init__(self) -> None:
        self._flag = False
        self._parent = os.getppid() if any(mark in os.environ for mark in _LAUNCHER_MARKS) else None
        self._previous: dict[int, _Handler] = {}

    def __enter__(self) -> StopRequest:
        # Python delivers signals to the main thread only; in another thread the run is stopped by its caller.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            # None stands for a handler that was not installed from Python, and cannot be put back from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._flag and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._flag = True

    def requested(self) -> bool:
        """True once a signal came, or once the launcher that started this process has gone without a word."""
        if self._parent is not None and os.getppid() != self._parent:
            self._flag = True
        return self._flag


@contextmanager
def sigterm_unwinds() -> Iterator[None]:
    """Within its `with` block, SIGTERM ends the process by an exception, as Ctrl-C does: each `finally` is kept."""
    is_main = threading.current_thread() is threading.main_thread()
    # Who has a handler of his own knows better what is to be done.
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit(number: int, frame: FrameType | None) -> None:
    # What a shell says of a process that this signal ended.
    raise SystemExit(128 + number)
