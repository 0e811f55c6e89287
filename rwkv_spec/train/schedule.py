"""The learning rate as a pure function of the step, so that nothing of it is ever saved or can drift on a resume."""

from __future__ import annotations

import math
from typing import Final

TYPES: Final = ("cosine", "constant")
# The first warm-up step runs at this share of the rate, as published.
WARMUP_FLOOR: Final = 0.01


def learning_rate(
    step: int,
    *,
    type: str,
    lr: float,
    lr_final: float,
    warmup_steps: int,
    tokens_per_step: int,
    total_tokens: int,
) -> float:
    """The rate of the update that follows `step` finished updates; `step` counts from 0.

    cosine: from lr to lr_final over the tokens after the warm-up, and lr_final from total_tokens on. constant: lr
    throughout. The warm-up multiplies on top of either.
    """
    if type not in TYPES:
        raise ValueError(f"scheduler type {type!r} is not known; known: {', '.join(TYPES)}")
    rate = lr
    if type == "cosine":
        warmup_tokens = warmup_steps * tokens_per_step
        progress = _progress(step * tokens_per_step - warmup_tokens, total_tokens - warmup_tokens)
        # Mean and half range instead of the published ratio lr_final / lr: the same value, and lr = 0 has no division.
        rate = (lr + lr_final) / 2 + (lr - lr_final) / 2 * math.cos(math.pi * progress)
    if step < warmup_steps:
        rate *= WARMUP_FLOOR + (1 - WARMUP_FLOOR) * step / warmup_steps
    return rate


def _progress(done: int, whole: int) -> float:
    if done <= 0:
        return 0.0
    # A warm-up as long as the run leaves nothing to decay over: what comes after it is at the end.
    return 1.0 if done >= whole else done / whole
