"""Generated texts on standard output: whole lines, pieces as they come, or JSON.

A model may produce anything: on a terminal, what would move the cursor is shown as codes; a file gets it as it is.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Mapping
from typing import TextIO


def write_texts(output: TextIO, texts: Iterable[str]) -> None:
    """Each text and a line end."""
    for text in texts:
        _write(output, f"{text}\n")


def write_pieces(output: TextIO, pieces: Iterable[str]) -> None:
    """One text in pieces, each to be seen at once, and a line end: the same characters as write_texts gives."""
    for piece in pieces:
        _write(output, piece)
    _write(output, "\n")


def write_json(output: TextIO, values: Iterable[Mapping[str, object]]) -> None:
    """A JSON list of objects, in ASCII, so that no terminal and no encoding can spoil it."""
    output.write(json.dumps([dict(value) for value in values], indent=2) + "\n")


def _write(output: TextIO, text: str) -> None:
    if output.isatty():
        text = "".join(_visible(char) for char in text)
    encoding = getattr(output, "encoding", None) or "utf-8"
    output.write(text.encode(encoding, "backslashreplace").decode(encoding))
    output.flush()


def _visible(char: str) -> str:
    """Control characters as codes. Spaces of all kinds and joiners, which other scripts need, stay."""
    if char in "\n\t" or unicodedata.category(char) != "Cc":
        return char
    return char.encode("unicode_escape").decode("ascii")
