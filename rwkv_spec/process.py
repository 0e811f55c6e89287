"""Two settings of the whole process that bear on how fast a CPU trains; neither changes a number.

Threads that wait spin only briefly: OpenMP's long spinning at barriers keeps a core from whoever has the next piece
of work, which costs speed when another process wants a core. And freed memory stays with the process: the large tensors
of one step would else go back to the system and be cleared page by page for the next.
"""

from __future__ import annotations

import ctypes
import os
import sys

# Turns of the waiting loop before a thread sleeps: some microseconds, about the length of a small operator.
_SPIN_COUNT = "1000"
# glibc's mallopt: M_TRIM_THRESHOLD -1 and M_MMAP_MAX -4.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_LARGEST = 2**31 - 1


def wait_briefly() -> None:
    """Takes effect if torch is not imported yet: its OpenMP runtime looks once. What the user set is left alone."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)


def keep_freed_memory() -> None:
    """On Linux with glibc; elsewhere nothing happens. What the user set in glibc's variables is left alone."""
    if not sys.platform.startswith("linux") or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, _LARGEST)
