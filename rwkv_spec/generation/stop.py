"""Where a sequence that is being generated ends: at a stop, at token 0, or at its greatest length.

A row holds back what may be the beginning of a stop, so that all it lets go is certain to stay. Stops of numbers are
sequences of ids; stops of text are found in the text, however its tokens happen to cut it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

from rwkv_spec.errors import UserError
from rwkv_spec.generation.penalty import END_OF_DOCUMENT
from rwkv_spec.tokenizer.protocol import Tokenizer
from rwkv_spec.tokenizer.stream import StreamDecoder

StoppedBy = Literal["length", "end_of_document", "stop_sequence"]
_Item = TypeVar("_Item", str, int)


class IdRow:
    """One sequence whose stops are sequences of ids. `ids` and `logprobs` hold what is certain to stay."""

    def __init__(
        self, *, stops: Sequence[Sequence[int]], max_new_tokens: int, stop_at_end_of_document: bool = True
    ) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.stopped_by: StoppedBy | None = "length" if max_new_tokens == 0 else None
        self._room = max_new_tokens
        self._held: list[int] = []
        self._held_logprobs: list[float] = []
        self._stops = [list(stop) for stop in stops]
        self._end = [END_OF_DOCUMENT] if stop_at_end_of_document else None

    def take(self, token: int, logprob: float) -> None:
        """One more token."""
        self._room -= 1
        self._held.append(token)
        self._held_logprobs.append(logprob)
        complete = [stop for stop in self._stops if self._held[-len(stop) :] == stop]
        if complete:
            # A token 0 may itself be the end of a longer stop.
            self._let_go(max(map(len, complete)), "stop_sequence")
        elif self._end is not None and token == END_OF_DOCUMENT:
            self._let_go(1, "end_of_document")
        elif self._room == 0:
            self._let_go(0, "length")
        else:
            self._let_go(max((num_begun(self._held, stop) for stop in self._stops), default=0), None)

    def _let_go(self, num_kept: int, reason: StoppedBy | None) -> None:
        certain = len(self._held) - num_kept
        self.ids += self._held[:certain]
        self.logprobs += self._held_logprobs[:certain]
        self._held, self._held_logprobs = self._held[certain:], self._held_logprobs[certain:]
        self.stopped_by = reason


class NumberRow:
    """An IdRow that also gives out its text: for tokenizers of numbers."""

    def __init__(self, decoder: StreamDecoder, *, stops: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        self._row = IdRow(stops=stops, max_new_tokens=max_new_tokens)
        self._decoder = decoder
        self._num_decoded = 0
        self.text = ""
        # The text after the last whole token: numbers have none.
        self.rest = ""

    @property
    def ids(self) -> list[int]:
        return self._row.ids

    @property
    def logprobs(self) -> list[float]:
        return self._row.logprobs

    @property
    def stopped_by(self) -> StoppedBy | None:
        return self._row.stopped_by

    def take(self, token: int, logprob: float) -> str:
        """One more token; the text that it makes certain."""
        self._row.take(token, logprob)
        piece = "".join(self._decoder.feed(id) for id in self.ids[self._num_decoded :])
        self._num_decoded = len(self.ids)
        if self.stopped_by is not None:
            piece += self._decoder.finish()
        self.text += piece
        return piece


class TextRow:
    """One sequence whose stops are texts. At the end `ids` are the tokens that lie wholly in `text`.

    A stop may begin inside a token: `rest` is then the text after the last whole token.
    """

    def __init__(
        self, tokenizer: Tokenizer, decoder: StreamDecoder, *, stops: Sequence[str], max_new_tokens: int
    ) -> None:
        self.text = ""
        self.rest = ""
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.stopped_by: StoppedBy | None = "length" if max_new_tokens == 0 else None
        self._tokenizer = tokenizer
        self._decoder = decoder
        self._stops = stops
        self._room = max_new_tokens
        self._num_certain = 0

    def take(self, token: int, logprob: float) -> str:
        """One more token; the text that it makes certain."""
        self._room -= 1
        start = self._num_certain
        if token == END_OF_DOCUMENT:
            self._end("end_of_document")
            return self.text[start:]
        self.ids.append(token)
        self.logprobs.append(logprob)
        self._add(self._decoder.feed(token))
        if self.stopped_by is None and self._room == 0:
            self._end("length")
        return self.text[start : self._num_certain]

    def _add(self, piece: str) -> None:
        self.text += piece
        # No stop begins in what was let go: it would have been held back.
        stop_at = first_stop(self.text, self._stops, start=self._num_certain)
        if stop_at is not None:
            self.text = self.text[:stop_at]
            self._num_certain = stop_at
            self.stopped_by = "stop_sequence"
            self._drop_cut_tokens()
        else:
            held = self.text[self._num_certain :]
            self._num_certain = len(self.text) - max((num_begun(held, stop) for stop in self._stops), default=0)

    def _end(self, reason: StoppedBy) -> None:
        # What the decoder still held may complete a stop.
        self._add(self._decoder.finish())
        if self.stopped_by is None:
            self.stopped_by = reason
            self._num_certain = len(self.text)

    def _drop_cut_tokens(self) -> None:
        """Keep as many tokens as spell a beginning of the text; a token with half a character spells none."""
        for count in range(len(self.ids), -1, -1):
            spelt = self._tokenizer.decode(self.ids[:count]) if count else ""
            if self.text.startswith(spelt):
                self.ids, self.logprobs = self.ids[:count], self.logprobs[:count]
                self.rest = self.text[len(spelt) :]
                return


def rest_ids(row: TextRow | NumberRow, tokenizer: Tokenizer) -> list[int]:
    """Tokens for the text after a row's last whole token, so that a state can stand exactly at the end of its text."""
    if not row.rest:
        return []
    try:
        return list(tokenizer.encode(row.rest))
    except ValueError as error:
        raise UserError(
            f"the stop cut a token in two, and its first part {row.rest!r} cannot be encoded, so that no state stands "
            f"at the end of the text: {error}"
        ) from error


def first_stop(text: str, stops: Sequence[str], *, start: int) -> int | None:
    """Where the stop begins that ends first at or after `start` (of several, the longest), or None."""
    found = [(place + len(stop), place) for stop in stops if (place := text.find(stop, start)) >= 0]
    return min(found)[1] if found else None


def num_begun(held: Sequence[_Item], stop: Sequence[_Item]) -> int:
    """How many of the last items of `held` are the beginning of `stop`, all of it excepted."""
    longest = min(len(stop) - 1, len(held))
    return next((count for count in range(longest, 0, -1) if held[-count:] == stop[:count]), 0)
