"""Megatron's MMapIndexedDataset v1 (.bin/.idx), byte for byte: a checking reader and a streaming, atomic writer.

The reader believes nothing a header says before the file sizes confirm it; its arrays stay valid after close().
The writer keeps constant memory, renames both files into place with .idx last, and never leaves a pair that mismatches.
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from rwkv_spec.atomic import temporary_sibling
from rwkv_spec.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_CODES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOAT_CODES = (6, 7)
_WRITER_CODES = {np.dtype("<u2"): 8, np.dtype("<i4"): 4}
_CHUNK = 1 << 20
IntArray = NDArray[np.integer]


def bin_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".idx")


def dtype_for(vocab_size: int) -> np.dtype[np.integer]:
    """The smallest store type that holds every id below vocab_size: 16 bits up to 65,536 ids, else 32."""
    return np.dtype("<u2") if vocab_size <= 65_536 else np.dtype("<i4")


class IndexedReader:
    """The documents of prefix.bin and prefix.idx, mapped in place. A pair that contradicts itself is a DataError."""

    def __init__(self, prefix: Path) -> None:
        self.prefix = Path(prefix)
        for path in (idx_path(self.prefix), bin_path(self.prefix)):
            if not path.is_file():
                raise DataError(f"{path}: no such file; a token store is a pair of {self.prefix.name}.bin and .idx")
        try:
            self._open()
        except OSError as error:
            raise DataError(f"{self.prefix}.idx: cannot be read: {error.strerror or error}") from error

    def _open(self) -> None:
        path = idx_path(self.prefix)
        idx_bytes, bin_bytes = path.stat().st_size, bin_path(self.prefix).stat().st_size
        self.dtype, num_items, num_bounds = _read_header(path, idx_bytes)
        self.num_documents = num_items
        self.sizes: IntArray = _map(path, "<i4", _HEADER.size, num_items)
        self.pointers: IntArray = _map(path, "<i8", _HEADER.size + 4 * num_items, num_items)
        total = _check_sizes(path, num_items, self.dtype.itemsize)
        _check_bounds(path, num_items, num_bounds)
        if total * self.dtype.itemsize != bin_bytes:
            raise DataError(
                f"{bin_path(self.prefix)}: has {bin_bytes} bytes, but its .idx describes {total} tokens of "
                f"{self.dtype.itemsize} bytes = {total * self.dtype.itemsize}; one of the two is truncated, extended "
                "or from another preparation: make the pair again"
            )
        self.num_tokens = total
        self.tokens: IntArray = _map(bin_path(self.prefix), self.dtype.str, 0, total)

    def document(self, index: int) -> IntArray:
        """The ids of one document: a view into the file, valid as long as it is held, also after close()."""
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} is outside 0..{self.num_documents - 1}")
        start = self.document_start(index)
        return self.tokens[start : start + int(self.sizes[index])]

    def document_start(self, index: int) -> int:
        """Offset in tokens of a document's first one."""
        return int(self.pointers[index]) // self.dtype.itemsize

    def document_at(self, offset: int) -> int:
        """The document that holds the token at an offset."""
        return int(np.searchsorted(self.pointers, offset * self.dtype.itemsize, side="right")) - 1

    def close(self) -> None:
        """Let go of the maps. Arrays handed out keep their own hold, so that none of them can dangle."""
        nothing = np.zeros(0, np.int64)
        self.tokens, self.sizes, self.pointers = nothing.astype(self.dtype), nothing, nothing

    def __enter__(self) -> IndexedReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _read_header(path: Path, idx_bytes: int) -> tuple[np.dtype[np.integer], int, int]:
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
    if not head.startswith(MAGIC):
        raise DataError(f"{path}: is no token index: it does not start with MMIDIDX")
    if len(head) < _HEADER.size:
        raise DataError(f"{path}: is truncated inside its header ({len(head)} of {_HEADER.size} bytes)")
    _, version, code, num_items, num_bounds = _HEADER.unpack(head)
    if version != 1:
        raise DataError(f"{path}: is a token index of version {version}; only version 1 is known")
    if code in _FLOAT_CODES:
        raise DataError(f"{path}: holds floating-point numbers (dtype code {code}), not token ids")
    if code not in _CODES:
        raise DataError(f"{path}: dtype code {code} is unknown; known are {', '.join(map(str, sorted(_CODES)))}")
    # Python integers do not overflow, so that a lying count is caught here, before anything is mapped or allocated.
    expected = _HEADER.size + 12 * num_items + 8 * num_bounds
    if idx_bytes != expected:
        raise DataError(
            f"{path}: has {idx_bytes} bytes, but its header counts {num_items} documents, which take {expected}; "
            "it is truncated, extended or damaged"
        )
    return np.dtype(_CODES[code]), num_items, num_bounds


def _map(path: Path, dtype: str, offset: int, count: int) -> IntArray:
    """A read-only view of a part of a file. An empty one cannot be mapped, and needs no file."""
    if count == 0:
        return np.zeros(0, np.dtype(dtype))
    return np.memmap(path, dtype=np.dtype(dtype), mode="r", offset=offset, shape=(count,)).view(np.ndarray)


def _check_sizes(path: Path, num_items: int, itemsize: int) -> int:
    """The number of tokens, after a check of all sizes and pointers. Reads chunks: mapped pages count as memory."""
    total = 0
    for first in range(0, num_items, _CHUNK):
        count = min(_CHUNK, num_items - first)
        sizes = _read(path, "<i4", _HEADER.size + 4 * first, count)
        pointers = _read(path, "<i8", _HEADER.size + 4 * num_items + 8 * first, count)
        negative = np.flatnonzero(sizes < 0)
        if negative.size:
            raise DataError(f"{path}: document {first + int(negative[0])} has a negative size, {sizes[negative[0]]}")
        expected = (total + np.cumsum(sizes) - sizes) * itemsize
        wrong = np.flatnonzero(expected != pointers)
        if wrong.size:
            at = int(wrong[0])
            raise DataError(
                f"{path}: document {first + at} points to byte {pointers[at]}, but the documents before it end at "
                f"{expected[at]}; the index is damaged or its documents are not back to back"
            )
        total += int(sizes.sum())
    return total


def _check_bounds(path: Path, num_items: int, num_bounds: int) -> None:
    previous = 0
    for first in range(0, num_bounds, _CHUNK):
        start = _HEADER.size + 12 * num_items + 8 * first
        part = _read(path, "<i8", start, min(_CHUNK, num_bounds - first))
        if part[0] < previous or (np.diff(part) < 0).any() or part[-1] > num_items:
            raise DataError(f"{path}: its document bounds do not rise from 0 to {num_items}; the index is damaged")
        previous = int(part[-1])


def _read(path: Path, dtype: str, offset: int, count: int) -> NDArray[np.int64]:
    return np.fromfile(path, np.dtype(dtype), count, offset=offset).astype(np.int64)


class IndexedWriter:
    """Writes prefix.bin and prefix.idx. Leaving the `with` block renames both into place; an exception leaves none."""

    def __init__(self, prefix: Path, dtype: np.dtype[np.integer]) -> None:
        if np.dtype(dtype) not in _WRITER_CODES:
            raise ValueError(f"a token store is written as <u2 or <i4, not as {np.dtype(dtype).str}")
        self.prefix, self.dtype = Path(prefix), np.dtype(dtype)
        self.num_documents = self.num_tokens = self._num_ended = 0
        self._digest = hashlib.sha256()
        self._top = int(np.iinfo(self.dtype).max)

    def __enter__(self) -> IndexedWriter:
        self._bin_temporary = temporary_sibling(bin_path(self.prefix))
        self._idx_temporary = temporary_sibling(idx_path(self.prefix))
        self._bin: BinaryIO = self._bin_temporary.open("wb")
        self._idx: BinaryIO = self._idx_temporary.open("w+b")
        self._idx.write(b"\x00" * _HEADER.size)
        return self

    def add(self, ids: IntArray) -> None:
        """Append one document, its final token 0 included if it is to have one."""
        self.add_many(ids, np.array([len(ids)], np.int64))

    def add_many(self, ids: IntArray, sizes: IntArray) -> None:
        """Append documents that lie back to back in `ids`."""
        self.write_ids(ids)
        self.write_sizes(sizes)

    def write_ids(self, ids: IntArray) -> None:
        """Append ids of documents that write_sizes ends. An id that the type cannot hold is refused, never wrapped."""
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) <= self._top):
            raise DataError(f"{self.prefix}: an id lies outside 0..{self._top}, all that {self.dtype.str} can hold")
        data = np.ascontiguousarray(ids, self.dtype).data
        self._bin.write(data)
        self._digest.update(data)
        self.num_tokens += len(ids)

    def write_sizes(self, sizes: IntArray) -> None:
        """End documents of these sizes."""
        if len(sizes) and int(sizes.max()) > np.iinfo(np.int32).max:
            raise DataError(f"{self.prefix}: a document of {int(sizes.max())} tokens is longer than 2^31 - 1; split it")
        self._idx.write(np.ascontiguousarray(sizes, "<i4").data)
        self.num_documents += len(sizes)
        self._num_ended += int(sizes.sum())

    @property
    def sha256(self) -> str:
        """The hash of the .bin so far."""
        return self._digest.hexdigest()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._bin.close()
            self._idx.close()
            self._bin_temporary.unlink(missing_ok=True)
            self._idx_temporary.unlink(missing_ok=True)

    def _finish(self) -> None:
        if self._num_ended != self.num_tokens:
            raise ValueError(f"{self.num_tokens} ids were written, but the sizes add up to {self._num_ended}")
        self._write_pointers()
        self._idx.seek(0)
        code = _WRITER_CODES[self.dtype]
        self._idx.write(_HEADER.pack(MAGIC, 1, code, self.num_documents, self.num_documents + 1))
        for file in (self._bin, self._idx):
            file.flush()
            os.fsync(file.fileno())
            file.close()
        # Without its .idx an earlier pair is no store: a kill between the two renames leaves nothing that can be read.
        idx_path(self.prefix).unlink(missing_ok=True)
        os.replace(self._bin_temporary, bin_path(self.prefix))
        os.replace(self._idx_temporary, idx_path(self.prefix))

    def _write_pointers(self) -> None:
        """Pointers, then document bounds, from the sizes that lie in the file already: a chunk at a time."""
        start = 0
        for first in range(0, self.num_documents, _CHUNK):
            count = min(_CHUNK, self.num_documents - first)
            self._idx.seek(_HEADER.size + 4 * first)
            sizes = np.frombuffer(self._idx.read(4 * count), "<i4").astype(np.int64) * self.dtype.itemsize
            self._idx.seek(0, os.SEEK_END)
            self._idx.write((start + np.cumsum(sizes) - sizes).astype("<i8").data)
            start += int(sizes.sum())
        for first in range(0, self.num_documents + 1, _CHUNK):
            self._idx.write(np.arange(first, min(first + _CHUNK, self.num_documents + 1), dtype="<i8").data)
