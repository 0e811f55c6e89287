"""A checked spec as frozen dataclasses, one per section, with exactly the keys of schema.json (a test holds that).

Every path is absolute. "auto" is still "auto" here: a Plan holds what it becomes. Nothing in here reads a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rwkv_spec.errors import Problem
from rwkv_spec.spec.origin import Source as Source

Auto = Literal["auto"]
FieldValue = str | int | float | bool


@dataclass(frozen=True)
class Every:
    """A period: exactly one of the three is not None."""

    epochs: float | None
    steps: int | None
    tokens: int | None


@dataclass(frozen=True)
class DataEval:
    """What is held out: exactly one of the four is not None. `documents` is a count."""

    where: Mapping[str, tuple[FieldValue, ...]] | None
    path: tuple[Path, ...] | None
    fraction: float | None
    documents: int | None


@dataclass(frozen=True)
class Data:
    """`train` is None when the data is passed from Python; `eval` is None without evaluation."""

    train: tuple[Path, ...] | None
    eval: DataEval | None
    field: str
    order: str
    store: Path


@dataclass(frozen=True)
class Tokenizer:
    """Keys that belong to another type are None."""

    type: str
    max_value: int | None
    path: Path | None
    vocab_size: int | None


@dataclass(frozen=True)
class Model:
    """A model with fresh weights. `ranks` is None for the types that have one rule only."""

    type: str
    n_layer: int
    n_embd: int
    head_size: int
    dropout: float
    vocab_size: int | Auto
    ranks: str | None


@dataclass(frozen=True)
class Checkpoint:
    """Weights to start from, instead of a Model; with `resize_vocab`, as many rows of them as the tokenizer has ids."""

    path: Path
    resize_vocab: bool
    dropout: float


@dataclass(frozen=True)
class Train:
    """Exactly one of epochs, steps and tokens is not None."""

    objective: str
    ctx_len: int
    batch_size: int
    micro_batch_size: int | Auto
    epochs: float | None
    steps: int | None
    tokens: int | None
    precision: str
    grad_checkpoint: bool
    grad_clip: float
    l2wrap: float


@dataclass(frozen=True)
class Optimizer:
    """AdamW's settings."""

    type: str
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


@dataclass(frozen=True)
class Scheduler:
    """`lr_final` is None for type constant."""

    type: str
    lr_final: float | Auto | None
    warmup_steps: int | Auto


@dataclass(frozen=True)
class Eval:
    """When the held-out documents are scored."""

    every: Every
    continuations: int


@dataclass(frozen=True)
class Save:
    """When and how weights are written."""

    every: Every
    keep: int
    format: str
    dtype: str


@dataclass(frozen=True)
class Log:
    """When rows of numbers are written, and where else they go."""

    every: Every
    trackers: tuple[str, ...]


@dataclass(frozen=True)
class Spec:
    """A whole checked spec.

    `tokenizer` is None when it is passed from Python. Exactly one of model and checkpoint is set.

    `sources` maps every key, such as `train.steps`, to where its value comes from, and `""` to the spec itself. Two
    specs are equal if their values are, wherever they come from.
    """

    version: int
    name: str
    work_dir: Path
    seed: int
    data: Data
    tokenizer: Tokenizer | None
    model: Model | None
    checkpoint: Checkpoint | None
    train: Train
    optimizer: Optimizer
    scheduler: Scheduler
    eval: Eval
    save: Save
    log: Log
    kernels: str
    sources: Mapping[str, Source] = field(compare=False, repr=False)

    @property
    def dropout(self) -> float:
        """The dropout of the model, whether it is new or read from a checkpoint."""
        section = self.model or self.checkpoint
        assert section is not None
        return section.dropout

    def is_given(self, key: str) -> bool:
        """True if a person wrote this key, so that the value is not a default."""
        source = self.sources.get(key)
        return source is not None and source.is_given

    def problem(self, key: str, what: str, fix: str = "") -> Problem:
        """A problem with `key`, placed where the key was given, or else where its nearest given parent was."""
        name = key
        while True:
            source = self.sources.get(name)
            if source is not None and source.is_given:
                return Problem(source.where, source.line, source.column, key, what, fix)
            if not name:
                return Problem("spec", 0, 0, key, what, fix)
            name = parent_key(name)


def parent_key(key: str) -> str:
    """`data.train[1]` -> `data.train` -> `data` -> the empty string, which is the spec itself."""
    if key.endswith("]"):
        return key.rpartition("[")[0]
    return key.rpartition(".")[0]
