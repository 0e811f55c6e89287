"""What a run leaves to read: out/metrics.jsonl, a JSON object a row, and out/train_log.txt, the same in plain lines.

Both hold rows up to a step and nothing half-written: `cut_back` restores that before a resume. A row's JSON is the same
for the same run but for tokens_per_s; NaN and infinities are written as null.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rwkv_spec.atomic import discard, flush_folder, temporary_sibling
from rwkv_spec.errors import UserError

_LINE_STEP = re.compile(rb"step (\d+) ")


@dataclass(frozen=True)
class Row:
    """One line of metrics.jsonl. Losses are nats a token; `loss` is the weighted mean since the previous row."""

    step: int
    epoch: float
    tokens: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_s: float
    eval_loss: float | None = None


class RunLog:
    """Appends to both files. `sync` puts what was written on the disk: call it before a state is saved."""

    def __init__(self, out: Path, *, now: Callable[[], datetime] = datetime.now) -> None:
        self.metrics_path = out / "metrics.jsonl"
        self.log_path = out / "train_log.txt"
        self._now = now
        try:
            out.mkdir(parents=True, exist_ok=True)
            self._metrics = self.metrics_path.open("ab")
            self._log = self.log_path.open("ab")
            flush_folder(out)
        except OSError as error:
            raise _cannot_write(out, error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, spec: str) -> None:
        """The header of a run in train_log.txt: when it began, and its spec on one line."""
        one_line = " ".join(spec.split())
        self._append_log(f"NEW RUN {self._now():%Y-%m-%d %H:%M:%S}\nspec {one_line}\n")

    def write(self, row: Row) -> None:
        """One row into both files, at once visible to who reads them."""
        text = f"{_json_of(row)}\n".encode()
        try:
            self._metrics.write(text)
            self._metrics.flush()
        except OSError as error:
            raise _cannot_write(self.metrics_path, error) from error
        self._append_log(f"{line_of(row)} at {self._now():%H:%M:%S}\n")

    def sync(self) -> None:
        """Return once everything written so far is on the disk."""
        for path, file in ((self.metrics_path, self._metrics), (self.log_path, self._log)):
            try:
                file.flush()
                os.fsync(file.fileno())
            except OSError as error:
                raise _cannot_write(path, error) from error

    def close(self) -> None:
        if self._log.closed:
            return
        self.sync()
        self._metrics.close()
        self._log.close()

    def _append_log(self, text: str) -> None:
        try:
            self._log.write(text.encode())
            self._log.flush()
        except OSError as error:
            raise _cannot_write(self.log_path, error) from error


def line_of(row: Row) -> str:
    """A row as a person reads it, on one line that begins with `step N `."""
    eval_loss = "" if row.eval_loss is None else f" eval_loss {row.eval_loss:.6f}"
    return (
        f"step {row.step} epoch {row.epoch:.3f} tokens {row.tokens} loss {row.loss:.6f} lr {row.lr:.4e}"
        f" grad_norm {row.grad_norm:.4f} tokens/s {row.tokens_per_s:.0f}{eval_loss}"
    )


def read_rows(path: Path) -> list[Row]:
    """The rows of a metrics.jsonl, in order; none where the file does not exist. Unreadable lines are left out."""
    rows = (_row_of(line) for line in _lines(path))
    return [row for row in rows if row is not None]


def cut_back(path: Path, step: int) -> None:
    """Drop what comes after `step` from a metrics.jsonl or a train_log.txt, and a half-written last line, atomically.

    In a metrics.jsonl, lines that are no rows (the leavings of a power cut) go too. The file is not touched if nothing
    is to be dropped.
    """
    lines = _lines(path)
    if not lines:
        return
    kept = _rows_until(lines, step) if path.suffix == ".jsonl" else _log_until(lines, step)
    text = b"".join(line + b"\n" for line in kept)
    temporary = temporary_sibling(path)
    try:
        if text == path.read_bytes():
            return
        with temporary.open("wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        flush_folder(path.parent)
    except OSError as error:
        raise _cannot_write(path, error) from error
    finally:
        discard(temporary)


def _rows_until(lines: list[bytes], step: int) -> list[bytes]:
    kept = []
    for line in lines:
        values = _object_of(line)
        if values is not None and values["step"] <= step:
            kept.append(line)
    return kept


def _log_until(lines: list[bytes], step: int) -> list[bytes]:
    """The lines before the first one of a later step: whatever follows that one belongs to what is undone."""
    kept = []
    # The last piece has no line end: it is empty or half-written.
    for line in lines[:-1]:
        found = _LINE_STEP.match(line)
        if found is not None and int(found.group(1)) > step:
            break
        kept.append(line)
    return kept


def _lines(path: Path) -> list[bytes]:
    """The pieces between line ends; the last is what follows the last line end. Nothing for a missing or empty file."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    return content.split(b"\n") if content else []


def _json_of(row: Row) -> str:
    values = {field.name: getattr(row, field.name) for field in fields(row)}
    if row.eval_loss is None:
        del values["eval_loss"]
    # JSON has no NaN and no infinity; a bare NaN would break every strict reader of the file.
    finite = {key: value if math.isfinite(value) else None for key, value in values.items()}
    return json.dumps(finite, allow_nan=False)


def _object_of(line: bytes) -> dict[str, Any] | None:
    """The object on this line, or None where it is not one with the number of a step."""
    try:
        values = json.loads(line)
    except ValueError:
        return None
    return values if isinstance(values, dict) and isinstance(values.get("step"), int) else None


def _row_of(line: bytes) -> Row | None:
    values = _object_of(line)
    if values is None:
        return None
    known: dict[str, Any] = {field.name: values[field.name] for field in fields(Row) if field.name in values}
    numbers: dict[str, Any] = {key: math.nan if value is None else value for key, value in known.items()}
    try:
        return Row(**numbers) if all(isinstance(value, int | float) for value in numbers.values()) else None
    except TypeError:
        # A key that every row has is missing.
        return None


def _cannot_write(path: Path, error: OSError) -> UserError:
    reason = error.strerror or str(error)
    return UserError(f"{path}: cannot write: {reason}; mend that and start again: the run goes on from its last state")
