"""What a resumed run may change, and what it takes over from its state.

A state records the spec it was trained under, every resolved auto, and the hashes of data and checkpoint. Going on with
another model, order or rate would make a run that nobody asked for: such changes are refused with `key: old → new`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

from rwkv_spec.errors import CheckpointError
from rwkv_spec.spec.schema import at, default_of
from rwkv_spec.spec.types import Spec

# Free to change: they decide what is reported and kept, or how the same numbers are computed.
_FREE = (
    "name",
    "work_dir",
    "version",
    "kernels",
    "train.micro_batch_size",
    "train.grad_checkpoint",
    "eval",
    "save",
    "log",
)
# Free as words, since what they lead to is compared by hash.
_BY_HASH = ("data.train", "data.store", "data.eval.path", "tokenizer.path", "checkpoint.path")
_LENGTH = ("train.epochs", "train.steps", "train.tokens")

Value = str | int | float | bool | None | list[object]


@dataclass(frozen=True)
class Resolved:
    """The autos of a run as they were decided, and what its data and weights came from."""

    precision: str
    micro_batch_size: int
    num_threads: int
    num_processes: int
    backend: str
    total_sequences: int
    data_hash: str
    checkpoint_hash: str


def spec_values(spec: Spec) -> dict[str, Value]:
    """Every key of the spec with its value, flat: `train.ctx_len` -> 512. Paths are strings, tuples are lists."""
    flat: dict[str, Value] = {}
    _flatten("", spec, flat)
    return flat


def _flatten(prefix: str, value: object, flat: dict[str, Value]) -> None:
    if is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            if prefix or field.name != "sources":
                _flatten(f"{prefix}.{field.name}" if prefix else field.name, getattr(value, field.name), flat)
    elif isinstance(value, Mapping):
        for key in value:
            _flatten(f"{prefix}.{key}", value[key], flat)
    elif isinstance(value, tuple | list):
        flat[prefix] = [str(item) if isinstance(item, Path) else item for item in value]
    elif isinstance(value, Path):
        flat[prefix] = str(value)
    else:
        assert value is None or isinstance(value, str | int | float | bool)
        flat[prefix] = value


@dataclass(frozen=True)
class Settings:
    """A spec as flat values, and what its autos became."""

    values: Mapping[str, object]
    derived: Mapping[str, object]

    def resolved(self, key: str) -> object:
        value = self.values.get(key)
        return self.derived.get(key) if value == "auto" else value


def changes(recorded: Settings, current: Settings) -> list[str]:
    """`key: old → new` for every key that a resume may not change, sorted. What was auto and still is may change."""
    skipped = (*_FREE, *_BY_HASH, *_LENGTH)
    found = []
    for key in sorted(recorded.values.keys() | current.values.keys()):
        old, new = recorded.values.get(key), current.values.get(key)
        if key not in recorded.values and new == default_of(at(tuple(key.split("."))) or {}):
            # The version that wrote the state did not have this key: what it did is now the default.
            continue
        is_free = any(key == skip or key.startswith(f"{skip}.") for skip in skipped)
        if old != new and not is_free and recorded.resolved(key) != current.resolved(key):
            found.append(f"{key}: {_shown(recorded.resolved(key))} → {_shown(current.resolved(key))}")
    return found


def refuse_changes(state: Path, found: Sequence[str]) -> None:
    """Raise CheckpointError listing what differs from the state's run and may not; nothing if `found` is empty."""
    if found:
        lines = "\n  ".join(found)
        raise CheckpointError(
            f"{state}: this run was started with other settings:\n  {lines}\n"
            "set them back to go on with it, or use another work_dir for a new run"
        )


def changed_contents(
    recorded: Mapping[str, object], *, data_hash: str, checkpoint_hash: str, total_sequences: int
) -> list[str]:
    """What differs in the tokens, in the weights that the run began from, and in its length, which may only grow."""
    found = []
    for name, now in (("data", data_hash), ("checkpoint", checkpoint_hash)):
        before = recorded.get(f"{name}_hash")
        if before != now:
            found.append(f"{name} (contents): {_short(before)} → {_short(now)}")
    before = recorded.get("total_sequences")
    if isinstance(before, int) and total_sequences < before:
        found.append(f"length: {before} sequences → {total_sequences} (a run can only be made longer)")
    return found


def _shown(value: object) -> str:
    return "none" if value is None else str(value)


def _short(value: object) -> str:
    return str(value)[:12] if value else "none"
