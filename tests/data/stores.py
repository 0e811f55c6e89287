"""Small sources and their stores, as several tests make them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rwkv_spec.data.binidx import IndexedWriter
from rwkv_spec.data.prepare import prepare
from rwkv_spec.data.source import Given
from rwkv_spec.data.store import Store
from rwkv_spec.tokenizer.integer import AngleTokenizer

ROOT = Path(__file__).parents[2]
ANGLES = AngleTokenizer()


class Custom:
    """The least that a user's own tokenizer has."""

    vocab_size = 300
    fingerprint = "custom"

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


def make(tmp_path: Path, *sources: Given, **options: object) -> Store:
    arguments = {"tokenizer": ANGLES, "store": tmp_path / "store", **options}
    return prepare(sources=sources, **arguments)  # type: ignore[arg-type]


def tokens(store: Store) -> list[int]:
    return store.train.read(0, store.train.num_tokens).tolist()


def held_out(store: Store) -> list[list[int]]:
    return [ids.tolist() for ids in store.eval_documents]


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def write_pair(prefix: Path, documents: list[list[int]]) -> Path:
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        for document in documents:
            writer.add(np.array(document, np.int64))
    return prefix


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
