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

# RWKV-5.2, RWKV-6 and RWKV-7, and the recurrence that each is built on.
TYPES: Final = ("x052", "x060", "x070")
OPERATORS: Final = {"x052": "wkv5", "x060": "wkv6", "x070": "wkv7"}
RANK_RULES: Final = ("current", "older")

_RANKS_OF_TYPE: Final = {
    "x052": (),
    "x060": ("rank_decay", "rank_mix"),
    "x070": ("rank_decay", "rank_iclr", "rank_value", "rank_gate"),
}
# The published x060 mixes its five inputs w, k, v, r, g by low-rank weights of their own, kept side by side.
NUM_MIXED: Final = 5
_FRESH_RANK_DECAY, _FRESH_RANK_MIX = 64, 32


@dataclass(frozen=True)
class Ranks:
    """Inner sizes of the low-rank pairs; 0 where a generation has none.

    decay (w1, w2 of x070, time_decay_w1, _w2 of x060), in-context rate (a1, a2), value (v1, v2) and gate (g1, g2) of
    x070, mix (time_maa_w1, _w2 of x060).
    """

    decay: int
    iclr: int
    value: int
    gate: int
    mix: int = 0


@dataclass(frozen=True)
class ModelShape:
    """All that is needed to build a model, or to read its weights: published names for the published numbers.

    Ranks that the generation has none of are 0.
    """

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
    rank_mix: int = 0

    def __post_init__(self) -> None:
        if self.type not in TYPES:
            raise ValueError(f"model type {self.type!r} is not known; known: {', '.join(TYPES)}")
        for name, value in vars(self).items():
            if name.startswith("rank_") and name not in _RANKS_OF_TYPE[self.type]:
                if value != 0:
                    raise ValueError(f"{name} must be 0, as {self.type} has no such matrices, got {value!r}")
            elif name != "type" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
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

    @property
    def ranks(self) -> Ranks:
        return Ranks(self.rank_decay, self.rank_iclr, self.rank_value, self.rank_gate, self.rank_mix)


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
    """The shape of a model that starts from nothing. ValueError says which number cannot be.

    `ranks` is the rule of x070's ranks (see low_ranks); the other generations have one rule only.
    """
    if n_embd < 1:
        raise ValueError(f"n_embd must be a whole number of at least 1, got {n_embd!r}")
    low, dim_ffn = Ranks(0, 0, 0, 0), max(32, 32 * (7 * n_embd // 64))
    if type == "x060":
        low = Ranks(_FRESH_RANK_DECAY, 0, 0, 0, _FRESH_RANK_MIX)
    elif type == "x070":
        low, dim_ffn = low_ranks(n_embd, rule=ranks), 4 * n_embd
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
        dim_ffn=dim_ffn,
        rank_mix=low.mix,
    )


def parameter_shapes(shape: ModelShape) -> dict[str, ParameterShape]:
    """Published name -> shape and group, in the order in which the published trainer writes them."""
    width = shape.n_embd
    table = {"emb.weight": ParameterShape((shape.vocab_size, width), DECAY)}
    for layer in range(shape.n_layer):
        norms = ("ln1", "ln2", "ln0") if layer == 0 else ("ln1", "ln2")
        for name in (f"{norm}.{part}" for norm in norms for part in ("weight", "bias")):
            table[f"blocks.{layer}.{name}"] = ParameterShape((width,), PLAIN)
        block = _block_x070(shape, layer=layer) if shape.type == "x070" else _block_with_faaaa(shape)
        table |= {f"blocks.{layer}.{name}": parameter for name, parameter in block.items()}
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
    width, table = shape.n_embd, {}
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


def _block_with_faaaa(shape: ModelShape) -> dict[str, ParameterShape]:
    """x052 and x060, which differ in how inputs are mixed and in where the decay comes from."""
    width, heads = shape.n_embd, (shape.num_heads, shape.head_size)
    vector = ParameterShape((1, 1, width), PLAIN)
    if shape.type == "x052":
        prefix = "time_mix"
        table = {f"att.time_mix_{letter}": vector for letter in "kvrg"}
        table["att.time_decay"] = ParameterShape(heads, DOUBLE)
    else:
        prefix = "time_maa"
        table = {f"att.time_maa_{letter}": vector for letter in "xwkvrg"}
        table["att.time_maa_w1"] = ParameterShape((width, NUM_MIXED * shape.rank_mix), PLAIN)
        table["att.time_maa_w2"] = ParameterShape((NUM_MIXED, shape.rank_mix, width), PLAIN)
        table["att.time_decay"] = ParameterShape((1, 1, width), DOUBLE)
        table["att.time_decay_w1"] = ParameterShape((width, shape.rank_decay), PLAIN)
        table["att.time_decay_w2"] = ParameterShape((shape.rank_decay, width), PLAIN)
    table["att.time_faaaa"] = ParameterShape(heads, PLAIN)
    for matrix in ("receptance", "key", "value", "output", "gate"):
        table[f"att.{matrix}.weight"] = ParameterShape((width, width), DECAY)
    table["att.ln_x.weight"] = ParameterShape((width,), PLAIN)
    table["att.ln_x.bias"] = ParameterShape((width,), PLAIN)
    table[f"ffn.{prefix}_k"] = vector
    table[f"ffn.{prefix}_r"] = vector
    table["ffn.key.weight"] = ParameterShape((shape.dim_ffn, width), DECAY)
    table["ffn.receptance.weight"] = ParameterShape((width, width), DECAY)
    table["ffn.value.weight"] = ParameterShape((width, shape.dim_ffn), DECAY)
    return table
