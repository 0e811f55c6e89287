"""A Hugging Face folder as a set of weights files: which they are, and which tensor lies in which.

Only plain file names inside the folder are followed: an index that names a path, or a file that is not there, is a
CheckpointError, and so is a configuration that asks for another model than the tensors alone would tell.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rwkv_spec.errors import CheckpointError

CONFIG = "config.json"
SINGLE = "model.safetensors"
# Block 0 of x070 has value-residual tensors that no model uses and this layout has no names for. They lie beside it,
# where no other program looks, so that a conversion back gives the file that it came from.
UNUSED = "block0_value_residual.safetensors"
_SINGLES = (SINGLE, "pytorch_model.bin")
_INDEXES = (f"{SINGLE}.index.json", "pytorch_model.bin.index.json")
_PLAIN_NAME = re.compile(r"[^/\\:\0]+")
_MOST_JSON_BYTES = 64 << 20
# What the tensors do not show, with what RWKV has.
_FIXED = {"norm_eps": 1e-5, "layer_norm_epsilon": 1e-5, "head_size_divisor": 8, "hidden_act": "sqrelu"}
# Where the tensors have the sizes that other programs take from the configuration: published name and dimension.
_SIZES = {
    "hidden_size": ("emb.weight", 1),
    "vocab_size": ("emb.weight", 0),
    "head_dim": ("blocks.0.att.r_k", 1),
    "intermediate_size": ("blocks.0.ffn.key.weight", 0),
    "decay_low_rank_dim": ("blocks.0.att.w1", 1),
    "a_low_rank_dim": ("blocks.0.att.a1", 1),
    "v_low_rank_dim": ("blocks.1.att.v1", 1),
    "gate_low_rank_dim": ("blocks.0.att.g1", 1),
}
_BLOCK_NORM = re.compile(r"blocks\.\d+\.ln1\.weight")


@dataclass(frozen=True)
class Folder:
    """The weights files of a folder, in order. `shards` is file -> tensors by the index, None where there is none.

    `sizes` are those of the model that the configuration tells of; what it leaves open is not among them.
    """

    path: Path
    files: tuple[Path, ...]
    shards: dict[Path, frozenset[str]] | None
    unused: Path | None
    sizes: Mapping[str, object]

    @property
    def all_files(self) -> tuple[Path, ...]:
        return self.files if self.unused is None else (*self.files, self.unused)


def is_weights_folder(path: Path) -> bool:
    """True for a folder that holds weights, or at least the configuration, in the Hugging Face layout."""
    try:
        return path.is_dir() and any((path / name).is_file() for name in (CONFIG, *_SINGLES, *_INDEXES))
    except (OSError, ValueError):
        return False


def open_folder(path: Path) -> Folder:
    """Find the weights files of a folder and check its configuration."""
    sizes = _read_config(path / CONFIG)
    unused = path / UNUSED if (path / UNUSED).is_file() else None
    for single, index in zip(_SINGLES, _INDEXES, strict=True):
        if (path / single).is_file():
            return Folder(path, (path / single,), None, unused, sizes)
        if (path / index).is_file():
            shards = _read_index(path / index)
            return Folder(path, tuple(sorted(shards)), shards, unused, sizes)
    holds = ", ".join(sorted(entry.name for entry in path.iterdir())[:8])
    raise CheckpointError(
        f"{path}: is a Hugging Face folder without weights: neither {SINGLE} nor {_INDEXES[0]} is there "
        f"(it holds {holds}); fetch the weights too"
    )


def check_sizes(folder: Folder, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a configuration that tells of another model than the tensors, by published name, are: one is not right."""
    found = {key: shapes[name][axis] for key, (name, axis) in _SIZES.items() if len(shapes.get(name, ())) == 2}
    found["num_hidden_layers"] = sum(1 for name in shapes if _BLOCK_NORM.fullmatch(name))
    wrong = [
        f"{key} {str(told)[:40]} instead of {found[key]}"
        for key, told in folder.sizes.items()
        if key in found and told != found[key]
    ]
    if wrong:
        raise CheckpointError(
            f"{folder.path / CONFIG}: tells of another model than the tensors beside it: {', '.join(wrong)}; fetch the "
            "whole folder again, or move the file that is wrong away"
        )


def _read_index(path: Path) -> dict[Path, frozenset[str]]:
    content = _read_json(path)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: has no weight_map from tensors to files; fetch it again")
    shards: dict[Path, set[str]] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not _PLAIN_NAME.fullmatch(name) or name in (".", ".."):
            raise CheckpointError(
                f"{path}: names {str(name)[:100]!r} as the file of a tensor; only a file beside it is followed"
            )
        shards.setdefault(path.parent / name, set()).add(tensor)
    missing = sorted(shard.name for shard in shards if not shard.is_file())
    if missing:
        listed = ", ".join(repr(name[:100]) for name in missing[:4])
        raise CheckpointError(
            f"{path}: names {len(shards)} files, of which {listed} {'is' if len(missing) == 1 else 'are'} not there; "
            "fetch the whole folder"
        )
    return {shard: frozenset(tensors) for shard, tensors in shards.items()}


def _read_config(path: Path) -> dict[str, object]:
    """The sizes that it gives. Refuses what the tensors cannot tell, and would change the numbers."""
    if not path.is_file():
        return {}
    config = _read_json(path)
    for key, published in _FIXED.items():
        given = config.get(key, published)
        if given != published:
            raise CheckpointError(f"{path}: {key} is {given!r}; RWKV's is {published!r}, and this version has no other")
    if config.get("tie_word_embeddings") is True:
        raise CheckpointError(
            f"{path}: tie_word_embeddings is true: head and embedding are one matrix; this version has two"
        )
    if config.get("quantization_config"):
        raise CheckpointError(f"{path}: the weights are quantized; get the model in bf16, fp16 or fp32")
    return {key: config[key] for key in (*_SIZES, "num_hidden_layers") if config.get(key) is not None}


def _read_json(path: Path) -> dict[str, object]:
    try:
        if path.stat().st_size > _MOST_JSON_BYTES:
            raise CheckpointError(f"{path}: is too large to be a description ({path.stat().st_size:,} bytes)")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {type(error).__name__}: {str(error)[:120]}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds no JSON object; fetch it again")
    return content
