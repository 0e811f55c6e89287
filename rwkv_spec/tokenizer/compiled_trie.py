"""The same greedy longest match as trie.py, by kernels/cpu/trie.cpp: many times as fast.

The trie lies in numpy arrays that C only reads: threads may share it, and it can be copied and pickled.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rwkv_spec.errors import KernelError
from rwkv_spec.tokenizer.protocol import Utf8Texts
from rwkv_spec.tokenizer.trie import Match, Trie

if TYPE_CHECKING:
    from rwkv_spec.ops.build import Kernels

# What trie.cpp returns.
_FULL, _STUCK, _TOO_SMALL = 1, 2, 3
# Ids of one call: the memory for them is bounded however long a text is, and Ctrl-C is heard between calls.
_ROOM = 1 << 20
_MAX_CELLS = 1 << 30
# Cells of two numbers each, and the id of the token that ends at each cell.
Arrays = tuple[NDArray[np.uint32], NDArray[np.int32]]
_SELF_CHECK = {
    1: b"a", 2: b"b", 3: b"ab", 4: b"abab", 7: b"ababab\x00", 8: b"\x00", 9: b"\xff", 70000: b"\xff\xff", 11: b"ba",
    12: "é".encode(), 13: "éa".encode(), 2**31 - 2: b" " * 128, 15: b" ",
}  # fmt: skip


def make_trie(tokens: Mapping[int, bytes]) -> Trie | CompiledTrie:
    """The compiled trie; where there is no compiler, or none that works, the plain one."""
    try:
        return CompiledTrie(tokens)
    except KernelError as error:
        # Not an error for the user: the ids are the same, and who chooses plain torch has no use for a compiler.
        return Trie(tokens, remark=f"plain Python, many times slower: {error}")


class CompiledTrie:
    """A double array; trie.cpp says how. Making one builds the operator if need be: a KernelError where it cannot."""

    def __init__(self, tokens: Mapping[int, bytes]) -> None:
        kernels = trie_of_this_machine()
        self.remark = f"compiled by {kernels.compiler}"
        self._arrays = build_arrays(kernels.library, tokens)

    def match(self, documents: Sequence[bytes]) -> Match:
        """The ids of all documents, without a copy of their bytes."""
        return self.match_utf8(Utf8Texts.of(documents))

    def match_utf8(self, texts: Utf8Texts) -> Match:
        """The same for texts that lie anywhere in memory."""
        # The library is no attribute: it could not be copied or pickled.
        return match_arrays(trie_of_this_machine().library, self._arrays, texts)


def build_arrays(library: ctypes.CDLL, tokens: Mapping[int, bytes], *, capacity: int | None = None) -> Arrays:
    """`capacity`: how many cells are tried first; the doubled number where they do not suffice."""
    data = b"".join(tokens.values())
    ends = np.cumsum(np.fromiter(map(len, tokens.values()), np.int64, len(tokens)))
    ids, used = np.fromiter(tokens, np.int32, len(tokens)), ctypes.c_int64()
    # About as many cells as nodes are used, and there are fewer nodes than bytes.
    capacity, code = capacity or min(len(data) + 1024, _MAX_CELLS), _TOO_SMALL
    while code == _TOO_SMALL and capacity <= _MAX_CELLS:
        cells, id_of_cell = np.empty((capacity, 2), np.uint32), np.empty(capacity, np.int32)
        code = library.trie_build(
            data, ends.ctypes.data, ids.ctypes.data, len(tokens), capacity, cells.ctypes.data, id_of_cell.ctypes.data,
            ctypes.byref(used),
        )  # fmt: skip
        capacity *= 2
    if code != 0:
        raise KernelError("trie: the vocabulary is too large for the compiled trie, or for the memory")
    return cells[: used.value].copy(), id_of_cell[: used.value].copy()


def match_arrays(library: ctypes.CDLL, arrays: Arrays, texts: Utf8Texts, *, room: int = _ROOM) -> Match:
    """`room`: how many ids one call may find; there are as many calls as it takes."""
    cells, id_of_cell = arrays
    sizes = texts.sizes
    counts, place, written = np.zeros(len(sizes), np.int64), np.zeros(2, np.int64), ctypes.c_int64()
    found: list[NDArray[np.int64]] = []
    # No id stands for less than a byte, so that this many may still come.
    most, code = int(sizes.sum()), _FULL
    while code == _FULL and most > 0:
        ids = np.empty(min(most, room), np.int64)
        code = library.trie_encode(
            cells.ctypes.data, id_of_cell.ctypes.data, texts.addresses.ctypes.data, sizes.ctypes.data, len(sizes),
            len(ids), ids.ctypes.data, counts.ctypes.data, place.ctypes.data, ctypes.byref(written),
        )  # fmt: skip
        found.append(ids[: written.value])
        most -= written.value
    stuck = (int(place[0]), int(place[1])) if code == _STUCK else None
    return Match(found[0] if len(found) == 1 else np.concatenate([np.zeros(0, np.int64), *found]), counts, stuck)


@functools.cache
def trie_of_this_machine() -> Kernels:
    # Here, since most tokenizers need no compiler, and a spec with one of them is checked without it.
    from rwkv_spec.ops.build import load_operator

    kernels = load_operator("trie", check_library)
    _declare(kernels.library)
    return kernels


def _declare(library: ctypes.CDLL) -> None:
    """Argument types: without them a 64-bit address would be cut to 32 bits."""
    address, count = ctypes.c_void_p, ctypes.c_int64
    library.trie_build.argtypes = [ctypes.c_char_p, address, address, count, count, address, address, address]
    library.trie_encode.argtypes = [address, address, address, address, count, count, *[address] * 4]


def check_library(library: ctypes.CDLL) -> None:
    """KernelError where a library that was just built finds other ids than the plain trie."""
    _declare(library)
    generator = np.random.default_rng(0)
    alphabet = np.frombuffer("ab \x00é".encode() + b"\xff", np.uint8)
    documents = [alphabet[generator.integers(0, len(alphabet), size)].tobytes() for size in (0, 1, 2, 500, 3, 0)]
    documents += [b" " * 300, b"ab" * 50, b"ababab", b"ab\xc3"]
    # Without the halves of é the match ends early; many short tokens make nodes that compete for the same cells.
    pieces = {b"\xc3", b"\xa9", *(alphabet[generator.integers(0, len(alphabet), 3)].tobytes() for _ in range(200))}
    more = dict(enumerate(sorted(pieces - set(_SELF_CHECK.values())), 100))
    for tokens in (_SELF_CHECK, _SELF_CHECK | more):
        want = Trie(tokens).match(documents)
        got = match_arrays(library, build_arrays(library, tokens, capacity=1), Utf8Texts.of(documents), room=64)
        same = np.array_equal(want.ids, got.ids) and np.array_equal(want.counts, got.counts)
        if not same or want.stuck != got.stuck:
            raise KernelError(
                "trie: the compiled trie finds other ids than the plain one; try another compiler by CXX="
            )
