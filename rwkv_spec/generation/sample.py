"""From logits to the next token of each sequence, with log-probabilities.

Every sequence draws from a generator of its own, one number a token, so that its tokens depend on its seed and its
logits alone, never on what else is in the batch, nor on the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_MAX_SEED = (1 << 63) - 1


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen: temperature, then the top_k largest, then the smallest set of probability top_p.

    temperature 0 takes the largest logit (the first one, if several are equal). top_k 0 and top_p 1 leave all in.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise ValueError(f"temperature must be a finite number of at least 0, got {self.temperature!r}")
        if not isinstance(self.top_k, int) or isinstance(self.top_k, bool) or self.top_k < 0:
            raise ValueError(f"top_k must be a whole number, 0 for no limit, got {self.top_k!r}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p!r}")


def sequence_generators(seed: int, *, count: int) -> list[torch.Generator]:
    """One generator for each sequence: sequence i has seed + i, so that it can be repeated alone."""
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed <= _MAX_SEED - count:
        raise ValueError(f"seed must be a whole number from 0 to {_MAX_SEED - count}, got {seed!r}")
    return [torch.Generator().manual_seed(seed + index) for index in range(count)]


def sample(
    logits_BV: Tensor, *, sampling: Sampling, generators: Sequence[torch.Generator]
) -> tuple[list[int], list[float]]:
    """(token, log-probability) of each row. Log-probabilities are the model's own: no temperature, nothing left out."""
    if logits_BV.shape[0] != len(generators):
        raise ValueError(f"{logits_BV.shape[0]} rows of logits need as many generators, got {len(generators)}")
    # float64 on the CPU: a sum of 65536 probabilities keeps its digits, and every device draws the same tokens.
    logits_BV = logits_BV.detach().to(device="cpu", dtype=torch.float64)
    if not bool(torch.isfinite(logits_BV).all()):
        raise ValueError("the model gives logits that are not finite numbers, so that no token can be chosen")
    tokens_B = logits_BV.argmax(dim=-1) if sampling.temperature == 0 else _draw(logits_BV, sampling, generators)
    logprobs_B = logits_BV.gather(1, tokens_B[:, None]).squeeze(1) - logits_BV.logsumexp(dim=-1)
    return tokens_B.tolist(), logprobs_B.tolist()


def _draw(logits_BV: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> Tensor:
    # Stable order: equal logits keep the order of their ids, and the largest comes first.
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        sorted_BV, order_BV = sorted_BV[:, : sampling.top_k], order_BV[:, : sampling.top_k]
    # Taking the largest off first keeps a tiny temperature from overflowing.
    probabilities_BV = ((sorted_BV - sorted_BV[:, :1]) / sampling.temperature).softmax(dim=-1)
    cumulative_BV = probabilities_BV.cumsum(dim=-1)
    # A token stays if those before it do not yet reach top_p, so that the largest always stays.
    num_kept_B = (cumulative_BV - probabilities_BV < sampling.top_p).sum(dim=-1, keepdim=True)
    mass_B1 = cumulative_BV.gather(1, num_kept_B - 1)
    drawn_B1 = torch.stack([torch.rand(1, generator=generator, dtype=torch.float64) for generator in generators])
    place_B1 = torch.searchsorted(cumulative_BV, drawn_B1 * mass_B1, right=True)
    # Rounding could place the draw behind the last token that stays.
    return order_BV.gather(1, torch.minimum(place_B1, num_kept_B - 1)).squeeze(1)
