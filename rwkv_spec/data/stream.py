"""A stream of tokens over pieces of mapped files: what training reads, without ever copying a .bin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from rwkv_spec.data.binidx import IndexedReader


@dataclass(frozen=True)
class Segment:
    """Tokens start … stop-1 of an array."""

    array: NDArray[np.integer]
    start: int
    stop: int


class TokenStream:
    """Segments one after the other. `read` may cross their borders; it gives int64 ids, free of the file."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = [segment for segment in segments if segment.stop > segment.start]
        lengths = [segment.stop - segment.start for segment in self._segments]
        self._ends = np.cumsum(np.array(lengths, np.int64))

    @property
    def num_tokens(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, start: int, count: int) -> NDArray[np.int64]:
        if start < 0 or count < 0 or start + count > self.num_tokens:
            raise IndexError(f"tokens {start}..{start + count - 1} are outside a stream of {self.num_tokens}")
        result = np.empty(count, np.int64)
        filled = 0
        number = int(np.searchsorted(self._ends, start, side="right"))
        while filled < count:
            segment = self._segments[number]
            inside = start + filled - (int(self._ends[number]) - (segment.stop - segment.start))
            taken = min(count - filled, segment.stop - segment.start - inside)
            first = segment.start + inside
            result[filled : filled + taken] = segment.array[first : first + taken]
            filled += taken
            number += 1
        return result

    def documents_before(self, position: int) -> int:
        """How many documents end before token `position`, counted by their final 0. Reads all that lies before."""
        block, stop = 1 << 20, min(position, self.num_tokens)
        return sum(int((self.read(at, min(block, stop - at)) == 0).sum()) for at in range(0, stop, block))


class Documents(Sequence[NDArray[np.int64]]):
    """Documents of mapped stores, each without its final 0. Read when asked for."""

    def __init__(self, places: Sequence[tuple[IndexedReader, NDArray[np.int64]]]) -> None:
        self._places = [(reader, numbers) for reader, numbers in places if len(numbers)]
        self._ends = np.cumsum(np.array([len(numbers) for _, numbers in self._places], np.int64))

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @overload
    def __getitem__(self, index: int) -> NDArray[np.int64]: ...
    @overload
    def __getitem__(self, index: slice) -> list[NDArray[np.int64]]: ...
    def __getitem__(self, index: int | slice) -> NDArray[np.int64] | list[NDArray[np.int64]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"document {index} is outside 0..{len(self) - 1}")
        place = int(np.searchsorted(self._ends, at, side="right"))
        reader, numbers = self._places[place]
        ids = reader.document(int(numbers[at - (int(self._ends[place]) - len(numbers))])).astype(np.int64)
        return ids[:-1] if len(ids) and ids[-1] == 0 else ids
