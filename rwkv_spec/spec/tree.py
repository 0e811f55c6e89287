"""The tree that a spec is read into: values that know where they stand. Also the strict reading of scalars."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path

from rwkv_spec.errors import Problem
from rwkv_spec.spec.origin import Source

Scalar = str | int | float | bool | None
# The way to a value: keys of sections, numbers of list items.
KeyPath = tuple[str | int, ...]

MAX_DEPTH = 40
MAX_NODES = 20_000

_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_NULL = ("", "~", "null", "Null", "NULL")
_TRUE = ("true", "True", "TRUE")
_FALSE = ("false", "False", "FALSE")
# Python refuses to read integers of more than some thousand digits; nothing in a spec has so many.
_MAX_DIGITS = 300


@dataclass
class Node:
    """A value and where it stands: for the value of a key, where the key stands. Relative paths start at `base`."""

    source: Source
    base: Path
    value: Scalar | dict[str, Node] | list[Node]

    @property
    def section(self) -> dict[str, Node] | None:
        """The keys, if this is a mapping."""
        return self.value if isinstance(self.value, dict) else None

    @property
    def items(self) -> list[Node] | None:
        """The items, if this is a list."""
        return self.value if isinstance(self.value, list) else None

    def problem(self, key: str, what: str, fix: str = "") -> Problem:
        """A problem at this place."""
        return problem_at(self.source, key, what, fix)

    def child(self, path: Sequence[str | int]) -> Node:
        """The deepest node along a path of keys and indices."""
        node = self
        for step in path:
            section, items = node.section, node.items
            if section is not None and isinstance(step, str) and step in section:
                node = section[step]
            elif items is not None and isinstance(step, int) and step < len(items):
                node = items[step]
            else:
                break
        return node


def problem_at(source: Source, key: str, what: str, fix: str = "") -> Problem:
    """A problem at a place. A key is somebody's text: what cannot be printed, or is endless, is not."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in key)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return Problem(source.where, source.line, source.column, shown, what, fix)


def plain(node: Node) -> object:
    """The bare value: dicts, lists and scalars."""
    if isinstance(node.value, dict):
        return {name: plain(child) for name, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain(child) for child in node.value]
    return node.value


def read_scalar(text: str) -> Scalar:
    """What an unquoted scalar means: true, false, null, a finite decimal number, or else text.

    So yes, no, on and off, dates, 017, 0o17, 0x1f, 1_000, 1:30, .inf and .nan are text, and 1e-4 and 1e9 are numbers.
    """
    if text in _NULL:
        return None
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    if len(text) <= _MAX_DIGITS:
        if _INTEGER.fullmatch(text):
            return int(text)
        if _FLOAT.fullmatch(text):
            return settled_number(float(text), text)
    return text


def settled_number(number: float, text: str) -> Scalar:
    """An integral float as an int, a float beyond all bounds as its text."""
    if not math.isfinite(number):
        return text
    return int(number) if number.is_integer() else number


def from_python(
    value: object, source: Source, base: Path, problems: list[Problem], *, key: str = "", depth: int = 0
) -> Node:
    """A tree from a dict, or from what may stand in one. What may not becomes a problem, and null in the tree."""
    if depth > MAX_DEPTH:
        problems.append(problem_at(source, key, "is nested too deeply", "a spec is flat"))
        return Node(source, base, None)
    if isinstance(value, Mapping):
        section: dict[str, Node] = {}
        for name, child in value.items():
            if isinstance(name, str):
                inner = f"{key}.{name}" if key else name
                section[name] = from_python(child, source, base, problems, key=inner, depth=depth + 1)
            else:
                problems.append(problem_at(source, key, f"the key {name!r} is not text", "keys are strings"))
        return Node(source, base, section)
    if isinstance(value, list | tuple):
        items = [
            from_python(child, source, base, problems, key=f"{key}[{index}]", depth=depth + 1)
            for index, child in enumerate(value)
        ]
        return Node(source, base, items)
    scalar, understood = _python_scalar(value)
    if not understood:
        what = f"a {type(value).__name__} cannot stand in a spec"
        fix = "pass arrays as run(spec, data=...)" if hasattr(value, "shape") else "use text, numbers, lists and dicts"
        problems.append(problem_at(source, key, what, fix))
    return Node(source, base, scalar)


def _python_scalar(value: object) -> tuple[Scalar, bool]:
    if value is None or isinstance(value, bool):
        return value, True
    if isinstance(value, str):
        return str(value), True
    if isinstance(value, os.PathLike):
        return os.fsdecode(value), True
    # These two are registered for the scalars of numpy too, and numpy's bool is neither.
    if isinstance(value, Integral):
        number = int(value)
        # Nobody can print such an integer, the schema library included.
        return (number if number.bit_length() < 1000 else f"1e{int(number.bit_length() * 0.30103)}"), True
    if isinstance(value, Real):
        return settled_number(float(value), str(value)), True
    return None, False
