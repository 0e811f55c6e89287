"""Prompts in, new tokens out: prefill by the parallel form, then one token at a time for the whole batch.

A row that is finished leaves the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from rwkv_spec.generation.context import GenerationState, fresh, read
from rwkv_spec.generation.penalty import END_OF_DOCUMENT
from rwkv_spec.generation.sample import Sampling, check_seed, is_whole, sample, uniform
from rwkv_spec.generation.stop import IdRow, StoppedBy
from rwkv_spec.model.language_model import LanguageModel


@dataclass(frozen=True)
class Generation:
    """What one prompt gave: new ids, the model's log-probability of each, and why it ended.

    A stop sequence and the end of the document are not among the ids.
    """

    ids: list[int]
    logprobs: list[float]
    stopped_by: StoppedBy


class Row(Protocol):
    """One sequence that takes tokens until it has a reason to stop."""

    @property
    def stopped_by(self) -> StoppedBy | None: ...

    def take(self, token: int, logprob: float) -> object: ...


def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    penalty_decay: float = 1.0,
    repetition_penalty: float = 1.0,
    stop_sequences: Sequence[Sequence[int]] = (),
    stop_at_end_of_document: bool = True,
    seed: int = 0,
    left_out: Sequence[int] = (),
) -> list[Generation]:
    """Continue every prompt by at most max_new_tokens tokens; row i draws with seed + i.

    An empty prompt starts from id 0. The ids `left_out` are never drawn: those that name nothing. Bad arguments are
    ValueErrors.
    """
    sampling = Sampling(
        temperature, top_k, top_p, presence_penalty, frequency_penalty, penalty_decay, repetition_penalty
    )
    check_length(max_new_tokens)
    check_seed(seed, count=len(prompts))
    starts = [checked_ids(model, prompt, what=f"prompt {row}") for row, prompt in enumerate(prompts)]
    stops = checked_stops(model, stop_sequences)
    rows = [
        IdRow(stops=stops, max_new_tokens=max_new_tokens, stop_at_end_of_document=stop_at_end_of_document)
        for _ in starts
    ]
    if starts and max_new_tokens:
        start = read(
            model,
            fresh(model, batch_size=len(starts)),
            [ids or [END_OF_DOCUMENT] for ids in starts],
            generated=False,
        )
        for row, token, logprob in draws(model, start, rows, sampling=sampling, left_out=left_out, seed=seed):
            rows[row].take(token, logprob)
    return [Generation(row.ids, row.logprobs, row.stopped_by or "length") for row in rows]


def draws(
    model: LanguageModel,
    start: GenerationState,
    rows: Sequence[Row],
    *,
    sampling: Sampling,
    left_out: Sequence[int],
    seed: int,
) -> Iterator[tuple[int, int, float]]:
    """(row, token, log-probability), one token after the other for each row; whoever asks for the next one has given
    it to rows[row].take before. Ends when every row has a reason to stop."""
    logits_BV, state = start.logits_BV, start.state
    num_ids, gaps = _drawable(model.shape.vocab_size, left_out)
    histories = [sampling.history(*of_row) for of_row in zip(start.ids, start.generated, strict=True)]
    positions = [len(ids) for ids in start.ids]
    # The batch of states that it holds may be large.
    del start
    here = list(range(len(rows)))
    tokens: list[int] = []
    is_own = False
    while True:
        going = [place for place, row in enumerate(here) if rows[row].stopped_by is None]
        if not going:
            return
        if len(going) < len(here):
            here, tokens = [here[place] for place in going], [tokens[place] for place in going if tokens]
            going_B = torch.tensor(going, device=logits_BV.device)
            logits_BV, state = logits_BV.index_select(0, going_B), state.select(going_B)
        if tokens:
            # Turned off call by call: a context held open here would leak to the caller between two tokens.
            with torch.no_grad():
                # The first step makes a State of its own, which the others write over: the start belongs to the caller.
                out = state if is_own else None
                logits_BV, state = model.step(torch.tensor(tokens, device=logits_BV.device), state, out=out)
            is_own = True
        tokens, logprobs = sample(
            logits_BV,
            sampling=sampling,
            numbers=[uniform(seed + row, positions[row]) for row in here],
            histories=[histories[row] for row in here],
            num_ids=num_ids,
            gaps=gaps,
        )
        for row, token, logprob in zip(here, tokens, logprobs, strict=True):
            positions[row] += 1
            history = histories[row]
            if history is not None:
                history.add(token, generated=True)
            yield row, token, logprob


def check_length(max_new_tokens: int) -> None:
    """ValueError unless it is a whole number of at least 0."""
    if not is_whole(max_new_tokens) or max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be a whole number of at least 0, got {max_new_tokens!r}")


def checked_ids(model: LanguageModel, ids: Sequence[int], *, what: str) -> list[int]:
    """The ids as plain integers; ValueError where one is none, or none of the model's."""
    if isinstance(ids, (str, bytes)):
        raise ValueError(f"{what} must be a list of token ids, got text; encode it with the tokenizer")
    try:
        numbers = list(ids)
    except TypeError:
        raise ValueError(f"{what} must be a list of token ids, got {ids!r}") from None
    vocab_size = model.shape.vocab_size
    for place, number in enumerate(numbers):
        if isinstance(number, bool) or not hasattr(number, "__index__"):
            raise ValueError(f"{what} must hold whole numbers, got {number!r} at place {place}")
        if not 0 <= number < vocab_size:
            raise ValueError(f"{what} holds id {number} at place {place}, but the model's ids end at {vocab_size - 1}")
    return [int(number) for number in numbers]


def checked_stops(model: LanguageModel, stops: Sequence[Sequence[int]]) -> list[list[int]]:
    """The stop sequences as plain integers; ValueError where one is empty or holds what is no id."""
    checked = [checked_ids(model, stop, what=f"stop sequence {index}") for index, stop in enumerate(stops)]
    if not all(checked):
        raise ValueError("a stop sequence is empty, and would stop before the first token; leave it out")
    return checked


def _drawable(vocab_size: int, left_out: Sequence[int]) -> tuple[int, list[int]]:
    """So many ids from 0 on are drawn from, and those below that are left out. What pads a vocabulary costs nothing."""
    gone, num_ids = set(left_out), vocab_size
    while num_ids - 1 in gone:
        num_ids -= 1
    if num_ids == 0:
        raise ValueError("every id of the model is left out, so that none can be drawn")
    return num_ids, sorted(index for index in gone if 0 <= index < num_ids)
