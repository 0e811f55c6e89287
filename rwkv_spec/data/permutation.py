"""A keyed permutation of 0 … size-1, computed at any index without a table: the source of every shuffle of data.

The same (size, key) gives the same permutation on every machine and numpy version; it holds no state and, for large
sizes, no memory beyond the asked indices.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Below this size a sort of hashes gives every permutation the same chance; a Feistel network on so few bits would not.
_SORT_LIMIT = 1024
_NUM_ROUNDS = 8
_MASK = (1 << 64) - 1


def mix64(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The splitmix64 finaliser: a bijection of 64-bit words in which each bit moves about half of the others."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def permute(index: NDArray[np.int64], *, size: int, seed: int, epoch: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where permutation (seed, epoch[i]) of 0 … size-1 sends index[i]; index and epoch have one shape."""
    if size < 1:
        raise ValueError(f"a permutation needs at least one element, got size {size}")
    if index.size and (int(index.min()) < 0 or int(index.max()) >= size):
        raise ValueError(f"permutation index outside 0..{size - 1}")
    if size == 1 or index.size == 0:
        return np.zeros(index.shape, np.int64)
    seed_word = np.array([seed & _MASK], np.uint64)
    keys = mix64(mix64(seed_word) ^ epoch.ravel().astype(np.uint64))
    flat = index.ravel()
    result = _sorted_permute(flat, size, keys) if size <= _SORT_LIMIT else _feistel_permute(flat, size, keys)
    return result.reshape(index.shape)


def _sorted_permute(index: NDArray[np.int64], size: int, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    unique_keys, key_row = np.unique(keys, return_inverse=True)
    hashes = mix64(unique_keys[:, None] ^ mix64(np.arange(size, dtype=np.uint64))[None, :])
    order = np.argsort(hashes, axis=1, kind="stable")
    return order[key_row.ravel(), index].astype(np.int64)


def _feistel_permute(index: NDArray[np.int64], size: int, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    half_bits = ((size - 1).bit_length() + 1) // 2
    value = _feistel(index.astype(np.uint64), keys, half_bits)
    # Cycle walking: the network permutes the next power of four; following it until it lands inside 0 … size-1
    # permutes exactly that range.
    outside = np.flatnonzero(value >= np.uint64(size))
    while outside.size:
        value[outside] = _feistel(value[outside], keys[outside], half_bits)
        outside = outside[value[outside] >= np.uint64(size)]
    return value.astype(np.int64)


def _feistel(value: NDArray[np.uint64], keys: NDArray[np.uint64], half_bits: int) -> NDArray[np.uint64]:
    mask = np.uint64((1 << half_bits) - 1)
    left, right = value >> np.uint64(half_bits), value & mask
    for number in range(_NUM_ROUNDS):
        round_keys = mix64(keys ^ np.uint64(number << 56))
        left, right = right, left ^ (mix64(round_keys ^ right) & mask)
    return (left << np.uint64(half_bits)) | right
