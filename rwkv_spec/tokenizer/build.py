"""Builds a tokenizer from plain values, and says which values build it again in another process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rwkv_spec.tokenizer.byte import BytesTokenizer
from rwkv_spec.tokenizer.ids import IdsTokenizer
from rwkv_spec.tokenizer.integer import AngleTokenizer, IntegerTokenizer
from rwkv_spec.tokenizer.protocol import Tokenizer
from rwkv_spec.tokenizer.vocab import VocabTokenizer
from rwkv_spec.tokenizer.world import WorldTokenizer

TYPES = ("angle", "integer", "vocab", "world", "bytes", "ids")


@dataclass(frozen=True)
class Recipe:
    """The arguments of build_tokenizer. Plain values, so that they travel to another process."""

    type: str
    max_value: int | None = None
    path: str | None = None
    vocab_size: int | None = None

    def build(self) -> Tokenizer:
        path = None if self.path is None else Path(self.path)
        return build_tokenizer(self.type, max_value=self.max_value, path=path, vocab_size=self.vocab_size)


def build_tokenizer(
    type: str, *, max_value: int | None = None, path: str | Path | None = None, vocab_size: int | None = None
) -> Tokenizer:
    """The tokenizer of a spec's `tokenizer` section. A vocabulary file that cannot be used is a DataError."""
    if type == "angle":
        return AngleTokenizer()
    if type == "integer" and max_value is not None:
        return IntegerTokenizer(max_value)
    if type == "vocab" and path is not None:
        return VocabTokenizer(path)
    if type == "world":
        return WorldTokenizer(path)
    if type == "bytes":
        return BytesTokenizer()
    if type == "ids" and vocab_size is not None:
        return IdsTokenizer(vocab_size)
    if type not in TYPES:
        raise ValueError(f"tokenizer type {type!r} is unknown; choose one of {', '.join(TYPES)}")
    missing = {"integer": "max_value", "vocab": "path", "ids": "vocab_size"}[type]
    raise ValueError(f"tokenizer type {type!r} needs {missing}")


def recipe_of(tokenizer: Tokenizer) -> Recipe | None:
    """What builds this tokenizer again; None for a user's own class, or one derived from ours."""
    if type(tokenizer) is AngleTokenizer:
        return Recipe("angle")
    if type(tokenizer) is IntegerTokenizer:
        return Recipe("integer", max_value=tokenizer.max_value)
    if type(tokenizer) is BytesTokenizer:
        return Recipe("bytes")
    if type(tokenizer) is IdsTokenizer:
        return Recipe("ids", vocab_size=tokenizer.vocab_size)
    if type(tokenizer) is VocabTokenizer:
        return Recipe("vocab", path=str(tokenizer.path.absolute()))
    if type(tokenizer) is WorldTokenizer:
        return Recipe("world", path=str(tokenizer.path.absolute()))
    return None
