"""How many bytes a run takes, in memory and on disk: estimates from counted tensors, not measurements."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Bytes of a value in memory. Under bf16 autocast about half of the saved tensors are fp32: norms, gates and sums.
_VALUE_BYTES = {"fp32": 4, "bf16": 3, "fp64": 8}
_FILE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
# The recurrence keeps its state once per so many tokens, in fp32 at least.
_STATE_CHUNK = 16


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
    num_tokens: int, *, n_layer: int, n_embd: int, head_size: int, vocab_size: int, precision: str, dropout: bool
) -> int:
    """Bytes that autograd keeps for the backward pass of `num_tokens` tokens of an x070 model, run at once.

    Counted in values a token, C wide. A block's time-mix: input and output of ln1, the shift's difference, six mixed
    inputs of the matrix products (9 C); r, w_raw, k, v, the two gates, g and their inner products (10 C); normalised
    and scaled keys, a and b of the recurrence (6 C); its output, the group norm, the bonus and the gated sum (6 C); the
    inner sides of the low-rank products, about 16 sqrt(C). The recurrence: the state once per 16 tokens, head_size / 16
    values a channel in fp32, and its product with a (1 C). The channel-mix: input, difference, mixed input (3 C) and
    its inner width before and after the square (2 * 4 C). The ends of the model: two norms (4 C); logits, their
    log-softmax and its gradient (3 V).

    Tensors saved by the model sum to about 0.8 of this in fp32 and 0.75 in bf16, where blocks and not logits dominate;
    the rest is left for the gradients that live at once in the backward pass.
    """
    value = _VALUE_BYTES[precision]
    wide = max(4, value)
    channels = 9 + 10 + 6 + 6 + 3 + 2 * 4 + (2 if dropout else 0)
    block = value * (channels * n_embd + 16 * math.sqrt(n_embd)) + wide * n_embd * (head_size / _STATE_CHUNK + 1)
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
