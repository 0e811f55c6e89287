"""Finds the column of a value inside a line of JSON, so that an error can point at it. Called only for errors."""

from __future__ import annotations

import json
import re

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")
_ESCAPED = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.|.", re.DOTALL)


def field_column(line: str, field: str) -> int:
    """The column (from 1) at which the value of a field of the line's object begins; 1 if the object lacks it."""
    at = _skip(line, _skip(line, 0) + 1)
    while at < len(line) and line[at] == '"':
        key, at = _DECODER.raw_decode(line, at)
        start = _skip(line, _skip(line, at) + 1)
        if key == field:
            return start + 1
        _, at = _DECODER.raw_decode(line, start)
        at = _skip(line, _skip(line, at) + 1)
    return 1


def text_column(line: str, field: str, offset: int) -> int:
    """The column of character `offset` of a text field, counted over its escapes."""
    at = field_column(line, field)
    for _ in range(offset):
        match = _ESCAPED.match(line, at)
        at = match.end() if match else at
    return at + 1


def element_column(line: str, field: str, index: int) -> int:
    """The column of element `index` of a list field."""
    at = _skip(line, field_column(line, field))
    for _ in range(index):
        _, at = _DECODER.raw_decode(line, at)
        at = _skip(line, _skip(line, at) + 1)
    return at + 1


def _skip(line: str, at: int) -> int:
    match = _SPACE.match(line, at)
    return match.end() if match else at
