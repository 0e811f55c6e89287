"""The tokenizer for data that is token ids already: ids as they are, 0..vocab_size - 1; its text is decimal ids."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rwkv_spec.tokenizer.compiled_ids import can_read_ids, ids_of_integers
from rwkv_spec.tokenizer.decimals import outside, parse, parse_many
from rwkv_spec.tokenizer.protocol import EncodeError, Utf8Texts, Values, first_outside, integer_array
from rwkv_spec.tokenizer.stream import NumbersDecoder, StreamDecoder
from rwkv_spec.tokenizer.vocab_file import write_vocab

MAX_VOCAB_SIZE = 2**31 - 1


class IdsTokenizer:
    """Ids stay what they are. An id 0 in the data is an end of document like any other."""

    def __init__(self, vocab_size: int) -> None:
        if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or not 2 <= vocab_size <= MAX_VOCAB_SIZE:
            raise ValueError(f"vocab_size is {vocab_size!r}; it must be an integer in 2..{MAX_VOCAB_SIZE}")
        self.vocab_size = vocab_size
        self.fingerprint = hashlib.sha256(f"rwkv_spec tokenizer: ids {vocab_size}".encode()).hexdigest()

    def __repr__(self) -> str:
        return f"IdsTokenizer(vocab_size={self.vocab_size})"

    @property
    def value_range(self) -> tuple[int, int]:
        return 0, self.vocab_size - 1

    def encode(self, text: str) -> list[int]:
        ids: list[int] = parse(text, low=0, high=self.vocab_size - 1).tolist()
        return ids

    def encode_many(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The ids of all texts back to back, and how many each text has."""
        parsed = parse_many(texts)
        if parsed is None or first_outside(parsed[0], 0, self.vocab_size - 1) is not None:
            arrays = [parse(text, low=0, high=self.vocab_size - 1) for text in texts]
            parsed = np.concatenate([np.zeros(0, np.int64), *arrays]), np.array([len(a) for a in arrays], np.int64)
        return parsed

    @property
    def is_compiled(self) -> bool:
        return can_read_ids()

    def encode_utf8(self, texts: Utf8Texts) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """The same for texts that lie anywhere in memory; None where the others have something to say."""
        return ids_of_integers(texts, high=self.vocab_size - 1, shift=0)

    def encode_sequence(self, values: Values) -> NDArray[np.int64]:
        array = integer_array(values)
        at = first_outside(array, 0, self.vocab_size - 1)
        if at is not None:
            raise outside(array[at], 0, self.vocab_size - 1, at)
        return array

    def decode(self, ids: Values) -> str:
        return " ".join(map(str, self.decode_sequence(ids)))

    def decode_sequence(self, ids: Values) -> list[int]:
        """The same ids, checked. Zeros stay: here they may be part of the data."""
        array = integer_array(ids)
        at = first_outside(array, 0, self.vocab_size - 1)
        if at is not None:
            raise EncodeError(f"id {array[at]} is outside 0..{self.vocab_size - 1}", "decode ids of this tokenizer", at)
        listed: list[int] = array.tolist()
        return listed

    def stream_decoder(self) -> StreamDecoder:
        return NumbersDecoder(self.decode_sequence)

    def save_vocab(self, path: str | Path) -> None:
        """An RWKV vocabulary file of the tokens '1 ', '2 ', …: other software then decodes readable ids."""
        write_vocab(path, ((token_id, f"{token_id} ".encode()) for token_id in range(1, self.vocab_size)))
