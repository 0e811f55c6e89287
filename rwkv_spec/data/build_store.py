"""Builds a token store in an empty folder: hash and encode the sources, choose what is held out, join, describe."""

from __future__ import annotations

import hashlib
import itertools
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rwkv_spec.data.binidx import IndexedReader, IndexedWriter, bin_path, dtype_for, idx_path
from rwkv_spec.data.estimate import sample
from rwkv_spec.data.faults import raise_faults, raise_no_match
from rwkv_spec.data.holdout import Choice, EvalRule, choose
from rwkv_spec.data.join import Mask, join_part
from rwkv_spec.data.part import Job, Part, encode_array
from rwkv_spec.data.pool import job_bytes, run_jobs
from rwkv_spec.data.source import LINE_KINDS, Source, content_hash, file_hash
from rwkv_spec.data.store import FORMAT, FileRecord, Manifest, SourceRecord
from rwkv_spec.errors import DataError
from rwkv_spec.tokenizer.protocol import SavesVocab, Tokenizer

_SAMPLE_BYTES = 1 << 20
_REPORT_SECONDS = 0.25


@dataclass(frozen=True)
class Building:
    """All that a build needs. `folder` is empty and ours."""

    sources: tuple[Source, ...]
    eval_sources: tuple[Source, ...]
    tokenizer: Tokenizer
    field: str
    eval_rule: EvalRule | None
    seed: int
    key: str
    eval_description: dict[str, object]
    folder: Path
    processes: int
    progress: Callable[[int, int], None] | None


@dataclass
class _Piece:
    """A source on its way into the store."""

    source: Source
    is_eval: bool
    files: tuple[FileRecord, ...] = ()
    content: str = ""
    parts: list[Part] = field(default_factory=list)
    documents: int = 0
    tokens: int = 0
    held_out: int = 0
    train_tokens: int = 0

    def record(self) -> SourceRecord:
        lines_before, first_blank = 0, 0
        for part in self.parts:
            if part.first_blank and not first_blank:
                first_blank = lines_before + part.first_blank
            lines_before += part.num_lines
        return SourceRecord(
            kind=self.source.kind,
            name=self.source.full_name,
            files=self.files,
            content=self.content,
            documents=self.documents,
            held_out=self.held_out,
            tokens=self.tokens,
            train_tokens=self.train_tokens,
            lines=lines_before,
            blank_lines=sum(part.num_blank for part in self.parts),
            first_blank_line=first_blank,
            empty_documents=sum(part.num_empty for part in self.parts),
        )


class _Meter:
    """Passes progress on a few times a second. Every byte counts twice: it is hashed, and it is encoded."""

    def __init__(self, total: int, report: Callable[[int, int], None] | None) -> None:
        self._total, self._report = max(total, 1), report
        self._done, self._last = 0, 0.0

    def add(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if self._report is not None and now - self._last >= _REPORT_SECONDS:
            self._last = now
            self._report(min(self._done, self._total), self._total)

    def finish(self) -> None:
        if self._report is not None:
            self._report(self._total, self._total)


def build(order: Building) -> Manifest:
    """Write train and eval files and vocab.txt into the folder, and return the manifest that describes them."""
    pieces = [_Piece(source, is_eval=False) for source in order.sources]
    pieces += [_Piece(source, is_eval=True) for source in order.eval_sources]
    _check_room(order, pieces)
    meter = _Meter(2 * sum(piece.source.num_bytes for piece in pieces), order.progress)
    for piece in pieces:
        _hash(piece, order.tokenizer, meter)
    _encode(order, pieces, meter)
    for piece in pieces:
        _check_unchanged(piece)
        if piece.documents == 0:
            raise DataError(f"{piece.source.name}: holds no document that has a token")
    choice = _choice(order, pieces)
    hashes = _join(order, pieces, choice)
    if isinstance(order.tokenizer, SavesVocab):
        order.tokenizer.save_vocab(order.folder / "vocab.txt")
    meter.finish()
    return _describe(order, pieces, choice, hashes)


def _check_room(order: Building, pieces: Sequence[_Piece]) -> None:
    """Refuse before writing what the disk cannot hold, judged from the first megabyte of each source."""
    itemsize = dtype_for(order.tokenizer.vocab_size).itemsize
    needed = 0.0
    for piece in pieces:
        if piece.source.kind != "binidx":
            found = sample(
                piece.source, tokenizer=order.tokenizer, field=order.field, where=None, max_bytes=_SAMPLE_BYTES
            )
            needed += found.tokens * itemsize + found.documents * 20
    free = shutil.disk_usage(order.folder).free
    # Parts are deleted as they are joined, so that little more than the store's own size is in use at any time.
    if needed * 1.1 > free:
        raise DataError(
            f"{order.folder.parent}: the token store will take about {needed / 1e9:.1f} GB and the disk has "
            f"{free / 1e9:.1f} GB free; free some space or set data.store to another disk"
        )


def _hash(piece: _Piece, tokenizer: Tokenizer, meter: _Meter) -> None:
    source = piece.source
    if source.kind == "binidx":
        _scan_pair(piece, tokenizer, meter)
        return
    if not source.files:
        piece.content = content_hash(source)
        meter.add(source.num_bytes)
        return
    piece.files = tuple(_file_record(path, lambda chunk: meter.add(len(chunk))) for path in source.files)
    piece.content = piece.files[0].sha256


def _file_record(path: Path, inspect: Callable[[bytes], None]) -> FileRecord:
    found = path.stat()
    return FileRecord(str(path.absolute()), found.st_size, found.st_mtime_ns, file_hash(path, inspect))


def _scan_pair(piece: _Piece, tokenizer: Tokenizer, meter: _Meter) -> None:
    """Hash a pair and look at every id once, in one reading."""
    assert piece.source.path is not None
    with IndexedReader(piece.source.path) as reader:
        vocab_size, start = tokenizer.vocab_size, 0

        def inspect(chunk: bytes) -> None:
            nonlocal start
            ids = np.frombuffer(chunk, reader.dtype)
            wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
            if wrong.size:
                at = start + int(wrong[0])
                document = reader.document_at(at)
                raise DataError(
                    f"{piece.source.name}.bin: document {document}, offset {at - reader.document_start(document)}: id "
                    f"{ids[wrong[0]]} is outside 0..{vocab_size - 1}, the ids of the tokenizer; choose the tokenizer "
                    "that made this data, or ids with a larger vocab_size"
                )
            start += len(ids)
            meter.add(2 * len(chunk))

        bin_file, idx_file = piece.source.files
        piece.files = (_file_record(bin_file, inspect), _file_record(idx_file, lambda chunk: meter.add(2 * len(chunk))))
        piece.documents, piece.tokens = reader.num_documents, reader.num_tokens
    piece.content = hashlib.sha256("".join(file.sha256 for file in piece.files).encode()).hexdigest()


def _encode(order: Building, pieces: Sequence[_Piece], meter: _Meter) -> None:
    """Arrays first: they are quick. Then the ranges of all line files together, so that all cores stay busy."""
    jobs: list[Job] = []
    owners: list[_Piece] = []
    total = sum(piece.source.num_bytes for piece in pieces if piece.source.kind in LINE_KINDS)
    for piece in pieces:
        if piece.source.kind in LINE_KINDS:
            where = order.eval_rule.where if order.eval_rule and not piece.is_eval else None
            for start, stop in _ranges(piece.source.files[0], job_bytes(total, order.processes)):
                out = str(order.folder / f"part-{len(jobs):06d}")
                path = str(piece.source.files[0])
                jobs.append(Job(path, piece.source.kind, start, stop, order.field, where, out, total))
                owners.append(piece)
        elif piece.source.kind != "binidx":
            out = str(order.folder / f"array-{pieces.index(piece):06d}")
            piece.parts = [encode_array(piece.source, order.tokenizer, out, meter.add)]
    parts = run_jobs(jobs, order.tokenizer, processes=order.processes, progress=meter.add)
    for owner, part in zip(owners, parts, strict=False):
        owner.parts.append(part)
    raise_faults([(piece.source.name, piece.parts) for piece in pieces])
    for piece in pieces:
        if piece.parts:
            piece.documents = sum(part.num_documents for part in piece.parts)
            piece.tokens = sum(part.num_tokens for part in piece.parts)


def _ranges(path: Path, size: int) -> list[tuple[int, int]]:
    """Stretches of about `size` bytes that begin and end where lines do."""
    total = path.stat().st_size
    cuts = [0]
    with path.open("rb") as file:
        while cuts[-1] + size < total:
            file.seek(cuts[-1] + size)
            file.readline()
            cuts.append(file.tell())
    if cuts[-1] < total:
        cuts.append(total)
    return list(itertools.pairwise(cuts))


def _check_unchanged(piece: _Piece) -> None:
    for file in piece.files:
        found = Path(file.path).stat()
        if (found.st_size, found.st_mtime_ns) != (file.bytes, file.mtime_ns):
            raise DataError(f"{file.path}: was changed while it was being read; start again when it is complete")


def _choice(order: Building, pieces: Sequence[_Piece]) -> Choice:
    """What is held out by number, if anything; an error where no document is held out, or none is left to train on."""
    trained = [piece for piece in pieces if not piece.is_eval]
    total = sum(piece.documents for piece in trained)
    rule = order.eval_rule
    if rule is not None and rule.is_chosen:
        return choose(rule, total, order.seed)
    if rule is not None and rule.where is not None:
        for piece in trained:
            piece.held_out = sum(part.num_held_out for part in piece.parts)
        held_out = sum(piece.held_out for piece in trained)
        if held_out == 0:
            raise_no_match(rule.where, [part.values_seen for piece in trained for part in piece.parts])
        if held_out == total:
            raise DataError(
                f"data.eval.where: holds out all {total} document(s) and leaves none to train on; name fewer values"
            )
    return Choice(0, total, order.seed)


def _join(order: Building, pieces: Sequence[_Piece], choice: Choice) -> tuple[str, str]:
    """Write the copied documents to train and eval; the hashes of the two .bin files, '' where there is none."""
    dtype = dtype_for(order.tokenizer.vocab_size)
    first = 0
    train, held_out = IndexedWriter(order.folder / "train", dtype), IndexedWriter(order.folder / "eval", dtype)
    with train, held_out:
        for piece in pieces:
            out = choice.documents(first, piece.documents) if not piece.is_eval else np.arange(piece.documents)
            if piece.is_eval or choice.count:
                piece.held_out = len(out)
            if piece.source.path is not None and piece.source.kind == "binidx":
                with IndexedReader(piece.source.path) as reader:
                    piece.train_tokens = piece.tokens - int(reader.sizes[out].sum(dtype=np.int64))
            number = first
            for part in piece.parts:
                piece.train_tokens += join_part(part, train, held_out, mask=_mask(piece, choice, number))
                number += part.num_documents
            first += piece.documents
    is_copied = any(not piece.is_eval and piece.source.kind != "binidx" for piece in pieces)
    kept = (is_copied, held_out.num_documents > 0)
    for writer, is_kept in zip((train, held_out), kept, strict=True):
        if not is_kept:
            bin_path(writer.prefix).unlink()
            idx_path(writer.prefix).unlink()
    return train.sha256 if kept[0] else "", held_out.sha256 if kept[1] else ""


def _mask(piece: _Piece, choice: Choice, first: int) -> Mask | None:
    """Which documents of a part, whose first one has this number over all sources, are held out."""
    if piece.is_eval:
        return lambda start, stop: np.ones(stop - start, np.bool_)
    if choice.count:
        return lambda start, stop: choice.mask(first + start, first + stop)
    return None


def _describe(order: Building, pieces: Sequence[_Piece], choice: Choice, hashes: tuple[str, str]) -> Manifest:
    trained = [piece for piece in pieces if not piece.is_eval]
    train_tokens = sum(piece.train_tokens for piece in trained)
    if train_tokens < 2:
        raise DataError(
            f"the training data has {train_tokens} token(s); at least 2 are needed, an input and its target"
        )
    held_out = sum(piece.held_out for piece in pieces)
    return Manifest(
        format=FORMAT,
        key=order.key,
        tokenizer=repr(order.tokenizer),
        fingerprint=order.tokenizer.fingerprint,
        vocab_size=order.tokenizer.vocab_size,
        field=order.field,
        eval=order.eval_description,
        seed=order.seed,
        sources=tuple(piece.record() for piece in trained),
        eval_sources=tuple(piece.record() for piece in pieces if piece.is_eval),
        chosen=choice.count,
        train_documents=sum(piece.documents for piece in pieces) - held_out,
        train_tokens=train_tokens,
        eval_documents=held_out,
        eval_tokens=sum(piece.tokens for piece in pieces) - train_tokens,
        train_sha256=hashes[0],
        eval_sha256=hashes[1],
    )
