"""What the tests of tokenizers share: vocabulary files, the World vocabulary if installed, the plain definition."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from rwkv_spec.errors import DataError, KernelError
from rwkv_spec.ops.build import find_compiler
from rwkv_spec.tokenizer.world import WorldTokenizer, find_world_vocab


def has_compiler() -> bool:
    try:
        find_compiler()
    except KernelError:
        return False
    return True


compiled = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler on this machine")


@cache
def world_file() -> Path:
    try:
        return find_world_vocab()
    except DataError:
        pytest.skip("the rwkv package, which carries the World vocabulary, is not installed")


@cache
def world() -> WorldTokenizer:
    return WorldTokenizer(world_file())


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def naive(tokens: dict[int, bytes], data: bytes) -> tuple[list[int], int | None]:
    """Greedy longest match as one would explain it: the ids, and the byte where no token begins, if there is one."""
    by_bytes, ids, at = {token: i for i, token in tokens.items()}, [], 0
    while at < len(data):
        size = next((n for n in range(len(data) - at, 0, -1) if data[at : at + n] in by_bytes), None)
        if size is None:
            return ids, at
        ids.append(by_bytes[data[at : at + size]])
        at += size
    return ids, None
