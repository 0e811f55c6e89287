"""Puts a folder with a built library and its checksum in place by one rename, however many processes try at once.

Promises: what is found in place is whole, or is built again; a process killed at any moment leaves nothing that harms;
a lock left behind costs seconds, never a hang.
"""

from __future__ import annotations

import hashlib
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rwkv_spec.lock import Lock, Locked

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
    started = time.monotonic()
    while not is_whole(target, name):
        lock = _lock(target.with_suffix(".lock"))
        if lock is None and time.monotonic() - started < LOCK_SECONDS:
            time.sleep(0.05)
            continue
        try:
            if not is_whole(target, name):
                _build_and_rename(target, name, build)
        finally:
            if lock is not None:
                lock.release()
    return target


def _lock(path: Path) -> Lock | None:
    """The lock, or None while a living process has it."""
    try:
        return Lock(path)
    except Locked:
        return None


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
