"""Every parameter of every generation: published name, shape and optimizer group; and the published rank rules.

Torch-free, so that a plan can be made without loading torch. One table feeds the modules, the initialisation, the
optimizer's groups and the counts, and a test holds the modules' own names and shapes equal to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

DECAY: Final = "decay"
PLAIN: Final = "plain"
DOUBLE: Final = "double"
UNTRAINED: Final = "untrained"
# Weight decay only on large matrices; the decay bias learns at twice the rate; block 0's value residual is never used.
GROUPS: Final = (DECAY, PLAIN, DOUBLE, UNTRAINED)

TYPES: Final = ("x070",)
RANK_RULES: Final = ("current", "older")


@dataclass(frozen=True)
class Ranks:
    """Inner sizes of the low-rank pairs: decay (w1, w2), in-context rate (a1, a2), value (v1, v2), gate (g1, g2)."""

    decay: int
    iclr: int
    value: int
    gate: int


@dataclass(frozen=True)
class ModelShape:
    """All that is needed to build a model, or to read its weights: published names for the published numbers."""

    type: str
    n_layer: int
    n_embd: int
    head_size: int
    vocab_size: int
    rank_decay: int
    rank_iclr: int
    rank_value: int
    rank_gate: int
    dim_ffn: int

    def __post_init__(self) -> None:
        if self.type not in TYPES:
            raise ValueError(f"model type {self.type!r} is not known; known: {', '.join(TYPES)}")
        for name, value in vars(self).items():
            if name != "type" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.n_embd % self.head_size:
            lower = self.n_embd // self.head_size * self.head_size
            nearest = f"{lower} or {lower + self.head_size}" if lower else f"{self.head_size}"
            raise ValueError(
                f"n_embd {self.n_embd} is not a multiple of head_size {self.head_size}; nearest: {nearest}"
            )

    @property
    def num_heads(self) -> int:
        return self.n_embd // self.head_size


@dataclass(frozen=True)
class ParameterShape:
    """One tensor of the weights file: its sizes, and the optimizer group that it belongs to."""

    shape: tuple[int, ...]
    group: str

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def low_ranks(n_embd: int, *, rule: str = "current") -> Ranks:
    """The published ranks of a fresh x070. "current" is the reference trainer since July 2025, "older" the one before.

    Published files follow neither throughout: a checkpoint's ranks are read from its tensors, never from here.
    """
    root = math.sqrt(n_embd)
    if rule == "current":
        return Ranks(
            decay=_rounded_rank(2.5 * root),
            iclr=_rounded_rank(2.5 * root),
            value=_rounded_rank(1.7 * root),
            gate=_rounded_rank(5.0 * root),
        )
    if rule == "older":
        return Ranks(
            decay=_rounded_rank(1.8 * root),
            iclr=_rounded_rank(1.8 * root),
            value=_rounded_rank(1.3 * root),
            gate=_rounded_rank(0.6 * n_embd**0.8),
        )
    raise ValueError(f"rank rule {rule!r} is not known; known: {', '.join(RANK_RULES)}")


def fresh_shape(
    type: str, *, n_layer: int, n_embd: int, head_size: int, vocab_size: int, ranks: str = "current"
) -> ModelShape:
    """The shape of a model that starts from nothing. ValueError says which number cannot be."""
    if n_embd < 1:
        raise ValueError(f"n_embd must be a whole number of at least 1, got {n_embd!r}")
    low = low_ranks(n_embd, rule=ranks)
    return ModelShape(
        type=type,
        n_layer=n_layer,
        n_embd=n_embd,
        head_size=head_size,
        vocab_size=vocab_size,
        rank_decay=low.decay,
        rank_iclr=low.iclr,
        rank_value=low.value,
        rank_gate=low.gate,
        dim_ffn=4 * n_embd,
    )


def parameter_shapes(shape: ModelShape) -> dict[str, ParameterShape]:
    """Published name -> shape and group, in the order in which the published trainer writes them."""
    width = shape.n_embd
    table = {"emb.weight": ParameterShape((shape.vocab_size, width), DECAY)}
    for layer in range(shape.n_layer):
        for name, parameter in _block_x070(shape, layer=layer).items():
            table[f"blocks.{layer}.{name}"] = parameter
    table["ln_out.weight"] = ParameterShape((width,), PLAIN)
    table["ln_out.bias"] = ParameterShape((width,), PLAIN)
    table["head.weight"] = ParameterShape((shape.vocab_size, width), DECAY)
    return table


def parameter_groups(shape: ModelShape) -> dict[str, str]:
    """Published name -> optimizer group."""
    return {name: parameter.group for name, parameter in parameter_shapes(shape).items()}


def num_parameters(shape: ModelShape) -> dict[str, int]:
    """Group -> number of single weights in it; every group is present."""
    counts = dict.fromkeys(GROUPS, 0)
    for parameter in parameter_shapes(shape).values():
        counts[parameter.group] += parameter.num_elements
    return counts


def _rounded_rank(value: float) -> int:
    # Python's round goes to the even neighbour on a half, as the published rule does.
    return max(32, 32 * round(value / 32))


def _block_x070(shape: ModelShape, *, layer: int) -> dict[str, ParameterShape]:
    width = shape.n_embd
    norms = ("ln1", "ln2", "ln0") if layer == 0 else ("ln1", "ln2")
    table = {f"{norm}.{part}": ParameterShape((width,), PLAIN) for norm in norms for part in ("weight", "bias")}
    for mix in ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g"):
        table[f"att.{mix}"] = ParameterShape((1, 1, width), PLAIN)
    ranks = {"w": shape.rank_decay, "a": shape.rank_iclr, "v": shape.rank_value, "g": shape.rank_gate}
    for letter, rank in ranks.items():
        # The first block makes the value that later blocks mix in, so that its own mixing weights have no use.
        group = UNTRAINED if letter == "v" and layer == 0 else PLAIN
        table[f"att.{letter}1"] = ParameterShape((width, rank), group)
        table[f"att.{letter}2"] = ParameterShape((rank, width), group)
        if letter != "g":
            table[f"att.{letter}0"] = ParameterShape((1, 1, width), DOUBLE if letter == "w" else group)
    table["att.k_k"] = ParameterShape((1, 1, width), PLAIN)
    table["att.k_a"] = ParameterShape((1, 1, width), PLAIN)
    table["att.r_k"] = ParameterShape((shape.num_heads, shape.head_size), PLAIN)
    for matrix in ("receptance", "key", "value", "output"):
        table[f"att.{matrix}.weight"] = ParameterShape((width, width), DECAY)
    table["att.ln_x.weight"] = ParameterShape((width,), PLAIN)
    table["att.ln_x.bias"] = ParameterShape((width,), PLAIN)
    table["ffn.x_k"] = ParameterShape((1, 1, width), PLAIN)
    table["ffn.key.weight"] = ParameterShape((shape.dim_ffn, width), DECAY)
    table["ffn.value.weight"] = ParameterShape((width, shape.dim_ffn), DECAY)
    return table
