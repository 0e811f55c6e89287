"""What a weights file is, judged by its tensors alone: generation, sizes, ranks, dtype.

Every name is accounted for: a missing, unexpected or misshapen tensor is a CheckpointError that lists it, and so is
another generation or layout, called by its name. Key order, file name and published rank rules play no part.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rwkv_spec.checkpoint.format import DTYPES, Header, TensorInfo, shown
from rwkv_spec.errors import CheckpointError
from rwkv_spec.model.shapes import GROUPS, TYPES, UNTRAINED, ModelShape, Ranks, low_ranks, parameter_shapes

_BLOCK = re.compile(r"blocks\.(0|[1-9]\d{0,5})\.")
_NUM_LISTED = 6
_GENERATIONS = {
    "x040": "RWKV-4",
    "x050": "RWKV-5.0 (x050)",
    "x051": "RWKV-5.1 (x051)",
    "x052": "RWKV-5.2 (x052)",
    "x060": "RWKV-6 (x060)",
    "x060a": "RWKV-6 (x060a)",
    "x060b": "RWKV-6 (x060b)",
    "x070": "RWKV-7 (x070)",
    "x070a": "RWKV-7a (x070a, with token-wise embeddings in the channel-mix)",
    "x070b": "RWKV-7b (x070b, with token-wise embeddings in both mixes)",
}


@dataclass(frozen=True)
class Detected:
    """A model's shape as its tensors tell it. dtype is that of most of its numbers: fp32, bf16, fp16 or fp64.

    has_block0_value_residual: block 0's v0, v1 and v2 are in the file; they are never used, and most published files
    lack them.
    """

    shape: ModelShape
    dtype: str
    num_parameters: int
    has_block0_value_residual: bool


@dataclass(frozen=True)
class Info:
    """What `inspect` tells of a weights file. Counts are of single numbers in the file."""

    path: Path
    format: str
    type: str
    n_layer: int
    n_embd: int
    head_size: int
    vocab_size: int
    ranks: Ranks
    dtype: str
    num_parameters: int
    parameters_by_group: Mapping[str, int]
    file_bytes: int

    def as_dict(self) -> dict[str, object]:
        """The same as plain values that JSON can hold."""
        return {**asdict(self), "path": str(self.path), "parameters_by_group": dict(self.parameters_by_group)}

    def __str__(self) -> str:
        ranks = ", ".join(f"{name} {rank}" for name, rank in asdict(self.ranks).items())
        groups = ", ".join(f"{name} {count:,}" for name, count in self.parameters_by_group.items() if count)
        rows = {
            "file": f"{self.path} ({self.format}, {self.file_bytes:,} bytes)",
            "type": self.type,
            "n_layer": str(self.n_layer),
            "n_embd": str(self.n_embd),
            "head_size": str(self.head_size),
            "vocab_size": f"{self.vocab_size:,}",
            "ranks": ranks,
            "dtype": self.dtype,
            "parameters": f"{self.num_parameters:,} ({groups})",
        }
        return "\n".join(f"{name:<11} {value}" for name, value in rows.items())


def detect(tensors: Mapping[str, TensorInfo], *, where: Path) -> Detected:
    """The shape that these tensors have, or a CheckpointError that begins with `where`."""
    generation = _generation_of(tensors)
    if generation not in TYPES:
        known = f"an {_GENERATIONS[generation]} file" if generation else _describe_strange(tensors)
        raise CheckpointError(f"{where}: this is {known}; this version trains {', '.join(TYPES)} only")
    num_layers = _num_layers(tensors, where=where)
    shape = _shape_x070(tensors, num_layers=num_layers, where=where)
    _account_for_all(tensors, shape, where=where)
    elements = dict.fromkeys(DTYPES, 0)
    for info in tensors.values():
        elements[info.dtype] += math.prod(info.shape)
    return Detected(
        shape=shape,
        dtype=max(elements, key=lambda dtype: elements[dtype]),
        num_parameters=sum(elements.values()),
        has_block0_value_residual="blocks.0.att.v1" in tensors,
    )


def describe(header: Header) -> Info:
    """The facts of a weights file for a person, from its header."""
    found = detect(header.tensors, where=header.path)
    shape = found.shape
    counts = dict.fromkeys(GROUPS, 0)
    for name, parameter in parameter_shapes(shape).items():
        counts[parameter.group] += parameter.num_elements if name in header.tensors else 0
    return Info(
        path=header.path,
        format=header.format,
        type=shape.type,
        n_layer=shape.n_layer,
        n_embd=shape.n_embd,
        head_size=shape.head_size,
        vocab_size=shape.vocab_size,
        ranks=Ranks(shape.rank_decay, shape.rank_iclr, shape.rank_value, shape.rank_gate),
        dtype=found.dtype,
        num_parameters=found.num_parameters,
        parameters_by_group=counts,
        file_bytes=header.file_bytes,
    )


def _generation_of(tensors: Mapping[str, TensorInfo]) -> str:
    """A key of _GENERATIONS, or "" for what is no RWKV file in the published layout."""
    parts = {_BLOCK.sub("", name): info for name, info in tensors.items() if _BLOCK.match(name)}

    def has(*starts: str) -> bool:
        return any(part.startswith(starts) for part in parts)

    if has("att.r_k", "att.x_r", "att.k_k", "att.a0"):
        if has("ffn.s_emb"):
            return "x070b" if has("qkv.") else "x070a"
        return "x070"
    if has("att.time_maa_"):
        if has("att.time_maa_rkvw"):
            return "x060b"
        return "x060a" if has("att.gate_w1") else "x060"
    decay = parts.get("att.time_decay")
    if decay is None:
        return ""
    if not has("att.ln_x."):
        return "x040"
    if not has("att.gate."):
        return "x050"
    return "x052" if len(decay.shape) > 1 and decay.shape[1] > 1 else "x051"


def _describe_strange(tensors: Mapping[str, TensorInfo]) -> str:
    names = list(tensors)
    if all(name.endswith(".att.time_state") for name in names):
        return "an initial state from state tuning, not a model's weights"
    if any("lora_" in name or ".lora." in name for name in names):
        return f"an adapter (LoRA), not a model's weights (it holds {_listed(names)})"
    if any(name.startswith(("model.", "transformer.")) or name == "lm_head.weight" for name in names):
        return f"a model in the layout of another library, not in the published one (it holds {_listed(names)})"
    return f"no RWKV file (it holds {_listed(names)})"


def _num_layers(tensors: Mapping[str, TensorInfo], *, where: Path) -> int:
    found = {int(match.group(1)) for name in tensors if (match := _BLOCK.match(name))}
    num_layers = max(found) + 1
    if num_layers > len(found):
        # Only a few of them are looked for: the highest number may be far beyond what the file holds.
        gaps = [str(layer) for layer in range(min(num_layers, len(found) + _NUM_LISTED)) if layer not in found]
        raise CheckpointError(
            f"{where}: has blocks up to {max(found)}, but not {_listed(gaps)}; a part of the model is missing"
        )
    return num_layers


def _shape_x070(tensors: Mapping[str, TensorInfo], *, num_layers: int, where: Path) -> ModelShape:
    def sizes(name: str) -> tuple[int, int]:
        info = tensors.get(name)
        if info is None:
            raise CheckpointError(f"{where}: {name} is missing; a part of the model is not in this file")
        if len(info.shape) != 2:
            raise CheckpointError(f"{where}: {name} has the shape {list(info.shape)}; expected two dimensions")
        return info.shape[0], info.shape[1]

    vocab_size, n_embd = sizes("emb.weight")
    # Block 0 does not use its value residual and may lack it: a model of one block has no such rank, any will do.
    value_from = "blocks.1.att.v1" if num_layers > 1 else "blocks.0.att.v1"
    has_value_rank = num_layers > 1 or value_from in tensors
    rank_value = sizes(value_from)[1] if has_value_rank else low_ranks(n_embd).value
    try:
        return ModelShape(
            type="x070",
            n_layer=num_layers,
            n_embd=n_embd,
            head_size=sizes("blocks.0.att.r_k")[1],
            vocab_size=vocab_size,
            rank_decay=sizes("blocks.0.att.w1")[1],
            rank_iclr=sizes("blocks.0.att.a1")[1],
            rank_value=rank_value,
            rank_gate=sizes("blocks.0.att.g1")[1],
            dim_ffn=sizes("blocks.0.ffn.key.weight")[0],
        )
    except ValueError as error:
        raise CheckpointError(f"{where}: its tensors do not fit together: {error}") from error


def _account_for_all(tensors: Mapping[str, TensorInfo], shape: ModelShape, *, where: Path) -> None:
    expected = parameter_shapes(shape)
    untrained = [name for name, parameter in expected.items() if parameter.group == UNTRAINED]
    optional = untrained if not any(name in tensors for name in untrained) else []
    missing = [name for name in expected if name not in tensors and name not in optional]
    unexpected = [name for name in tensors if name not in expected]
    misshapen = [
        f"{name} {list(tensors[name].shape)} instead of {list(parameter.shape)}"
        for name, parameter in expected.items()
        if name in tensors and tensors[name].shape != parameter.shape
    ]
    strange = [f"{name} {info.dtype}" for name, info in tensors.items() if info.dtype not in DTYPES]
    problems = [
        f"{what}: {_listed(names)}"
        for what, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of another shape than the rest of the file tells", misshapen),
            (f"of a dtype other than {', '.join(DTYPES)}", strange),
        )
        if names
    ]
    if problems:
        raise CheckpointError(f"{where}: is not a whole {shape.type} model; {'; '.join(problems)}")


def _listed(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    every = [shown(name) for name in names]
    more = f" and {len(every) - _NUM_LISTED} more" if len(every) > _NUM_LISTED else ""
    return ", ".join(every[:_NUM_LISTED]) + more
