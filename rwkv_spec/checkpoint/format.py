"""Weights files: .pth (torch.save) and .safetensors, under the published names and shapes.

A bad file of any kind is a CheckpointError that says what the file is. Reading never runs code that a file brings.
Writing is whole or not at all: beside its place, flushed to the disk, then renamed.
"""

from __future__ import annotations

import os
import pickle
import re
import struct
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import safetensors.torch
import torch

from rwkv_spec.atomic import discard, flush_folder, temporary_sibling
from rwkv_spec.checkpoint.not_weights import HEAD_BYTES, describe_content, describe_folder, describe_missing
from rwkv_spec.errors import CheckpointError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
FORMATS = ("pth", "safetensors")
_Value = TypeVar("_Value")

# Wrappers (torch.compile, DDP, DeepSpeed) put these before every name, also one after the other; a Lightning module
# puts "model." before published names, which begin the names of other libraries as well.
_PREFIXES = re.compile(r"(_forward_module\.|module\.|_orig_mod\.|model\.(?=(emb|blocks|ln_out|head|model)\.))+")
_CHUNK_BYTES = 1 << 20

# What torch, pickle, zipfile and safetensors raise on files that are damaged or were never weights.
_UNREADABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.PickleError,
    safetensors.SafetensorError,
    struct.error,
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
)


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of one tensor. dtype is fp32, bf16, fp16, fp64, or torch's own name of any other."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Header:
    """Names, shapes and dtypes of a weights file, read without its data; `format` is pth or safetensors.

    `layout` tells whose names the file has, `remarks` what of it is not among `tensors`.
    """

    path: Path
    format: str
    file_bytes: int
    tensors: Mapping[str, TensorInfo]
    layout: str = "published"
    remarks: tuple[str, ...] = ()


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a weights file on the CPU, prefixes of wrappers taken off the names.

    The data stays mapped from the file, copy on write: copy it out before the file is changed in place. The checksums
    of a .pth are verified; a .safetensors has none.
    """
    kind = _kind_of(path)
    if kind == "safetensors":
        return _without_prefixes(path, _read_safetensors(path))
    return _without_prefixes(path, _read_torch(path, zipped=kind == "zip", verify=True))


def read_header(path: Path) -> Header:
    """Names, shapes and dtypes of a weights file; only a file that torch wrote before version 1.6 is read whole."""
    kind = _kind_of(path)
    if kind == "safetensors":
        tensors, file_format = _safetensors_infos(path), "safetensors"
    else:
        tensors, file_format = tensor_infos(_read_torch(path, zipped=kind == "zip", verify=False)), "pth"
    return Header(path, file_format, path.stat().st_size, _without_prefixes(path, tensors))


def tensor_infos(weights: Mapping[str, torch.Tensor]) -> dict[str, TensorInfo]:
    """The header that these weights would have in a file."""
    return {name: TensorInfo(tuple(tensor.shape), _dtype_name(tensor.dtype)) for name, tensor in weights.items()}


def write_weights(path: Path, weights: Mapping[str, torch.Tensor], *, format: str, dtype: str | None) -> None:
    """Write every tensor as `dtype` (None: as it is) under its name and shape. The same weights give the same bytes."""
    if format not in FORMATS:
        raise ValueError(f"format is one of {', '.join(FORMATS)}, not {format!r}")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype is one of {', '.join(DTYPES)}, not {dtype!r}")
    own = {name: cast(tensor, dtype, where=f"{path}: {name}") for name, tensor in weights.items()}
    temporary = temporary_sibling(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            if format == "pth":
                # A file object, not a path: torch would put the temporary name inside the file.
                torch.save(own, file)
                file.flush()
                os.fsync(file.fileno())
        if format == "safetensors":
            _save_safetensors(temporary, own)
        temporary.replace(path)
        flush_folder(path.parent)
    except (OSError, RuntimeError, UnicodeError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot write the weights: {_one_line(_system_error(error))}") from error
    finally:
        discard(temporary)


def _system_error(error: BaseException) -> BaseException:
    """The system's own words, such as of a full disk: torch's zip writer hides them behind a count of bytes."""
    hidden: BaseException | None = error
    while hidden is not None and not isinstance(hidden, OSError):
        hidden = hidden.__context__
    return error if hidden is None else hidden


def _save_safetensors(temporary: Path, weights: dict[str, torch.Tensor]) -> None:
    # safetensors replaces the file by one that only its owner may read; keep the usual permissions.
    mode = temporary.stat().st_mode
    safetensors.torch.save_file(weights, str(temporary), metadata={"format": "pt"})
    temporary.chmod(mode & 0o777)
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())


def cast(tensor: torch.Tensor, dtype: str | None, *, where: str) -> torch.Tensor:
    """A copy on the CPU in the dtype (None: its own), with its own storage: torch.save would write all of a view's.

    CheckpointError, beginning with `where`, for a value that the dtype cannot hold.
    """
    copy = torch.empty(tensor.shape, dtype=tensor.dtype if dtype is None else DTYPES[dtype])
    copy.copy_(tensor.detach())
    if copy.dtype != tensor.dtype and bool((torch.isinf(copy) & torch.isfinite(tensor).to(copy.device)).any()):
        raise CheckpointError(f"{where} has values beyond the range of {dtype}; save as bf16 or fp32")
    return copy


def _kind_of(path: Path) -> str:
    """zip (torch), pickle (torch before 1.6) or safetensors, judged by content; anything else is a CheckpointError."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{path}: its name is no UTF-8 text, which torch cannot open; rename it") from error
    try:
        if path.is_dir():
            raise CheckpointError(describe_folder(path))
        if not path.exists():
            raise CheckpointError(describe_missing(path))
        if not path.is_file():
            raise CheckpointError(f"{path}: is a device or a pipe, not a weights file")
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {_one_line(error)}") from error
    if not head:
        raise CheckpointError(f"{path}: is empty (0 bytes); fetch or save it again")
    if head.startswith(b"PK\x03\x04"):
        return "zip"
    # Eight bytes of length, then JSON. Before the test for pickles: such a length may begin like one.
    if head[8:9] == b"{":
        return "safetensors"
    # A legacy file by torch and any other pickle look alike here; torch tells them apart without running them.
    if head[0] == 0x80 and len(head) > 1 and head[1] <= 5:
        return "pickle"
    raise CheckpointError(f"{path}: {describe_content(head)}")


def _read_torch(path: Path, *, zipped: bool, verify: bool) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        # torch.load would judge it by that name.
        raise CheckpointError(f"{path}: is a torch file under the name of a safetensors file; rename it to .pth")
    if zipped:
        _check_zip(path, verify=verify)
    try:
        with warnings.catch_warnings():
            # They are about torch's own formats: a file either loads or is refused.
            warnings.simplefilter("ignore")
            # Mapped where the format allows it: a header costs no memory, and weights no second copy.
            value = torch.load(path, map_location="cpu", weights_only=True, mmap=True if zipped else None)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path}: {_describe_pickle(error)}") from error
    except _UNREADABLE as error:
        raise CheckpointError(f"{path}: is damaged, or no torch file: {_one_line(error)}; fetch it again") from error
    return _state_dict(path, value)


def _check_zip(path: Path, *, verify: bool) -> None:
    """Refuse zips cut off, zips that torch did not write, or whose checksums (with `verify`, the data's) do not fit."""
    damaged = f"{path}: is damaged"
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if not any(member.filename.split("/")[-1] == "data.pkl" for member in members):
                names = ", ".join(member.filename for member in members[:4])
                raise CheckpointError(f"{path}: is a zip archive that torch did not write (it holds {names})")
            if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                raise CheckpointError(f"{path}: was packed anew by a zip program; save it again with torch.save")
            # torch writes zeros throughout where its checksums are switched off.
            if any(member.CRC for member in members):
                for member in members:
                    if verify or "/data/" not in member.filename:
                        _read_through(archive, member)
    except zipfile.BadZipFile as error:
        if "not a zip" in str(error):
            size = path.stat().st_size
            raise CheckpointError(
                f"{path}: is cut off: the end of a torch file is missing after {size:,} bytes; fetch or copy it again"
            ) from error
        raise CheckpointError(f"{damaged}: {_one_line(error)}; fetch or copy it again") from error
    except _UNREADABLE as error:
        raise CheckpointError(f"{damaged}: {_one_line(error)}; fetch or copy it again") from error


def _read_through(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    """zipfile compares the checksum at the end of a member."""
    with archive.open(member) as stream:
        while stream.read(_CHUNK_BYTES):
            pass


def _describe_pickle(error: pickle.UnpicklingError) -> str:
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    if found is None:
        return "is damaged, or a pickle of something else than tensors; fetch it again, or save it with torch.save"
    return (
        f"holds a Python object ({found.group(1)}), not tensors alone; reading it could run code, so nothing of it was "
        "read; ask for a file of tensors (a state dict, or safetensors)"
    )


def _state_dict(path: Path, value: object) -> dict[str, torch.Tensor]:
    """The value itself where it is a dict of plain tensors; otherwise an error that says what it is instead."""
    if isinstance(value, torch.Tensor):
        raise CheckpointError(f"{path}: holds a single tensor of shape {list(value.shape)}, not a model's weights")
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}, not weights by name")
    if not value:
        raise CheckpointError(f"{path}: holds no tensors at all")
    if "param_groups" in value or {"exp_avg", "exp_avg_sq"} & value.keys():
        raise CheckpointError(f"{path}: is the state of an optimizer, not a model's weights; name a weights file")
    if "_strategy" in value:
        raise CheckpointError(
            f"{path}: was converted by the rwkv package for one strategy of its own, which changes the numbers; name "
            "the file that it was made from"
        )
    for key in ("state_dict", "model", "module", "model_state_dict"):
        if isinstance(value.get(key), dict):
            raise CheckpointError(
                f"{path}: is a trainer's checkpoint, its weights under {key!r}; save that part alone with torch.save"
            )
    weights = {}
    for name, tensor in value.items():
        if not isinstance(name, str):
            raise CheckpointError(f"{path}: has {str(name)[:40]!r} where the name of a tensor belongs")
        weights[name] = _plain_tensor(path, name, tensor)
    return weights


def _plain_tensor(path: Path, name: str, tensor: object) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(f"{path}: {shown(name)} is a {type(tensor).__name__}, not a tensor")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        what = "has no data (a meta tensor)" if tensor.is_meta else "is a quantized or sparse tensor"
        raise CheckpointError(f"{path}: {shown(name)} {what}; save plain tensors")
    return tensor.detach()


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        with safetensors.safe_open(str(path), framework="pt", device="cpu") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
    except _UNREADABLE as error:
        raise CheckpointError(_describe_safetensors(path, error)) from error
    return _state_dict(path, weights)


def _safetensors_infos(path: Path) -> dict[str, TensorInfo]:
    names = {"F32": "fp32", "BF16": "bf16", "F16": "fp16", "F64": "fp64"}
    infos = {}
    try:
        with safetensors.safe_open(str(path), framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                part = file.get_slice(name)
                infos[name] = TensorInfo(tuple(part.get_shape()), names.get(part.get_dtype(), part.get_dtype().lower()))
    except _UNREADABLE as error:
        raise CheckpointError(_describe_safetensors(path, error)) from error
    if not infos:
        raise CheckpointError(f"{path}: holds no tensors at all")
    return infos


def _describe_safetensors(path: Path, error: BaseException) -> str:
    return (
        f"{path}: is damaged, cut off, or no safetensors file: {_one_line(error)} "
        f"({path.stat().st_size:,} bytes); fetch or copy it again"
    )


def _without_prefixes(path: Path, named: Mapping[str, _Value]) -> dict[str, _Value]:
    result: dict[str, _Value] = {}
    for name, value in named.items():
        match = _PREFIXES.match(name)
        short = name if match is None else name[match.end() :]
        if short in result:
            raise CheckpointError(f"{path}: has {shown(short)} twice, under different prefixes")
        result[short] = value
    return result


def shown(name: str) -> str:
    """A tensor's name in a message: what a file brings along must not move the cursor or fill the screen."""
    return name if name.isprintable() and len(name) <= 100 else repr(name[:100])


def _dtype_name(dtype: torch.dtype) -> str:
    return _DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def _one_line(error: BaseException) -> str:
    """The first line of another library's message, short: the rest is advice for its own users."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__
