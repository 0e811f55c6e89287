"""A checkpoint in another form: .pth, .safetensors, or the Hugging Face folder of RWKV-7; in its own or another dtype.

The new checkpoint is written beside its place, read back, held against the old one, tensor by tensor and by the logits
that the two give, and only then renamed. A file that is there already is left alone. Both files stay mapped, and only
one copy of the weights is in memory at a time: what is written, then one model, then the other.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from rwkv_spec.atomic import flush_folder, temporary_sibling, write_json
from rwkv_spec.checkpoint.detect import Detected, detect_model
from rwkv_spec.checkpoint.folder import CONFIG, SINGLE, UNUSED
from rwkv_spec.checkpoint.format import FORMATS, cast, write_weights
from rwkv_spec.checkpoint.load import model_of
from rwkv_spec.checkpoint.names import HF_RWKV7_HEAD_SIZE
from rwkv_spec.checkpoint.published import FOLDER_FORMAT, open_header, open_weights, to_huggingface_layout
from rwkv_spec.errors import CheckpointError
from rwkv_spec.interrupt import sigterm_unwinds
from rwkv_spec.model.shapes import UNTRAINED, ModelShape, parameter_groups

DTYPES = ("bf16", "fp16", "fp32")
_HF_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
# A dot and a letter, as in a.gguf or a.pht, begin the ending of a file; rwkv7-0.1b is a name for a folder.
_ENDING = re.compile(r"\.([a-z][^.]*)$")
_NUM_ROWS, _NUM_TOKENS = 2, 24
_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Converted:
    """What was written. greatest_difference: between the logits of source and target, over `num_logits` of them."""

    source: Path
    target: Path
    format: str
    type: str
    dtype: str
    num_parameters: int
    num_logits: int
    greatest_difference: float
    greatest_logit: float
    remarks: tuple[str, ...]

    def as_dict(self) -> dict[str, object]:
        """The same as plain values that JSON can hold."""
        return {**asdict(self), "source": str(self.source), "target": str(self.target)}

    def __str__(self) -> str:
        lines = [
            f"{self.target}: {self.type}, {self.num_parameters:,} parameters, {self.format}, {self.dtype}",
            f"checked against {self.source}: the greatest difference of {self.num_logits:,} logits, which go up to "
            f"{self.greatest_logit:.3g}, is {self.greatest_difference:.3g}",
        ]
        return "\n".join(lines + [f"remark: {remark}" for remark in self.remarks])


def convert(source: Path, target: Path, *, dtype: str | None = None) -> Converted:
    """Write `source` to `target`, whose ending decides the form; `dtype` None keeps each tensor's own."""
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; it is one of {', '.join(DTYPES)}, or None to keep the file's")
    target_format = format_of(target)
    header = open_header(source)
    found = detect_model(header.tensors, where=source)
    if target_format == FOLDER_FORMAT:
        _refuse_other_than_rwkv7(source, target, found.shape)
    _refuse_existing(target)
    weights = open_weights(source)
    given = {name: weights[name] for name in parameter_groups(found.shape) if name in weights}
    remarks = (*header.remarks, *_check_values(given, dtype, source=source))
    staging = temporary_sibling(target)
    with sigterm_unwinds():
        try:
            _make_folder(staging, target)
            written = staging / target.name
            _write(written, given, found=found, file_format=target_format, dtype=dtype)
            difference, greatest, count = compare(given, written, dtype=dtype, source=source, target=target)
            _move(written, target)
        except CheckpointError as error:
            # Where it lay for the moment is nothing to a person.
            raise CheckpointError(str(error).replace(str(staging / target.name), str(target))) from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return Converted(
        source=source,
        target=target,
        format=target_format,
        type=found.shape.type,
        dtype=dtype or found.dtype,
        num_parameters=found.num_parameters,
        num_logits=count,
        greatest_difference=difference,
        greatest_logit=greatest,
        remarks=remarks,
    )


def format_of(target: Path) -> str:
    """pth or safetensors by the ending; any name that does not end like another file is a Hugging Face folder."""
    ending = _ENDING.search(target.name.lower())
    if ending is None:
        return FOLDER_FORMAT
    if ending.group(1) not in FORMATS:
        raise CheckpointError(
            f"{target}: {ending.group()} is no form that is written; end the name in .pth or .safetensors, or give a "
            "folder's name, without such an ending, for the Hugging Face layout"
        )
    return ending.group(1)


def _check_values(given: Mapping[str, torch.Tensor], dtype: str | None, *, source: Path) -> tuple[str, ...]:
    """Refuse, before anything is written, what the dtype cannot hold; a remark on what is no number as it is."""
    wrong = []
    for name, tensor in given.items():
        if dtype is not None:
            cast(tensor, dtype, where=f"{source}: {name}")
        if not bool(torch.isfinite(tensor).all()):
            wrong.append(name)
    return (f"some numbers are not finite: {', '.join(wrong[:4])}",) if wrong else ()


def _make_folder(staging: Path, target: Path) -> None:
    try:
        staging.mkdir(parents=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{target}: cannot be written: {error}; name another place") from error


def _move(written: Path, target: Path) -> None:
    _refuse_existing(target)
    try:
        written.rename(target)
        flush_folder(target.parent)
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written: {error}; name another place") from error


def _refuse_existing(target: Path) -> None:
    try:
        exists = target.exists() or target.is_symlink()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{target}: cannot be written: {error}; name another place") from error
    if exists:
        raise CheckpointError(f"{target}: is there already and was left alone; move it, or name another place")


def _refuse_other_than_rwkv7(source: Path, target: Path, shape: ModelShape) -> None:
    advice = "end the name in .pth or .safetensors"
    if shape.type != "x070":
        raise CheckpointError(
            f"{source}: is {shape.type}; the Hugging Face layout is written for x070 only, as no program on PyPI reads "
            f"one of {shape.type}. For another form than {target} {advice}"
        )
    if shape.head_size != HF_RWKV7_HEAD_SIZE:
        raise CheckpointError(
            f"{source}: has heads of {shape.head_size}; the programs that read the Hugging Face layout take the "
            f"epsilon of a norm from the head size, and give these numbers for heads of {HF_RWKV7_HEAD_SIZE} only. For "
            f"another form than {target} {advice}"
        )


def _write(
    path: Path, weights: Mapping[str, torch.Tensor], *, found: Detected, file_format: str, dtype: str | None
) -> None:
    if file_format != FOLDER_FORMAT:
        write_weights(path, weights, format=file_format, dtype=dtype)
        return
    groups = parameter_groups(found.shape)
    unused = {name for name in weights if groups[name] == UNTRAINED}
    turned = to_huggingface_layout({name: tensor for name, tensor in weights.items() if name not in unused})
    write_weights(path / SINGLE, turned, format="safetensors", dtype=dtype)
    if unused:
        write_weights(path / UNUSED, {name: weights[name] for name in unused}, format="safetensors", dtype=dtype)
    try:
        write_json(path / CONFIG, _config(found.shape, dtype=dtype or found.dtype))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot write {CONFIG}: {error}") from error


def _config(shape: ModelShape, *, dtype: str) -> dict[str, object]:
    """What rwkv7-hf and flash-linear-attention build the model from. Token 0 ends a document and starts the first."""
    return {
        "architectures": ["RWKV7ForCausalLM"],
        "model_type": "rwkv7",
        "torch_dtype": _HF_DTYPES[dtype],
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.n_embd,
        "num_hidden_layers": shape.n_layer,
        "num_heads": shape.num_heads,
        "head_dim": shape.head_size,
        "intermediate_size": shape.dim_ffn,
        "hidden_ratio": shape.dim_ffn / shape.n_embd,
        "hidden_act": "sqrelu",
        "decay_low_rank_dim": shape.rank_decay,
        "a_low_rank_dim": shape.rank_iclr,
        "v_low_rank_dim": shape.rank_value,
        "gate_low_rank_dim": shape.rank_gate,
        "value_dim": [shape.n_embd] * shape.n_layer,
        "norm_first": True,
        "norm_bias": True,
        "norm_eps": 1e-5,
        "attn_mode": "chunk",
        "fuse_norm": False,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": None,
    }


def compare(
    given: Mapping[str, torch.Tensor], written: Path, *, dtype: str | None, source: Path, target: Path
) -> tuple[float, float, int]:
    """Read back what was written and hold it against the source, bit for bit and by the logits that it gives.

    Returns the greatest difference of two logits, the greatest of the source, and their number. In another dtype the
    difference is what the rounding costs, and no fault.
    """
    back = open_weights(written)
    differing = given.keys() ^ back.keys()
    for name in given.keys() & back.keys():
        if not _same_bits(cast(given[name], dtype, where=f"{source}: {name}"), back[name]):
            differing.add(name)
    if differing:
        raise CheckpointError(
            f"{target}: does not read back as it was written ({', '.join(sorted(differing)[:4])}); nothing was kept. "
            "Is the disk sound?"
        )
    before = _logits(given, source)
    if not bool(torch.isfinite(before).all()):
        raise CheckpointError(f"{source}: gives logits that are not finite, so that nothing can be checked or written")
    after = _logits(back, target)
    greatest, off = float(before.abs().max()), float((after - before).abs().max())
    is_rounded = any(given[name].dtype != tensor.dtype for name, tensor in back.items())
    if not math.isfinite(off) or (not is_rounded and off > _TOLERANCE * max(greatest, 1.0)):
        raise CheckpointError(f"{target}: gives logits that are off by {off:.3g} of {greatest:.3g}; nothing was kept")
    return off, greatest, before.numel()


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Unlike torch.equal, true of two equal NaNs, and false of 0 and -0."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _logits(weights: Mapping[str, torch.Tensor], where: Path) -> torch.Tensor:
    model = model_of(weights, where=where)
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(model.shape.vocab_size, (_NUM_ROWS, _NUM_TOKENS), generator=generator)
    with torch.no_grad():
        logits_BTV: torch.Tensor = model(ids_BT)
    return logits_BTV
