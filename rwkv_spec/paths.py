"""Paths as people write them: `~` is a home folder. A folder is looked for without a stumble over a strange name."""

from __future__ import annotations

from pathlib import Path

from rwkv_spec.errors import UserError


def expanded(path: str | Path) -> Path:
    """The path with `~` and `~name` replaced. UserError where nobody has that name."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(f"{path}: the home folder in it is not known; write the whole path") from error


def is_folder(path: Path) -> bool:
    """False also for names that the system cannot look up: whoever opens them says what is wrong."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False
