"""Prompts continued as text, piece by piece, with stops found in the text, from a fresh start or a saved state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rwkv_spec.errors import CheckpointError, UserError
from rwkv_spec.generation.context import GenerationState, fresh, read
from rwkv_spec.generation.decode import check_length, checked_ids, checked_stops, draws
from rwkv_spec.generation.penalty import END_OF_DOCUMENT
from rwkv_spec.generation.sample import NonFiniteLogits, Sampling, check_seed
from rwkv_spec.generation.state_file import check_state_target, load_state, save_state
from rwkv_spec.generation.stop import NumberRow, StoppedBy, TextRow, rest_ids
from rwkv_spec.model.language_model import LanguageModel
from rwkv_spec.paths import expanded
from rwkv_spec.tokenizer.byte import utf8
from rwkv_spec.tokenizer.protocol import NumericTokenizer, Tokenizer, shorten, stream_decoder, undrawable_ids

# Text, or values of a numeric tokenizer.
Written = str | Sequence[int]


@dataclass(frozen=True)
class Completion:
    """What one prompt gave. `ids` are the new tokens that lie wholly in `text`, `logprobs` the model's own of each."""

    prompt: Written
    text: str
    ids: list[int]
    logprobs: list[float]
    stopped_by: StoppedBy


class TextStream:
    """Iterates over (row, piece of text), each piece as soon as it is certain not to be part of a stop.

    A row's pieces together are its completion's text, which holds neither the prompt nor the stop. Without a `state`
    each prompt begins a document: it follows token 0, as in training. With one, prompt i goes on where sequence i
    stands (all prompts, where it holds one sequence) and may be empty. Prompts None are one empty prompt for each
    sequence of the state, or one without a state. Arguments are checked at once: UserError for
    what the tokenizer or the state does not take, ValueError for the rest.

    At the end `save_state` is written: the state then stands at the ends of the texts. A token is drawn by the seed,
    the row and its place in the sequence, so that going on from there draws what a longer generation would have drawn,
    and prompts read in parts draw what whole ones would have drawn: from the same logits, up to rounding.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        prompts: str | Sequence[Written] | None,
        *,
        max_new_tokens: int,
        sampling: Sampling,
        stop_sequences: str | Sequence[Written] = (),
        seed: int = 0,
        state: str | Path | GenerationState | None = None,
        save_state: str | Path | None = None,
    ) -> None:
        self._model, self._tokenizer, self._sampling, self._seed = model, tokenizer, sampling, seed
        given = load_state(state, model) if isinstance(state, (str, Path)) else state
        if prompts is None:
            prompts = [""] * (1 if given is None else given.batch_size)
        self._prompts: list[Written] = [prompts] if isinstance(prompts, str) else list(prompts)
        stops = [stop_sequences] if isinstance(stop_sequences, str) else stop_sequences
        check_length(max_new_tokens)
        check_seed(seed, count=len(self._prompts))
        self._target = None if save_state is None else expanded(save_state)
        if self._target is not None:
            check_state_target(self._target)
            if not self._prompts:
                raise ValueError("save_state needs at least one prompt, which may be empty: there is nothing to save")
        first = [END_OF_DOCUMENT] if given is None else []
        encoded = [_encode(tokenizer, prompt, what="prompt") for prompt in self._prompts]
        self._ids = [[*first, *checked_ids(model, ids, what=f"prompt {row}")] for row, ids in enumerate(encoded)]
        self._rows = _rows(model, tokenizer, stops, count=len(encoded), max_new_tokens=max_new_tokens)
        self._given = None if given is None else _matching(given, count=len(encoded))
        self._pieces = self._generate()

    def __iter__(self) -> Iterator[tuple[int, str]]:
        return self._pieces

    @property
    def num_texts(self) -> int:
        return len(self._rows)

    def completions(self) -> list[Completion]:
        """Generate what is left, and return what each prompt gave."""
        for _ in self._pieces:
            pass
        return [
            Completion(prompt, row.text, row.ids, row.logprobs, row.stopped_by or "length")
            for prompt, row in zip(self._prompts, self._rows, strict=True)
        ]

    def _generate(self) -> Iterator[tuple[int, str]]:
        if self._target is None and all(row.stopped_by is not None for row in self._rows):
            return
        before = fresh(self._model, batch_size=len(self._ids)) if self._given is None else self._given
        start = read(self._model, before, self._ids, generated=False)
        left_out = undrawable_ids(self._tokenizer, num_rows=self._model.shape.vocab_size)
        tokens = draws(self._model, start, self._rows, sampling=self._sampling, left_out=left_out, seed=self._seed)
        # A batch of states may be large: those that are needed no more are let go.
        del before
        if self._target is None:
            del start
        try:
            for row, token, logprob in tokens:
                piece = self._take(row, token, logprob)
                if piece:
                    yield row, piece
        except NonFiniteLogits as error:
            raise CheckpointError(f"{error}; its weights are damaged, or their training had diverged") from error
        if self._target is not None:
            # Read again from the prompts' end: a stop may lie behind tokens that were drawn and read, or inside one.
            new = [[*row.ids, *rest_ids(row, self._tokenizer)] for row in self._rows]
            ids = [checked_ids(self._model, of_row, what=f"text {row}") for row, of_row in enumerate(new)]
            save_state(self._target, read(self._model, start, ids, generated=True), self._model)

    def _take(self, row: int, token: int, logprob: float) -> str:
        try:
            return self._rows[row].take(token, logprob)
        except ValueError as error:
            raise UserError(
                f"the model produced what its tokenizer cannot decode: {error}; do the two belong together?"
            ) from error


def _matching(state: GenerationState, *, count: int) -> GenerationState:
    if state.batch_size == count:
        return state
    if state.batch_size == 1 and count > 0:
        return state.repeated(count)
    raise UserError(f"the state holds {state.batch_size} sequences, but the prompts given are {count}; give as many")


def _rows(
    model: LanguageModel, tokenizer: Tokenizer, stops: Sequence[Written], *, count: int, max_new_tokens: int
) -> list[NumberRow | TextRow]:
    """Numbers are matched as ids, which is exact; text as text, since a stop's tokens depend on what is around it."""
    decoders = [stream_decoder(tokenizer) for _ in range(count)]
    if isinstance(tokenizer, NumericTokenizer):
        of_ids = checked_stops(model, [_encode(tokenizer, stop, what="stop sequence") for stop in stops])
        return [NumberRow(decoder, stops=of_ids, max_new_tokens=max_new_tokens) for decoder in decoders]
    of_text = [stop for stop in stops if isinstance(stop, str)]
    if len(of_text) < len(stops):
        raise UserError(f"{type(tokenizer).__name__} takes stop sequences of text, not lists of values")
    if not all(of_text):
        raise ValueError("a stop sequence is empty, and would stop before the first token; leave it out")
    for stop in of_text:
        _check_characters(stop)
    return [TextRow(tokenizer, decoder, stops=of_text, max_new_tokens=max_new_tokens) for decoder in decoders]


def _check_characters(stop: str) -> None:
    """No text holds half of a surrogate pair, so that such a stop would silently be none."""
    try:
        utf8(stop)
    except ValueError as error:
        raise UserError(f"stop sequence {shorten(repr(stop))}: {error}") from error


def _encode(tokenizer: Tokenizer, written: Written, *, what: str) -> list[int]:
    # A prompt may be a whole book.
    shown = shorten(repr(written))
    try:
        if isinstance(written, str):
            return list(tokenizer.encode(written))
        if not hasattr(written, "__iter__"):
            raise UserError(f"{what} {shown}: is neither text nor a list of values; put a single one into a list too")
        if isinstance(tokenizer, NumericTokenizer):
            return [int(index) for index in tokenizer.encode_sequence(list(written))]
    except ValueError as error:
        raise UserError(f"{what} {shown}: {error}") from error
    raise UserError(f"{what} {shown}: {type(tokenizer).__name__} takes text, not a list of values")
