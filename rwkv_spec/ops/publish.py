"""Puts a folder with a built library and its checksum in place by one rename, however many processes try at once.

Promises: what is found in place is whole, or is built again; a process killed at any moment leaves nothing that harms;
a lock left behind costs seconds, never a hang.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

# A build takes seconds; after this long another process's lock no longer counts.
LOCK_SECONDS = 60.0


def is_whole(folder: Path, name: str) -> bool:
    """Whether the folder holds the library with the bytes that were built. A cut-off one could crash on loading."""
    try:
        expected = (folder / "sha256").read_text(encoding="ascii", errors="replace")
        return hashlib.sha256((folder / name).read_bytes()).hexdigest() == expected
    except OSError:
        return False


def publish(target: Path, name: str, build: Callable[[Path], None]) -> Path:
    """`target`, whole: found, waited for, or built here. The lock only saves work: what is renamed is always whole."""
    lock = target.with_suffix(".lock")
    started = time.monotonic()
    while not is_whole(target, name):
        owned = _take_lock(lock)
        if not owned and time.monotonic() - started < LOCK_SECONDS:
            time.sleep(0.05)
            continue
        try:
            if not is_whole(target, name):
                _build_and_rename(target, name, build)
        finally:
            if owned:
                lock.unlink(missing_ok=True)
    return target


def _build_and_rename(target: Path, name: str, build: Callable[[Path], None]) -> None:
    _sweep(target.parent)
    folder = Path(tempfile.mkdtemp(prefix=".build-", dir=target.parent))
    try:
        build(folder)
        digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        (folder / "sha256").write_text(digest, encoding="ascii")
        if target.exists() and not is_whole(target, name):
            target.rename(target.with_name(f".damaged-{secrets.token_hex(8)}"))
        try:
            folder.rename(target)
        except OSError:
            # Another process was first, which is as good.
            if not is_whole(target, name):
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(cache: Path) -> None:
    """Removes what killed builds left behind more than a day ago."""
    for folder in (*cache.glob(".build-*"), *cache.glob(".damaged-*")):
        try:
            old = time.time() - folder.stat().st_mtime > 86400
        except OSError:
            continue
        if old:
            shutil.rmtree(folder, ignore_errors=True)


def _take_lock(lock: Path) -> bool:
    """Creates the lock, or removes it where its owner is gone, so that the next try may create it."""
    try:
        handle = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        if _is_stale(lock):
            lock.unlink(missing_ok=True)
        return False
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump({"host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}, file)
    return True


def _is_stale(lock: Path) -> bool:
    """Whether the owner ran on this machine and is no longer there, or holds the lock for longer than a build takes."""
    try:
        age = time.time() - lock.stat().st_mtime
        owner = json.loads(lock.read_text(encoding="utf-8"))
        host, pid = owner["host"], int(owner["pid"])
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError):
        # Just created and not yet written, or damaged: a moment tells which.
        return age > 2.0
    return age > LOCK_SECONDS or (host == socket.gethostname() and not _is_running(pid))


def _is_running(pid: int) -> bool:
    if os.name != "posix":
        # Signal 0 would interrupt the process on Windows: there only the lock's age counts.
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
