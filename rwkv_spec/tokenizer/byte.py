"""The tokenizer that needs no vocabulary: the UTF-8 byte b of a text is id b + 1, and 0 ends a document; 257 ids."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rwkv_spec.tokenizer.compiled_ids import can_read_ids, ids_of_bytes
from rwkv_spec.tokenizer.protocol import EncodeError, Utf8Texts, Values, first_outside, integer_array
from rwkv_spec.tokenizer.stream import BytesDecoder, StreamDecoder
from rwkv_spec.tokenizer.vocab_file import write_vocab


def utf8(text: str) -> bytes:
    """The bytes of a text; half of a surrogate pair has none and is an EncodeError."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        what = f"U+{ord(text[error.start]):04X} is half of a surrogate pair, which is no character"
        raise EncodeError(what, "correct or remove it", error.start) from None


class BytesTokenizer:
    """Any text, byte for byte."""

    vocab_size = 257
    fingerprint = hashlib.sha256(b"rwkv_spec tokenizer: bytes").hexdigest()

    def __repr__(self) -> str:
        return "BytesTokenizer()"

    def encode(self, text: str) -> list[int]:
        return self.encode_bytes(utf8(text))

    def encode_bytes(self, data: bytes) -> list[int]:
        return [byte + 1 for byte in data]

    def encode_many(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The ids of all texts back to back, and how many each text has."""
        pieces = [utf8(text) for text in texts]
        ids = np.frombuffer(b"".join(pieces), np.uint8).astype(np.int64) + 1
        return ids, np.fromiter(map(len, pieces), np.int64, len(pieces))

    @property
    def is_compiled(self) -> bool:
        return can_read_ids()

    def encode_utf8(self, texts: Utf8Texts) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """The same for texts that lie anywhere in memory; None where the others have something to say."""
        return ids_of_bytes(texts)

    def decode(self, ids: Values) -> str:
        """The text; ends of documents are left out, and bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Values) -> bytes:
        array = integer_array(ids)
        at = first_outside(array, 0, 256)
        if at is not None:
            raise EncodeError(f"id {array[at]} is outside 0..256", "decode ids of this tokenizer", at)
        data: bytes = (array[array != 0] - 1).astype(np.uint8).tobytes()
        return data

    def stream_decoder(self) -> StreamDecoder:
        return BytesDecoder(self.decode_bytes)

    def save_vocab(self, path: str | Path) -> None:
        write_vocab(path, ((byte + 1, bytes([byte])) for byte in range(256)))
