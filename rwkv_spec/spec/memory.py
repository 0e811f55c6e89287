"""How many bytes a run takes, in memory and on disk: estimates from counted tensors, not measurements."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Bytes of a value in memory. Under bf16 autocast about half of the saved tensors are fp32: norms, gates and sums.
_VALUE_BYTES = {"fp32": 4, "bf16": 3, "fp64": 8}
_FILE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
# The recurrence keeps its state once per so many tokens, in fp32 at least; compiled for the CPU, half as often.
_STATE_CHUNK = 16


@dataclass(frozen=True)
class _Block:
    """Values that a block keeps for each token: C wide ones, those of inner sides of low-rank products, and others.

    `inner` is the width of the channel-mix in C; `recurrence` counts what is kept beside the states.
    """

    time_mix: int
    channel_mix: int
    inner: float
    low_rank: int
    low_rank_per_root: int
    recurrence: int


_BLOCKS = {
    # Four mixed inputs (4); r, k, v (3); output, normed output, both sides of the gate's product, gate, gated sum (6).
    "x052": _Block(time_mix=16, channel_mix=7, inner=3.5, low_rank=0, low_rank_per_root=0, recurrence=0),
    # As x052, and six mixed inputs instead of four, w_raw, and five mixing weights.
    "x060": _Block(time_mix=24, channel_mix=7, inner=3.5, low_rank=448, low_rank_per_root=0, recurrence=0),
    # Six mixed inputs (6); r, w_raw, k, v, the two gates, g and their inner products (10); normalised and scaled keys,
    # a and b of the recurrence (6); its output, the group norm, the bonus and the gated sum (6).
    "x070": _Block(time_mix=31, channel_mix=3, inner=4.0, low_rank=0, low_rank_per_root=16, recurrence=1),
}


@dataclass(frozen=True)
class Bytes:
    """Memory of one process at the height of a step."""

    weights: int
    gradients: int
    moments: int
    activations: int

    @property
    def total(self) -> int:
        """The sum of the four."""
        return self.weights + self.gradients + self.moments + self.activations


@dataclass(frozen=True)
class Disk:
    """Bytes of one weights file, one state, and all that is kept at the end of the run."""

    weights_file: int
    state: int
    total: int


def activation_bytes(
    num_tokens: int,
    *,
    type: str,
    n_layer: int,
    n_embd: int,
    head_size: int,
    vocab_size: int,
    precision: str,
    dropout: bool,
) -> int:
    """Bytes that autograd keeps for the backward pass of `num_tokens` tokens of a model, run at once.

    Counted in values a token, C wide. The time-mix: input and output of ln1, and the difference to the previous token
    (3 C); then by generation what _BLOCKS says. The recurrence: the state once per 16 tokens, head_size / 16 values a
    channel in fp32 (x070: and its product with a). The channel-mix: input, difference and mixed inputs, and its inner
    width before and after the square. The ends of the model: two norms (4 C); logits, their log-softmax and its
    gradient (3 V).

    Tensors saved by the model sum to 0.7 to 0.85 of this where blocks and not logits dominate; the rest is left for the
    gradients that live at once in the backward pass.
    """
    value = _VALUE_BYTES[precision]
    wide = max(4, value)
    kept = _BLOCKS[type]
    channels = kept.time_mix + kept.channel_mix + 2 * kept.inner + (2 if dropout else 0)
    low = kept.low_rank + kept.low_rank_per_root * math.sqrt(n_embd)
    state = wide * n_embd * (head_size / _STATE_CHUNK + kept.recurrence)
    block = value * (channels * n_embd + low) + state
    ends = value * 4 * n_embd + wide * 3 * vocab_size
    return int(num_tokens * (n_layer * block + ends))


def resident_bytes(num_parameters: int, num_untrained: int, *, activations: int, precision: str) -> Bytes:
    """Weights, gradients and AdamW's two moments are fp32, or fp64 if the run is; every process holds them whole."""
    value = 8 if precision == "fp64" else 4
    num_trained = num_parameters - num_untrained
    return Bytes(value * num_parameters, value * num_trained, 2 * value * num_trained, activations)


def disk_use(
    num_parameters: int, num_untrained: int, *, num_numbered: int, has_best: bool, save_dtype: str, precision: str
) -> Disk:
    """Numbered saves are weights and a state together; initial, final and best weights stand beside them."""
    value = 8 if precision == "fp64" else 4
    weights_file = _FILE_BYTES[save_dtype] * num_parameters
    state = value * num_parameters + 2 * value * (num_parameters - num_untrained)
    total = weights_file * (2 + has_best + num_numbered) + state * max(1, num_numbered)
    return Disk(weights_file, state, total)
