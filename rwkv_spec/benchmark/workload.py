"""What is timed, in plain numbers: it travels as JSON to the processes that measure, ours and those of peers.

All of them train on the same random tokens, windows of `ctx_len`, `batch_size` windows a step.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rwkv_spec.data.batch import Batch
from rwkv_spec.data.batch import random_batch as random_rows
from rwkv_spec.model.shapes import ModelShape
from rwkv_spec.spec.plan import Plan
from rwkv_spec.spec.types import Spec


@dataclass(frozen=True)
class Workload:
    """A model and its optimizer step. `num_parameters` counts all tensors of the model, the embedding included."""

    shape: ModelShape
    num_parameters: int
    precision: str
    backend: str
    num_threads: int
    batch_size: int
    ctx_len: int
    accumulate: int
    micro_batch_size: int
    dropout: float
    grad_checkpoint: bool
    l2wrap: float
    grad_clip: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    seed: int

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.ctx_len

    @property
    def flop_per_step(self) -> int:
        """6 × parameters without the embedding × tokens: what the matrix products of a step multiply and add."""
        return 6 * (self.num_parameters - self.shape.vocab_size * self.shape.n_embd) * self.tokens_per_step

    def as_dict(self) -> dict[str, object]:
        return asdict(self)

    def small(self) -> Workload:
        """The same operators on few tokens: two layers, two windows of more than one chunk of the recurrence."""
        shape = self.shape
        less = replace(shape, n_layer=min(2, shape.n_layer), vocab_size=min(97, shape.vocab_size))
        return replace(self, shape=less, batch_size=2, ctx_len=45, micro_batch_size=2, accumulate=1)

    @staticmethod
    def from_dict(values: dict[str, object]) -> Workload:
        shape = values["shape"]
        assert isinstance(shape, dict)
        return Workload(**{**values, "shape": ModelShape(**shape)})  # type: ignore[arg-type]


def workload_of(spec: Spec, plan: Plan, shape: ModelShape, *, num_parameters: int, num_threads: int) -> Workload:
    """The step that a run of this spec would do in one process."""
    return Workload(
        shape=shape,
        num_parameters=num_parameters,
        precision=plan.precision,
        backend=plan.backend,
        num_threads=num_threads,
        batch_size=spec.train.batch_size,
        ctx_len=spec.train.ctx_len,
        accumulate=plan.accumulate,
        micro_batch_size=plan.micro_batch_size,
        dropout=spec.dropout,
        grad_checkpoint=spec.train.grad_checkpoint,
        l2wrap=spec.train.l2wrap,
        grad_clip=spec.train.grad_clip,
        beta1=spec.optimizer.betas[0],
        beta2=spec.optimizer.betas[1],
        eps=spec.optimizer.eps,
        weight_decay=spec.optimizer.weight_decay,
        seed=spec.seed,
    )


def random_tokens(workload: Workload) -> NDArray[np.int32]:
    """As many tokens as one step trains on, and one more for the last target."""
    count = workload.tokens_per_step + 1
    return np.random.default_rng(0).integers(0, workload.shape.vocab_size, count, dtype=np.int32)


def random_batch(workload: Workload) -> Batch:
    """One step's windows, of the same tokens."""
    return random_rows(workload.batch_size, ctx_len=workload.ctx_len, vocab_size=workload.shape.vocab_size)
