"""Prompts in, new tokens out: prefill by the parallel form, then one token at a time for the whole batch.

Prompts of unequal length share a batch without padding, so that a sequence gets the numbers it would get alone. A row
that is finished leaves the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from rwkv_spec.generation.sample import Sampling, sample, sequence_generators
from rwkv_spec.model.language_model import LanguageModel, State

END_OF_DOCUMENT: Final = 0
# Prompt tokens in one parallel pass, over all rows: bounds the memory of a prefill.
_PREFILL_TOKENS: Final = 4096

StoppedBy = Literal["length", "end_of_document", "stop_sequence"]


@dataclass(frozen=True)
class Generation:
    """What one prompt gave: new ids, the model's log-probability of each, and why it ended.

    A stop sequence and the end of the document are not among the ids.
    """

    ids: list[int]
    logprobs: list[float]
    stopped_by: StoppedBy


@dataclass(frozen=True)
class _Event:
    """A token that is certain to stay (`id` set), or the end of a row (`stopped_by` set)."""

    row: int
    id: int
    logprob: float
    stopped_by: StoppedBy | None


def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    stop_sequences: Sequence[Sequence[int]] = (),
    stop_at_end_of_document: bool = True,
    seed: int = 0,
    num_ids: int | None = None,
) -> list[Generation]:
    """Continue every prompt by at most max_new_tokens tokens; row i draws with seed + i.

    An empty prompt starts from id 0. `num_ids` leaves out the ids from there on: those that a padded
    vocabulary has beyond its tokenizer's. Bad arguments are ValueErrors.
    """
    results: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
    stopped: list[StoppedBy] = ["length"] * len(prompts)
    events = _events(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=Sampling(temperature, top_k, top_p),
        stop_sequences=stop_sequences,
        stop_at_end_of_document=stop_at_end_of_document,
        seed=seed,
        num_ids=num_ids,
    )
    for event in events:
        if event.stopped_by is None:
            results[event.row][0].append(event.id)
            results[event.row][1].append(event.logprob)
        else:
            stopped[event.row] = event.stopped_by
    return [Generation(ids, logprobs, reason) for (ids, logprobs), reason in zip(results, stopped, strict=True)]


def stream(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    stop_sequences: Sequence[Sequence[int]] = (),
    stop_at_end_of_document: bool = True,
    seed: int = 0,
    num_ids: int | None = None,
) -> Iterator[tuple[int, int]]:
    """The tokens of generate() as (row, id), each as soon as it is certain not to be part of a stop sequence."""
    events = _events(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=Sampling(temperature, top_k, top_p),
        stop_sequences=stop_sequences,
        stop_at_end_of_document=stop_at_end_of_document,
        seed=seed,
        num_ids=num_ids,
    )
    return ((event.row, event.id) for event in events if event.stopped_by is None)


def prefill(model: LanguageModel, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, State]:
    """Logits [B, V] after the last token of every prompt and the State there. No prompt may be empty."""
    device = model.emb.weight.device
    state = model.initial_state(len(prompts))
    logits_BV = model.head.weight.new_zeros((len(prompts), model.shape.vocab_size))
    done = 0
    while True:
        rows = [row for row, prompt in enumerate(prompts) if len(prompt) > done]
        if not rows:
            return logits_BV, state
        # As far as the shortest unfinished prompt reaches: rows of one pass are equally long and need no padding.
        length = min(len(prompts[row]) for row in rows) - done
        length = min(length, max(1, _PREFILL_TOKENS // len(rows)))
        ids_BT = torch.tensor([list(prompts[row][done : done + length]) for row in rows], device=device)
        rows_B = torch.tensor(rows, device=device)
        part_BV, part = model.prefill(ids_BT, state.select(rows_B))
        logits_BV = logits_BV.index_copy(0, rows_B, part_BV.to(logits_BV.dtype))
        state = state.replaced(rows_B, part)
        done += length


def _events(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    stop_sequences: Sequence[Sequence[int]],
    stop_at_end_of_document: bool,
    seed: int,
    num_ids: int | None,
) -> Iterator[_Event]:
    """Checks at once, before the first token is asked for."""
    vocab_size = model.shape.vocab_size
    if not isinstance(max_new_tokens, int) or isinstance(max_new_tokens, bool) or max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be a whole number of at least 0, got {max_new_tokens!r}")
    num_ids = vocab_size if num_ids is None else num_ids
    if not isinstance(num_ids, int) or not 1 <= num_ids <= vocab_size:
        raise ValueError(f"num_ids must be a whole number from 1 to the model's {vocab_size}, got {num_ids!r}")
    starts = [_checked(prompt, what=f"prompt {row}", vocab_size=vocab_size) for row, prompt in enumerate(prompts)]
    stops = [_checked(stop, what=f"stop sequence {i}", vocab_size=vocab_size) for i, stop in enumerate(stop_sequences)]
    if any(not stop for stop in stops):
        raise ValueError("a stop sequence is empty, and would stop before the first token; leave it out")
    if stop_at_end_of_document:
        stops.append([END_OF_DOCUMENT])
    generators = sequence_generators(seed, count=len(starts))
    rows = [
        _Row(index, generator, stops, max_new_tokens, stop_at_end_of_document)
        for index, generator in enumerate(generators)
    ]
    if not starts or max_new_tokens == 0:
        return iter([_Event(row.index, -1, 0.0, "length") for row in rows])
    return _decode(model, [start or [END_OF_DOCUMENT] for start in starts], rows, sampling, num_ids)


def _decode(
    model: LanguageModel, prompts: list[list[int]], rows: list[_Row], sampling: Sampling, num_ids: int
) -> Iterator[_Event]:
    # Gradients are turned off call by call: a context held open here would leak to the caller between two tokens.
    with torch.no_grad():
        logits_BV, state = prefill(model, prompts)
    while rows:
        tokens, logprobs = sample(logits_BV[:, :num_ids], sampling=sampling, generators=[row.generator for row in rows])
        going = []
        for place, (row, token, logprob) in enumerate(zip(rows, tokens, logprobs, strict=True)):
            yield from row.take(token, logprob)
            if not row.finished:
                going.append(place)
        if not going:
            return
        with torch.no_grad():
            if len(going) < len(rows):
                rows = [rows[place] for place in going]
                tokens = [tokens[place] for place in going]
                state = state.select(torch.tensor(going, device=logits_BV.device))
            logits_BV, state = model.step(torch.tensor(tokens, device=logits_BV.device), state)


class _Row:
    """One sequence being generated: holds back what may be the beginning of a stop sequence."""

    def __init__(
        self,
        index: int,
        generator: torch.Generator,
        stops: list[list[int]],
        max_new_tokens: int,
        stop_at_end_of_document: bool,
    ) -> None:
        self.index = index
        self.generator = generator
        self.finished = False
        self._stops = stops
        self._room = max_new_tokens
        self._stop_at_end_of_document = stop_at_end_of_document
        self._held: list[_Event] = []

    def take(self, token: int, logprob: float) -> Iterator[_Event]:
        """The events that this new token makes certain."""
        self._room -= 1
        self._held.append(_Event(self.index, token, logprob, None))
        ids = [event.id for event in self._held]
        complete = [stop for stop in self._stops if ids[-len(stop) :] == stop]
        if complete:
            longest = max(complete, key=len)
            ended = longest == [END_OF_DOCUMENT] and self._stop_at_end_of_document
            yield from self._release(len(longest))
            yield self._end("end_of_document" if ended else "stop_sequence")
        elif self._room == 0:
            yield from self._release(0)
            yield self._end("length")
        else:
            yield from self._release(max(_begun(ids, stop) for stop in self._stops) if self._stops else 0)

    def _release(self, num_kept: int) -> Iterator[_Event]:
        certain = self._held[: len(self._held) - num_kept]
        self._held = self._held[len(certain) :]
        yield from certain

    def _end(self, reason: StoppedBy) -> _Event:
        self.finished = True
        return _Event(self.index, -1, 0.0, reason)


def _begun(ids: list[int], stop: list[int]) -> int:
    """How many of the last ids are the beginning of `stop`."""
    return max((n for n in range(1, min(len(stop), len(ids) + 1)) if ids[-n:] == stop[:n]), default=0)


def _checked(ids: Sequence[int], *, what: str, vocab_size: int) -> list[int]:
    if isinstance(ids, (str, bytes)):
        raise ValueError(f"{what} must be a list of token ids, got text; encode it with the tokenizer")
    try:
        numbers = list(ids)
    except TypeError:
        raise ValueError(f"{what} must be a list of token ids, got {ids!r}") from None
    for place, number in enumerate(numbers):
        if isinstance(number, bool) or not hasattr(number, "__index__"):
            raise ValueError(f"{what} must hold whole numbers, got {number!r} at place {place}")
        if not 0 <= number < vocab_size:
            raise ValueError(f"{what} holds id {number} at place {place}, but the model's ids end at {vocab_size - 1}")
    return [int(number) for number in numbers]
