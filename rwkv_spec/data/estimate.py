"""How many documents and tokens sources hold, from their first megabytes: for a plan, and to see if a disk has room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rwkv_spec.data.binidx import IndexedReader
from rwkv_spec.data.encode import LineEncoder
from rwkv_spec.data.holdout import EvalRule
from rwkv_spec.data.rows import MAX_FAULTS, RowReader, place
from rwkv_spec.data.source import LINE_KINDS, Given, Source, open_source
from rwkv_spec.errors import DataError
from rwkv_spec.tokenizer.protocol import NumericTokenizer, Tokenizer

MAX_BYTES = 64 << 20
# A user's own tokenizer may take seconds for a megabyte: more text would make a plan slow without making it better.
_MAX_TEXT_BYTES = 8 << 20


@dataclass(frozen=True)
class Sample:
    """What the beginning of a source held, scaled to the whole of it."""

    documents: float
    tokens: float
    held_out_documents: float
    held_out_tokens: float
    approximate: bool
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class Estimate:
    """Tokens count the final 0 of each document. `approximate` unless everything was read."""

    train_documents: int
    train_tokens: int
    eval_documents: int
    eval_tokens: int
    approximate: bool


def estimate(
    sources: Sequence[Given],
    *,
    tokenizer: Tokenizer,
    field: str = "text",
    eval_rule: EvalRule | None = None,
    max_bytes: int = MAX_BYTES,
) -> Estimate:
    """Reads at most max_bytes of each source. DataError where what was read holds faults."""
    where = eval_rule.where if eval_rule else None
    limit = max_bytes if isinstance(tokenizer, NumericTokenizer) else min(max_bytes, _MAX_TEXT_BYTES)
    train = [sample(open_source(s), tokenizer=tokenizer, field=field, where=where, max_bytes=limit) for s in sources]
    others = eval_rule.sources if eval_rule else ()
    held = [sample(open_source(s), tokenizer=tokenizer, field=field, where=None, max_bytes=limit) for s in others]
    faults = [fault for part in (*train, *held) for fault in part.faults]
    if faults:
        raise DataError("\n".join(faults[:MAX_FAULTS]))
    documents, tokens = sum(part.documents for part in train), sum(part.tokens for part in train)
    out, out_tokens = sum(part.held_out_documents for part in train), sum(part.held_out_tokens for part in train)
    if eval_rule is not None and eval_rule.is_chosen:
        out = min(eval_rule.documents or max(1, round((eval_rule.fraction or 0) * documents)), documents)
        out_tokens = tokens * out / max(documents, 1)
    return Estimate(
        train_documents=round(documents - out),
        train_tokens=round(tokens - out_tokens),
        eval_documents=round(out + sum(part.documents for part in held)),
        eval_tokens=round(out_tokens + sum(part.tokens for part in held)),
        approximate=any(part.approximate for part in (*train, *held)) or bool(eval_rule and eval_rule.is_chosen),
    )


def sample(
    source: Source, *, tokenizer: Tokenizer, field: str, where: Mapping[str, object] | None, max_bytes: int
) -> Sample:
    """Documents and tokens of a source; of a line file no more than max_bytes is read."""
    if source.kind == "binidx":
        with IndexedReader(source.path or Path()) as reader:
            return Sample(reader.num_documents, reader.num_tokens, 0, 0, approximate=False)
    if source.kind not in LINE_KINDS:
        lengths = [source.row_length(0)] * source.num_rows if source.array is not None else map(len, source.ragged)
        counts = [length + 1 for length in lengths if length]
        return Sample(len(counts), sum(counts), 0, 0, approximate=False)
    return _sample_lines(source, tokenizer, RowReader(source.files[0], source.kind, field, where), max_bytes)


def _sample_lines(source: Source, tokenizer: Tokenizer, reader: RowReader, max_bytes: int) -> Sample:
    documents = tokens = held_documents = held_tokens = read = 0
    encoder = LineEncoder(reader, tokenizer, num_bytes=min(source.num_bytes, max_bytes))
    for num_bytes, block in reader.blocks(0, source.num_bytes):
        found = encoder.documents(block)
        full = found.sizes > 0
        sizes, held_out = found.sizes[full] + 1, found.held_out[full]
        documents, tokens = documents + len(sizes), tokens + int(sizes.sum())
        held_documents += int(held_out.sum())
        held_tokens += int(sizes[held_out].sum())
        read += num_bytes
        if read >= max_bytes:
            break
    faults = tuple(f"{place(source.name, line, column)}: {text}" for line, column, text in reader.faults)
    scale = max(1.0, source.num_bytes / max(read, 1))
    return Sample(
        documents * scale,
        tokens * scale,
        held_documents * scale,
        held_tokens * scale,
        approximate=read < source.num_bytes,
        faults=faults,
    )
