"""Our own training loop, timed as it is: the model, the optimizer and the loop that `run` would use.

Tokens are random and lie in a mapped file, as a token store does, so that the wait for data is a real one; the file is
gone afterwards. The breakdown and the split are taken after the timed steps, and after the peak of memory is read.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from rwkv_spec.benchmark.breakdown import breakdown
from rwkv_spec.benchmark.gate import check_operators
from rwkv_spec.benchmark.machine import now, peak_memory, product_rate
from rwkv_spec.benchmark.timed import WARMUP_STEPS, OwnTimes
from rwkv_spec.benchmark.workload import Workload, random_batch, random_tokens
from rwkv_spec.data.batch import Batch, batches
from rwkv_spec.data.stream import Segment, TokenStream
from rwkv_spec.micro_batch import Work, find_choice, notes_folder
from rwkv_spec.model.build import build_model
from rwkv_spec.model.language_model import LanguageModel
from rwkv_spec.model.shapes import parameter_groups
from rwkv_spec.objective.cross_entropy import cross_entropy
from rwkv_spec.spec.split import MicroBatch
from rwkv_spec.train.engine import Engine
from rwkv_spec.train.loop import Objective, StepResult, steps
from rwkv_spec.train.optimizer import build_optimizer

_PROFILED_STEPS = 3


def find_split(workload: Workload, sizes: tuple[int, ...]) -> MicroBatch:
    """The micro-batch size that a run takes which is long enough to compare these; operators are checked first."""
    work = Work(
        shape=workload.shape,
        ctx_len=workload.ctx_len,
        share=workload.batch_size,
        sizes=sizes,
        precision=workload.precision,
        backend=workload.backend,
        num_threads=workload.num_threads,
        dropout=workload.dropout,
        l2wrap=workload.l2wrap,
    )
    with tempfile.TemporaryDirectory(prefix="rwkv_spec-bench-") as folder:
        engine = Engine(precision=workload.precision, trackers=(), log_dir=Path(folder), threads=workload.num_threads)
        try:
            check_operators(workload, engine.device)
            return find_choice(work, engine, notes=notes_folder())
        finally:
            engine.end()


def measure_own(workload: Workload, *, num_steps: int, detailed: bool) -> OwnTimes:
    """Times of `num_steps` optimizer steps. `detailed`: check the operators first, and say where the time goes."""
    with tempfile.TemporaryDirectory(prefix="rwkv_spec-bench-") as folder:
        engine = Engine(precision=workload.precision, trackers=(), log_dir=Path(folder), threads=workload.num_threads)
        try:
            if detailed:
                check_operators(workload, engine.device)
            return _measure(workload, engine, Path(folder), num_steps=num_steps, detailed=detailed)
        finally:
            engine.end()


def _measure(workload: Workload, engine: Engine, folder: Path, *, num_steps: int, detailed: bool) -> OwnTimes:
    model, optimizer, wrapped, prepared = _prepared(workload, engine)
    objective = partial(cross_entropy, l2wrap=workload.l2wrap, backend=workload.backend)
    num_profiled = _PROFILED_STEPS if detailed and engine.device.type == "cpu" else 0
    waits: list[float] = []
    results = _steps(
        workload,
        engine,
        wrapped,
        prepared,
        objective,
        _Waiting(_data(workload, folder, WARMUP_STEPS + num_steps + num_profiled), waits),
    )
    seconds = []
    for _ in range(WARMUP_STEPS + num_steps):
        started = now(engine.device)
        next(results)
        seconds.append(now(engine.device) - started)
    memory = peak_memory()
    shares = breakdown(lambda: [next(results) for _ in range(num_profiled)]) if num_profiled else {}
    micro = random_batch(workload).split(workload.micro_batch_size, workload.accumulate)[0]
    forward, backward, update = _split(model, optimizer, micro, engine, objective) if detailed else (0.0, 0.0, 0.0)
    return OwnTimes(
        seconds=tuple(seconds[WARMUP_STEPS:]),
        peak_memory_bytes=memory,
        num_parameters=sum(x.numel() for x in model.parameters()),
        wait_seconds=tuple(waits[WARMUP_STEPS : WARMUP_STEPS + num_steps]),
        product_rate=product_rate(engine.device, workload.precision),
        forward_seconds=forward,
        backward_seconds=backward,
        optimizer_seconds=update,
        shares=shares,
    )


def _prepared(
    workload: Workload, engine: Engine
) -> tuple[LanguageModel, torch.optim.Optimizer, torch.nn.Module, torch.optim.Optimizer]:
    model = build_model(
        workload.shape,
        dropout=workload.dropout,
        backend=workload.backend,
        grad_checkpoint=workload.grad_checkpoint,
        seed=workload.seed,
    )
    if workload.precision == "fp64":
        model = model.double()
    optimizer = build_optimizer(
        dict(model.named_parameters()),
        groups=parameter_groups(workload.shape),
        lr=0.0,
        betas=(workload.beta1, workload.beta2),
        eps=workload.eps,
        weight_decay=workload.weight_decay,
    )
    wrapped, prepared = engine.prepare(model, optimizer)
    return model, optimizer, wrapped, prepared


def _steps(
    workload: Workload,
    engine: Engine,
    wrapped: torch.nn.Module,
    prepared: torch.optim.Optimizer,
    objective: Objective,
    data: Iterator[Batch],
) -> Iterator[StepResult]:
    return steps(
        wrapped,
        data,
        objective,
        engine=engine,
        optimizer=prepared,
        lr_at=lambda step: 0.0,
        first_step=0,
        num_micro_batches=workload.accumulate,
        micro_batch_size=workload.micro_batch_size,
        grad_clip=workload.grad_clip,
        seed=workload.seed,
        should_stop=lambda: False,
    )


def _data(workload: Workload, folder: Path, num_steps: int) -> Iterator[Batch]:
    """Batches as a run reads them, from a mapped file of random tokens."""
    path = folder / "tokens.bin"
    tokens_of_a_step = random_tokens(workload)
    with path.open("wb") as file:
        for _ in range(num_steps):
            file.write(tokens_of_a_step[:-1].tobytes())
        file.write(tokens_of_a_step[-1:].tobytes())
    tokens = np.memmap(path, dtype=np.int32, mode="r")
    return batches(
        TokenStream([Segment(tokens, 0, len(tokens))]),
        ctx_len=workload.ctx_len,
        batch_size=workload.batch_size,
        order="shuffle",
        seed=workload.seed,
        total_sequences=num_steps * workload.batch_size,
    )


class _Waiting:
    """Hands batches on and notes how long each was waited for."""

    def __init__(self, data: Iterator[Batch], seconds: list[float]) -> None:
        self._data = data
        self._seconds = seconds

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        started = time.perf_counter()
        batch = next(self._data)
        self._seconds.append(time.perf_counter() - started)
        return batch


def _split(
    model: LanguageModel, optimizer: torch.optim.Optimizer, micro: Batch, engine: Engine, objective: Objective
) -> tuple[float, float, float]:
    """Median seconds of forward with loss, backward, and clip with update, of one micro-batch."""
    ids, targets, weights = (
        torch.from_numpy(array).to(engine.device) for array in (micro.ids_BT, micro.targets_BT, micro.weights_BT)
    )
    seeds = torch.from_numpy(micro.sequence_B).to(engine.device)
    device = engine.device
    rows = []
    for _ in range(5):
        marks = [now(device)]
        with engine.autocast():
            loss, _ = model(
                ids, dropout_seed_B=seeds, loss=lambda hidden, head: objective(hidden, head, targets, weights)
            )
        marks.append(now(device))
        engine.backward(loss)
        marks.append(now(device))
        engine.clip(model, 1.0)
        optimizer.step()
        marks.append(now(device))
        optimizer.zero_grad(set_to_none=True)
        rows.append([after - before for before, after in pairwise(marks)])
    forward, backward, update = (statistics.median(column) for column in zip(*rows[1:], strict=True))
    return forward, backward, update
