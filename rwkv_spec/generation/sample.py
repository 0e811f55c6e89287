"""From logits to the next token of each sequence, with log-probabilities.

Every token is drawn by a number of its own, which depends on the sequence's seed and the token's place in it alone:
never on what else is in the batch, on the device, or on where the sequence was cut into a prompt, a state and the rest.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor

from rwkv_spec.generation.penalty import History

_MAX_SEED = (1 << 63) - 1
# As many of the likeliest tokens hold most of the probability of most texts.
_FIRST_LOOK = 256
# Far beyond the range of any model's logits, and far from overflowing.
_LARGEST_PENALTY = 1000.0


class NonFiniteLogits(ValueError):
    """The model's logits hold NaN or infinity: the fault lies in its weights, not in a caller's arguments."""


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen: penalties, then temperature, then the top_k largest, then the smallest set of
    probability top_p. temperature 0 takes the largest logit after penalties (the first one, if several are equal);
    top_k 0 and top_p 1 leave all in.

    repetition_penalty: the logit of every token that the sequence holds, prompt included, is divided by it if
    positive, else multiplied by it; once, however often the token stands there. 1 is none, above 1 discourages.
    presence_penalty and frequency_penalty: then presence_penalty + count * frequency_penalty is subtracted from the
    logit of every token generated before. 0 is none, below 0 encourages. count starts at 0; after each generated
    token all counts are multiplied by penalty_decay (1: nothing fades), then the new token's grows by 1. A count that
    fades leaves the presence penalty as it is.
    Token 0, the end of a document, is never penalised.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_decay: float = 1.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, Real):
                raise ValueError(f"{name} must be a number, got {value!r}")
        # Written so that NaN, which compares as false, is refused too.
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise ValueError(f"temperature must be a finite number of at least 0, got {self.temperature!r}")
        if not is_whole(self.top_k) or self.top_k < 0:
            raise ValueError(f"top_k must be a whole number, 0 for no limit, got {self.top_k!r}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p!r}")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not -_LARGEST_PENALTY <= value <= _LARGEST_PENALTY:
                raise ValueError(f"{name} must be from -{_LARGEST_PENALTY:g} to {_LARGEST_PENALTY:g}, got {value!r}")
        if not 0.0 <= self.penalty_decay <= 1.0:
            raise ValueError(f"penalty_decay must be from 0 to 1, got {self.penalty_decay!r}")
        if not 1 / _LARGEST_PENALTY <= self.repetition_penalty <= _LARGEST_PENALTY:
            raise ValueError(
                f"repetition_penalty must be from {1 / _LARGEST_PENALTY:g} to {_LARGEST_PENALTY:g} (1 is none), "
                f"got {self.repetition_penalty!r}"
            )

    def history(self, ids: Sequence[int], generated: Sequence[bool]) -> History | None:
        """What the penalties count of a sequence so far; None where all of them are off."""
        if self.presence_penalty == 0.0 and self.frequency_penalty == 0.0 and self.repetition_penalty == 1.0:
            return None
        history = History(
            presence=self.presence_penalty,
            frequency=self.frequency_penalty,
            decay=self.penalty_decay,
            repetition=self.repetition_penalty,
        )
        for token, is_generated in zip(ids, generated, strict=True):
            history.add(token, generated=is_generated)
        return history


def is_whole(value: object) -> bool:
    """Whether it is an integer of any type, such as numpy's, but no truth value."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_seed(seed: int, *, count: int) -> None:
    """ValueError unless seed, seed + 1, ... give `count` sequences a seed each."""
    if not is_whole(seed) or not 0 <= seed <= _MAX_SEED - count:
        raise ValueError(f"seed must be a whole number from 0 to {_MAX_SEED - count}, got {seed!r}")


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that draws the token with `position` tokens before it in a sequence of this seed."""
    digest = hashlib.blake2b(b"%d %d" % (seed, position), digest_size=8).digest()
    # The upper 53 bits: as many as a double holds, so that the result cannot round to 1.
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample(
    logits_BV: Tensor,
    *,
    sampling: Sampling,
    numbers: Sequence[float],
    histories: Sequence[History | None] | None = None,
    num_ids: int | None = None,
    gaps: Sequence[int] = (),
) -> tuple[list[int], list[float]]:
    """(token, log-probability) of each row; row i is drawn by numbers[i], in [0, 1), and penalised by its history.

    Chosen from are the first num_ids tokens (None: all) but those in `gaps`. Log-probabilities are the model's own: no
    penalties, no temperature, nothing left out.
    """
    if logits_BV.shape[0] != len(numbers):
        raise ValueError(f"{logits_BV.shape[0]} rows of logits need as many numbers, got {len(numbers)}")
    wide = torch.float64 if logits_BV.dtype == torch.float64 else torch.float32
    logits_BV = logits_BV.detach().to(device="cpu", dtype=wide)
    least, most_B1 = logits_BV.amin(), logits_BV.amax(dim=-1, keepdim=True)
    if not (math.isfinite(float(least)) and bool(torch.isfinite(most_B1).all())):
        raise NonFiniteLogits("the model gives logits that are not finite numbers, so that no token can be chosen")
    penalised_BV = _penalised(logits_BV[:, :num_ids], histories)
    if gaps:
        penalised_BV = penalised_BV.index_fill(1, torch.tensor(gaps), -math.inf)
    tokens_B = penalised_BV.argmax(dim=-1) if sampling.temperature == 0 else _draw(penalised_BV, sampling, numbers)
    # A sum of 65536 probabilities keeps its digits in float64 only.
    total_B = (logits_BV - most_B1).exp_().sum(dim=-1, dtype=torch.float64)
    logprobs_B = (logits_BV.gather(1, tokens_B[:, None]) - most_B1).squeeze(1).double() - total_B.log()
    return tokens_B.tolist(), logprobs_B.tolist()


def _penalised(logits_BV: Tensor, histories: Sequence[History | None] | None) -> Tensor:
    if histories is None or not any(histories):
        return logits_BV
    penalised_BV = logits_BV.clone()
    for logits_V, history in zip(penalised_BV.numpy(), histories, strict=True):
        if history is not None:
            history.penalise(logits_V)
    return penalised_BV


def _draw(logits_BV: Tensor, sampling: Sampling, numbers: Sequence[float]) -> Tensor:
    # Taking the largest off first keeps a tiny temperature from overflowing; a tinier one would be zero in float32.
    scaled_BV = (logits_BV - logits_BV.amax(dim=-1, keepdim=True)) / max(sampling.temperature, 1e-30)
    if sampling.top_k == 0 and sampling.top_p == 1.0:
        return _place(scaled_BV.exp(), torch.tensor(numbers, dtype=torch.float64))
    rows = [_draw_from_top(*row, sampling) for row in zip(scaled_BV, numbers, strict=True)]
    return torch.stack(rows)


def _draw_from_top(scaled_V: Tensor, number: float, sampling: Sampling) -> Tensor:
    order_K = _largest(scaled_V, sampling)
    weights_K = scaled_V[order_K].exp()
    total = (weights_K if sampling.top_k else scaled_V.exp()).sum(dtype=torch.float64)
    # A token stays if those before it do not yet reach top_p, so that the largest always stays.
    num_kept = int((weights_K.cumsum(dim=0, dtype=torch.float64) - weights_K < sampling.top_p * total).sum())
    kept_1K = weights_K[None, :num_kept]
    return order_K[_place(kept_1K, torch.tensor([number], dtype=torch.float64))[0]]


def _largest(scaled_V: Tensor, sampling: Sampling) -> Tensor:
    """The ids of the largest numbers, largest first, equal ones in the order of ids: top_k, or as many as hold top_p.

    A whole vocabulary is sorted only where its probability is spread over much of it.
    """
    num_ids = len(scaled_V)
    count = min(sampling.top_k or _FIRST_LOOK, num_ids)
    wanted = 0.0 if sampling.top_k else sampling.top_p * float(scaled_V.exp().sum(dtype=torch.float64))
    while True:
        values_K = scaled_V.topk(count).values
        if count == num_ids or float(values_K.exp().sum(dtype=torch.float64)) > wanted:
            break
        count = min(8 * count, num_ids)
    # What is equal to the last one is taken in too, since topk picks any of them.
    ids = torch.nonzero(scaled_V >= values_K[-1]).squeeze(1)
    return ids[scaled_V[ids].sort(descending=True, stable=True).indices[:count]]


def _place(weights_BK: Tensor, numbers_B: Tensor) -> Tensor:
    """The place in each row that its number in [0, 1) falls on, where a place is as wide as its weight."""
    cumulative_BK = weights_BK.cumsum(dim=-1, dtype=torch.float64)
    # A number of 53 bits below 1, times the total, stays below the total when rounded: no draw falls behind the end.
    return torch.searchsorted(cumulative_BK, numbers_B[:, None] * cumulative_BK[:, -1:], right=True).squeeze(1)
