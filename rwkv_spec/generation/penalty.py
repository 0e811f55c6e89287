"""What a sequence holds so far, as the penalties of sampling count it, and their effect on its next logits."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

END_OF_DOCUMENT: Final = 0
_FIRST_ROOM = 64


class History:
    """The distinct tokens of one sequence, each with its faded count. Sampling says what the four numbers mean."""

    def __init__(self, *, presence: float, frequency: float, decay: float, repetition: float) -> None:
        self._presence, self._frequency, self._decay, self._repetition = presence, frequency, decay, repetition
        self._places: dict[int, int] = {}
        self._ids = np.zeros(_FIRST_ROOM, np.int64)
        self._counts = np.zeros(_FIRST_ROOM, np.float64)
        self._is_generated = np.zeros(_FIRST_ROOM, np.bool_)

    def add(self, token: int, *, generated: bool) -> None:
        """One more token of the sequence."""
        if generated:
            # A token 0 counts for nothing, but time passes.
            self._counts *= self._decay
        if token == END_OF_DOCUMENT:
            return
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            self._grow()
        self._ids[place] = token
        if generated:
            self._counts[place] += 1.0
            self._is_generated[place] = True

    def penalise(self, logits_V: NDArray[np.float32] | NDArray[np.float64]) -> None:
        """Change the logits of the next token in place."""
        num_held = len(self._places)
        ids, counts, generated = self._ids[:num_held], self._counts[:num_held], self._is_generated[:num_held]
        if num_held and int(ids.max()) >= len(logits_V):
            # The rows of a padded vocabulary beyond its tokenizer's are cut off before a token is chosen.
            inside = ids < len(logits_V)
            ids, counts, generated = ids[inside], counts[inside], generated[inside]
        values = logits_V[ids]
        values = np.where(values > 0, values / self._repetition, values * self._repetition)
        logits_V[ids] = values - (generated * self._presence + counts * self._frequency)

    def _grow(self) -> None:
        self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
        self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._is_generated = np.concatenate([self._is_generated, np.zeros_like(self._is_generated)])
