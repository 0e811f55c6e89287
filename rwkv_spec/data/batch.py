"""One optimizer step's batch for any number of processes: a pure function of the step, all that a resume needs to know.

Every target is trained exactly once an epoch; what a last window or a last step lacks is padded with weight 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rwkv_spec.data.order import epoch_windows, window_index


class Tokens(Protocol):
    """What a batch reads from: a TokenStream, or anything else with these two."""

    @property
    def num_tokens(self) -> int: ...

    def read(self, start: int, count: int) -> NDArray[np.int64]: ...


# The windows of so many sequences are found at once: for the few of one step it takes longer than reading them.
_SEQUENCES_AHEAD = 1024


@dataclass(frozen=True)
class Batch:
    """Rows of equal length. `sequence_B` counts rows over the whole run, `window_B` names the window; filler has -1."""

    ids_BT: NDArray[np.int64]
    targets_BT: NDArray[np.int64]
    weights_BT: NDArray[np.float32]
    starts_BT: NDArray[np.bool_]
    sequence_B: NDArray[np.int64]
    window_B: NDArray[np.int64]

    @property
    def num_rows(self) -> int:
        return int(self.ids_BT.shape[0])

    def split(self, micro_batch_size: int, count: int) -> list[Batch]:
        """Exactly `count` batches of one size ≤ micro_batch_size: the rows in order, then filler rows of weight 0."""
        if micro_batch_size * count < self.num_rows:
            raise ValueError(f"{self.num_rows} rows do not fit into {count} micro-batches of {micro_batch_size}")
        rows_each = max(1, -(-self.num_rows // count))
        padded = self._padded(rows_each * count)
        return [padded._rows(i * rows_each, (i + 1) * rows_each) for i in range(count)]

    def _rows(self, start: int, stop: int) -> Batch:
        return Batch(
            self.ids_BT[start:stop],
            self.targets_BT[start:stop],
            self.weights_BT[start:stop],
            self.starts_BT[start:stop],
            self.sequence_B[start:stop],
            self.window_B[start:stop],
        )

    def _padded(self, num_rows: int) -> Batch:
        missing = num_rows - self.num_rows
        if missing == 0:
            return self
        wide, tall = ((0, missing), (0, 0)), (0, missing)
        return Batch(
            np.pad(self.ids_BT, wide),
            np.pad(self.targets_BT, wide),
            np.pad(self.weights_BT, wide),
            np.pad(self.starts_BT, wide),
            np.pad(self.sequence_B, tall, constant_values=-1),
            np.pad(self.window_B, tall, constant_values=-1),
        )


@dataclass(frozen=True)
class Cursor:
    """Where a run stands in its data: `step` optimizer updates are finished. All that a saved state needs to record."""

    step: int

    def sequences(self, *, batch_size: int, total_sequences: int) -> tuple[int, int]:
        """(start, stop) of the sequences that the next step trains, over all processes."""
        start = min(self.step * batch_size, total_sequences)
        return start, min(start + batch_size, total_sequences)

    def next(self) -> Cursor:
        return Cursor(self.step + 1)


def rank_share(num_rows: int, rank: int, world: int) -> tuple[int, int]:
    """The contiguous (start, stop) of the rows that `rank` takes; sizes differ by at most one, none is left over."""
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} is outside 0..{world - 1}")
    return num_rows * rank // world, num_rows * (rank + 1) // world


def read_windows(stream: Tokens, window_B: NDArray[np.int64], *, ctx_len: int, sequence_B: NDArray[np.int64]) -> Batch:
    """Window i as a row: inputs from token i·ctx_len on, each target the token after its input, padding of weight 0."""
    num_rows = len(window_B)
    ids_BT = np.zeros((num_rows, ctx_len), np.int64)
    targets_BT = np.zeros((num_rows, ctx_len), np.int64)
    weights_BT = np.zeros((num_rows, ctx_len), np.float32)
    for row, window in enumerate(window_B.tolist()):
        start = window * ctx_len
        num_targets = min(ctx_len, stream.num_tokens - 1 - start)
        if window < 0 or num_targets < 1:
            raise ValueError(f"window {window} of {ctx_len} is outside a stream of {stream.num_tokens} tokens")
        tokens = stream.read(start, num_targets + 1)
        ids_BT[row, :num_targets] = tokens[:-1]
        targets_BT[row, :num_targets] = tokens[1:]
        weights_BT[row, :num_targets] = 1.0
    # As published, state and token shift cross the ends of documents inside a window, so that nothing starts anew.
    starts_BT = np.zeros((num_rows, ctx_len), np.bool_)
    return Batch(ids_BT, targets_BT, weights_BT, starts_BT, sequence_B, window_B)


def random_batch(num_rows: int, *, ctx_len: int, vocab_size: int) -> Batch:
    """Windows of random ids, the same at each call, of weight 1: for timing, and for comparing operators."""
    tokens = np.random.default_rng(0).integers(0, vocab_size, num_rows * ctx_len + 1, dtype=np.int32).astype(np.int64)
    numbers = np.arange(num_rows, dtype=np.int64)
    return Batch(
        ids_BT=tokens[:-1].reshape(num_rows, ctx_len).copy(),
        targets_BT=tokens[1:].reshape(num_rows, ctx_len).copy(),
        weights_BT=np.ones((num_rows, ctx_len), np.float32),
        starts_BT=np.zeros((num_rows, ctx_len), np.bool_),
        sequence_B=numbers,
        window_B=numbers,
    )


def batches(
    stream: Tokens,
    *,
    ctx_len: int,
    batch_size: int,
    order: str,
    seed: int,
    total_sequences: int,
    first_step: int = 0,
    rank: int = 0,
    world: int = 1,
) -> Iterator[Batch]:
    """One Batch for each optimizer step from `first_step` on: this rank's share of its rows.

    The last step of a run may be short: a rank may then have no row.
    """
    cursor = Cursor(first_step)
    known = range(0)
    window_of_known = np.zeros(0, np.int64)
    while cursor.step * batch_size < total_sequences:
        first, last = cursor.sequences(batch_size=batch_size, total_sequences=total_sequences)
        if last > known.stop:
            known = range(first, first + max(_SEQUENCES_AHEAD, last - first))
            num_windows = epoch_windows(stream.num_tokens, ctx_len=ctx_len, order=order)
            window_of_known = window_index(np.array(known), num_windows=num_windows, order=order, seed=seed)
        start, stop = rank_share(last - first, rank, world)
        sequence_B = np.arange(first + start, first + stop, dtype=np.int64)
        window_B = window_of_known[sequence_B - known.start]
        yield read_windows(stream, window_B, ctx_len=ctx_len, sequence_B=sequence_B)
        cursor = cursor.next()
