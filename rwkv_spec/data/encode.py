"""Rows to ids: the fast way for whole blocks, and the exact way, row by row, when a block holds a fault."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rwkv_spec.data.compiled_lines import Documents, plain_reader
from rwkv_spec.data.place import element_column, field_column, text_column
from rwkv_spec.data.rows import Fault, Row, RowReader, decode_line
from rwkv_spec.tokenizer.build import recipe_of
from rwkv_spec.tokenizer.compiled_ids import end_with_zero
from rwkv_spec.tokenizer.protocol import (
    BatchTokenizer,
    EncodeError,
    NumericTokenizer,
    Tokenizer,
    first_outside,
    integer_array,
)

Encoded = tuple[NDArray[np.int64], NDArray[np.int64]]
# So many ids at once come from data that is large enough to start a compiler for.
MANY_IDS = 1 << 16


class WantsText(EncodeError):
    """Integers for a tokenizer that takes text: no single one of them is to blame."""

    def __init__(self) -> None:
        what = "the values are integers, but this tokenizer takes text"
        super().__init__(what, "choose tokenizer angle, integer or ids, or give text", 0)


class Encoder:
    """Encodes with any tokenizer, and checks what a user's own one returns."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._is_ours = recipe_of(tokenizer) is not None

    def encode_block(self, values: Sequence[str | list[object]]) -> Encoded:
        """All ids back to back, and how many each value has. Raises EncodeError, without saying which value."""
        if self._is_ours and isinstance(self._tokenizer, BatchTokenizer) and all(type(v) is str for v in values):
            return self._tokenizer.encode_many(values)  # type: ignore[arg-type]
        arrays = [self.encode(value) for value in values]
        sizes = np.fromiter(map(len, arrays), np.int64, len(arrays))
        return np.concatenate([np.zeros(0, np.int64), *arrays]), sizes

    def encode(self, value: str | Sequence[object] | NDArray[np.integer]) -> NDArray[np.int64]:
        """The ids of one text or one list of integers."""
        if isinstance(value, str):
            return self._checked(self._encode_text(value))
        return self._checked(self.encode_values(value))

    def encode_values(self, values: Sequence[object] | NDArray[np.integer]) -> NDArray[np.int64]:
        if not isinstance(self._tokenizer, NumericTokenizer):
            raise WantsText
        return np.asarray(self._tokenizer.encode_sequence(values))

    def _encode_text(self, text: str) -> NDArray[np.int64]:
        if self._is_ours:
            return np.array(self._tokenizer.encode(text), np.int64)
        try:
            return integer_array(self._tokenizer.encode(text))
        except EncodeError:
            raise
        except (ValueError, LookupError) as error:
            raise EncodeError(f"the tokenizer refuses it: {error}", "correct the text or the tokenizer", 0) from error

    def _checked(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        at = None if self._is_ours else first_outside(ids, 0, self._tokenizer.vocab_size - 1)
        if at is not None:
            top = self._tokenizer.vocab_size - 1
            raise EncodeError(
                f"the tokenizer returned id {ids[at]}, outside its own 0..{top}", "correct its vocab_size", 0
            )
        return ids


class LineEncoder:
    """Encodes blocks of lines: all at once where every line is plain, else row by row. The documents are the same."""

    def __init__(self, reader: RowReader, tokenizer: Tokenizer, *, num_bytes: int) -> None:
        """`num_bytes`: how much is to be read in all, by this encoder and others."""
        self._reader, self._encoder = reader, Encoder(tokenizer)
        self._plain = plain_reader(reader, tokenizer, num_bytes=num_bytes)

    def documents(self, block: bytes) -> Documents:
        """Those that can be encoded; the reader takes note of the rows that cannot."""
        found = None if self._plain is None else self._plain.documents(block)
        if found is not None:
            return found
        ids, sizes, good = encode_rows(self._encoder, self._reader.rows(block), self._reader)
        return Documents(ids, sizes, np.fromiter((row.held_out for row in good), np.bool_, len(good)))


def encode_rows(
    encoder: Encoder, rows: Sequence[Row], reader: RowReader
) -> tuple[NDArray[np.int64], NDArray[np.int64], list[Row]]:
    """(ids, ids a row, rows) of the rows that can be encoded; the reader takes note of those that cannot."""
    try:
        ids, sizes = encoder.encode_block([row.value for row in rows])
        return ids, sizes, list(rows)
    except EncodeError:
        good: list[Row] = []
        arrays: list[NDArray[np.int64]] = []
        for row in rows:
            try:
                arrays.append(encoder.encode(row.value))
                good.append(row)
            except EncodeError as error:
                reader.add_fault(row.line, _located(row, error, reader))
        sizes = np.fromiter(map(len, arrays), np.int64, len(arrays))
        return np.concatenate([np.zeros(0, np.int64), *arrays]), sizes, good


def _located(row: Row, error: EncodeError, reader: RowReader) -> Fault:
    line = decode_line(row.raw)
    if reader.kind == "txt":
        return Fault(error.offset + 1, f"{error.what}; {error.fix}")
    if isinstance(row.value, str):
        column = text_column(line, reader.field, error.offset)
        return Fault(column, f"{reader.field}: {error.what}; {error.fix}")
    if isinstance(error, WantsText) or not row.value:
        column, where = field_column(line, reader.field), ""
    else:
        column, where = element_column(line, reader.field, error.offset), f"element {error.offset}: "
    return Fault(column, f"{reader.field}: {where}{error.what}; {error.fix}")


def end_documents(ids: NDArray[np.int64], sizes: NDArray[np.int64], dtype: np.dtype[np.integer]) -> NDArray[np.integer]:
    """The same documents in a store's type, each followed by token 0."""
    if len(ids) >= MANY_IDS and (compiled := end_with_zero(ids, sizes, dtype)) is not None:
        return compiled
    ended = np.zeros(len(ids) + len(sizes), dtype)
    ended[np.arange(len(ids)) + np.repeat(np.arange(len(sizes)), sizes)] = ids
    return ended
