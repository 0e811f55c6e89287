"""How many bytes a run takes, in memory and on disk: estimates from counted tensors, not measurements."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Bytes of a value in memory. Under bf16 autocast plain torch keeps about half of the saved tensors in fp32.
_VALUE_BYTES = {"fp32": 4, "bf16": 3, "fp64": 8}
# What matrix products make and take, and compiled operators keep.
_PRODUCT_BYTES = {"fp32": 4, "bf16": 2, "fp64": 8}
_FILE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
# Logits that are made at once, and rows of them, at most.
_LOGITS, _ROWS = 1 << 26, 2048


@dataclass(frozen=True)
class _Block:
    """Values that a block keeps for each token: C of each kind, and those of the inner sides of low-rank products.

    `values` and `wide` (float32 whatever the precision) are counts of C. `inner` is the width of the channel-mix in C,
    kept so many times. The recurrence keeps its state once in `chunk` tokens, and `recurrence` values beside it.
    """

    values: float
    wide: int
    low_rank: int
    low_rank_per_root: int
    recurrence: int
    chunk: int


# Plain torch. Both halves: norm, sum, difference to the previous token and its inputs (10).
_PLAIN = {
    # Mixed inputs (6); r, k, v (3); output, normed output, both sides of the gate's product, gate, gated sum (6); the
    # channel-mix before and after the square, its gate and its value (9).
    "x052": _Block(values=30, wide=0, low_rank=0, low_rank_per_root=0, recurrence=0, chunk=16),
    # As x052, and two mixed inputs more, w_raw, and five mixing weights.
    "x060": _Block(values=38, wide=0, low_rank=448, low_rank_per_root=0, recurrence=0, chunk=16),
    # Mixed inputs (7); r, w_raw, k, v, the gates and g (8); normalised and scaled keys, a and b of the recurrence (6);
    # its output, the group norm, the bonus and the gated sum (6); the channel-mix before and after the square (8).
    "x070": _Block(values=42, wide=0, low_rank=0, low_rank_per_root=16, recurrence=1, chunk=16),
}
# Compiled: what the fused operators say that they save. Wide are the two sums.
_COMPILED = {
    # Mixed inputs (6); r, k, v, gate (4); y and what is gated (2); squares (3.5), gate and value (2).
    "x052": _Block(values=17.5, wide=2, low_rank=0, low_rank_per_root=0, recurrence=0, chunk=32),
    # As x052, and the token itself, the input of the shares, one mixed input, w_raw, and five added shares.
    "x060": _Block(values=26.5, wide=2, low_rank=448, low_rank_per_root=0, recurrence=0, chunk=32),
    # Mixed inputs (7); r, k, v and two low-rank products (5); w_raw, key, value, a and b (5); y, gate and what is
    # gated (3); squares (4).
    "x070": _Block(values=24, wide=2, low_rank=0, low_rank_per_root=16, recurrence=1, chunk=32),
}
# In the backward pass the gradients of about so many values of C a token live at once.
_GRADIENTS = 12


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
    compiled: bool,
    grad_checkpoint: bool,
) -> int:
    """Bytes that one forward and backward pass of `num_tokens` tokens, run at once, takes beside the weights.

    A block keeps what _PLAIN or _COMPILED says of it; with `grad_checkpoint` it keeps what goes into it, and one block
    at a time has the rest. Then the gradients that live at once in a block's backward pass; the ends of the model with
    the gradient of the last hidden vectors (5 C); one piece of logits with its softmax, and the head's gradient.
    """
    value = _PRODUCT_BYTES[precision] if compiled else _VALUE_BYTES[precision]
    wide = max(4, _PRODUCT_BYTES[precision])
    kept = (_COMPILED if compiled else _PLAIN)[type]
    low = kept.low_rank + kept.low_rank_per_root * math.sqrt(n_embd)
    block = n_embd * (value * (kept.values + (2 if dropout else 0)) + wide * kept.wide) + value * low
    block += wide * n_embd * (head_size / kept.chunk + kept.recurrence)
    layers = block + n_layer * n_embd * (wide + value) + value * n_embd if grad_checkpoint else n_layer * block
    logits = min(num_tokens, _ROWS, max(1, _LOGITS // vocab_size)) * vocab_size * wide * 2
    ends = wide * 5 * n_embd
    return int(num_tokens * (layers + value * _GRADIENTS * n_embd + ends) + logits + wide * vocab_size * n_embd)


def resident_bytes(num_parameters: int, num_untrained: int, *, activations: int, precision: str) -> Bytes:
    """Weights, gradients and AdamW's two moments are fp32, or fp64 if the run is; every process holds them whole.

    In bf16 the weights stand beside their casts, which live as long as a forward pass or longer.
    """
    value = 8 if precision == "fp64" else 4
    cast = 2 if precision == "bf16" else 0
    num_trained = num_parameters - num_untrained
    return Bytes((value + cast) * num_parameters, value * num_trained, 2 * value * num_trained, activations)


def disk_use(
    num_parameters: int, num_untrained: int, *, num_numbered: int, has_best: bool, save_dtype: str, precision: str
) -> Disk:
    """Numbered saves are weights and a state together; initial, final and best weights stand beside them."""
    value = 8 if precision == "fp64" else 4
    weights_file = _FILE_BYTES[save_dtype] * num_parameters
    state = value * num_parameters + 2 * value * (num_parameters - num_untrained)
    total = weights_file * (2 + has_best + num_numbered) + state * max(1, num_numbered)
    return Disk(weights_file, state, total)
