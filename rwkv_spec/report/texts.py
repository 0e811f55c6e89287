"""Generated texts on standard output: whole lines, pieces as they come, or JSON.

A model may produce anything: on a terminal, what would move the cursor is shown as codes; a file gets it as it is.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Mapping
from typing import TextIO

from rwkv_spec.errors import UserError


def write_texts(output: TextIO, texts: Iterable[str]) -> None:
    """Each text and a line end."""
    for text in texts:
        _write(output, f"{text}\n")


def write_pieces(output: TextIO, pieces: Iterable[str]) -> None:
    """One text in pieces, each to be seen at once, and a line end: the same characters as write_texts gives."""
    try:
        for piece in pieces:
            _write(output, piece)
    except UserError:
        # What is said next begins a line of its own.
        _write(output, "\n")
        raise
    _write(output, "\n")


def write_json(output: TextIO, values: Iterable[Mapping[str, object]]) -> None:
    """A JSON list of objects, in ASCII, so that no terminal and no encoding can spoil it."""
    _put(output, json.dumps([dict(value) for value in values], indent=2) + "\n")


def _write(output: TextIO, text: str) -> None:
    if output.isatty():
        text = "".join(_visible(char) for char in text)
    encoding = getattr(output, "encoding", None) or "utf-8"
    _put(output, text.encode(encoding, "backslashreplace").decode(encoding))


def _put(output: TextIO, text: str) -> None:
    """Written and flushed; UserError where there is no room. A reader that has gone stays a BrokenPipeError."""
    try:
        output.write(text)
        output.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UserError(f"standard output: cannot be written: {error.strerror or error}") from error


def _visible(char: str) -> str:
    """Control characters as codes. Spaces of all kinds and joiners, which other scripts need, stay."""
    if char in "\n\t" or unicodedata.category(char) != "Cc":
        return char
    return char.encode("unicode_escape").decode("ascii")
