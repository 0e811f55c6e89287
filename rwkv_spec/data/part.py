"""Parts: the encoded documents of one piece of a source, written beside the store, later joined in order.

A part is three flat files, ids, sizes and marks (1: held out). A line range gives the same part in this process and in
a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from rwkv_spec.data.binidx import dtype_for
from rwkv_spec.data.encode import Encoder, LineEncoder, WantsText, end_documents
from rwkv_spec.data.rows import RowReader
from rwkv_spec.data.source import Source
from rwkv_spec.errors import DataError
from rwkv_spec.tokenizer.build import recipe_of
from rwkv_spec.tokenizer.protocol import EncodeError, Tokenizer

# Values encoded at once from arrays: a few tens of megabytes of work space, whatever the array's size.
_CHUNK = 1 << 20
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Job:
    """A range of whole lines to encode. Plain values only: it travels to a worker as JSON.

    `num_bytes` counts those of all jobs, this one among them.
    """

    path: str
    kind: str
    start: int
    stop: int
    field: str
    where: Mapping[str, object] | None
    out: str
    num_bytes: int


@dataclass
class Part:
    """What a piece held. Lines and faults count from the piece's own first line."""

    out: str
    num_documents: int = 0
    num_tokens: int = 0
    num_held_out: int = 0
    num_lines: int = 0
    num_blank: int = 0
    first_blank: int = 0
    num_empty: int = 0
    num_faults: int = 0
    faults: list[tuple[int, int, str]] = field(default_factory=list)
    values_seen: dict[str, list[str]] = field(default_factory=dict)


class PartWriter:
    """Appends documents to a part's three files."""

    def __init__(self, out: str, dtype: np.dtype[np.integer]) -> None:
        self.part = Part(out)
        self._dtype = dtype

    def __enter__(self) -> PartWriter:
        self._ids = ids_path(self.part.out).open("wb")
        self._sizes = sizes_path(self.part.out).open("wb")
        self._marks = marks_path(self.part.out).open("wb")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in (self._ids, self._sizes, self._marks):
            file.close()

    def add(self, ids: NDArray[np.int64], sizes: NDArray[np.int64], held_out: NDArray[np.bool_]) -> None:
        """Append documents without their final 0, which is added here. Empty ones are counted and left out."""
        full = sizes > 0
        self.part.num_empty += int((~full).sum())
        self.write_ids(end_documents(ids, sizes[full], self._dtype))
        self.write_documents(sizes[full] + 1, held_out[full])

    def write_ids(self, ids: NDArray[np.integer]) -> None:
        self._ids.write(ids.astype(self._dtype, copy=False).data)
        self.part.num_tokens += len(ids)

    def write_documents(self, sizes: NDArray[np.int64], held_out: NDArray[np.bool_]) -> None:
        if sizes.size and int(sizes.max()) > np.iinfo(np.int32).max:
            raise DataError(f"a document of {int(sizes.max())} tokens is longer than 2^31 - 1; split it")
        self._sizes.write(sizes.astype("<i4").data)
        self._marks.write(held_out.astype(np.uint8).data)
        self.part.num_documents += len(sizes)
        self.part.num_held_out += int(held_out.sum())


def ids_path(out: str) -> Path:
    return Path(f"{out}.ids")


def sizes_path(out: str) -> Path:
    return Path(f"{out}.sizes")


def marks_path(out: str) -> Path:
    return Path(f"{out}.marks")


def encode_range(job: Job, tokenizer: Tokenizer, progress: Progress) -> Part:
    """Encode the rows of a byte range into a part. Faulty rows are noted in it: which line they are is known later."""
    reader = RowReader(Path(job.path), job.kind, job.field, job.where)
    encoder = LineEncoder(reader, tokenizer, num_bytes=job.num_bytes)
    with PartWriter(job.out, dtype_for(tokenizer.vocab_size)) as writer:
        for num_bytes, block in reader.blocks(job.start, job.stop):
            found = encoder.documents(block)
            writer.add(found.ids, found.sizes, found.held_out)
            progress(num_bytes)
    part = writer.part
    part.num_lines, part.num_blank, part.first_blank = reader.num_lines, reader.num_blank, reader.first_blank
    part.num_faults, part.faults, part.values_seen = reader.num_faults, reader.faults, reader.values_seen
    return part


def encode_array(source: Source, tokenizer: Tokenizer, out: str, progress: Progress) -> Part:
    """Encode .npy files, arrays and lists: a row, or a whole flat array, is a document."""
    encoder = Encoder(tokenizer)
    with PartWriter(out, dtype_for(tokenizer.vocab_size)) as writer:
        if recipe_of(tokenizer) is None:
            _encode_whole_rows(source, encoder, writer, progress)
        elif source.array is not None and source.array.ndim == 2:
            _encode_matrix(source, encoder, writer, progress)
        else:
            _encode_flat_rows(source, encoder, writer, progress)
    return writer.part


def _encode_whole_rows(source: Source, encoder: Encoder, writer: PartWriter, progress: Progress) -> None:
    """A user's own tokenizer may look at more than one value at a time: it gets whole documents."""
    for number, row in enumerate(source.rows()):
        try:
            ids = encoder.encode(row)
        except EncodeError as error:
            raise DataError(
                f"{source.name}: row {number}, element {error.offset}: {error.what}; {error.fix}"
            ) from error
        writer.add(ids, np.array([len(ids)], np.int64), np.zeros(1, np.bool_))
        progress(row.nbytes)


def _encode_matrix(source: Source, encoder: Encoder, writer: PartWriter, progress: Progress) -> None:
    num_rows, num_columns = source.num_rows, source.row_length(0)
    if num_columns > _CHUNK:
        _encode_flat_rows(source, encoder, writer, progress)
        return
    rows_each = max(1, _CHUNK // num_columns)
    for first in range(0, num_rows, rows_each):
        block = source.block(first, min(first + rows_each, num_rows))
        ids = _encode_values(encoder, block.ravel(), source, first * num_columns)
        sizes = np.full(len(block), num_columns, np.int64)
        writer.add(ids, sizes, np.zeros(len(block), np.bool_))
        progress(block.nbytes)


def _encode_flat_rows(source: Source, encoder: Encoder, writer: PartWriter, progress: Progress) -> None:
    """Documents of any length, a chunk of values at a time."""
    for row in range(source.num_rows):
        length = source.row_length(row)
        if length == 0:
            writer.part.num_empty += 1
            continue
        for first in range(0, length, _CHUNK):
            chunk = source.piece(row, first, min(first + _CHUNK, length))
            writer.write_ids(_encode_values(encoder, chunk, source, first, row))
            progress(chunk.nbytes)
        writer.write_ids(np.zeros(1, np.int64))
        writer.write_documents(np.array([length + 1], np.int64), np.zeros(1, np.bool_))


def _encode_values(
    encoder: Encoder, values: NDArray[np.integer], source: Source, first: int, row: int | None = None
) -> NDArray[np.int64]:
    """Ids of values that begin at element `first` of a row, or of the whole matrix."""
    try:
        return encoder.encode_values(values)
    except WantsText as error:
        raise DataError(f"{source.name}: {error.what}; {error.fix}") from error
    except EncodeError as error:
        at = first + error.offset
        number, element = divmod(at, source.row_length(0)) if row is None else (row, at)
        raise DataError(f"{source.name}: row {number}, element {element}: {error.what}; {error.fix}") from error
