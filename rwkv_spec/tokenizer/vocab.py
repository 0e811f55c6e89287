"""The tokenizer over an RWKV vocabulary file: greedy longest match on UTF-8 bytes, as RWKV's own World tokenizer.

Id 0 ends a document and stands for no bytes, whatever the file says about it.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rwkv_spec.tokenizer.byte import utf8
from rwkv_spec.tokenizer.compiled_trie import CompiledTrie, make_trie
from rwkv_spec.tokenizer.protocol import EncodeError, Utf8Texts, Values, first_outside, integer_array, shorten
from rwkv_spec.tokenizer.stream import BytesDecoder, StreamDecoder
from rwkv_spec.tokenizer.trie import Trie
from rwkv_spec.tokenizer.vocab_file import read_vocab, write_vocab


class VocabTokenizer:
    """vocab_size is the highest id + 1; `unnamed_ids` are those below it that name no token."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.tokens = read_vocab(self.path)
        self.vocab_size = max(self.tokens) + 1
        digest = hashlib.sha256(b"rwkv_spec tokenizer: vocab")
        for token_id, token in sorted(self.tokens.items()):
            digest.update(b"%d %d " % (token_id, len(token)) + token)
        self.fingerprint = digest.hexdigest()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    @functools.cached_property
    def unnamed_ids(self) -> tuple[int, ...]:
        """The gaps of the file, in rising order. Id 0 has a meaning, though no bytes."""
        return tuple(index for index in range(1, self.vocab_size) if index not in self.tokens)

    @functools.cached_property
    def _trie(self) -> Trie | CompiledTrie:
        # Made at the first text: whoever only asks for vocab_size or decodes does not wait for a compiler.
        return make_trie(self.tokens)

    @property
    def is_compiled(self) -> bool:
        return isinstance(self._trie, CompiledTrie)

    @property
    def how_it_matches(self) -> str:
        """`compiled by …`, or `plain Python` and why. The ids are the same; the speed is not."""
        return self._trie.remark

    def encode(self, text: str) -> list[int]:
        return self._encode_checked(utf8(text), text)

    def encode_bytes(self, data: bytes) -> list[int]:
        return self._encode_checked(bytes(data), None)

    def _encode_checked(self, data: bytes, text: str | None) -> list[int]:
        match = self._trie.match([data])
        if match.stuck is not None:
            raise self._no_token(data, text, match.stuck[1])
        listed: list[int] = match.ids.tolist()
        return listed

    def encode_many(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The ids of all texts back to back, and how many each text has."""
        pieces = [utf8(text) for text in texts]
        match = self._trie.match(pieces)
        if match.stuck is not None:
            document, at = match.stuck
            raise self._no_token(pieces[document], texts[document], at)
        return match.ids, match.counts

    def encode_utf8(self, texts: Utf8Texts) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """The same for texts that lie anywhere in memory; None where encode_many has something to say."""
        if not isinstance(self._trie, CompiledTrie) or texts.is_list.any():
            return None
        match = self._trie.match_utf8(texts)
        return (match.ids, match.counts) if match.stuck is None else None

    def _no_token(self, data: bytes, text: str | None, at: int) -> EncodeError:
        offset = at if text is None else len(data[:at].decode("utf-8", errors="ignore"))
        shown = shorten(repr(data[at : at + 12])) if text is None else shorten(repr(text[offset : offset + 12]))
        what = f"no token of {self.path.name} begins at {shown} (byte 0x{data[at]:02x})"
        return EncodeError(what, "add tokens for the single bytes to the vocabulary, or correct the text", offset)

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
            piece = b"" if token_id == 0 else self.tokens.get(token_id)
            if piece is None:
                raise EncodeError(
                    f"id {token_id} names no token of {self.path.name}", "decode ids of this tokenizer", index
                )
            pieces.append(piece)
        return b"".join(pieces)

    def stream_decoder(self) -> StreamDecoder:
        return BytesDecoder(self.decode_bytes)

    def save_vocab(self, path: str | Path) -> None:
        write_vocab(path, sorted(self.tokens.items()))


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
