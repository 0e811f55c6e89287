"""Whole files or none: written beside their place, flushed to the disk, then renamed over it.

A kill, a full disk or a power cut at any moment leaves either the old file or the new one.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path


def temporary_sibling(path: Path) -> Path:
    """A name in the same folder that no other process uses, hidden, and recognisable as left over from a kill."""
    return path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")


def discard(temporary: Path) -> None:
    """Remove what may be left of a failed write. Nothing that goes wrong here hides what went wrong before."""
    with contextlib.suppress(OSError):
        temporary.unlink()


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8 with LF line ends. Raises OSError; the file at `path` is then as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_sibling(path)
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        discard(temporary)


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write a JSON object, indented, keys in the order given. Raises OSError, and ValueError for NaN."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def flush_folder(folder: Path) -> None:
    """Make renames inside `folder` durable where the system can open folders (not on Windows)."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
