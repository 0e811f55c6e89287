"""Documents to a token store: streaming, on all cores, renamed into place when whole, reused while nothing changed.

A preparation that fails or is killed leaves the earlier store as it was, and nothing that could be taken for a new one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rwkv_spec.atomic import flush_folder, write_json
from rwkv_spec.data.build_store import Building, build
from rwkv_spec.data.holdout import EvalRule
from rwkv_spec.data.pool import num_cores
from rwkv_spec.data.source import Given, Source, content_hash, file_hash, open_source
from rwkv_spec.data.store import FORMAT, MANIFEST, FileRecord, Manifest, SourceRecord, Store, open_store, read_manifest
from rwkv_spec.errors import DataError
from rwkv_spec.lock import Lock, Locked, this_process
from rwkv_spec.tokenizer.build import recipe_of
from rwkv_spec.tokenizer.protocol import Tokenizer

LOCK = "prepare.lock"
_POLL_SECONDS = 0.5
_PATIENCE_SECONDS = 600.0
VOCAB = "vocab.txt"
_STORE_FILES = ("train.bin", "train.idx", "eval.bin", "eval.idx", VOCAB)
# (bytes done, bytes in all)
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Request:
    """What a store is asked to hold. `key` names all that decides ids but the content of files."""

    sources: tuple[Source, ...]
    eval_sources: tuple[Source, ...]
    contents: tuple[str, ...]
    tokenizer: Tokenizer
    field: str
    eval_rule: EvalRule | None
    seed: int

    @property
    def eval_description(self) -> dict[str, object]:
        rule = self.eval_rule
        if rule is None:
            return {}
        if rule.where is not None:
            return {"where": dict(rule.where)}
        if rule.sources:
            return {"path": [source.name for source in self.eval_sources]}
        return {"fraction": rule.fraction} if rule.fraction is not None else {"documents": rule.documents}

    @property
    def key(self) -> str:
        is_chosen = self.eval_rule is not None and self.eval_rule.is_chosen
        both = (*self.sources, *self.eval_sources)
        what = {
            "format": FORMAT,
            "sources": [[source.kind, content] for source, content in zip(both, self.contents, strict=True)],
            "num_eval_sources": len(self.eval_sources),
            "fingerprint": self.tokenizer.fingerprint,
            "vocab_size": self.tokenizer.vocab_size,
            "field": self.field,
            "eval": self.eval_description if not self.eval_sources else {},
            "seed": self.seed if is_chosen else 0,
        }
        return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()

    @property
    def folder_name(self) -> str:
        """Keeps apart, in a place shared by several runs, what differs in key or in the paths of its sources."""
        paths = [str(file.absolute()) for source in (*self.sources, *self.eval_sources) for file in source.files]
        return hashlib.sha256(json.dumps([self.key, paths]).encode()).hexdigest()[:16]


def prepare(
    *,
    sources: Sequence[Given],
    tokenizer: Tokenizer,
    store: Path,
    field: str = "text",
    eval_rule: EvalRule | None = None,
    seed: int = 0,
    keyed: bool = False,
    verify: bool = False,
    processes: int | None = None,
    progress: Progress | None = None,
    notify: Callable[[str], None] | None = None,
) -> Store:
    """The token store of these sources, made now unless it is there already.

    `keyed`: `store` is shared between runs, and each combination of sources, tokenizer and rule has a folder of its own
    in it, so that none replaces another's. `verify` hashes every file instead of trusting its size and time. While
    another process prepares the same store this one waits, and says so through `notify`.
    """
    request = _request(sources, tokenizer, field, eval_rule, seed)
    folder = Path(store) / request.folder_name if keyed else Path(store)
    try:
        found = _usable(folder, request, verify)
        if found is not None:
            return found
        folder.mkdir(parents=True, exist_ok=True)
        with _sole(folder, notify):
            # Whoever held the lock before may have prepared exactly this.
            found = _usable(folder, request, verify)
            return found or _make(folder, request, processes or num_cores(), progress)
    except OSError as error:
        what = f"{error.filename}: " if error.filename else ""
        raise DataError(
            f"{folder}: the token store cannot be made: {what}{error.strerror or error}; free some space or correct "
            "the permissions, or set data.store to another place; an earlier store is left as it was"
        ) from error


def find_store(
    *,
    sources: Sequence[Given],
    tokenizer: Tokenizer,
    store: Path,
    field: str = "text",
    eval_rule: EvalRule | None = None,
    seed: int = 0,
    keyed: bool = False,
) -> Store | None:
    """The store that prepare() would reuse, or None where it would have to make one. Writes nothing but fresh times."""
    request = _request(sources, tokenizer, field, eval_rule, seed)
    return _usable(Path(store) / request.folder_name if keyed else Path(store), request, verify=False)


def _request(
    sources: Sequence[Given], tokenizer: Tokenizer, field: str, eval_rule: EvalRule | None, seed: int
) -> Request:
    if not sources:
        raise DataError("data.train: names no source")
    problems: list[str] = []
    opened: list[list[Source]] = [[], []]
    for number, given in enumerate((sources, eval_rule.sources if eval_rule else ())):
        for index, item in enumerate(given):
            name = ("data.train", "data.eval")[number] + (f"[{index}]" if len(given) > 1 else "")
            try:
                opened[number].append(open_source(item, name=name))
            except DataError as error:
                problems.append(str(error))
    if eval_rule is not None and eval_rule.where is not None:
        problems += [
            f"{source.name}: data.eval.where chooses rows of .jsonl files by their fields, and this source has none; "
            "use data.eval.fraction, documents or path"
            for source in opened[0]
            if source.kind != "jsonl"
        ]
    if problems:
        raise DataError("\n".join(problems))
    contents = tuple("" if source.path else content_hash(source) for source in (*opened[0], *opened[1]))
    return Request(tuple(opened[0]), tuple(opened[1]), contents, tokenizer, field, eval_rule, seed)


def _usable(folder: Path, request: Request, verify: bool) -> Store | None:
    """The finished store, if it was made for this request and no source has changed since."""
    manifest = read_manifest(folder)
    if manifest is None or manifest.key != request.key:
        return None
    fresh = _refreshed(manifest, request, verify)
    if fresh is None:
        return None
    try:
        found = open_store(folder, manifest=fresh)
        if verify and not _files_match(folder, manifest):
            return None
    except DataError:
        # Damaged from outside: making it again is the remedy.
        return None
    if fresh != manifest:
        # Only paths and times have changed. A store that may not be written to is good all the same.
        with contextlib.suppress(OSError):
            write_json(folder / MANIFEST, fresh.to_json())
    return found


def _files_match(folder: Path, manifest: Manifest) -> bool:
    pairs = (("train.bin", manifest.train_sha256), ("eval.bin", manifest.eval_sha256))
    return all(file_hash(folder / name) == sha256 for name, sha256 in pairs if sha256)


def _refreshed(manifest: Manifest, request: Request, verify: bool) -> Manifest | None:
    """The manifest with the sources' present paths and times; None where the content of one is another now."""
    train = _refreshed_records(manifest.sources, request.sources, verify)
    held_out = _refreshed_records(manifest.eval_sources, request.eval_sources, verify)
    if train is None or held_out is None:
        return None
    return replace(manifest, sources=train, eval_sources=held_out)


def _refreshed_records(
    records: Sequence[SourceRecord], sources: Sequence[Source], verify: bool
) -> tuple[SourceRecord, ...] | None:
    fresh: list[SourceRecord] = []
    for record, source in zip(records, sources, strict=True):
        files = [_refreshed_file(old, path, verify) for old, path in zip(record.files, source.files, strict=True)]
        kept = tuple(file for file in files if file is not None)
        if len(kept) < len(files):
            return None
        fresh.append(replace(record, name=source.full_name, files=kept))
    return tuple(fresh)


def _refreshed_file(record: FileRecord, path: Path, verify: bool) -> FileRecord | None:
    """A file is unchanged if path, size and time are; else, or to be sure, its content decides."""
    found = path.stat()
    here = replace(record, path=str(path.absolute()), mtime_ns=found.st_mtime_ns)
    if found.st_size != record.bytes:
        return None
    if here == record and not verify:
        return record
    return here if file_hash(path) == record.sha256 else None


@contextlib.contextmanager
def _sole(folder: Path, notify: Callable[[str], None] | None) -> Iterator[None]:
    """Hold the store's lock. Waits while a living process has it; never inside a collective of several processes."""
    lock: Lock | None = None
    seen: list[tuple[str, int]] | None = None
    since = time.monotonic()
    while lock is None:
        try:
            lock = Lock(folder / LOCK)
        except Locked as error:
            if notify is not None and seen is None:
                notify(f"waiting while the data is being prepared: {error}")
            if (progress := _traces(folder)) != seen:
                seen, since = progress, time.monotonic()
            # Whether a process on another host still lives can only be told from what it writes.
            if error.owner.host != this_process().host and time.monotonic() - since > _PATIENCE_SECONDS:
                raise
            time.sleep(_POLL_SECONDS)
    try:
        yield
    finally:
        lock.release()


def _traces(folder: Path) -> list[tuple[str, int]]:
    """The files of a preparation under way and their sizes."""
    traces = []
    for path in sorted(folder.glob(".preparing-*/*")):
        # A part may be joined and deleted between being listed and being asked for its size.
        with contextlib.suppress(FileNotFoundError):
            traces.append((path.name, path.stat().st_size))
    return traces


def _make(folder: Path, request: Request, processes: int, progress: Progress | None) -> Store:
    _refuse_foreign(folder, request)
    for left_over in folder.glob(".preparing-*"):
        # The lock is ours: whoever left this was killed.
        shutil.rmtree(left_over)
    temporary = folder / f".preparing-{uuid.uuid4().hex[:8]}"
    temporary.mkdir()
    try:
        manifest = build(
            Building(
                sources=request.sources,
                eval_sources=request.eval_sources,
                tokenizer=request.tokenizer,
                field=request.field,
                eval_rule=request.eval_rule,
                seed=request.seed,
                key=request.key,
                eval_description=request.eval_description,
                folder=temporary,
                processes=processes,
                progress=progress,
            )
        )
        _move_into_place(temporary, folder, manifest, _inputs(request))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return open_store(folder, reused=False)


def _inputs(request: Request) -> set[Path]:
    """The files that this preparation reads, and must not replace."""
    files = {file.resolve() for source in (*request.sources, *request.eval_sources) for file in source.files}
    recipe = recipe_of(request.tokenizer)
    return files | {Path(recipe.path).resolve()} if recipe and recipe.path else files


def _refuse_foreign(folder: Path, request: Request) -> None:
    """Only an earlier store may be replaced: no source that lies there, and nothing that no manifest accounts for."""
    inputs, is_ours = _inputs(request), (folder / MANIFEST).exists()
    is_copied = any(source.kind != "binidx" for source in (*request.sources, *request.eval_sources))
    for name in _STORE_FILES if is_copied else (VOCAB,):
        path = folder / name
        if path.resolve() in inputs:
            if name != VOCAB:
                raise DataError(f"{path}: is a source and lies where the token store goes; move it or set data.store")
        elif path.exists() and not is_ours:
            raise DataError(f"{path}: lies where the token store goes and is no part of one; move it or set data.store")


def _move_into_place(temporary: Path, folder: Path, manifest: Manifest, inputs: set[Path]) -> None:
    """While files are replaced the manifest says so: a mixture is never taken for a store, yet known to be ours."""
    is_ours = (folder / MANIFEST).exists()
    write_json(folder / MANIFEST, {"format": 0, "status": "being replaced"})
    for name in _STORE_FILES:
        if (folder / name).resolve() in inputs:
            continue
        if (temporary / name).exists():
            (temporary / name).replace(folder / name)
        elif is_ours:
            (folder / name).unlink(missing_ok=True)
    flush_folder(folder)
    write_json(folder / MANIFEST, manifest.to_json())
