"""A finished token store: its manifest, and the streams that training and evaluation read. Opening it touches no source
but .bin/.idx pairs, which are read where they lie.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rwkv_spec.data.binidx import IndexedReader
from rwkv_spec.data.holdout import Choice
from rwkv_spec.data.stream import Documents, Segment, TokenStream
from rwkv_spec.errors import DataError

FORMAT = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class FileRecord:
    """A source file as it was when it was read."""

    path: str
    bytes: int
    mtime_ns: int
    sha256: str


@dataclass(frozen=True)
class SourceRecord:
    """What one source gave. `train_tokens` counts what is left after the held-out documents."""

    kind: str
    name: str
    files: tuple[FileRecord, ...]
    content: str
    documents: int
    held_out: int
    tokens: int
    train_tokens: int
    lines: int = 0
    blank_lines: int = 0
    first_blank_line: int = 0
    empty_documents: int = 0


@dataclass(frozen=True)
class Manifest:
    """All that a store is: what it was made from and with, and what is in it."""

    format: int
    key: str
    tokenizer: str
    fingerprint: str
    vocab_size: int
    field: str
    eval: dict[str, object]
    seed: int
    sources: tuple[SourceRecord, ...]
    eval_sources: tuple[SourceRecord, ...]
    chosen: int
    train_documents: int
    train_tokens: int
    eval_documents: int
    eval_tokens: int
    train_sha256: str
    eval_sha256: str

    @property
    def hash(self) -> str:
        """Names the tokens themselves, wherever they came from: equal hashes mean equal training and evaluation."""
        pairs = [record.content if record.kind == "binidx" else record.train_tokens for record in self.sources]
        held = [record.content for record in self.eval_sources if record.kind == "binidx"]
        what = [self.train_sha256, self.eval_sha256, pairs, held, self.chosen, self.seed if self.chosen else 0]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a finished store; None where there is none, or one that this version cannot read."""
    try:
        fields = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if fields["format"] != FORMAT:
            return None
        for name in ("sources", "eval_sources"):
            records = [{**r, "files": tuple(FileRecord(**f) for f in r["files"])} for r in fields[name]]
            fields[name] = tuple(SourceRecord(**record) for record in records)
        return Manifest(**fields)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError):
        return None
    except OSError as error:
        raise DataError(f"{folder / MANIFEST}: cannot be read: {error.strerror or error}") from error


@dataclass(frozen=True)
class Store:
    """`train` is one stream of tokens; `eval_documents` come without their final 0. `reused`: it was there already."""

    dir: Path
    manifest: Manifest
    train: TokenStream
    eval_documents: Sequence[NDArray[np.int64]]
    reused: bool = False

    @property
    def num_train_documents(self) -> int:
        return self.manifest.train_documents

    @property
    def hash(self) -> str:
        return self.manifest.hash

    def notes(self) -> list[str]:
        """What a person should know about rows that were left out."""
        found = []
        for record in (*self.manifest.sources, *self.manifest.eval_sources):
            if record.blank_lines:
                first = f"the first is line {record.first_blank_line}"
                found.append(f"{record.name}: {record.blank_lines} blank line(s) skipped; {first}")
            if record.empty_documents:
                found.append(f"{record.name}: {record.empty_documents} document(s) without a token skipped")
        return found


def open_store(folder: Path, *, reused: bool = True, manifest: Manifest | None = None) -> Store:
    """Open a finished store. DataError where there is none, or where a file is not what the manifest says."""
    folder = Path(folder)
    manifest = manifest or read_manifest(folder)
    if manifest is None:
        raise DataError(f"{folder}: holds no finished token store of this version; prepare the data first")
    copied = [record for record in manifest.sources if record.kind != "binidx"]
    copied_eval = [record for record in manifest.eval_sources if record.kind != "binidx"]
    train = _pair(folder / "train", manifest.vocab_size) if copied else None
    held_out = _pair(folder / "eval", manifest.vocab_size) if copied_eval or any(r.held_out for r in copied) else None
    if train is not None and train.num_tokens != sum(record.train_tokens for record in copied):
        raise DataError(f"{folder / 'train.bin'}: is not the file that the manifest describes; prepare the data again")
    stream, eval_documents = _lay_out(manifest, train, held_out)
    if (stream.num_tokens, len(eval_documents)) != (manifest.train_tokens, manifest.eval_documents):
        raise DataError(f"{folder}: its files do not hold what its manifest says; prepare the data again")
    return Store(folder, manifest, stream, eval_documents, reused)


def _pair(prefix: Path, vocab_size: int) -> IndexedReader:
    reader = IndexedReader(prefix)
    if reader.dtype.itemsize < (2 if vocab_size <= 65_536 else 4):
        raise DataError(f"{prefix}.idx: {reader.dtype} cannot hold {vocab_size} ids; prepare the data again")
    return reader


def _lay_out(
    manifest: Manifest, train: IndexedReader | None, held_out: IndexedReader | None
) -> tuple[TokenStream, Documents]:
    """Streams over all sources in their order: copied ones lie in train and eval, pairs are read in place."""
    choice = Choice(manifest.chosen, sum(record.documents for record in manifest.sources), manifest.seed)
    segments: list[Segment] = []
    places: list[tuple[IndexedReader, NDArray[np.int64]]] = []
    number = start = eval_start = 0
    for record in (*manifest.sources, *manifest.eval_sources):
        is_eval = number >= choice.total
        if record.kind == "binidx":
            reader = IndexedReader(Path(record.name))
            out = np.arange(reader.num_documents) if is_eval else choice.documents(number, record.documents)
            segments += [] if is_eval else _between(reader, out)
            places.append((reader, out))
        else:
            if train is not None and not is_eval:
                segments.append(Segment(train.tokens, start, start + record.train_tokens))
                start += record.train_tokens
            if held_out is not None:
                places.append((held_out, np.arange(eval_start, eval_start + record.held_out)))
                eval_start += record.held_out
        number += record.documents
    return TokenStream(segments), Documents(places)


def _between(reader: IndexedReader, held_out: NDArray[np.int64]) -> list[Segment]:
    """The stretches of a pair between its held-out documents."""
    segments: list[Segment] = []
    start = 0
    for number in held_out.tolist():
        first = reader.document_start(number)
        segments.append(Segment(reader.tokens, start, first))
        start = first + int(reader.sizes[number])
    segments.append(Segment(reader.tokens, start, reader.num_tokens))
    return segments
