"""A checkpoint in another form: .pth, .safetensors, or the Hugging Face folder of RWKV-7; in its own or another dtype.

The new checkpoint is written beside its place, read back, held against the old one, tensor by tensor and by the logits
that the two give, and only then renamed. A file that is there already is left alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from rwkv_spec.atomic import flush_folder, temporary_sibling, write_json
from rwkv_spec.checkpoint.detect import detect_model
from rwkv_spec.checkpoint.folder import CONFIG, SINGLE, UNUSED
from rwkv_spec.checkpoint.format import cast, write_weights
from rwkv_spec.checkpoint.load import model_of
from rwkv_spec.checkpoint.published import FOLDER_FORMAT, open_header, open_weights, to_huggingface_layout
from rwkv_spec.errors import CheckpointError
from rwkv_spec.model.shapes import UNTRAINED, ModelShape, parameter_groups

DTYPES = ("bf16", "fp16", "fp32")
_HF_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
# The other programs take the group norm's epsilon from the head size, where the published one is 64e-5 for every size.
_HF_HEAD_SIZE = 64
_OTHER_SUFFIXES = (".pt", ".bin", ".ckpt", ".gguf", ".ggml", ".onnx", ".npz", ".npy", ".json", ".yaml", ".yml", ".zip")
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
    order = [name for name in parameter_groups(found.shape) if name in header.tensors]
    given = open_weights(source)
    own = {name: cast(given[name], dtype, where=f"{source}: {name}") for name in order}
    staging = temporary_sibling(target)
    try:
        _make_folder(staging, target)
        written = staging / target.name
        _write(written, own, shape=found.shape, file_format=target_format, dtype=dtype or found.dtype)
        difference, greatest, count = compare(given, own, written, source=source, target=target)
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
        remarks=header.remarks,
    )


def format_of(target: Path) -> str:
    """pth or safetensors by the ending; any name that does not end like another file is a Hugging Face folder."""
    suffix = target.suffix.lower()
    if suffix in (".pth", ".safetensors"):
        return suffix.removeprefix(".")
    if suffix in _OTHER_SUFFIXES:
        raise CheckpointError(
            f"{target}: {suffix} is no form that is written; end the name in .pth or .safetensors, or give a folder's "
            "name for the Hugging Face layout"
        )
    return FOLDER_FORMAT


def _make_folder(staging: Path, target: Path) -> None:
    try:
        staging.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written: {error}; name another place") from error


def _move(written: Path, target: Path) -> None:
    _refuse_existing(target)
    try:
        written.rename(target)
        flush_folder(target.parent)
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written: {error}; name another place") from error


def _refuse_existing(target: Path) -> None:
    if target.exists() or target.is_symlink():
        raise CheckpointError(f"{target}: is there already and was left alone; move it, or name another place")


def _refuse_other_than_rwkv7(source: Path, target: Path, shape: ModelShape) -> None:
    advice = "end the name in .pth or .safetensors"
    if shape.type != "x070":
        raise CheckpointError(
            f"{source}: is {shape.type}; the Hugging Face layout is written for x070 only, as no program on PyPI reads "
            f"one of {shape.type}. For another form than {target} {advice}"
        )
    if shape.head_size != _HF_HEAD_SIZE:
        raise CheckpointError(
            f"{source}: has heads of {shape.head_size}; the programs that read the Hugging Face layout take the "
            f"epsilon of a norm from the head size, and give these numbers for heads of {_HF_HEAD_SIZE} only. For "
            f"another form than {target} {advice}"
        )


def _write(path: Path, weights: Mapping[str, torch.Tensor], *, shape: ModelShape, file_format: str, dtype: str) -> None:
    if file_format != FOLDER_FORMAT:
        write_weights(path, weights, format=file_format, dtype=None)
        return
    unused = {name for name, group in parameter_groups(shape).items() if group == UNTRAINED and name in weights}
    turned = to_huggingface_layout({name: tensor for name, tensor in weights.items() if name not in unused})
    write_weights(path / SINGLE, turned, format="safetensors", dtype=None)
    if unused:
        write_weights(path / UNUSED, {name: weights[name] for name in unused}, format="safetensors", dtype=None)
    try:
        write_json(path / CONFIG, _config(shape, dtype=dtype))
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
    given: Mapping[str, torch.Tensor],
    own: Mapping[str, torch.Tensor],
    written: Path,
    *,
    source: Path,
    target: Path,
) -> tuple[float, float, int]:
    """Read back what was written and hold it against what it should be; the greatest difference from the source."""
    back = open_weights(written)
    differing = [
        name
        for name in own.keys() | back.keys()
        if name not in own
        or name not in back
        or own[name].dtype != back[name].dtype
        or not torch.equal(own[name], back[name])
    ]
    if differing and bool(all(torch.isfinite(tensor).all() for tensor in own.values())):
        raise CheckpointError(
            f"{target}: does not read back as it was written ({', '.join(sorted(differing)[:4])}); nothing was kept. "
            "Is the disk sound?"
        )
    before, after = _logits(given, source), _logits(back, target)
    if not bool(torch.isfinite(before).all()):
        raise CheckpointError(f"{source}: gives logits that are not finite, so that nothing can be checked or written")
    expected = before if _same_dtypes(given, own) else _logits(own, target)
    greatest, off = float(before.abs().max()), float((after - expected).abs().max())
    # Written so that a NaN fails too.
    if not off <= _TOLERANCE * max(greatest, 1.0):
        raise CheckpointError(f"{target}: gives logits that are off by {off:.3g} of {greatest:.3g}; nothing was kept")
    return float((after - before).abs().max()), greatest, before.numel()


def _same_dtypes(given: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> bool:
    return all(given[name].dtype == tensor.dtype for name, tensor in own.items())


def _logits(weights: Mapping[str, torch.Tensor], where: Path) -> torch.Tensor:
    model = model_of(weights, where=where)
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(model.shape.vocab_size, (_NUM_ROWS, _NUM_TOKENS), generator=generator)
    with torch.no_grad():
        logits_BTV: torch.Tensor = model(ids_BT)
    return logits_BTV
