"""The order in which a run reads its windows: a pure function of (seed, sequence number), with no state to save.

`shuffle` is a fresh permutation for each epoch, `sequential` the plain order, `rwkv-lm` the cubic magic-prime order of
RWKV-LM, bit for bit.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rwkv_spec.data.permutation import permute
from rwkv_spec.errors import DataError

ORDERS = ("shuffle", "rwkv-lm", "sequential")


def num_windows(num_tokens: int, ctx_len: int) -> int:
    """How many windows train every target exactly once: ceil((num_tokens - 1) / ctx_len)."""
    if num_tokens < 2:
        raise DataError(f"the training data has {num_tokens} token(s); at least 2 are needed, an input and its target")
    return -(-(num_tokens - 1) // ctx_len)


def epoch_windows(num_tokens: int, *, ctx_len: int, order: str) -> int:
    """Windows in one epoch: W of DESIGN; in `rwkv-lm` order that is the magic prime."""
    return magic_prime(num_tokens, ctx_len) if order == "rwkv-lm" else num_windows(num_tokens, ctx_len)


def window_index(sequence: NDArray[np.int64], *, num_windows: int, order: str, seed: int) -> NDArray[np.int64]:
    """The window that sequence n of the run reads, for each n: order(n div W, n mod W)."""
    sequence = np.asarray(sequence, np.int64)
    if order == "shuffle":
        return permute(sequence % num_windows, size=num_windows, seed=seed, epoch=sequence // num_windows)
    if order == "sequential":
        return sequence % num_windows
    if order == "rwkv-lm":
        return rwkv_lm_window(sequence, magic_prime=num_windows)
    raise ValueError(f"order {order!r} is unknown; choose one of {', '.join(ORDERS)}")


def rwkv_lm_window(sequence: NDArray[np.int64], *, magic_prime: int) -> NDArray[np.int64]:
    """RWKV-LM's window for sequence n: floor(p·(√5-1)/2)·(1+n)³ mod p, exact in any size."""
    factor = int(magic_prime * (5**0.5 - 1) / 2)
    sample = (np.asarray(sequence, np.int64) + 1) % magic_prime
    if magic_prime < 1 << 32:
        # Each product of two residues below 2^32 fits into 64 unsigned bits.
        prime, residue = np.uint64(magic_prime), sample.astype(np.uint64)
        cube = (residue * residue % prime) * residue % prime
        return (cube * np.uint64(factor) % prime).astype(np.int64)
    exact = [factor * pow(int(i), 3, magic_prime) % magic_prime for i in sample.ravel()]
    return np.array(exact, np.int64).reshape(sample.shape)


def magic_prime(num_tokens: int, ctx_len: int) -> int:
    """RWKV-LM's magic prime: the largest prime p ≤ floor(tokens / ctx_len) - 1 with p mod 3 = 2."""
    if num_tokens < 3 * ctx_len:
        raise DataError(
            f"order rwkv-lm needs at least 3·ctx_len = {3 * ctx_len} training tokens and there are {num_tokens}; "
            "lower train.ctx_len, give more data, or choose data.order: shuffle"
        )
    candidate = num_tokens // ctx_len - 1
    while not (candidate % 3 == 2 and is_prime(candidate)):
        candidate -= 1
    return candidate


def is_prime(number: int) -> bool:
    """Miller-Rabin with the bases that decide every number below 3.3·10^24."""
    bases = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)
    if number < 2:
        return False
    for base in bases:
        if number % base == 0:
            return number == base
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    return all(_passes(number, base, odd, twos) for base in bases)


def _passes(number: int, base: int, odd: int, twos: int) -> bool:
    value = pow(base, odd, number)
    if value in (1, number - 1):
        return True
    for _ in range(twos - 1):
        value = value * value % number
        if value == number - 1:
            return True
    return False
