"""Ids of many texts at once where they lie in memory, by kernels/cpu/ids.cpp: integers, bytes, and documents' ends.

Each function gives None where there is no compiler, or where a text is not plain: the exact way then gives the ids, or
says what is wrong.
"""

from __future__ import annotations

import ctypes
import functools

import numpy as np
from numpy.typing import NDArray

from rwkv_spec.errors import KernelError
from rwkv_spec.ops.build import Kernels, load_operator
from rwkv_spec.tokenizer.protocol import Utf8Texts

Encoded = tuple[NDArray[np.int64], NDArray[np.int64]]
# What ids.cpp returns where it found nothing unusual.
_DONE = 0


def can_read_ids() -> bool:
    """Whether there is a compiled form on this machine. Builds it if need be."""
    return _ids_of_this_machine() is not None


def ids_of_integers(texts: Utf8Texts, *, high: int, shift: int) -> Encoded | None:
    """Integers 0..high as ids that are `shift` higher, and how many each text has."""
    kernels = _ids_of_this_machine()
    return None if kernels is None else _integers(kernels.library, texts, high, shift)


def ids_of_bytes(texts: Utf8Texts) -> Encoded | None:
    """The bytes as ids that are 1 higher, and how many each text has."""
    kernels = _ids_of_this_machine()
    return None if kernels is None or texts.is_list.any() else _bytes(kernels.library, texts)


def end_with_zero(
    ids: NDArray[np.int64], sizes: NDArray[np.int64], dtype: np.dtype[np.integer]
) -> NDArray[np.integer] | None:
    """The documents in a store's type, each followed by id 0. The ids fit into the type: they were checked."""
    kernels = _ids_of_this_machine()
    return None if kernels is None else _end(kernels.library, ids, sizes, dtype)


def _integers(library: ctypes.CDLL, texts: Utf8Texts, high: int, shift: int) -> Encoded | None:
    # An integer takes a digit, and something that parts it from the next one.
    ids = np.empty(int((texts.sizes + 1).sum()) // 2 + len(texts.sizes), np.int64)
    counts = np.empty(len(texts.sizes), np.int64)
    code = library.ids_of_integers(
        texts.addresses.ctypes.data, texts.sizes.ctypes.data, texts.is_list.ctypes.data, len(counts), high, shift,
        ids.ctypes.data, counts.ctypes.data,
    )  # fmt: skip
    return (ids[: int(counts.sum())], counts) if code == _DONE else None


def _bytes(library: ctypes.CDLL, texts: Utf8Texts) -> Encoded:
    ids = np.empty(int(texts.sizes.sum()), np.int64)
    library.ids_of_bytes(texts.addresses.ctypes.data, texts.sizes.ctypes.data, len(texts.sizes), ids.ctypes.data)
    return ids, texts.sizes


def _end(
    library: ctypes.CDLL, ids: NDArray[np.int64], sizes: NDArray[np.int64], dtype: np.dtype[np.integer]
) -> NDArray[np.integer]:
    ids, sizes = np.ascontiguousarray(ids), np.ascontiguousarray(sizes)
    ended = np.empty(len(ids) + len(sizes), dtype)
    library.ids_end(ids.ctypes.data, sizes.ctypes.data, len(sizes), dtype.itemsize, ended.ctypes.data)
    return ended


@functools.cache
def _ids_of_this_machine() -> Kernels | None:
    try:
        kernels = load_operator("ids", check_library)
    except KernelError:
        # Not an error for the user: without a compiler the ids are the same.
        return None
    _declare(kernels.library)
    return kernels


def _declare(library: ctypes.CDLL) -> None:
    """Argument types: without them a 64-bit address would be cut to 32 bits."""
    address, count = ctypes.c_void_p, ctypes.c_int64
    library.ids_of_integers.argtypes = [address, address, address, count, count, count, address, address]
    library.ids_of_bytes.argtypes = [address, address, count, address]
    library.ids_end.argtypes = [address, address, count, count, address]


def check_library(library: ctypes.CDLL) -> None:
    """KernelError where a library that was just built gives other ids than plain Python."""
    _declare(library)
    generator = np.random.default_rng(0)
    rows = [generator.integers(0, 10 ** (i % 19), i).tolist() for i in range(60)]
    texts = ["\t\n\v\f\r ".join(map(str, row)) for row in rows[::2]] + [" , ".join(map(str, row)) for row in rows[1::2]]
    is_list = [False] * 30 + [True] * 30
    rows = rows[::2] + rows[1::2]
    pieces = [text.encode() for text in texts]
    found = [_integers(library, Utf8Texts.of(pieces, is_list), 10**18, 1)]
    for wrong in (b"1.5", b"-1", b"1,2", b"7\x00", b"8", b"\xc3\xa9", b"0" * 19):
        found.append(_integers(library, Utf8Texts.of([b"7 7", wrong]), 7, 0))
    want = np.array([value + 1 for row in rows for value in row], np.int64), np.array(list(map(len, rows)), np.int64)
    right = found[0] is not None and _same(found[0], want) and found[1:] == [None] * 7
    of_bytes = _bytes(library, Utf8Texts.of([*pieces, b"\x00\xff"]))
    right = right and (of_bytes[0] - 1).astype(np.uint8).tobytes() == b"".join(pieces) + b"\x00\xff"
    ids, ended = want[0] % 60_000, [value % 60_000 for row in rows for value in [*(v + 1 for v in row), 0]]
    for dtype in (np.dtype("<u2"), np.dtype("<i4")):
        right = right and _end(library, ids, want[1], dtype).tolist() == ended
    if not right:
        raise KernelError("ids: the compiled form gives other ids than the plain one; try another compiler by CXX=")


def _same(one: Encoded, other: Encoded) -> bool:
    return np.array_equal(one[0], other[0]) and np.array_equal(one[1], other[1])
