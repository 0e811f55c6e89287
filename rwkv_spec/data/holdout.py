"""Which documents are held out for evaluation: a pure function of rule, seed and a document's fields or number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rwkv_spec.data.permutation import permute
from rwkv_spec.data.source import Given
from rwkv_spec.errors import DataError

# Keeps the choice of documents apart from the shuffle of windows, which uses the same seed with epochs from 0 on.
_EPOCH = -1
_MASK_STEP = 1 << 20


@dataclass(frozen=True)
class EvalRule:
    """Exactly one of: rows of .jsonl whose fields equal a value (or one of a list); other sources (one, or a tuple of
    several); a share of the documents; a number of them."""

    where: Mapping[str, object] | None = None
    path: Given | tuple[Given, ...] = ()
    fraction: float | None = None
    documents: int | None = None

    def __post_init__(self) -> None:
        given = [self.where is not None, bool(self.sources), self.fraction is not None, self.documents is not None]
        if sum(given) != 1:
            raise ValueError("an EvalRule takes exactly one of where, path, fraction and documents")
        if self.where is not None and not self.where:
            raise DataError("data.eval.where: names no field; give for instance {month: 12}")
        if self.fraction is not None and not 0 < self.fraction < 1:
            raise DataError(f"data.eval.fraction: {self.fraction} must lie between 0 and 1")
        if self.documents is not None and self.documents < 1:
            raise DataError(f"data.eval.documents: {self.documents} must be at least 1")

    @property
    def sources(self) -> tuple[Given, ...]:
        """The sources that are held out as a whole."""
        return self.path if isinstance(self.path, tuple) else (self.path,)

    @property
    def is_chosen(self) -> bool:
        """Whether documents are chosen by the seed."""
        return self.fraction is not None or self.documents is not None


@dataclass(frozen=True)
class Choice:
    """`count` of `total` documents, chosen by a keyed permutation: any range can be asked for, nothing is stored."""

    count: int
    total: int
    seed: int

    def mask(self, start: int, stop: int) -> NDArray[np.bool_]:
        """For documents start … stop-1, whether each is held out."""
        index = np.arange(start, stop, dtype=np.int64)
        return permute(index, size=self.total, seed=self.seed, epoch=np.full_like(index, _EPOCH)) < self.count

    def documents(self, first: int, count: int) -> NDArray[np.int64]:
        """Numbers, counted from `first`, of the held-out ones among `count` documents from `first` on."""
        if self.count == 0:
            return np.zeros(0, np.int64)
        starts = range(0, count, _MASK_STEP)
        found = [np.flatnonzero(self.mask(first + at, first + min(at + _MASK_STEP, count))) + at for at in starts]
        return np.concatenate([np.zeros(0, np.int64), *found])


def choose(rule: EvalRule, total: int, seed: int) -> Choice:
    """max(1, round(fraction · total)) documents, or the number asked for; an error where none would be left."""
    asked = f"data.eval.fraction: {rule.fraction}"
    count = max(1, round((rule.fraction or 0) * total))
    if rule.documents is not None:
        asked, count = f"data.eval.documents: {rule.documents}", rule.documents
    if count >= total:
        raise DataError(
            f"{asked} holds out {count} of {total} document(s) and leaves none to train on; hold out fewer, or name "
            "another file as data.eval.path"
        )
    return Choice(count, total, seed)


def matches(fields: Mapping[str, object], where: Mapping[str, object]) -> bool:
    """Whether every field equals its value, or one of its values if several are given. 1 is not true, 12 not "12"."""
    return all(_is_one_of(fields[key], wanted) for key, wanted in where.items())


def _is_one_of(value: object, wanted: object) -> bool:
    choices = wanted if isinstance(wanted, (list, tuple)) else [wanted]
    return any(isinstance(value, bool) == isinstance(choice, bool) and value == choice for choice in choices)
