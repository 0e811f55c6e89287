"""Greedy longest match in plain numpy: the fallback without a compiler, and what the compiled trie is checked against.

The longest token is found at every position of a text at once: all positions walk down the trie together, a level at a
time. Encoding then follows the chain of greedy matches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_ABSENT = np.int64(-1)
# Positions matched at once: the work arrays then stay in the processor's cache.
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Match:
    """The ids of all documents back to back, and how many each has. `stuck`: the document and its byte where no token
    begins, which ends the match."""

    ids: NDArray[np.int64]
    counts: NDArray[np.int64]
    stuck: tuple[int, int] | None = None


class Trie:
    """A hash table keyed by node · 256 + byte; node 0 is the root; `token_of_node` is -1 inside a token."""

    def __init__(self, tokens: Mapping[int, bytes], *, remark: str = "plain Python") -> None:
        self.remark = remark
        nodes: dict[bytes, int] = {b"": 0}
        edges: list[int] = []
        for token in tokens.values():
            node = 0
            for depth in range(1, len(token) + 1):
                prefix = token[:depth]
                child = nodes.get(prefix)
                if child is None:
                    child = nodes[prefix] = len(nodes)
                    edges.append(node * 256 + prefix[-1])
                node = child
        self.token_of_node: NDArray[np.int32] = np.full(len(nodes), -1, np.int32)
        for token_id, token in tokens.items():
            self.token_of_node[nodes[token]] = token_id
        self._longest_token = max(map(len, tokens.values()))
        self._fill(np.array(edges, np.int64))
        # The first level is asked at every position: a plain table serves it.
        self._roots = self._children(np.arange(256, dtype=np.int64))

    def _fill(self, edges: NDArray[np.int64]) -> None:
        self._bits = max(4, (4 * len(edges)).bit_length())
        self._keys = np.full(1 << self._bits, _ABSENT, np.int64)
        self._values = np.zeros(1 << self._bits, np.int32)
        # Node numbers follow the order in which the edges were found: edge i leads to node i + 1.
        waiting, slots = np.arange(len(edges)), self._slots(edges)
        while waiting.size:
            free = self._keys[slots] == _ABSENT
            placed_slots, winner = np.unique(slots[free], return_index=True)
            placed = waiting[free][winner]
            self._keys[placed_slots] = edges[placed]
            self._values[placed_slots] = placed + 1
            still = ~np.isin(waiting, placed)
            waiting, slots = waiting[still], (slots[still] + 1) & ((1 << self._bits) - 1)

    def _slots(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        hashed = keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return (hashed >> np.uint64(64 - self._bits)).astype(np.int64)

    def _children(self, keys: NDArray[np.int64]) -> NDArray[np.int32]:
        """The node that each edge leads to; 0, which no edge leads to, where there is none."""
        slots = self._slots(keys)
        found = self._keys[slots]
        nodes = np.where(found == keys, self._values[slots], 0)
        searching = np.flatnonzero((found != keys) & (found != _ABSENT))
        while searching.size:
            slots[searching] = (slots[searching] + 1) & ((1 << self._bits) - 1)
            found = self._keys[slots[searching]]
            hit = found == keys[searching]
            nodes[searching[hit]] = self._values[slots[searching[hit]]]
            searching = searching[~hit & (found != _ABSENT)]
        return nodes

    def longest(self, data: NDArray[np.uint8], room: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Length and id of the longest token at each of the first len(room) positions that ends within `room` bytes.

        Length 0 says that no token fits. `data` must hold every byte that `room` allows.
        """
        nodes = self._roots[data[: len(room)]]
        ids = self.token_of_node[nodes]
        lengths = (ids >= 0).astype(np.int32)
        active = np.flatnonzero(nodes)
        nodes = nodes[active]
        depth = 1
        while active.size:
            fits = room[active] > depth
            active, nodes = active[fits], nodes[fits]
            nodes = self._children(nodes.astype(np.int64) * 256 + data[active + depth])
            alive = nodes != 0
            active, nodes = active[alive], nodes[alive]
            depth += 1
            found = self.token_of_node[nodes]
            ends = found >= 0
            lengths[active[ends]] = depth
            ids[active[ends]] = found[ends]
        return lengths, ids

    def match(self, documents: Sequence[bytes]) -> Match:
        data = np.frombuffer(b"".join(documents), np.uint8)
        ends = np.cumsum(np.fromiter(map(len, documents), np.int64, len(documents)))
        found: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
        starts: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
        position, stuck = 0, None
        while position < len(data) and stuck is None:
            stop = min(position + _CHUNK, len(data))
            where = np.arange(position, stop)
            room = ends[np.searchsorted(ends, where, side="right")] - where
            lengths, ids = self.longest(data[position : stop + self._longest_token], room)
            chain, following = _follow(lengths)
            if following is None:
                at = position + chain.pop()
                document = int(np.searchsorted(ends, at, side="right"))
                stuck = document, at - (int(ends[document - 1]) if document else 0)
            taken = np.array(chain, np.int64)
            found.append(ids[taken].astype(np.int64))
            starts.append(taken + position)
            position += following or 0
        bounds = np.searchsorted(np.concatenate(starts), ends, side="left")
        return Match(np.concatenate(found), np.diff(bounds, prepend=0), stuck)


def _follow(lengths: NDArray[np.int32]) -> tuple[list[int], int | None]:
    """The positions at which greedy matches begin, and where the next chunk does; None where the last one is stuck."""
    steps: list[int] = lengths.tolist()
    chain: list[int] = []
    position, stop = 0, len(steps)
    while position < stop:
        chain.append(position)
        step = steps[position]
        if step == 0:
            return chain, None
        position += step
    return chain, position
