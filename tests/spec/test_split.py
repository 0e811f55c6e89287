"""Micro-batch sizes: which are compared, when that pays, and that noise decides nothing."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rwkv_spec.spec.split import (
    PASSES,
    fastest,
    measured_choice,
    num_micro_batches,
    num_rows,
    pays,
    sizes_to_compare,
)


@pytest.mark.parametrize(
    ("share", "largest", "sizes"),
    [
        (1, 1, (1,)),
        (16, 16, (1, 2, 4, 8, 16)),
        (16, 4, (1, 2, 4)),
        (12, 12, (1, 2, 3, 6, 12)),
        # 21 in micro-batches of 11 would be 22 rows: 7 is as near to a half as it gets without filler.
        (21, 21, (1, 2, 3, 7, 21)),
    ],
)
def test_sizes_are_about_halves_without_filler_where_there_are_such(
    share: int, largest: int, sizes: tuple[int, ...]
) -> None:
    assert sizes_to_compare(share, largest) == sizes


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_sizes_rise_from_one_to_the_largest_with_little_filler(share: int, largest: int) -> None:
    sizes = sizes_to_compare(share, min(share, largest))
    assert sizes[0] == 1 and sizes[-1] == min(share, largest)
    for smaller, size in pairwise(sizes):
        assert smaller < size <= 8 * smaller
        half = -(-size // 2)
        assert num_rows(share, smaller) <= num_rows(share, half)
    assert all(num_rows(share, size) >= share for size in sizes)


def test_sizes_of_a_huge_share_are_found_at_once() -> None:
    assert len(sizes_to_compare(1_048_575, 1_048_575)) < 25


def test_filler_rows_are_counted() -> None:
    assert [num_rows(21, size) for size in (21, 11, 7, 2)] == [21, 22, 21, 22]
    # Five fit into four micro-batches, which need not be full: sixteen rows of work, not twenty.
    assert (num_micro_batches(16, 5), num_rows(16, 5)) == (4, 16)


def test_comparing_takes_two_hundredths_of_a_run_at_most() -> None:
    sizes = (1, 2, 4, 8, 16)
    work = 50 * PASSES * sum(sizes)
    assert pays(sizes, num_sequences=work) and not pays(sizes, num_sequences=work - 1)
    assert not pays((1,), num_sequences=work)


def test_only_what_is_clearly_faster_takes_the_place_of_the_largest() -> None:
    assert fastest({1: 3.0, 4: 0.96, 16: 1.0}) == 16
    assert fastest({1: 3.0, 4: 0.94, 8: 0.9, 16: 1.0}) == 8
    assert fastest({2: 1.0}) == 2


def test_a_choice_says_by_how_much() -> None:
    choice = measured_choice({4: 1.0, 16: 1.31}, share=16, sizes=(1, 2, 4, 8, 16))
    assert (choice.size, choice.reason) == (4, "micro-batch 4 of 16: measured 1.31 times as fast as 16")
    kept = measured_choice({4: 1.0, 16: 1.01}, share=16, sizes=(1, 2, 4, 8, 16))
    assert kept.size == 16 and "no smaller one measured 1.05 times as fast" in kept.reason
    part = measured_choice({1: 1.0, 2: 1.4}, share=16, sizes=(1, 2, 4, 8, 16))
    assert part.size == 1 and part.reason.endswith("sizes beyond 2 were left out as slower or too long to time")
