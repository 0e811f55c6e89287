"""The names and layouts that others give to the same tensors, as tables beside the published names.

Read: the published layout, the Hugging Face layout of RWKV-7 (flash-linear-attention, rwkv7-hf) and that of RWKV-5 and
RWKV-6. Written: the published one and that of RWKV-7. Names that no table has are left as they are, so that whoever
accounts for every tensor lists them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

PUBLISHED: Final = "published"
HF_RWKV7: Final = "Hugging Face, as flash-linear-attention and rwkv7-hf write it"
HF_RWKV56: Final = "Hugging Face, as the transformers code of RWKV-5 and RWKV-6 writes it"

# How a tensor lies in a file: as published, as the transposed matrix, or perhaps as [C] in place of [1, 1, C].
AS_IS: Final = ""
TURNED: Final = "turned"
FLAT: Final = "flat"

_LAYER = r"(0|[1-9]\d{0,5})"
_PUBLISHED_BLOCK = re.compile(rf"blocks\.{_LAYER}\.(.+)", re.DOTALL)
_HF_RWKV7_BLOCK = re.compile(rf"model\.layers\.{_LAYER}\.(.+)", re.DOTALL)
_HF_RWKV56_BLOCK = re.compile(rf"rwkv\.blocks\.{_LAYER}\.(.+)", re.DOTALL)
# Published as [1, 1, C]; some programs write them without the sizes of 1.
_VECTORS = re.compile(
    r"blocks\.\d+\.(att|ffn)\.(x_[rwkvag]|[wav]0|k_k|k_a|time_mix_[kvrg]|time_maa_[xwkvrg]|time_decay)"
)
_LATER_LN0 = re.compile(r"blocks\.[1-9]\d{0,5}\.ln0\.(weight|bias)")
# An early flash-linear-attention kept the six mixes in one tensor [6, C], in this order.
_STACKED_MIXES = tuple(f"att.x_{letter}" for letter in "rwkvag")
NUM_STACKED: Final = len(_STACKED_MIXES)
# Those who read and write this layout take the group norm's epsilon from the head size; the published one is 64e-5 for
# every size, so that the two agree for this size only.
HF_RWKV7_HEAD_SIZE: Final = 64

_HF_RWKV7_TOP = {
    "emb.weight": "model.embeddings.weight",
    "ln_out.weight": "model.norm.weight",
    "ln_out.bias": "model.norm.bias",
    "head.weight": "lm_head.weight",
}
_HF_RWKV7_PARTS = {
    **{
        f"{norm}.{part}": (f"{theirs}.{part}", AS_IS)
        for norm, theirs in (
            ("ln0", "pre_norm"),
            ("ln1", "attn_norm"),
            ("ln2", "ffn_norm"),
            ("att.ln_x", "attn.g_norm"),
        )
        for part in ("weight", "bias")
    },
    **{f"att.x_{letter}": (f"attn.x_{letter}", AS_IS) for letter in "rwkvag"},
    **{f"att.{name}": (f"attn.{name}", FLAT) for name in ("k_k", "k_a")},
    "att.r_k": ("attn.r_k", AS_IS),
    **{
        f"att.{name}.weight": (f"attn.{theirs}.weight", AS_IS)
        for name, theirs in (("receptance", "r_proj"), ("key", "k_proj"), ("value", "v_proj"), ("output", "o_proj"))
    },
    **{f"att.{letter}0": (f"attn.{letter}_lora.lora.2.bias", FLAT) for letter in "wav"},
    **{f"att.{letter}1": (f"attn.{letter}_lora.lora.0.weight", TURNED) for letter in "wavg"},
    **{f"att.{letter}2": (f"attn.{letter}_lora.lora.2.weight", TURNED) for letter in "wavg"},
    "ffn.x_k": ("ffn.x_k", FLAT),
    "ffn.key.weight": ("ffn.key.weight", AS_IS),
    "ffn.value.weight": ("ffn.value.weight", AS_IS),
}
_HF_RWKV7_READ = {theirs: (name, change) for name, (theirs, change) in _HF_RWKV7_PARTS.items()}

_HF_RWKV56_TOP = {
    "rwkv.embeddings.weight": "emb.weight",
    "rwkv.ln_out.weight": "ln_out.weight",
    "rwkv.ln_out.bias": "ln_out.bias",
    "head.weight": "head.weight",
}
_HF_RWKV56_STARTS = {"pre_ln.": "ln0.", "attention.": "att.", "feed_forward.": "ffn."}
_HF_RWKV56_MIXES = {
    "time_mix_key": "time_mix_k",
    "time_mix_value": "time_mix_v",
    "time_mix_receptance": "time_mix_r",
    "time_mix_gate": "time_mix_g",
}


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in a file: under which name, how, and as which row of a stack (None: it is not stacked)."""

    name: str
    change: str = AS_IS
    row: int | None = None


@dataclass(frozen=True)
class Naming:
    """How a file calls its tensors: published names and their places, and what no model uses and is left out.

    `twice` are published names that two tensors of the file claim.
    """

    layout: str
    places: dict[str, Place]
    left_out: tuple[str, ...]
    twice: tuple[str, ...]


def naming_of(names: Iterable[str]) -> Naming:
    """The layout that these names belong to, and the published name of each."""
    every = list(names)
    layout = _layout_of(every)
    places: dict[str, Place] = {}
    left_out, twice = [], []
    for theirs in every:
        for name, place in _published(theirs, layout):
            if _LATER_LN0.fullmatch(name):
                # Only block 0 has this norm; some inference code makes one in every block and never applies it.
                left_out.append(theirs)
            elif name in places:
                twice.append(name)
            else:
                places[name] = place
    return Naming(layout, places, tuple(left_out), tuple(twice))


def to_huggingface(name: str) -> Place:
    """Where the Hugging Face layout of RWKV-7 puts a published tensor. KeyError for a name that x070 does not have."""
    if name in _HF_RWKV7_TOP:
        return Place(_HF_RWKV7_TOP[name])
    match = _PUBLISHED_BLOCK.fullmatch(name)
    if match is None:
        raise KeyError(name)
    theirs, change = _HF_RWKV7_PARTS[match.group(2)]
    return Place(f"model.layers.{match.group(1)}.{theirs}", change)


def _layout_of(names: list[str]) -> str:
    for name in names:
        match = _HF_RWKV7_BLOCK.fullmatch(name)
        # Other models of that library have blocks of this name too; only RWKV-7's have these.
        if match and match.group(2) in ("attn.r_k", "attn.k_k", "attn.x_r", "attn.x_x"):
            return HF_RWKV7
        match = _HF_RWKV56_BLOCK.fullmatch(name)
        if match and match.group(2).startswith("attention."):
            return HF_RWKV56
    return PUBLISHED


def _published(theirs: str, layout: str) -> list[tuple[str, Place]]:
    """The published names that one tensor of a file holds, as a rule one."""
    if layout == HF_RWKV7:
        return _published_rwkv7(theirs)
    name = _published_rwkv56(theirs) if layout == HF_RWKV56 else theirs
    return [(name, Place(theirs, FLAT if _VECTORS.fullmatch(name) else AS_IS))]


def _published_rwkv7(theirs: str) -> list[tuple[str, Place]]:
    for name, top in _HF_RWKV7_TOP.items():
        if theirs == top:
            return [(name, Place(theirs))]
    match = _HF_RWKV7_BLOCK.fullmatch(theirs)
    if match is None:
        return [(theirs, Place(theirs))]
    block, part = f"blocks.{match.group(1)}.", match.group(2)
    if part == "attn.x_x":
        return [(block + name, Place(theirs, FLAT, row)) for row, name in enumerate(_STACKED_MIXES)]
    if part not in _HF_RWKV7_READ:
        return [(theirs, Place(theirs))]
    name, change = _HF_RWKV7_READ[part]
    return [(block + name, Place(theirs, change))]


def _published_rwkv56(theirs: str) -> str:
    if theirs in _HF_RWKV56_TOP:
        return _HF_RWKV56_TOP[theirs]
    match = _HF_RWKV56_BLOCK.fullmatch(theirs)
    if match is None:
        return theirs
    part = match.group(2)
    for start, published in _HF_RWKV56_STARTS.items():
        if part.startswith(start):
            rest = part.removeprefix(start)
            part = published + _HF_RWKV56_MIXES.get(rest, rest)
            break
    return f"blocks.{match.group(1)}.{part}"
