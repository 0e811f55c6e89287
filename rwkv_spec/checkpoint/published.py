"""Any checkpoint, a file or a Hugging Face folder, under the published names and shapes.

Whatever layout the source has, callers see one: the same tensors, turned and shaped as the published trainer leaves
them. What no model uses is left out with a remark; nothing else is dropped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from rwkv_spec.checkpoint.folder import Folder, check_sizes, is_weights_folder, open_folder
from rwkv_spec.checkpoint.format import Header, TensorInfo, read_header, read_weights, shown
from rwkv_spec.checkpoint.names import (
    AS_IS,
    FLAT,
    HF_RWKV7,
    HF_RWKV7_HEAD_SIZE,
    NUM_STACKED,
    TURNED,
    Naming,
    Place,
    naming_of,
    to_huggingface,
)
from rwkv_spec.checkpoint.state import file_sha256
from rwkv_spec.errors import CheckpointError

FOLDER_FORMAT = "huggingface"
_NUM_LISTED = 4
_Value = TypeVar("_Value")


def open_header(path: Path) -> Header:
    """Names, shapes and dtypes of a checkpoint as published, with the layout it has and remarks on it."""
    folder = open_folder(path) if is_weights_folder(path) else None
    if folder is not None:
        headers = {file: read_header(file) for file in folder.all_files}
        infos = _merged(folder, {file: header.tensors for file, header in headers.items()})
        file_format, file_bytes = FOLDER_FORMAT, sum(header.file_bytes for header in headers.values())
    else:
        header = read_header(path)
        infos, file_format, file_bytes = dict(header.tensors), header.format, header.file_bytes
    naming = _naming(path, infos)
    tensors = {name: _info(infos[place.name], place) for name, place in naming.places.items()}
    _check_layout(path, folder, naming, {name: info.shape for name, info in tensors.items()})
    return Header(path, file_format, file_bytes, tensors, naming.layout, _remarks(naming))


def open_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint on the CPU as published. What is not turned stays mapped from its file."""
    folder = open_folder(path) if is_weights_folder(path) else None
    if folder is not None:
        tensors = _merged(folder, {file: read_weights(file) for file in folder.all_files})
    else:
        tensors = read_weights(path)
    naming = _naming(path, tensors)
    weights = {name: _tensor(tensors[place.name], place) for name, place in naming.places.items()}
    _check_layout(path, folder, naming, {name: tuple(tensor.shape) for name, tensor in weights.items()})
    return weights


def to_huggingface_layout(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Published x070 tensors under the names and shapes of the Hugging Face layout."""
    turned = {}
    for name, tensor in weights.items():
        place = to_huggingface(name)
        if place.change == TURNED:
            tensor = tensor.t()
        elif place.change == FLAT:
            tensor = tensor.reshape(-1)
        turned[place.name] = tensor.contiguous()
    return turned


def checkpoint_sha256(path: Path) -> str:
    """A hash of the weights: of the file's bytes, or of a folder's weights files with their names."""
    if not is_weights_folder(path):
        return file_sha256(path)
    lines = [f"{file_sha256(file)}  {file.name}\n" for file in open_folder(path).all_files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _merged(folder: Folder, contents: Mapping[Path, Mapping[str, _Value]]) -> dict[str, _Value]:
    """All tensors of a folder's files. Each lies where the index says, and in one file only."""
    merged: dict[str, _Value] = {}
    for file, tensors in contents.items():
        if folder.shards is not None and file in folder.shards and tensors.keys() != folder.shards[file]:
            differing = sorted(tensors.keys() ^ folder.shards[file])
            raise CheckpointError(
                f"{file}: its tensors are not those that the index gives it ({_listed(differing)}); fetch the whole "
                "folder again"
            )
        for name in tensors:
            if name in merged:
                raise CheckpointError(f"{file}: has {shown(name)}, which another file of the folder has too")
        merged.update(tensors)
    return merged


def _naming(path: Path, names: Iterable[str]) -> Naming:
    naming = naming_of(names)
    if naming.twice:
        raise CheckpointError(f"{path}: has {_listed(naming.twice)} twice, under different names")
    return naming


def _check_layout(path: Path, folder: Folder | None, naming: Naming, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse what would give other numbers here than in the programs that the layout belongs to."""
    if folder is not None:
        check_sizes(folder, shapes)
    heads = shapes.get("blocks.0.att.r_k", ())
    if naming.layout == HF_RWKV7 and len(heads) == 2 and heads[1] != HF_RWKV7_HEAD_SIZE:
        raise CheckpointError(
            f"{path}: has heads of {heads[1]}, for which the programs of this layout give a norm another epsilon than "
            f"the published one; this version reads it for heads of {HF_RWKV7_HEAD_SIZE} only"
        )


def _remarks(naming: Naming) -> tuple[str, ...]:
    if not naming.left_out:
        return ()
    return (f"{_listed(naming.left_out)}: left out, since only block 0 has such a norm and no program applies another",)


def _info(info: TensorInfo, place: Place) -> TensorInfo:
    """Its shape as published; one that cannot be brought into it stays, for the accounting to refuse."""
    sizes = info.shape
    if place.row is not None and len(sizes) > 1 and sizes[0] == NUM_STACKED and set(sizes[1:-1]) <= {1}:
        sizes = (sizes[-1],)
    if place.change == TURNED and len(sizes) == 2:
        sizes = (sizes[1], sizes[0])
    elif place.change == FLAT and len(sizes) == 1:
        sizes = (1, 1, sizes[0])
    return TensorInfo(sizes, info.dtype)


def _tensor(tensor: Tensor, place: Place) -> Tensor:
    if place.change == AS_IS:
        return tensor
    sizes = _info(TensorInfo(tuple(tensor.shape), ""), place).shape
    if place.row is not None and sizes != tuple(tensor.shape):
        tensor = tensor[place.row]
    return tensor.t().contiguous() if place.change == TURNED and tensor.ndim == 2 else tensor.reshape(sizes)


def _listed(names: Iterable[str]) -> str:
    every = [shown(name) for name in names]
    more = f" and {len(every) - _NUM_LISTED} more" if len(every) > _NUM_LISTED else ""
    return ", ".join(every[:_NUM_LISTED]) + more
