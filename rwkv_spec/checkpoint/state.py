"""All that a resume needs, in one folder a state: `state/step-00000120/` after 120 updates.

weights.safetensors (published names, full precision), optimizer.safetensors (moments keyed by parameter name) and
manifest.json with the step, the run's record and a checksum of each file. No random state is kept: order and dropout
are pure functions of the seed and the step. A state is written under another name, flushed, then renamed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rwkv_spec.atomic import flush_folder, temporary_sibling, write_json
from rwkv_spec.errors import CheckpointError

FORMAT_VERSION = 1
WEIGHTS = "weights.safetensors"
_NAME = re.compile(r"step-(\d{8,})$")


@dataclass(frozen=True)
class SavedState:
    """A state read back. `record` is whatever the run stored beside the tensors (plain JSON values)."""

    step: int
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    record: dict[str, object]


def state_folder(states: Path, step: int) -> Path:
    return states / f"step-{step:08d}"


def list_states(states: Path) -> list[Path]:
    """Complete states, oldest first (by step, never by name order or time)."""
    if not states.is_dir():
        return []
    found = [path for path in states.iterdir() if _NAME.match(path.name) and (path / "manifest.json").is_file()]
    return sorted(found, key=step_of)


def step_of(folder: Path) -> int:
    match = _NAME.match(folder.name)
    assert match is not None
    return int(match.group(1))


def write_state(
    states: Path,
    step: int,
    *,
    weights: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, torch.Tensor],
    record: Mapping[str, object],
) -> Path:
    """Write the state of `step`, return its folder. CheckpointError (disk full, no permission): nothing has changed."""
    target = state_folder(states, step)
    temporary = temporary_sibling(target)
    try:
        temporary.mkdir(parents=True)
        checksums = {}
        for name, tensors in ((WEIGHTS, weights), ("optimizer.safetensors", optimizer)):
            file = temporary / name
            save_file({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, file)
            _flush_file(file)
            checksums[name] = {"sha256": file_sha256(file), "bytes": file.stat().st_size}
        write_json(
            temporary / "manifest.json",
            {"format": FORMAT_VERSION, "step": step, "files": checksums, "record": dict(record)},
        )
        flush_folder(temporary)
        _swap(temporary, target)
        flush_folder(states)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{target}: cannot save the state of step {step}: {error}; earlier states are untouched. Free space or fix "
            "the folder's permissions, then start the same command again"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _swap(temporary: Path, target: Path) -> None:
    """Put `temporary` in `target`'s place; a state of the same step that lies there gives way last."""
    if not target.exists():
        os.rename(temporary, target)
        return
    old = temporary_sibling(target)
    os.rename(target, old)
    os.rename(temporary, target)
    shutil.rmtree(old, ignore_errors=True)


def read_manifest(folder: Path) -> dict[str, object]:
    """The manifest of a state. Raises CheckpointError when it is not one of ours."""
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error}); {_advice(folder)}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT_VERSION:
        raise CheckpointError(f"{path}: not a state of format {FORMAT_VERSION}; {_advice(folder)}")
    if manifest.get("step") != step_of(folder) or not isinstance(manifest.get("record"), dict):
        raise CheckpointError(f"{path}: its step is not its folder's, or its record is gone; {_advice(folder)}")
    return manifest


def read_state(folder: Path) -> SavedState:
    """Read a state and verify every checksum. CheckpointError names the damaged file and the state before it."""
    manifest = read_manifest(folder)
    files = manifest.get("files")
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    for name in (WEIGHTS, "optimizer.safetensors"):
        path = folder / name
        entry = files.get(name) if isinstance(files, dict) else None
        expected = entry.get("sha256") if isinstance(entry, dict) else None
        try:
            if file_sha256(path) != expected:
                raise CheckpointError(f"{path}: its bytes are not those that were saved; {_advice(folder)}")
            tensors[name] = load_file(path)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error}); {_advice(folder)}") from error
    record = manifest["record"]
    assert isinstance(record, dict)
    return SavedState(step_of(folder), tensors[WEIGHTS], tensors["optimizer.safetensors"], record)


def _advice(folder: Path) -> str:
    earlier = [path for path in list_states(folder.parent) if step_of(path) < step_of(folder)]
    if not earlier:
        return "there is no earlier state: delete this one and start again"
    return f"delete or move {folder} to continue from {earlier[-1].name}, the state before it"


def remove_leftovers(states: Path) -> None:
    """Delete what a kill during a save or a rotation left behind. Only the run's own process may call this."""
    if states.is_dir():
        for path in states.iterdir():
            half_saved = path.name.startswith(".step-") and path.name.endswith(".tmp")
            half_deleted = _NAME.match(path.name) and not (path / "manifest.json").is_file()
            if half_saved or half_deleted:
                shutil.rmtree(path, ignore_errors=True)


def rotate_states(states: Path, *, keep: int) -> None:
    """Delete all but the newest `keep` states (at least one)."""
    for path in list_states(states)[: -max(1, keep)]:
        # The manifest goes first: a state half deleted by a kill is no state.
        with contextlib.suppress(FileNotFoundError):
            (path / "manifest.json").unlink()
        shutil.rmtree(path, ignore_errors=True)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush_file(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
