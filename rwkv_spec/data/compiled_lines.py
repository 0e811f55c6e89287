"""Reads whole blocks of plain lines by kernels/cpu/lines.cpp, and has their documents encoded where they lie.

What is not plain in every line, or cannot be encoded, gives None: rows.py then reads the block. So the documents are
the same, and every fault has the same words, with a compiler or without.
"""

from __future__ import annotations

import ctypes
import functools
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rwkv_spec.data.rows import Row, RowReader
from rwkv_spec.errors import KernelError
from rwkv_spec.ops.build import Kernels, load_operator
from rwkv_spec.tokenizer.build import recipe_of
from rwkv_spec.tokenizer.protocol import Tokenizer, Utf8Texts, Utf8Tokenizer

# What lines.cpp returns where it found nothing unusual.
_DONE = 0
# Less is read in no more time than a compiler takes to start.
SMALL_BYTES = 4 << 20
# Combinations of values of which it is remembered whether they are held out.
_MAX_REMEMBERED = 4096


@dataclass(frozen=True)
class Documents:
    """Encoded documents back to back, how many ids each has, and whether it is held out."""

    ids: NDArray[np.int64]
    sizes: NDArray[np.int64]
    held_out: NDArray[np.bool_]


@dataclass(frozen=True)
class Lines:
    """The documents of a block. `values`: of each document the JSON of the fields that were asked for."""

    texts: Utf8Texts
    values: list[tuple[bytes, ...]]
    num_lines: int
    num_blank: int
    first_blank: int


def can_read_plainly(tokenizer: Tokenizer, *, num_bytes: int) -> bool:
    """Whether lines and this tokenizer have compiled forms on this machine, and so many bytes are worth them. Builds
    them if need be."""
    if num_bytes < SMALL_BYTES or recipe_of(tokenizer) is None:
        return False
    return isinstance(tokenizer, Utf8Tokenizer) and tokenizer.is_compiled and _lines_here() is not None


class PlainReader:
    """Reads blocks for a RowReader, and moves its counters on as that would have."""

    def __init__(self, library: ctypes.CDLL, reader: RowReader, tokenizer: Utf8Tokenizer) -> None:
        self._library, self._reader, self._tokenizer = library, reader, tokenizer
        self._names = (reader.field, *(reader.where or {}))
        self._remembered: dict[tuple[bytes, ...], bool] = {}

    def documents(self, block: bytes) -> Documents | None:
        # Of a file that is nothing but a mark of byte order, rows.py makes one blank line.
        lines = read_lines(self._library, block, self._reader.kind, self._names) if block else None
        encoded = None if lines is None else self._tokenizer.encode_utf8(lines.texts)
        if lines is None or encoded is None:
            return None
        reader = self._reader
        held_out = np.zeros(len(encoded[1]), np.bool_)
        if reader.where is not None and reader.kind == "jsonl":
            held_out[:] = [self._is_held_out(values) for values in lines.values]
        if lines.num_blank:
            reader.first_blank = reader.first_blank or reader.num_lines + lines.first_blank
        reader.num_lines += lines.num_lines
        reader.num_blank += lines.num_blank
        return Documents(encoded[0], encoded[1], held_out)

    def _is_held_out(self, values: tuple[bytes, ...]) -> bool:
        known = self._remembered.get(values)
        if known is None:
            if len(self._remembered) == _MAX_REMEMBERED:
                self._remembered.clear()
            fields = {name: json.loads(value) for name, value in zip(self._names[1:], values, strict=True)}
            known = self._remembered[values] = self._reader.is_held_out(fields)
        return known


def plain_reader(reader: RowReader, tokenizer: Tokenizer, *, num_bytes: int) -> PlainReader | None:
    """None where there is no compiler, for a user's own tokenizer, and where only few bytes are to be read in all."""
    if not can_read_plainly(tokenizer, num_bytes=num_bytes):
        return None
    kernels = _lines_here()
    assert kernels is not None and isinstance(tokenizer, Utf8Tokenizer)
    return PlainReader(kernels.library, reader, tokenizer)


def read_lines(library: ctypes.CDLL, block: bytes, kind: str, names: tuple[str, ...]) -> Lines | None:
    """The documents of a block of whole lines: in .jsonl the first name is the field, of the others the values."""
    size, most, num_values = len(block), block.count(b"\n") + 1, len(names) - 1
    # A name with half a surrogate pair is in no line of UTF-8.
    encoded = [name.encode("utf-8", "surrogatepass") for name in names]
    name_ends = np.cumsum(np.array(list(map(len, encoded)), np.int64))
    arena = np.empty(size, np.uint8)
    addresses, sizes, is_list = np.empty(most, np.uintp), np.empty(most, np.int64), np.empty(most, np.bool_)
    value_addresses, value_sizes = np.empty((most, num_values), np.uintp), np.empty((most, num_values), np.int64)
    counts = np.empty(4, np.int64)
    code = library.lines_read(
        block, size, kind == "jsonl", b"".join(encoded), name_ends.ctypes.data, len(names), arena.ctypes.data,
        addresses.ctypes.data, sizes.ctypes.data, is_list.ctypes.data, value_addresses.ctypes.data,
        value_sizes.ctypes.data, counts.ctypes.data,
    )  # fmt: skip
    if code != _DONE:
        return None
    num_documents, num_lines, num_blank, first_blank = counts.tolist()
    texts = Utf8Texts(addresses[:num_documents], sizes[:num_documents], is_list[:num_documents], (block, arena))
    values: list[tuple[bytes, ...]] = []
    if num_values and kind == "jsonl":
        places = zip(value_addresses[:num_documents].tolist(), value_sizes[:num_documents].tolist(), strict=True)
        values = [tuple(map(ctypes.string_at, *place)) for place in places]
    return Lines(texts, values, num_lines, num_blank, first_blank)


@functools.cache
def _lines_here() -> Kernels | None:
    try:
        kernels = load_operator("lines", check_library)
    except KernelError:
        # Not an error for the user: without a compiler the documents are the same.
        return None
    _declare(kernels.library)
    return kernels


def _declare(library: ctypes.CDLL) -> None:
    """Argument types: without them a 64-bit address would be cut to 32 bits."""
    address, count = ctypes.c_void_p, ctypes.c_int64
    library.lines_read.argtypes = [
        ctypes.c_char_p, count, ctypes.c_int, ctypes.c_char_p, address, count, *[address] * 7,
    ]  # fmt: skip


_PLAIN = [
    '{"text": "1 2", "m": 1}', ' {"m" : [1, {"text": 3}], "n": {}, "text" : "a\\tb\\u00e9\\ud83d\\ude00\\"/\\\\" } \r',
    "\t \r", '{"text": "é你😀\x7f", "m": -0.5e+3, "x": [true, false, null, []]}', '{"text": "", "m": "\\u0000"}',
    '{"text": "' + 40 * "a long line of plain words; " + '", "m": null}', '{"text":[],"m":0}', "",
    '{"m":{"a":{"text":"no"}},"text":[ 0,12 ,345]}', "\x0b\x0c", '{"text": "\\uffff\\b", "m": false}',
]  # fmt: skip
_UNUSUAL = [
    '{"text": "1"', '{"text": "a\tb", "m": 1}', '{"text": "\\ud800", "m": 1}', '{"text": "1", "text": "2", "m": 1}',
    '{"txt": "1", "m": 1}', '{"text": "1"}', '{"text": 1, "m": 1}', '{"text": "1", "m": 01}', '{"text": "1", "m": NaN}',
    '{"text": "1", "m": {"a": 1, "a": 1}}', '{"text": "1", "m": 1} x', '{"text": "1", "m": 1,}',
    '{"text": "\\x", "m": 1}', '{"text": [01], "m": 1}', '{"text": [-1], "m": 1}',
]  # fmt: skip

_BROKEN = [
    b"\xff", b"\xc0\x80", b"\xe0\x80\x80", b"\xed\xa0\x80", b"\xf0\x80\x80\x80", b"\xf4\x90\x80\x80", b"\xe2\x82",
]  # fmt: skip


def check_library(library: ctypes.CDLL) -> None:
    """KernelError where a library that was just built reads other documents than rows.py."""
    _declare(library)
    right = True
    for kind in ("jsonl", "txt"):
        block = "\n".join([*_PLAIN, *_PLAIN[::-1]]).encode()
        reader = RowReader(Path(), kind, "text", None)
        rows, found = reader.rows(block), read_lines(library, block, kind, ("text", "m", "text"))
        right = right and found is not None and _bytes_of(found.texts) == [_text_of(row) for row in rows]
        if found is not None:
            counts = (found.num_lines, found.num_blank, found.first_blank)
            right = right and counts == (reader.num_lines, reader.num_blank, reader.first_blank)
            if kind == "jsonl":
                right = right and all(map(_has_values, rows, found.values))
    unusual = [*map(str.encode, _UNUSUAL), *(b'{"m": 1, "text": "1%s"}' % bad for bad in _BROKEN)]
    if not right or any(read_lines(library, line, "jsonl", ("text", "m")) is not None for line in unusual):
        raise KernelError("lines: the compiled form reads other documents than the plain one; try another compiler")


def _has_values(row: Row, values: tuple[bytes, ...]) -> bool:
    try:
        return [json.loads(row.raw)["m"], row.value] == [json.loads(value) for value in values]
    except ValueError:
        return False


def _bytes_of(texts: Utf8Texts) -> list[bytes]:
    return [ctypes.string_at(*place) for place in zip(texts.addresses.tolist(), texts.sizes.tolist(), strict=True)]


def _text_of(row: Row) -> bytes:
    """The bytes that the compiled form gives for a row: of a list what stands between its brackets."""
    if isinstance(row.value, str):
        return row.value.encode()
    return row.raw[row.raw.rindex(b"[") + 1 : row.raw.rindex(b"]")]
