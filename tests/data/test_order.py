"""The order of windows is a pure function, visits each window once an epoch, and is RWKV-LM's own where asked for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rwkv_spec.data.order import (
    epoch_windows,
    is_prime,
    magic_prime,
    num_windows,
    rwkv_lm_window,
    window_index,
)
from rwkv_spec.data.permutation import permute
from rwkv_spec.errors import DataError

GOLDEN = Path(__file__).parents[1] / "golden" / "sampling_golden.json"


def epoch(number: int, *, size: int, seed: int = 0, order: str = "shuffle") -> np.ndarray:
    sequence = np.arange(number * size, (number + 1) * size)
    return window_index(sequence, num_windows=size, order=order, seed=seed)


@pytest.mark.parametrize("order", ["shuffle", "sequential"])
def test_every_epoch_visits_each_window_once(order: str) -> None:
    for size in [*range(1, 301), 1023, 1024, 1025, 4096, 4097, 100_003]:
        for number in (0, 3):
            assert np.array_equal(np.sort(epoch(number, size=size, order=order)), np.arange(size)), (size, number)


def test_a_batch_may_span_epochs() -> None:
    sequence = np.arange(5, 40)
    whole = np.concatenate([epoch(i, size=7, seed=9) for i in range(6)])
    assert np.array_equal(window_index(sequence, num_windows=7, order="shuffle", seed=9), whole[5:40])
    assert window_index(sequence.reshape(5, 7), num_windows=7, order="shuffle", seed=9).shape == (5, 7)


@pytest.mark.parametrize("size", [50, 1024, 1025, 20_000])
def test_epochs_and_seeds_give_other_orders(size: int) -> None:
    orders = [epoch(e, size=size, seed=s) for e, s in [(0, 0), (1, 0), (2, 0), (0, 1), (0, 2), (0, -1), (0, 2**64 + 3)]]
    for i, one in enumerate(orders):
        assert abs(np.corrcoef(one, np.arange(size))[0, 1]) < 5 / np.sqrt(size)
        for other in orders[:i]:
            assert abs(np.corrcoef(one, other)[0, 1]) < 5 / np.sqrt(size)
            assert (one == other).mean() < 0.2


@pytest.mark.parametrize("size", [3, 4])
def test_small_sizes_reach_every_permutation(size: int) -> None:
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(2400):
        found = tuple(epoch(0, size=size, seed=seed).tolist())
        counts[found] = counts.get(found, 0) + 1
    expected = 2400 / (6 if size == 3 else 24)
    assert len(counts) == (6 if size == 3 else 24)
    assert all(expected * 0.5 < count < expected * 1.5 for count in counts.values())


@pytest.mark.parametrize("size", [1000, 5000])
def test_each_place_gets_each_window_equally_often(size: int) -> None:
    seeds = 400
    first = np.array([permute(np.array([0, 1]), size=size, seed=s, epoch=np.zeros(2, np.int64)) for s in range(seeds)])
    assert abs(first.mean() / (size - 1) - 0.5) < 0.05
    # Neighbours do not stay neighbours.
    assert (np.abs(first[:, 0] - first[:, 1]) < size // 20).mean() < 0.2


SMALL = [1, 0, 3, 5, 4, 6, 2, 9, 8, 7]
LARGE = [1372, 674, 1780, 1005, 1323, 1601, 603, 1275]


def test_the_shuffle_stays_what_it_is() -> None:
    # A resumed run must find the order of its first part: a change here is a change of the format.
    assert epoch(1, size=10, seed=42).tolist() == SMALL
    assert epoch(1, size=2000, seed=42)[:8].tolist() == LARGE


def test_an_index_outside_is_refused() -> None:
    with pytest.raises(ValueError):
        permute(np.array([5]), size=5, seed=0, epoch=np.zeros(1, np.int64))
    with pytest.raises(ValueError):
        permute(np.array([0]), size=0, seed=0, epoch=np.zeros(1, np.int64))
    with pytest.raises(ValueError, match="unknown"):
        window_index(np.arange(3), num_windows=3, order="random", seed=0)


def test_the_published_offsets_are_met() -> None:
    for case in json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]:
        samples = np.array([int(sample) for sample in case["offsets"]])
        windows = rwkv_lm_window(samples - 1, magic_prime=case["magic_prime"])
        assert (windows * case["ctx_len"]).tolist() == list(case["offsets"].values())


def test_large_primes_are_exact_too() -> None:
    prime = 2**40 - 87
    assert is_prime(prime)
    sequence = np.array([0, 1, 12345678901, prime - 1, prime, 2**62])
    factor = int(prime * (5**0.5 - 1) / 2)
    expected = [factor * (int(n) + 1) ** 3 % prime for n in sequence]
    assert rwkv_lm_window(sequence, magic_prime=prime).tolist() == expected
    near = 4294967291
    expected = [int(near * (5**0.5 - 1) / 2) * (int(n) + 1) ** 3 % near for n in sequence]
    assert rwkv_lm_window(sequence, magic_prime=near).tolist() == expected


@pytest.mark.parametrize(
    ("num_tokens", "ctx_len", "prime"),
    [
        (1498226207, 4096, 365759),
        (1498226207, 512, 2926181),
        (332115325534, 4096, 81082817),
        (296553, 64, 4583),
        (192, 64, 2),
        (6 * 64, 64, 5),
        (5 * 64, 64, 2),
    ],
)
def test_the_magic_prime_is_the_published_one(num_tokens: int, ctx_len: int, prime: int) -> None:
    assert magic_prime(num_tokens, ctx_len) == prime
    assert epoch_windows(num_tokens, ctx_len=ctx_len, order="rwkv-lm") == prime


def test_the_cubic_order_visits_each_window_once() -> None:
    for prime in (2, 5, 11, 113, 4583):
        assert sorted(epoch(0, size=prime, order="rwkv-lm").tolist()) == list(range(prime))


def test_too_few_tokens_for_a_magic_prime_are_refused() -> None:
    with pytest.raises(DataError, match="at least 3·ctx_len = 192"):
        magic_prime(191, 64)


def test_primes_are_told_apart() -> None:
    assert [n for n in range(100) if is_prime(n)] == [n for n in range(2, 100) if all(n % k for k in range(2, n))]
    assert not is_prime(3215031751) and not is_prime(341550071728321) and is_prime(2**61 - 1)


def test_windows_cover_every_target() -> None:
    assert [num_windows(n, 4) for n in (2, 4, 5, 6, 9, 10)] == [1, 1, 1, 2, 2, 3]
    assert epoch_windows(10, ctx_len=4, order="shuffle") == 3
    for few in (0, 1):
        with pytest.raises(DataError, match="at least 2"):
            num_windows(few, 4)
