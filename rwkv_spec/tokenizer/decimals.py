"""Reads plain decimal integers separated by ASCII whitespace: fast where all is well, exact about the place where not.

`1_0`, `+5`, `-1`, `3.7`, `1,2` and digits of other scripts are errors; Python's int() would take most of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rwkv_spec.tokenizer.protocol import EncodeError, shorten

_WORD = re.compile(r"[^ \t\n\r\v\f]+")
_PLAIN = re.compile(r"[0-9]+")
# Eighteen digits always fit into 64 bits.
_MAX_DIGITS = 18


def parse_many(texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """All values of all texts back to back, and how many each has; None where a text needs the exact parse()."""
    joined = "\n".join(texts)
    if not joined.isascii():
        return None
    data = np.frombuffer(joined.encode("ascii"), np.uint8)
    digit = data - np.uint8(48)
    is_digit = digit < 10
    # Of the ASCII characters that are no digits, only the space and 9 to 13 (tab, line feed, …, return) separate words.
    if not (is_digit | (data == 32) | ((data >= 9) & (data <= 13))).all():
        return None
    padded = np.zeros(len(data) + 2, np.int8)
    padded[1:-1] = is_digit
    edges = np.diff(padded)
    first, last = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1) - 1
    values = _sum_of_places(digit, first, last)
    if values is None:
        return None
    ends = np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)) + 1)
    return values, np.diff(np.searchsorted(first, ends), prepend=0)


def _sum_of_places(
    digit: NDArray[np.uint8], first: NDArray[np.int64], last: NDArray[np.int64]
) -> NDArray[np.int64] | None:
    num_digits = last - first + 1
    longest = int(num_digits.max()) if num_digits.size else 0
    if longest > _MAX_DIGITS:
        return None
    values = digit[last].astype(np.int64)
    for place in range(1, longest):
        long = np.flatnonzero(num_digits > place)
        values[long] += digit[last[long] - place] * np.int64(10**place)
    return values


def parse(text: str, *, low: int, high: int) -> NDArray[np.int64]:
    """The values of one text, each within low..high; EncodeError with the offset of the first word that is none."""
    values = []
    for match in _WORD.finditer(text):
        word = match.group()
        if not _PLAIN.fullmatch(word):
            raise EncodeError(f"{shorten(repr(word))} is no plain decimal integer", _advice(word), match.start())
        digits = word.lstrip("0") or "0"
        if len(digits) > _MAX_DIGITS or not low <= int(digits) <= high:
            raise outside(shorten(word), low, high, match.start())
        values.append(int(digits))
    return np.array(values, np.int64)


def outside(value: object, low: int, high: int, offset: int) -> EncodeError:
    return EncodeError(
        f"{value} is outside {low}..{high}",
        "correct the data, or choose a tokenizer with a larger range"
        if high != 359
        else "bring angles into 0..359 (360 is 0)",
        offset,
    )


def _advice(word: str) -> str:
    if re.fullmatch(r"[0-9]+(,[0-9]*)+", word):
        return "separate values by spaces, not by commas"
    if re.fullmatch(r"[+-][0-9]+", word):
        return "values are counted from 0 and have no sign; shift negative ones first"
    if re.fullmatch(r"[+-]?[0-9]*\.[0-9]*([eE][+-]?[0-9]+)?|[+-]?[0-9]+[eE][+-]?[0-9]+", word):
        return "round or scale it to an integer first; nothing is truncated here"
    if re.fullmatch(r"[0-9_]+", word):
        return "leave out the underscores"
    if word.isdigit():
        return "write it with the digits 0 to 9"
    return "give integers separated by spaces, or choose a tokenizer for text (bytes or vocab)"
