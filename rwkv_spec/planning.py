"""Puts the figures together that a Plan is made from: the model's sizes, the data, and the world it would train in."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from rwkv_spec.model.shapes import OPERATORS, ModelShape, num_parameters
from rwkv_spec.ops.wkv import resolve_backend
from rwkv_spec.spec.describe import describe
from rwkv_spec.spec.plan import DataStats, ModelSizes, Plan, World, make_plan
from rwkv_spec.spec.split import MicroBatch
from rwkv_spec.spec.types import Spec
from rwkv_spec.train.engine import Precision, available_device, decide_precision, num_cores

_COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@dataclass(frozen=True)
class Planned:
    """A plan and what it was made from; as text, it is what a person sees before a run."""

    plan: Plan
    spec: Spec
    sizes: ModelSizes
    data: DataStats
    world: World

    def with_micro_batch(self, micro_batch: MicroBatch) -> Planned:
        """The same with the micro-batch size settled, where the spec leaves it to us."""
        plan = make_plan(self.spec, sizes=self.sizes, data=self.data, world=self.world, micro_batch=micro_batch)
        return replace(self, plan=plan)

    def __str__(self) -> str:
        return describe(self.plan, self.spec, sizes=self.sizes, world=self.world)


def make_planned(
    spec: Spec, *, shape: ModelShape, data: DataStats, world: World, checkpoint_rows: int | None = None
) -> Planned:
    """SpecError where the figures do not go together. `checkpoint_rows`: the vocabulary rows of spec.checkpoint."""
    sizes = model_sizes(shape, checkpoint_rows=checkpoint_rows)
    return Planned(make_plan(spec, sizes=sizes, data=data, world=world), spec, sizes, data, world)


def model_sizes(shape: ModelShape, *, checkpoint_rows: int | None = None) -> ModelSizes:
    """Counts of parameters by optimizer group, and of what a sequence carries from token to token."""
    groups = num_parameters(shape)
    return ModelSizes(
        type=shape.type,
        n_layer=shape.n_layer,
        n_embd=shape.n_embd,
        head_size=shape.head_size,
        vocab_size=shape.vocab_size,
        parameters_by_group=groups,
        num_parameters=sum(groups.values()),
        num_state_values=shape.n_layer * shape.n_embd * (2 + shape.head_size),
        checkpoint_rows=checkpoint_rows,
    )


def make_world(
    spec: Spec,
    *,
    shape: ModelShape,
    num_processes: int = 1,
    num_local_processes: int | None = None,
    engine: str | None = None,
    precision: Precision | None = None,
    num_threads: int | None = None,
) -> World:
    """The world that is there, or one that is asked about. Builds the model's operator if the spec uses it."""
    device = available_device()
    local = num_local_processes or num_processes
    decided = precision or decide_precision(spec.train.precision, device=device)
    backend = resolve_backend(
        spec.kernels,
        device=device,
        dtype=_COMPUTE_DTYPES[decided.name],
        operator=OPERATORS[shape.type],
        head_size=shape.head_size,
    )
    return World(
        num_processes=num_processes,
        engine=engine or ("single" if num_processes == 1 else "ddp"),
        device=device,
        num_threads=num_threads or max(1, num_cores() // local),
        memory_bytes=_memory_bytes(device, local),
        precision=decided.name,
        precision_reason=decided.reason,
        backend=backend.name,
        backend_reason=backend.reason,
    )


def _memory_bytes(device: str, num_local_processes: int) -> int | None:
    """One process's share of the machine's memory, or of its GPU; None where the system does not say."""
    if device == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory)
    if not hasattr(os, "sysconf"):
        return None
    return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // num_local_processes)
