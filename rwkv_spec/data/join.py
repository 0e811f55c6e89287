"""Joins parts in order into the two files of a store, train and eval, a chunk at a time; used parts are deleted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rwkv_spec.data.binidx import IndexedWriter
from rwkv_spec.data.part import Part, ids_path, marks_path, sizes_path

_CHUNK_TOKENS = 1 << 20
_CHUNK_DOCUMENTS = 1 << 16
# (first document, one past the last) -> whether each is held out
Mask = Callable[[int, int], NDArray[np.bool_]]


def join_part(part: Part, train: IndexedWriter, held_out: IndexedWriter, *, mask: Mask | None) -> int:
    """Append a part's documents; returns how many tokens went to `train`. Without a mask its own marks decide."""
    before = train.num_tokens
    with (
        ids_path(part.out).open("rb") as ids,
        sizes_path(part.out).open("rb") as sizes,
        marks_path(part.out).open("rb") as marks,
    ):
        document = 0
        while document < part.num_documents:
            sizes.seek(4 * document)
            block = np.fromfile(sizes, "<i4", _CHUNK_DOCUMENTS).astype(np.int64)
            block = block[: max(1, int(np.searchsorted(np.cumsum(block), _CHUNK_TOKENS, side="right")))]
            marks.seek(document)
            is_out = np.fromfile(marks, np.bool_, len(block))
            if mask is not None:
                is_out = mask(document, document + len(block))
            if len(block) == 1:
                _copy(ids, int(block[0]), held_out if is_out[0] else train)
                (held_out if is_out[0] else train).write_sizes(block)
            else:
                tokens = np.fromfile(ids, train.dtype, int(block.sum()))
                token_is_out = np.repeat(is_out, block)
                train.add_many(tokens[~token_is_out], block[~is_out])
                held_out.add_many(tokens[token_is_out], block[is_out])
            document += len(block)
    for path in (ids_path(part.out), sizes_path(part.out), marks_path(part.out)):
        path.unlink()
    return train.num_tokens - before


def _copy(ids: object, count: int, writer: IndexedWriter) -> None:
    while count:
        chunk = np.fromfile(ids, writer.dtype, min(count, _CHUNK_TOKENS))  # type: ignore[call-overload]
        writer.write_ids(chunk)
        count -= len(chunk)
