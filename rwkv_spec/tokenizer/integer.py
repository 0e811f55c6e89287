"""Tokenizers for sequences of integers: value v is id v + 1, and 0 ends a document. An angle is an integer up to 359.

Text is decimal integers separated by ASCII whitespace; nothing else is accepted, and nothing is ever truncated.
"""

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

MAX_VALUE = 2**31 - 3


class IntegerTokenizer:
    """Values 0..max_value become ids 1..max_value + 1; vocab_size is max_value + 2."""

    def __init__(self, max_value: int) -> None:
        if isinstance(max_value, bool) or not isinstance(max_value, int) or not 0 <= max_value <= MAX_VALUE:
            raise ValueError(f"max_value is {max_value!r}; it must be an integer in 0..{MAX_VALUE}")
        self.max_value = max_value
        self.vocab_size = max_value + 2
        self.fingerprint = hashlib.sha256(f"rwkv_spec tokenizer: integer {max_value}".encode()).hexdigest()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(max_value={self.max_value})"

    @property
    def value_range(self) -> tuple[int, int]:
        return 0, self.max_value

    def encode(self, text: str) -> list[int]:
        ids: list[int] = (parse(text, low=0, high=self.max_value) + 1).tolist()
        return ids

    def encode_many(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The ids of all texts back to back, and how many each text has."""
        parsed = parse_many(texts)
        if parsed is None or first_outside(parsed[0], 0, self.max_value) is not None:
            arrays = [parse(text, low=0, high=self.max_value) for text in texts]
            parsed = np.concatenate([np.zeros(0, np.int64), *arrays]), np.array([len(a) for a in arrays], np.int64)
        return parsed[0] + 1, parsed[1]

    @property
    def is_compiled(self) -> bool:
        return can_read_ids()

    def encode_utf8(self, texts: Utf8Texts) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """The same for texts that lie anywhere in memory; None where the others have something to say."""
        return ids_of_integers(texts, high=self.max_value, shift=1)

    def encode_sequence(self, values: Values) -> NDArray[np.int64]:
        """Ids of a list or array of integers. Floats are refused, integral ones too: round them yourself."""
        array = integer_array(values)
        at = first_outside(array, 0, self.max_value)
        if at is not None:
            raise outside(array[at], 0, self.max_value, at)
        return array + 1

    def decode(self, ids: Values) -> str:
        return " ".join(map(str, self.decode_sequence(ids)))

    def decode_sequence(self, ids: Values) -> list[int]:
        """The values of the ids; ends of documents (id 0) are left out."""
        array = integer_array(ids)
        at = first_outside(array, 0, self.max_value + 1)
        if at is not None:
            raise EncodeError(f"id {array[at]} is outside 0..{self.max_value + 1}", "decode ids of this tokenizer", at)
        values: list[int] = (array[array != 0] - 1).tolist()
        return values

    def stream_decoder(self) -> StreamDecoder:
        return NumbersDecoder(self.decode_sequence)

    def save_vocab(self, path: str | Path) -> None:
        """An RWKV vocabulary file of the tokens '0 ', '1 ', …: other software then decodes readable numbers."""
        write_vocab(path, ((value + 1, f"{value} ".encode()) for value in range(self.max_value + 1)))


class AngleTokenizer(IntegerTokenizer):
    """Whole degrees 0..359: 361 ids."""

    def __init__(self) -> None:
        super().__init__(359)

    def __repr__(self) -> str:
        return "AngleTokenizer()"

    def encode_angle_sequence(self, angles: Values) -> NDArray[np.int64]:
        return self.encode_sequence(angles)

    def decode_angle_sequence(self, ids: Values) -> list[int]:
        return self.decode_sequence(ids)
