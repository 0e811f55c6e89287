"""A generation state as a .safetensors file, to go on from later, with the same model.

Tensors: att_shift and ffn_shift [L, B, C], wkv [L, B, H, N, N] (oriented as the model type publishes it), logits
[B, V], lengths [B], and of all sequences back to back: ids and generated (1 or 0). The metadata names the model: its
shape, and a fingerprint of its weights, since a state means nothing to other weights.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from rwkv_spec.atomic import discard, flush_folder, temporary_sibling
from rwkv_spec.checkpoint.format import Header, read_header, read_weights
from rwkv_spec.errors import CheckpointError
from rwkv_spec.generation.context import GenerationState
from rwkv_spec.model.build import weights
from rwkv_spec.model.language_model import LanguageModel, State
from rwkv_spec.model.shapes import UNTRAINED, parameter_groups
from rwkv_spec.paths import expanded

_FORMAT = "rwkv_spec generation state 1"
# Of each tensor: training moves every weight, so that a few tell two checkpoints apart.
_NUM_FINGERPRINTED = 64
_FLOATS = ("fp32", "bf16", "fp16", "fp64")


def check_state_target(path: Path) -> None:
    """CheckpointError where save_state could not write, before anything was generated."""
    # A link that leads nowhere is somebody's, too.
    if os.path.lexists(path):
        raise CheckpointError(f"{path}: is there already and was left alone; name another file, or delete it first")
    if not path.parent.is_dir():
        raise CheckpointError(f"{path}: the folder {path.parent} does not exist; make it first")
    if not os.access(path.parent, os.W_OK):
        raise CheckpointError(f"{path}: the folder {path.parent} may not be written to; name another one")


def save_state(path: str | Path, state: GenerationState, model: LanguageModel) -> None:
    """Write a state of this model. A file that is there already is left alone, and the error says so."""
    path = expanded(path)
    check_state_target(path)
    if not all(bool(torch.isfinite(tensor).all()) for tensor in (*state.state.tensors, state.logits_BV)):
        raise CheckpointError(
            f"{path}: was not written, since the state holds numbers that are not finite; the model's weights are "
            "damaged, or their training had diverged"
        )
    tensors = {
        "att_shift": state.state.att_shift,
        "wkv": state.state.wkv,
        "ffn_shift": state.state.ffn_shift,
        "logits": state.logits_BV,
        "ids": torch.tensor([token for ids in state.ids for token in ids], dtype=torch.int64),
        "generated": torch.tensor([flag for flags in state.generated for flag in flags], dtype=torch.uint8),
        "lengths": torch.tensor([len(ids) for ids in state.ids], dtype=torch.int64),
    }
    content = safetensors.torch.save(
        {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
        metadata={"format": _FORMAT, **_marks(model)},
    )
    temporary = temporary_sibling(path)
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        flush_folder(path.parent)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot write the state: {error}") from error
    finally:
        discard(temporary)


def load_state(path: str | Path, model: LanguageModel) -> GenerationState:
    """Read a state for this model, in its dtypes and on its device. A CheckpointError says what else the file is."""
    path = expanded(path)
    header = read_header(path)
    if header.format != "safetensors":
        raise CheckpointError(f"{path}: is a weights file, not a state that was saved by generate")
    _check_marks(path, _metadata(path), model)
    num_sequences = _check_layout(header, model)
    tensors = read_weights(path)
    ids, generated = _sequences(path, tensors, num_sequences=num_sequences, vocab_size=model.shape.vocab_size)
    for name in ("att_shift", "wkv", "ffn_shift", "logits"):
        if not bool(torch.isfinite(tensors[name]).all()):
            raise CheckpointError(f"{path}: {name} holds numbers that are not finite; it is damaged, make it again")
    zeros = model.initial_state(1)
    # Copied out of the file, so that nothing is bound to it any more.
    state = State(
        tensors["att_shift"].to(zeros.att_shift, copy=True),
        tensors["wkv"].to(zeros.wkv, copy=True),
        tensors["ffn_shift"].to(zeros.ffn_shift, copy=True),
    )
    return GenerationState(state, tensors["logits"].to(model.head.weight, copy=True), ids, generated)


def _marks(model: LanguageModel) -> dict[str, str]:
    """What tells the model of a state from others: its shape as JSON, and a fingerprint of its weights."""
    digest = hashlib.sha256()
    groups = parameter_groups(model.shape)
    for name, tensor in weights(model).items():
        if groups[name] == UNTRAINED:
            # Nothing uses them, and files of the same model have them or not.
            continue
        # Rounded, so that one checkpoint has one fingerprint whether it is loaded in fp32, bf16 or fp64.
        few = tensor.detach().reshape(-1)[:_NUM_FINGERPRINTED].to(device="cpu", dtype=torch.bfloat16)
        digest.update(name.encode() + few.view(torch.int16).numpy().tobytes())
    return {"shape": json.dumps(asdict(model.shape)), "weights": digest.hexdigest()[:16]}


def _metadata(path: Path) -> dict[str, str]:
    try:
        with safetensors.safe_open(str(path), framework="pt", device="cpu") as file:
            return dict(file.metadata() or {})
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def _check_marks(path: Path, found: Mapping[str, str], model: LanguageModel) -> None:
    if found.get("format") != _FORMAT:
        raise CheckpointError(f"{path}: is a .safetensors file, but not a state that was saved by generate")
    own = _marks(model)
    if found.get("shape") != own["shape"]:
        raise CheckpointError(
            f"{path}: is the state of another model: {_shown_shape(found.get('shape', ''))}; this one is "
            f"{_shown_shape(own['shape'])}; name the checkpoint that the state was saved with"
        )
    if found.get("weights") != own["weights"]:
        raise CheckpointError(
            f"{path}: is the state of other weights of the same shape (fingerprint "
            f"{found.get('weights', '')[:16]!r}, this model's is {own['weights']!r}); name the checkpoint that the "
            "state was saved with"
        )


def _shown_shape(text: str) -> str:
    """A shape from metadata in words; a file may bring anything here, so that only plain values are repeated."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        return "one that it does not name"
    names = ("type", "n_layer", "n_embd", "head_size", "vocab_size")
    shown = " ".join(
        f"{name} {str(values[name])[:12]!r}" if isinstance(values[name], str) else f"{name} {values[name]}"
        for name in names
        if isinstance(values.get(name), (str, int))
    )
    return shown[:200] or "one that it does not name"


def _check_layout(header: Header, model: LanguageModel) -> int:
    """The number of sequences; CheckpointError unless every tensor has the shape and kind that it should."""
    path, infos = header.path, header.tensors
    lengths, ids = infos.get("lengths"), infos.get("ids")
    if lengths is None or len(lengths.shape) != 1 or lengths.shape[0] < 1 or ids is None or len(ids.shape) != 1:
        raise CheckpointError(f"{path}: does not say how long its sequences are; it is damaged, make it again")
    num_sequences = lengths.shape[0]
    shape = model.shape
    shift = (shape.n_layer, num_sequences, shape.n_embd)
    wkv = (shape.n_layer, num_sequences, shape.num_heads, shape.head_size, shape.head_size)
    expected = {
        "att_shift": (shift, _FLOATS),
        "wkv": (wkv, ("fp32", "fp64")),
        "ffn_shift": (shift, _FLOATS),
        "logits": ((num_sequences, shape.vocab_size), _FLOATS),
        "ids": (ids.shape, ("i64",)),
        "generated": (ids.shape, ("u8",)),
        "lengths": (lengths.shape, ("i64",)),
    }
    wrong = sorted(expected.keys() ^ infos.keys())
    wrong += [
        name
        for name, (sizes, dtypes) in expected.items()
        if name in infos and (infos[name].shape != sizes or infos[name].dtype not in dtypes)
    ]
    if wrong:
        raise CheckpointError(f"{path}: these tensors are not as a state has them: {', '.join(map(repr, wrong[:6]))}")
    return num_sequences


def _sequences(
    path: Path, tensors: Mapping[str, Tensor], *, num_sequences: int, vocab_size: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[bool, ...], ...]]:
    lengths: list[int] = tensors["lengths"].tolist()
    ids: list[int] = tensors["ids"].tolist()
    flags: list[int] = tensors["generated"].tolist()
    if min(lengths) < 1 or sum(lengths) != len(ids) or not set(flags) <= {0, 1}:
        raise CheckpointError(f"{path}: the lengths of its sequences do not fit its tokens; it is damaged")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise CheckpointError(f"{path}: holds ids that the model does not have ({vocab_size} ids); it is damaged")
    ends = [sum(lengths[: index + 1]) for index in range(num_sequences)]
    spans = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    return tuple(tuple(ids[span]) for span in spans), tuple(tuple(map(bool, flags[span])) for span in spans)
