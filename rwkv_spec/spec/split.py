"""How a process's share of a step is split into micro-batches: the sizes there are, and when comparing them pays.

Arithmetic only. No split changes a result beyond rounding; on a CPU it changes the speed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

# A smaller micro-batch is taken only where it is so many times as fast as the largest, so that noise decides nothing.
MARGIN = 1.05
# Passes over each size: one that tries it out, the others timed.
PASSES = 4
# Comparing sizes may take this much of a run's work.
_MOST_OF_A_RUN = Fraction(1, 50)
# Sizes looked at around a half, a quarter and so on: among so many there is one with little filler.
_MOST_NEAR = 64


@dataclass(frozen=True)
class MicroBatch:
    """How many sequences a process runs at once, and why, as a sentence for a person ("" where there is nothing)."""

    size: int
    reason: str


def num_micro_batches(share: int, size: int) -> int:
    """Micro-batches of `size` that a process's share of a step takes."""
    return -(-share // size)


def rows_each(share: int, size: int) -> int:
    """Rows of each of these micro-batches, which are all of one size: `size`, or fewer where fewer are enough."""
    return -(-share // num_micro_batches(share, size))


def num_rows(share: int, size: int) -> int:
    """Rows that a process computes a step, the filler of weight 0 included."""
    return num_micro_batches(share, size) * rows_each(share, size)


def sizes_to_compare(share: int, largest: int) -> tuple[int, ...]:
    """About `largest`, a half, a quarter … 1, rising; of all sizes near such a part that with the least filler."""
    sizes = [largest]
    while sizes[-1] > 1:
        half = -(-sizes[-1] // 2)
        near = range(half, max(half // 2, half - _MOST_NEAR), -1)
        size = min(near, key=lambda size: num_rows(share, size))
        # As large as its micro-batches are when all are of one size.
        sizes.append(rows_each(share, size))
    return tuple(reversed(sizes))


def pays(sizes: tuple[int, ...], *, num_sequences: int) -> bool:
    """Whether comparing all sizes is a small part of a process's work of `num_sequences` sequences."""
    return len(sizes) > 1 and PASSES * sum(sizes) <= _MOST_OF_A_RUN * num_sequences


def fastest(seconds: Mapping[int, float]) -> int:
    """The size with the fewest seconds a sequence, but the largest unless another is faster by the margin."""
    best, largest = min(seconds, key=lambda size: seconds[size]), max(seconds)
    return best if seconds[best] * MARGIN < seconds[largest] else largest


def measured_choice(seconds: Mapping[int, float], *, share: int, sizes: tuple[int, ...]) -> MicroBatch:
    """What follows from the measured seconds a sequence of some of the sizes that there were to compare."""
    size, largest = fastest(seconds), max(seconds)
    start = f"micro-batch {size} of {share}: "
    # What is left out was slower already in a first pass, or too long to be tried.
    rest = "" if largest == sizes[-1] else f", and sizes beyond {largest} were left out as slower or too long to time"
    if size == largest:
        return MicroBatch(size, f"{start}no smaller one measured {MARGIN} times as fast{rest}")
    return MicroBatch(size, f"{start}measured {seconds[largest] / seconds[size]:.2f} times as fast as {largest}{rest}")
