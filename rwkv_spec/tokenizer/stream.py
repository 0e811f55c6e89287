"""Turns ids into text as they come, one at a time: what was given out stays, and ends in whole characters.

Promise: the pieces that feed() and finish() return, joined, are decode() of all the ids.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"


class StreamDecoder(Protocol):
    """What protocol.stream_decoder() returns, and what a user's own stream_decoder() should."""

    def feed(self, token_id: int) -> str:
        """The text that is certain now, and was not before; often empty."""

    def finish(self) -> str:
        """What was held back."""


class BytesDecoder:
    """For ids that stand for bytes: a character is given out when its last byte has arrived.

    Bytes that are no UTF-8 become U+FFFD, as many as in the text decoded as a whole.
    """

    def __init__(self, decode_bytes: Callable[[Sequence[int]], bytes]) -> None:
        self._decode_bytes = decode_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        return self._utf8.decode(self._decode_bytes([token_id]))

    def finish(self) -> str:
        """U+FFFD where the last character never became whole."""
        return self._utf8.decode(b"", final=True)


class NumbersDecoder:
    """For ids that stand for integers, separated by spaces: a space comes with the number behind it."""

    def __init__(self, decode_sequence: Callable[[Sequence[int]], list[int]]) -> None:
        self._decode_sequence = decode_sequence
        self._separator = ""

    def feed(self, token_id: int) -> str:
        text = ""
        for value in self._decode_sequence([token_id]):
            text += f"{self._separator}{value}"
            self._separator = " "
        return text

    def finish(self) -> str:
        return ""


class PrefixDecoder:
    """For a tokenizer of which only decode() is known: all ids so far are decoded anew each time.

    Given out is what two decodings in a row begin with, short of U+FFFD at its end, which may be half a character. So
    decode() may put something behind the last token, and a strict UTF-8 error is a wait for more ids.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._given = ""
        self._before = ""

    def feed(self, token_id: int) -> str:
        self._ids.append(token_id)
        try:
            text = self._decode(list(self._ids))
        except UnicodeDecodeError:
            return ""
        start = self._checked(text)
        before, self._before = self._before, text
        end = start
        while end < min(len(before), len(text)) and before[end] == text[end]:
            end += 1
        piece = text[start:end].rstrip(_REPLACEMENT)
        self._given += piece
        return piece

    def finish(self) -> str:
        if not self._ids:
            return ""
        text = self._decode(list(self._ids))
        piece = text[self._checked(text) :]
        self._given = text
        return piece

    def _checked(self, text: str) -> int:
        """Where the text that was not given out yet begins."""
        if not text.startswith(self._given):
            raise ValueError(
                f"decode() of {len(self._ids)} ids takes back text that it gave for fewer; "
                "give the tokenizer a stream_decoder() of its own, or decode all ids at once"
            )
        return len(self._given)
