"""The data part of a run: what is known of the tokens before they are prepared, and the token store itself."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import TypedDict

from rwkv_spec.data.estimate import estimate
from rwkv_spec.data.holdout import EvalRule
from rwkv_spec.data.order import magic_prime
from rwkv_spec.data.prepare import find_store, prepare
from rwkv_spec.data.source import Given
from rwkv_spec.data.store import Store
from rwkv_spec.errors import DataError, SpecError
from rwkv_spec.preflight import Inputs
from rwkv_spec.report.console import Console
from rwkv_spec.run_folder import RunFolder
from rwkv_spec.spec.plan import DataStats
from rwkv_spec.spec.types import Spec
from rwkv_spec.tokenizer.protocol import HasUnnamedIds, Tokenizer
from rwkv_spec.tokenizer.vocab import VocabTokenizer


class _Request(TypedDict):
    sources: tuple[Given, ...]
    tokenizer: Tokenizer
    store: Path
    field: str
    eval_rule: EvalRule | None
    seed: int
    keyed: bool


def terminal_console() -> Console:
    """What a person sees: on a terminal with a progress line, elsewhere plain lines."""
    return Console(sys.stdout, is_terminal=sys.stdout.isatty())


def silent_console() -> Console:
    """For every process but the first: they all do the same, and one of them tells."""
    return Console(io.StringIO(), is_terminal=False)


def foreseen(inputs: Inputs) -> DataStats:
    """Figures of the token store if there is one, else of at most 64 MB of each source, then marked as approximate."""
    request = _request(inputs)
    store = find_store(**request)
    if store is not None:
        return stored_data(store, inputs.spec)
    found = estimate(
        request["sources"], tokenizer=inputs.tokenizer, field=request["field"], eval_rule=request["eval_rule"]
    )
    if inputs.eval_rule is not None and not found.approximate and not found.eval_documents:
        problem = inputs.spec.problem("data.eval", "holds out no document", "no row has those values: correct them")
        raise SpecError([problem])
    return DataStats(
        num_tokens=found.train_tokens,
        num_documents=found.train_documents,
        num_eval_documents=found.eval_documents,
        num_eval_tokens=found.eval_tokens,
        approximate=found.approximate,
        magic_prime=_magic_prime(found.train_tokens, inputs.spec),
    )


def stored_data(store: Store, spec: Spec) -> DataStats:
    """Exact figures of a prepared store."""
    return DataStats(
        num_tokens=store.train.num_tokens,
        num_documents=store.num_train_documents,
        num_eval_documents=len(store.eval_documents),
        num_eval_tokens=store.manifest.eval_tokens,
        magic_prime=_magic_prime(store.train.num_tokens, spec),
    )


def prepare_inputs(inputs: Inputs, console: Console, *, verify: bool = False) -> Store:
    """The token store of the inputs, made now unless nothing has changed. Any number of processes may ask at once."""
    names = ", ".join(source.name if isinstance(source, Path) else "data" for source in inputs.sources)
    store = prepare(
        **_request(inputs),
        verify=verify,
        progress=lambda done, total: console.preparing(names, done, total),
        notify=console.lines,
    )
    how = "unchanged, as prepared before" if store.reused else "prepared"
    held_out = f", {store.manifest.eval_tokens:,} held out" if len(store.eval_documents) else ""
    console.prepared(
        "\n".join(
            [
                f"data {how}: {store.train.num_tokens:,} tokens to train on{held_out}",
                *store.notes(),
                *_notes(inputs.tokenizer, is_new=not store.reused),
            ]
        )
    )
    return store


def _notes(tokenizer: Tokenizer, *, is_new: bool) -> list[str]:
    """What is odd about a vocabulary without being wrong, and why encoding it took long."""
    notes = []
    gaps = tokenizer.unnamed_ids if isinstance(tokenizer, HasUnnamedIds) else ()
    if gaps:
        named = f"{len(gaps):,} of the tokenizer's {tokenizer.vocab_size:,} ids name no token, the first is {gaps[0]}"
        notes.append(f"{named}: their rows of the model stand for nothing and are never drawn")
    if is_new and isinstance(tokenizer, VocabTokenizer) and not tokenizer.is_compiled:
        notes.append(f"text was encoded in {tokenizer.how_it_matches}")
    return notes


def _request(inputs: Inputs) -> _Request:
    spec = inputs.spec
    return _Request(
        sources=inputs.sources,
        tokenizer=inputs.tokenizer,
        store=spec.data.store,
        field=spec.data.field,
        eval_rule=inputs.eval_rule,
        seed=spec.seed,
        # A place outside the run may serve several runs: each has its own folder in it.
        keyed=spec.data.store != RunFolder(spec.work_dir).data,
    )


def _magic_prime(num_tokens: int, spec: Spec) -> int | None:
    if spec.data.order != "rwkv-lm":
        return None
    try:
        return magic_prime(num_tokens, spec.train.ctx_len)
    except DataError:
        # make_plan says what is too short, at the place of data.order.
        return None
