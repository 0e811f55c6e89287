"""What every tokenizer offers, the error it raises, and the check of given numbers: nothing is ever truncated.

Token 0 ends a document. No tokenizer but `ids` produces it; decoding leaves it out.
"""

from __future__ import annotations

import ctypes
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rwkv_spec.tokenizer.stream import PrefixDecoder, StreamDecoder

INT64_MAX = 2**63 - 1
# Integers to encode, or ids to decode: a list, a tuple, or an array of any integer type.
Values = ArrayLike | Sequence[object]
# What faults_of_tokenizer asks for.
NEEDED = "a tokenizer has encode(text), decode(ids), vocab_size (a whole number) and fingerprint (text)"


class EncodeError(ValueError):
    """What a tokenizer cannot encode. `offset` counts the characters (of text) or elements (of values) before it."""

    def __init__(self, what: str, fix: str, offset: int) -> None:
        self.what, self.fix, self.offset = what, fix, offset
        super().__init__(f"at {offset}: {what}; {fix}")


@runtime_checkable
class Tokenizer(Protocol):
    """The four things that a user's own tokenizer needs. `fingerprint` changes when some text would get other ids."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@runtime_checkable
class SavesVocab(Protocol):
    """A tokenizer that can leave an RWKV vocabulary file for other software."""

    def save_vocab(self, path: str | Path) -> None: ...


@runtime_checkable
class HasUnnamedIds(Protocol):
    """A tokenizer some of whose ids below vocab_size name nothing that could be decoded: these, in rising order."""

    @property
    def unnamed_ids(self) -> Sequence[int]: ...


@runtime_checkable
class Streams(Protocol):
    """A tokenizer that knows how to give out text as the ids come."""

    def stream_decoder(self) -> StreamDecoder: ...


@runtime_checkable
class BatchTokenizer(Protocol):
    """A tokenizer with a fast form for many texts: all ids back to back, and how many each text has."""

    def encode_many(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...


@dataclass(frozen=True)
class Utf8Texts:
    """Texts as they lie in memory: the address and the bytes of each, whole UTF-8. `owners` keep the memory.

    Where `is_list` is true the text is what stands between the brackets of a JSON list of integers.
    """

    addresses: NDArray[np.uintp]
    sizes: NDArray[np.int64]
    is_list: NDArray[np.bool_]
    owners: tuple[object, ...]

    @classmethod
    def of(cls, pieces: Sequence[bytes], is_list: Sequence[bool] | None = None) -> Utf8Texts:
        """Pieces that lie anywhere, without a copy of their bytes."""
        pointers = (ctypes.c_char_p * len(pieces))(*pieces)
        addresses = np.frombuffer(bytes(pointers), np.uintp)
        sizes = np.fromiter(map(len, pieces), np.int64, len(pieces))
        listed = np.zeros(len(pieces), np.bool_) if is_list is None else np.array(is_list, np.bool_)
        return cls(addresses, sizes, listed, (pieces,))


@runtime_checkable
class Utf8Tokenizer(Protocol):
    """A tokenizer that may have a compiled form, which reads texts where they lie. It says None where some text needs
    the exact way of the others."""

    @property
    def is_compiled(self) -> bool: ...

    def encode_utf8(self, texts: Utf8Texts) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None: ...


@runtime_checkable
class NumericTokenizer(Protocol):
    """A tokenizer of integers: it also takes lists and arrays of them."""

    @property
    def value_range(self) -> tuple[int, int]: ...

    def encode_sequence(self, values: Values) -> NDArray[np.int64]: ...

    def decode_sequence(self, ids: Values) -> list[int]: ...


def stream_decoder(tokenizer: Tokenizer) -> StreamDecoder:
    """Text as the ids come: feed(id) -> str, at the end finish() -> str; joined, the pieces are decode() of all ids.

    A user's own tokenizer may offer stream_decoder() for speed. Where it only has decode(), that is called on all ids
    so far; a ValueError if it then takes back text that it gave before.
    """
    if isinstance(tokenizer, Streams):
        for kind in type(tokenizer).__mro__:
            if "stream_decoder" in vars(kind):
                return tokenizer.stream_decoder()
            # A class that is derived from ours and decodes differently: the inherited stream would not say the same.
            if "decode" in vars(kind):
                break
    return PrefixDecoder(tokenizer.decode)


def undrawable_ids(tokenizer: Tokenizer, *, num_rows: int) -> list[int]:
    """The ids of a model with so many vocabulary rows that a sampler leaves out: they name nothing to be decoded."""
    unnamed = tokenizer.unnamed_ids if isinstance(tokenizer, HasUnnamedIds) else ()
    return [*unnamed, *range(tokenizer.vocab_size, num_rows)]


def faults_of_tokenizer(given: object) -> str | None:
    """What a tokenizer of the user's own lacks, or has of the wrong kind, in words; None where nothing."""
    if isinstance(given, type):
        return f"{given.__name__} is a class, not a tokenizer made of it"
    missing = [name for name in ("encode", "decode", "vocab_size", "fingerprint") if not hasattr(given, name)]
    wrong = [f"lacks {', '.join(missing)}"] if missing else []
    for name in ("encode", "decode"):
        if not callable(getattr(given, name, len)):
            wrong.append(f"has a {name} that is no function")
    rows = getattr(given, "vocab_size", 1)
    if isinstance(rows, bool) or not isinstance(rows, numbers.Integral) or rows < 1:
        wrong.append(f"has the vocab_size {rows!r}")
    fingerprint = getattr(given, "fingerprint", "")
    if not isinstance(fingerprint, str):
        wrong.append(f"has the fingerprint {fingerprint!r}")
    return f"{type(given).__name__} {'; '.join(wrong)}" if wrong else None


def integer_array(values: Values) -> NDArray[np.int64]:
    """A flat array of the given integers. Floats, booleans, text, nested and too large values are refused."""
    if isinstance(values, (list, tuple)):
        return _from_list(values)
    array = np.asarray(values)
    if array.ndim != 1:
        raise EncodeError(f"the values have {array.ndim} dimensions, not one", "give one sequence at a time", 0)
    if array.dtype.kind == "O":
        return _from_list(array.tolist())
    if array.dtype.kind not in "iu":
        raise EncodeError(f"the values are of type {array.dtype}, not integers", advice(array.dtype.kind), 0)
    if array.dtype.kind == "u" and array.size and int(array.max()) > INT64_MAX:
        at = int(array.argmax())
        raise EncodeError(f"{array[at]} is too large", "ids are smaller than 2^31", at)
    return array.astype(np.int64)


def _from_list(values: Sequence[object]) -> NDArray[np.int64]:
    if set(map(type, values)) - {int}:
        for index, value in enumerate(values):
            if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
                raise EncodeError(f"{describe(value)} is no integer", advice(_kind(value)), index)
    try:
        return np.array(values, np.int64)
    except OverflowError:
        at = next(i for i, value in enumerate(values) if abs(int(value)) > INT64_MAX)  # type: ignore[call-overload]
        raise EncodeError(f"{shorten(str_of_int(values[at]))} is too large", "ids are smaller than 2^31", at) from None


def first_outside(values: NDArray[np.int64], low: int, high: int) -> int | None:
    """The index of the first value outside low..high."""
    if values.size == 0 or (int(values.min()) >= low and int(values.max()) <= high):
        return None
    return int(np.flatnonzero((values < low) | (values > high))[0])


def advice(kind: str) -> str:
    """What to do about values of one of numpy's kinds of types."""
    return {
        "f": "round them yourself first, for instance values.round().astype(int); nothing is truncated here",
        "b": "give 0 and 1 as integers",
        "U": "give numbers without quotes, or choose a tokenizer for text (bytes or vocab)",
    }.get(kind, "give a flat list of integers")


def describe(value: object) -> str:
    """A value as a message shows it: short, and unmistakable about its kind."""
    if isinstance(value, str):
        return f"the text {shorten(repr(value))}"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, (list, tuple)):
        return "a list inside the list"
    return shorten(str_of_int(value))


def str_of_int(value: object) -> str:
    """str(value), also for integers beyond the length that Python turns into text."""
    if isinstance(value, int) and value.bit_length() > 4096:
        return f"an integer of {value.bit_length()} bits"
    return str(value)


def shorten(text: str, limit: int = 40) -> str:
    """A text as a message may hold it: not too long, and free of halves of surrogate pairs, which cannot be printed."""
    printable = text[: limit + 1].encode("utf-8", errors="backslashreplace").decode("utf-8")
    return printable if len(text) <= limit else f"{printable[: limit - 1]}…"


def _kind(value: object) -> str:
    if isinstance(value, (bool, np.bool_)):
        return "b"
    return "f" if isinstance(value, (float, np.floating)) else "U" if isinstance(value, str) else "O"
