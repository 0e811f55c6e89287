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
from rwkv_spec.model.shapes import (
    GROUPS,
    TYPES,
    UNTRAINED,
    ModelShape,
    Ranks,
    low_ranks,
    parameter_groups,
    parameter_shapes,
)

_BLOCK = re.compile(r"blocks\.(0|[1-9]\d{0,5})\.")
_NUM_LISTED = 6
# What a file of another generation is called, and what it needs that this version does not have.
_REFUSED = {
    "x040": ("RWKV-4", "its recurrence without heads (att.time_first, no att.ln_x)"),
    "x050": ("RWKV-5.0 (x050)", "its time-mix with one decay a head and no gate"),
    "x051": ("RWKV-5.1 (x051)", "its time-mix with one decay a head (att.time_decay of one column)"),
    "x060a": ("RWKV-6 (x060a)", "its low-rank gate (att.gate_w1, att.gate_w2)"),
    # The two have the same tensors and differ in one factor of the key.
    "x060b": ("RWKV-6 (x060b or x060c)", "its time-mix without a gate (att.time_maa_rkvw_w1, att.time_maa_rkvw_w2)"),
    "x070a": ("RWKV-7a (x070a)", "the DeepEmbed tensors (ffn.s_emb, ffn.s_emb_x, ffn.s0, ffn.s1, ffn.s2)"),
    "x070b": (
        "RWKV-7b (x070b)",
        "the DeepEmbed tensors (ffn.s_emb, ffn.s_emb_x, ffn.s0, ffn.s1, ffn.s2) and the attention beside the time-mix "
        "(qkv.*)",
    ),
}
INITIAL_STATE = "initial state"
_MOMENTS = (".exp_avg", ".exp_avg_sq")


@dataclass(frozen=True)
class Detected:
    """A model's shape as its tensors tell it. dtype is that of most of its numbers: fp32, bf16, fp16 or fp64.

    other_dtypes: those of the rest, with the number of tensors of each.
    has_block0_value_residual: block 0's v0, v1 and v2 are in the file; they are never used, and most published files
    lack them. has_initial_state: the file holds the time_state that state tuning leaves.
    """

    shape: ModelShape
    dtype: str
    other_dtypes: Mapping[str, int]
    num_parameters: int
    has_block0_value_residual: bool
    has_initial_state: bool


@dataclass(frozen=True)
class Info:
    """What `inspect` tells of a checkpoint. Counts are of single numbers in it."""

    path: Path
    format: str
    layout: str
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
    remarks: tuple[str, ...]

    def as_dict(self) -> dict[str, object]:
        """The same as plain values that JSON can hold."""
        return {**asdict(self), "path": str(self.path), "parameters_by_group": dict(self.parameters_by_group)}

    def __str__(self) -> str:
        ranks = ", ".join(f"{name} {rank}" for name, rank in asdict(self.ranks).items() if rank)
        groups = ", ".join(f"{name} {count:,}" for name, count in self.parameters_by_group.items() if count)
        rows = {
            "file": f"{self.path} ({self.format}, {self.file_bytes:,} bytes)",
            "layout": self.layout,
            "type": self.type,
            "n_layer": str(self.n_layer),
            "n_embd": str(self.n_embd),
            "head_size": str(self.head_size),
            "vocab_size": f"{self.vocab_size:,}",
            "ranks": ranks or "none",
            "dtype": self.dtype,
            "parameters": f"{self.num_parameters:,} ({groups})",
        }
        lines = [f"{name:<11} {value}" for name, value in rows.items()]
        return "\n".join(lines + [f"{'remark':<11} {remark}" for remark in self.remarks])


def detect(tensors: Mapping[str, TensorInfo], *, where: Path) -> Detected:
    """What these tensors are, or a CheckpointError that begins with `where`."""
    generation = _generation_of(tensors)
    if generation not in TYPES:
        kinds = ", ".join(TYPES)
        if generation:
            name, lacking = _REFUSED[generation]
            raise CheckpointError(
                f"{where}: this is an {name} file; this version trains {kinds} only and does not have {lacking}"
            )
        raise CheckpointError(f"{where}: this is {_describe_strange(tensors)}; this version trains {kinds} only")
    num_layers = _num_layers(tensors, where=where)
    read_shape = {"x052": _shape_x052, "x060": _shape_x060, "x070": _shape_x070}[generation]
    try:
        shape = read_shape(_Sizes(tensors, where), num_layers)
    except ValueError as error:
        raise CheckpointError(f"{where}: its tensors do not fit together: {error}") from error
    _account_for_all(tensors, shape, where=where)
    elements, counts = dict.fromkeys(DTYPES, 0), dict.fromkeys(DTYPES, 0)
    for info in tensors.values():
        elements[info.dtype] += math.prod(info.shape)
        counts[info.dtype] += 1
    most = max(elements, key=lambda dtype: elements[dtype])
    return Detected(
        shape=shape,
        dtype=most,
        other_dtypes={dtype: count for dtype, count in counts.items() if count and dtype != most},
        num_parameters=sum(elements.values()),
        has_block0_value_residual="blocks.0.att.v1" in tensors,
        has_initial_state="blocks.0.att.time_state" in tensors,
    )


def detect_model(tensors: Mapping[str, TensorInfo], *, where: Path) -> Detected:
    """As detect, for tensors that a model is made from: CheckpointError where a model would not use all of them."""
    found = detect(tensors, where=where)
    if found.has_initial_state:
        raise CheckpointError(
            f"{where}: holds an initial state from state tuning (att.time_state) beside its weights, without which it "
            "gives other text, and which this version does not use; name the file that the state was tuned for"
        )
    return found


def describe(header: Header) -> Info:
    """The facts of a checkpoint for a person, from its header."""
    found = detect(header.tensors, where=header.path)
    shape = found.shape
    counts = dict.fromkeys(GROUPS, 0)
    for name, parameter in parameter_shapes(shape).items():
        counts[parameter.group] += parameter.num_elements if name in header.tensors else 0
    remarks = header.remarks
    if found.other_dtypes:
        others = ", ".join(f"{count} in {dtype}" for dtype, count in found.other_dtypes.items())
        remarks += (f"not all of its {len(header.tensors)} tensors are in {found.dtype}: {others}",)
    if found.has_initial_state:
        counts[INITIAL_STATE] = found.num_parameters - sum(counts.values())
        remarks += ("holds an initial state from state tuning (att.time_state), which this version does not use",)
    return Info(
        path=header.path,
        format=header.format,
        layout=header.layout,
        type=shape.type,
        n_layer=shape.n_layer,
        n_embd=shape.n_embd,
        head_size=shape.head_size,
        vocab_size=shape.vocab_size,
        ranks=shape.ranks,
        dtype=found.dtype,
        num_parameters=found.num_parameters,
        parameters_by_group=counts,
        file_bytes=header.file_bytes,
        remarks=remarks,
    )


def _generation_of(tensors: Mapping[str, TensorInfo]) -> str:
    """One of TYPES, a key of _REFUSED, or "" for what is no RWKV file in a layout that is read."""
    parts = {_BLOCK.sub("", name): info for name, info in tensors.items() if _BLOCK.match(name)}

    def has(*starts: str) -> bool:
        return any(part.startswith(starts) for part in parts)

    if any(name.endswith(_MOMENTS) for name in tensors):
        return ""
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
    if any(name.endswith(_MOMENTS) for name in names):
        return f"the state of an optimizer, not a model's weights (it holds {_listed(names)})"
    if any("lora_" in name for name in names):
        return f"an adapter (LoRA), not a model's weights (it holds {_listed(names)})"
    if any(name.startswith(("model.", "transformer.", "layers.")) or name == "lm_head.weight" for name in names):
        return f"a model in the layout of another library that is not RWKV-7's (it holds {_listed(names)})"
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


@dataclass(frozen=True)
class _Sizes:
    """The sizes of single tensors, or words where one is missing or has another number of dimensions."""

    tensors: Mapping[str, TensorInfo]
    where: Path

    def __call__(self, name: str, num_dimensions: int = 2) -> tuple[int, ...]:
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self.where}: {name} is missing; a part of the model is not in this file")
        if len(info.shape) != num_dimensions:
            words = {2: "two", 3: "three"}[num_dimensions]
            raise CheckpointError(f"{self.where}: {name} has the shape {list(info.shape)}; expected {words} dimensions")
        return info.shape


def _shape(type: str, sizes: _Sizes, num_layers: int, *, head_size: int, ranks: Ranks) -> ModelShape:
    vocab_size, n_embd = sizes("emb.weight")
    return ModelShape(
        type=type,
        n_layer=num_layers,
        n_embd=n_embd,
        head_size=head_size,
        vocab_size=vocab_size,
        rank_decay=ranks.decay,
        rank_iclr=ranks.iclr,
        rank_value=ranks.value,
        rank_gate=ranks.gate,
        rank_mix=ranks.mix,
        dim_ffn=sizes("blocks.0.ffn.key.weight")[0],
    )


def _shape_x052(sizes: _Sizes, num_layers: int) -> ModelShape:
    head_size = sizes("blocks.0.att.time_faaaa")[1]
    return _shape("x052", sizes, num_layers, head_size=head_size, ranks=Ranks(0, 0, 0, 0))


def _shape_x060(sizes: _Sizes, num_layers: int) -> ModelShape:
    ranks = Ranks(
        decay=sizes("blocks.0.att.time_decay_w1")[1],
        iclr=0,
        value=0,
        gate=0,
        mix=sizes("blocks.0.att.time_maa_w2", 3)[1],
    )
    return _shape("x060", sizes, num_layers, head_size=sizes("blocks.0.att.time_faaaa")[1], ranks=ranks)


def _shape_x070(sizes: _Sizes, num_layers: int) -> ModelShape:
    # Block 0 does not use its value residual and may lack it: a model of one block has no such rank, any will do.
    value_from = "blocks.1.att.v1" if num_layers > 1 else "blocks.0.att.v1"
    has_value_rank = num_layers > 1 or value_from in sizes.tensors
    ranks = Ranks(
        decay=sizes("blocks.0.att.w1")[1],
        iclr=sizes("blocks.0.att.a1")[1],
        value=sizes(value_from)[1] if has_value_rank else low_ranks(sizes("emb.weight")[1]).value,
        gate=sizes("blocks.0.att.g1")[1],
    )
    return _shape("x070", sizes, num_layers, head_size=sizes("blocks.0.att.r_k")[1], ranks=ranks)


def _account_for_all(tensors: Mapping[str, TensorInfo], shape: ModelShape, *, where: Path) -> None:
    expected = {name: parameter.shape for name, parameter in parameter_shapes(shape).items()}
    states = {
        f"blocks.{layer}.att.time_state": (shape.num_heads, shape.head_size, shape.head_size)
        for layer in range(shape.n_layer)
    }
    if states.keys() <= tensors.keys():
        expected |= states
    untrained = [name for name, group in parameter_groups(shape).items() if group == UNTRAINED]
    optional = untrained if not any(name in tensors for name in untrained) else []
    missing = [name for name in expected if name not in tensors and name not in optional]
    unexpected = [name for name in tensors if name not in expected]
    misshapen = [
        f"{name} {list(tensors[name].shape)} instead of {list(sizes)}"
        for name, sizes in expected.items()
        if name in tensors and tensors[name].shape != sizes
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
