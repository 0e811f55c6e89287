"""Reads the rows of .jsonl and .txt files, a block of whole lines at a time; every fault gets its line and column.

A row is a document. Blank lines are skipped and counted; they never become documents.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from dataclasses import field as made_of
from pathlib import Path

from rwkv_spec.data.holdout import matches
from rwkv_spec.data.place import field_column
from rwkv_spec.tokenizer.protocol import describe, shorten

BLOCK_BYTES = 1 << 20
MAX_FAULTS = 20
_MAX_VALUES = 20
BOM = b"\xef\xbb\xbf"


class Fault(Exception):
    """One row that cannot be used: the column (0 for none) and the words."""

    def __init__(self, column: int, message: str) -> None:
        self.column, self.message = column, message
        super().__init__(message)


@dataclass(frozen=True)
class Row:
    """A document as it stands in its file. `line` counts from 1 within the range that is read."""

    line: int
    raw: bytes
    value: str | list[object]
    held_out: bool


@dataclass
class RowReader:
    """The rows of one byte range, which begins and ends at line ends. The counters grow as it reads."""

    path: Path
    kind: str
    field: str
    where: Mapping[str, object] | None
    num_lines: int = 0
    num_blank: int = 0
    first_blank: int = 0
    num_faults: int = 0
    faults: list[tuple[int, int, str]] = made_of(default_factory=list)
    values_seen: dict[str, list[str]] = made_of(default_factory=dict)

    def blocks(self, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
        """(bytes read, whole lines) for each block. Stops early once there are more faults than anyone reads."""
        with self.path.open("rb") as file:
            file.seek(start)
            while start < stop and self.num_faults < MAX_FAULTS:
                block = file.read(min(BLOCK_BYTES, stop - start))
                if not block:
                    break
                if not block.endswith(b"\n"):
                    block += file.readline()
                lines = block if start else block.removeprefix(BOM)
                start += len(block)
                yield len(block), lines

    def rows(self, block: bytes) -> list[Row]:
        """The rows of a block's lines. Those that cannot be used are noted as faults."""
        lines = block.removesuffix(b"\n").split(b"\n")
        return [row for raw in lines if (row := self._row(raw)) is not None]

    def _row(self, raw: bytes) -> Row | None:
        self.num_lines += 1
        if not raw.strip():
            self.num_blank += 1
            self.first_blank = self.first_blank or self.num_lines
            return None
        try:
            text = decode_line(raw)
            if self.kind == "txt":
                return Row(self.num_lines, raw, text, False)
            fields = _parse_object(text)
            held_out = self.where is not None and self.is_held_out(fields)
            return Row(self.num_lines, raw, _value(text, fields, self.field), held_out)
        except Fault as fault:
            self.add_fault(self.num_lines, fault)
            return None

    def is_held_out(self, fields: Mapping[str, object]) -> bool:
        """Whether the rule holds out a row with these fields. Their values are noted for the case that none is."""
        where = self.where or {}
        for key in where:
            if key not in fields:
                raise Fault(0, f"the row has no field {key!r}, which data.eval.where asks for; it has {_names(fields)}")
            seen = self.values_seen.setdefault(key, [])
            shown = shorten(json.dumps(fields[key], ensure_ascii=False))
            if len(seen) < _MAX_VALUES and shown not in seen:
                seen.append(shown)
        return matches(fields, where)

    def add_fault(self, line: int, fault: Fault) -> None:
        self.num_faults += 1
        if len(self.faults) < MAX_FAULTS:
            self.faults.append((line, fault.column, fault.message))


def place(name: str, line: int, column: int) -> str:
    """`file:line:column` as an error begins; column 0 is none."""
    return f"{name}:{line}:{column}" if column else f"{name}:{line}"


def decode_line(raw: bytes) -> str:
    """The text of a line without its end."""
    try:
        return raw.decode("utf-8").removesuffix("\r")
    except UnicodeDecodeError as error:
        column = len(raw[: error.start].decode("utf-8")) + 1
        raise Fault(column, f"byte 0x{raw[error.start]:02x} is not UTF-8; save the file as UTF-8") from None


def _parse_object(text: str) -> dict[str, object]:
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise Fault(error.colno, f'is no JSON: {error.msg}; each line holds one object, like {{"text": …}}') from None
    except RecursionError:
        raise Fault(1, "is nested too deeply") from None
    except ValueError:
        # The only other one: Python refuses to turn thousands of digits into an integer.
        raise Fault(1, "holds an integer of thousands of digits") from None
    if not isinstance(value, dict):
        kind = "a list" if isinstance(value, list) else "a single value"
        raise Fault(
            1, f'holds {kind}, not an object like {{"text": …}}; in .txt files a line is a document as it stands'
        )
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise Fault(1, f"the field {twice!r} stands twice in one object")
    return fields


def _no_constant(name: str) -> object:
    raise Fault(1, f"{name} is no JSON number")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)


def _value(text: str, fields: Mapping[str, object], name: str) -> str | list[object]:
    if name not in fields:
        raise Fault(
            0, f"the row has no field {name!r}; it has {_names(fields)}; data.field names the field to train on"
        )
    value = fields[name]
    if not isinstance(value, (str, list)):
        what = f"{name} is {describe(value)}; it must be a text or a list of integers"
        raise Fault(field_column(text, name), what)
    return value


def _names(fields: Mapping[str, object]) -> str:
    return shorten(", ".join(map(repr, fields)), 100) or "none"
