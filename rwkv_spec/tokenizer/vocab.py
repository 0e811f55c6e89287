"""The tokenizer over an RWKV vocabulary file: greedy longest match on UTF-8 bytes, as RWKV's own World tokenizer.

Id 0 ends a document and stands for no bytes, whatever the file says about it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rwkv_spec.tokenizer.byte import StreamDecoder, utf8
from rwkv_spec.tokenizer.protocol import EncodeError, Values, first_outside, integer_array, shorten
from rwkv_spec.tokenizer.trie import Trie
from rwkv_spec.tokenizer.vocab_file import read_vocab, write_vocab

# Positions matched at once: the work arrays then stay in the processor's cache.
_CHUNK = 1 << 16


class VocabTokenizer:
    """vocab_size is the highest id + 1; `num_missing_ids` counts the ids below it that name no token."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._tokens = read_vocab(self.path)
        self.vocab_size = max(self._tokens) + 1
        self.num_missing_ids = self.vocab_size - 1 - len(self._tokens)
        self._longest_token = max(map(len, self._tokens.values()))
        self._trie = Trie(self._tokens)
        digest = hashlib.sha256(b"rwkv_spec tokenizer: vocab")
        for token_id, token in sorted(self._tokens.items()):
            digest.update(b"%d %d " % (token_id, len(token)) + token)
        self.fingerprint = digest.hexdigest()

    def __repr__(self) -> str:
        return f"VocabTokenizer({str(self.path)!r})"

    def encode(self, text: str) -> list[int]:
        return self._encode_checked(utf8(text), text)

    def encode_bytes(self, data: bytes) -> list[int]:
        return self._encode_checked(data, None)

    def _encode_checked(self, data: bytes, text: str | None) -> list[int]:
        ids, _, stuck = self._match(np.frombuffer(data, np.uint8), np.array([len(data)], np.int64))
        if stuck is not None:
            raise self._no_token(data, text, stuck)
        listed: list[int] = ids.tolist()
        return listed

    def encode_many(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The ids of all texts back to back, and how many each text has."""
        pieces = [utf8(text) for text in texts]
        sizes = np.fromiter(map(len, pieces), np.int64, len(pieces))
        ids, counts, stuck = self._match(np.frombuffer(b"".join(pieces), np.uint8), sizes)
        if stuck is not None:
            at = int(np.searchsorted(np.cumsum(sizes), stuck, side="right"))
            raise self._no_token(pieces[at], texts[at], stuck - int(sizes[:at].sum()))
        return ids, counts

    def _no_token(self, data: bytes, text: str | None, at: int) -> EncodeError:
        offset = at if text is None else len(data[:at].decode("utf-8", errors="ignore"))
        shown = shorten(repr(data[at : at + 12])) if text is None else shorten(repr(text[offset : offset + 12]))
        what = f"no token of {self.path.name} begins at {shown} (byte 0x{data[at]:02x})"
        return EncodeError(what, "add tokens for the single bytes to the vocabulary, or correct the text", offset)

    def _match(
        self, data: NDArray[np.uint8], sizes: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], int | None]:
        """(ids, ids a document, None), or the offset of the first byte where no token fits."""
        ends = np.cumsum(sizes)
        found: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
        starts: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
        position = 0
        while position < len(data):
            stop = min(position + _CHUNK, len(data))
            where = np.arange(position, stop)
            room = ends[np.searchsorted(ends, where, side="right")] - where
            lengths, ids = self._trie.longest(data[position : stop + self._longest_token], room)
            chain, following = _follow(lengths)
            if following is None:
                return found[0], starts[0], position + chain[-1]
            taken = np.array(chain, np.int64)
            found.append(ids[taken].astype(np.int64))
            starts.append(taken + position)
            position += following
        bounds = np.searchsorted(np.concatenate(starts), ends, side="left")
        return np.concatenate(found), np.diff(bounds, prepend=0), None

    def decode(self, ids: Values) -> str:
        """The text; ends of documents are left out, and bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Values) -> bytes:
        array = integer_array(ids)
        at = first_outside(array, 0, self.vocab_size - 1)
        if at is not None:
            raise EncodeError(f"id {array[at]} is outside 0..{self.vocab_size - 1}", "decode ids of this tokenizer", at)
        pieces = []
        for index, token_id in enumerate(array.tolist()):
            piece = b"" if token_id == 0 else self._tokens.get(token_id)
            if piece is None:
                raise EncodeError(
                    f"id {token_id} names no token of {self.path.name}", "decode ids of this tokenizer", index
                )
            pieces.append(piece)
        return b"".join(pieces)

    def decoder(self) -> StreamDecoder:
        return StreamDecoder(self)

    def save_vocab(self, path: str | Path) -> None:
        write_vocab(path, sorted(self._tokens.items()))


# The name under which users of rwkv-trainer know it.
GenericTokenizer = VocabTokenizer


def create_vocab_file_from_tokens(tokens: Sequence[str | bytes], path: str | Path) -> None:
    """Write a vocabulary file that gives the tokens the ids 1, 2, … in order; id 0 stays the end of a document."""
    if isinstance(tokens, (str, bytes, os.PathLike)):
        raise ValueError("the first argument is the list of tokens, the second one the path of the file")
    rows: dict[bytes, int] = {}
    for token_id, token in enumerate(tokens, start=1):
        if not isinstance(token, (str, bytes)):
            raise ValueError(f"token {token_id} is {token!r}; tokens are str or bytes")
        data = token.encode("utf-8") if isinstance(token, str) else token
        if not data:
            raise ValueError(f"token {token_id} is empty")
        if data in rows:
            raise ValueError(f"token {token_id}, {token!r}, is the same as token {rows[data]}")
        rows[data] = token_id
    if not rows:
        raise ValueError("there is no token to write")
    write_vocab(path, ((token_id, data) for data, token_id in rows.items()))


def _follow(lengths: NDArray[np.int32]) -> tuple[list[int], int | None]:
    """The positions at which greedy matches begin, and where the next chunk does; None where the last one is stuck."""
    steps: list[int] = lengths.tolist()
    chain: list[int] = []
    position, stop = 0, len(steps)
    while position < stop:
        chain.append(position)
        step = steps[position]
        if step == 0:
            return chain, None
        position += step
    return chain, position
