"""What can be trained on: .npy, .jsonl, .txt, .bin/.idx, arrays and lists. Says in words what is wrong with one.

Opening reads headers only, so that a wrong path is found before anything is prepared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from rwkv_spec.data.binidx import IndexedReader, bin_path, idx_path
from rwkv_spec.errors import DataError
from rwkv_spec.paths import expanded
from rwkv_spec.tokenizer.protocol import EncodeError, advice, integer_array

# What a source may be given as: a path, a 1-D or 2-D integer array, a list of integers, or a list of such lists.
Given = str | Path | NDArray[np.integer] | Sequence[object]

LINE_KINDS = ("jsonl", "txt")
_CHUNK_BYTES = 1 << 22
_HINTS = {
    ".gz": "decompress it first",
    ".bz2": "decompress it first",
    ".xz": "decompress it first",
    ".zst": "decompress it first",
    ".zip": "unpack it first",
    ".npz": "save one array as .npy with numpy.save",
    ".json": "write one object a line and name it .jsonl",
    ".csv": "write the column as .txt, a document a line, or as .npy",
    ".tsv": "write the column as .txt, a document a line, or as .npy",
    ".parquet": "write its rows as .jsonl",
}


@dataclass(frozen=True)
class Source:
    """One opened source. `path` is the file, or the prefix of a .bin/.idx pair; `array` has the values of an array."""

    kind: str
    name: str
    path: Path | None = None
    array: NDArray[np.integer] | None = None
    ragged: tuple[NDArray[np.int64], ...] = ()

    @property
    def files(self) -> tuple[Path, ...]:
        if self.path is None:
            return ()
        return (bin_path(self.path), idx_path(self.path)) if self.kind == "binidx" else (self.path,)

    @property
    def full_name(self) -> str:
        """The absolute path, or the prefix of a pair; for an array what it was called."""
        return str(self.path.absolute()) if self.path is not None else self.name

    @property
    def num_bytes(self) -> int:
        """How much there is to read."""
        if self.array is not None:
            return int(self.array.nbytes)
        return sum(path.stat().st_size for path in self.files) + sum(row.nbytes for row in self.ragged)

    @property
    def num_rows(self) -> int:
        """Documents of an array."""
        if self.array is None:
            return len(self.ragged)
        return 1 if self.array.ndim == 1 else len(self.array)

    def row_length(self, row: int) -> int:
        return len(self.ragged[row]) if self.array is None else int(self.array.shape[-1])

    def block(self, first: int, stop: int) -> NDArray[np.integer]:
        """Rows first … stop-1 of a 2-D array."""
        assert self.array is not None
        columns = self.array.shape[1]
        if self._is_flat_file:
            return self._from_file(first * columns, (stop - first) * columns).reshape(-1, columns)
        return self.array[first:stop]

    def piece(self, row: int, first: int, stop: int) -> NDArray[np.integer]:
        """Values first … stop-1 of one row."""
        if self.array is None:
            return self.ragged[row][first:stop]
        if self._is_flat_file:
            return self._from_file(row * self.array.shape[-1] + first, stop - first)
        return (self.array if self.array.ndim == 1 else self.array[row])[first:stop]

    @property
    def _is_flat_file(self) -> bool:
        return self.path is not None and isinstance(self.array, np.memmap) and bool(self.array.flags.c_contiguous)

    def _from_file(self, start: int, count: int) -> NDArray[np.integer]:
        # Reading, not mapping: pages of a map that is read through count as this process's memory.
        assert isinstance(self.array, np.memmap) and self.path is not None
        dtype: np.dtype[np.integer] = self.array.dtype
        return np.fromfile(self.path, dtype, count, offset=self.array.offset + start * dtype.itemsize)

    def rows(self) -> Iterator[NDArray[np.integer]]:
        """The documents of an array, one after the other."""
        if self.array is None:
            yield from self.ragged
        elif self.array.ndim == 1:
            yield self.array
        else:
            yield from self.array


def open_source(given: Given, *, name: str = "data") -> Source:
    """Open one source; DataError where it is missing, empty, of an unknown kind or holds no integers."""
    if isinstance(given, (str, Path)):
        return _open_path(expanded(given))
    if isinstance(given, np.ndarray) or hasattr(given, "__array__"):
        return Source("array", name, array=_checked(np.asarray(given), name))
    if isinstance(given, (list, tuple)):
        return _open_list(given, name)
    raise DataError(
        f"{name}: is {type(given).__name__}; give a path, an integer array or a list of integers or of lists"
    )


def _open_path(path: Path) -> Source:
    prefix = _pair_prefix(path)
    if prefix is not None:
        IndexedReader(prefix).close()
        return Source("binidx", str(prefix), path=prefix)
    if path.is_dir():
        raise DataError(f"{path}: is a folder; name a file in it, or list several")
    if not path.exists():
        raise DataError(f"{path.absolute()}: no such file")
    kind = path.suffix.lower().lstrip(".")
    if kind not in (*LINE_KINDS, "npy"):
        hint = _HINTS.get(path.suffix.lower(), "known are .jsonl, .txt, .npy and .bin/.idx")
        raise DataError(f"{path}: cannot read files of kind {path.suffix or '(no ending)'}; {hint}")
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty")
    if kind == "npy":
        return Source("npy", str(path), path=path, array=_open_npy(path))
    _check_encoding(path)
    return Source(kind, str(path), path=path)


def _pair_prefix(path: Path) -> Path | None:
    """The prefix of a .bin/.idx pair, from either file's name or from the bare prefix."""
    if path.suffix in (".bin", ".idx"):
        return path.with_suffix("")
    return path if not path.exists() and idx_path(path).exists() else None


def _check_encoding(path: Path) -> None:
    try:
        with path.open("rb") as file:
            head = file.read(4)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{path}: is UTF-16 or UTF-32; save it as UTF-8")
    if head.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK\x03\x04")):
        raise DataError(f"{path}: is compressed, whatever its name says; decompress it first")


def _open_npy(path: Path) -> NDArray[np.integer]:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DataError(f"{path}: is no usable .npy file of integers: {error}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not isinstance(array, np.ndarray):
        array.close()
        raise DataError(f"{path}: holds several arrays (.npz); save one as .npy with numpy.save")
    return _checked(array, str(path))


def _checked(array: NDArray[np.generic], name: str) -> NDArray[np.integer]:
    if array.dtype.kind not in "iu":
        raise DataError(f"{name}: holds {array.dtype}, not integers; {advice(array.dtype.kind)}")
    if array.ndim not in (1, 2):
        raise DataError(f"{name}: has {array.ndim} dimensions; give 1 (one document) or 2 (a document a row)")
    if array.size == 0:
        raise DataError(f"{name}: holds no values (shape {array.shape})")
    return cast("NDArray[np.integer]", array)


def _open_list(given: Sequence[object], name: str) -> Source:
    if not given:
        raise DataError(f"{name}: the list is empty")
    nested = [isinstance(item, (list, tuple, np.ndarray)) for item in given]
    if any(isinstance(item, str) for item in given):
        raise DataError(f"{name}: holds text; write texts to a .txt or .jsonl file, and give integers here")
    if not any(nested):
        return Source("array", name, ragged=(_integers(given, name),))
    if not all(nested):
        at = nested.index(not nested[0])
        raise DataError(f"{name}: mixes integers and lists (element {at}); give a list of integers, or a list of lists")
    return Source("array", name, ragged=tuple(_integers(row, f"{name}: row {i}") for i, row in enumerate(given)))


def _integers(values: object, name: str) -> NDArray[np.int64]:
    try:
        return integer_array(cast("Sequence[int]", values))
    except EncodeError as error:
        raise DataError(f"{name}: element {error.offset}: {error.what}; {error.fix}") from None


def content_hash(source: Source) -> str:
    """sha256 of what a source in memory holds."""
    digest = hashlib.sha256()
    for row in source.rows():
        digest.update(b"%d:" % len(row))
        for start in range(0, len(row), _CHUNK_BYTES // 8):
            digest.update(np.ascontiguousarray(row[start : start + _CHUNK_BYTES // 8], "<i8").data)
    return digest.hexdigest()


def file_hash(path: Path, inspect: Callable[[bytes], None] | None = None) -> str:
    """sha256 of a file, read a few megabytes at a time; `inspect` sees each piece."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                if inspect is not None:
                    inspect(chunk)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()
