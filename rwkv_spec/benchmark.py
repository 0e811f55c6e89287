"""`bench SPEC`: how fast the very training loop runs here, as tokens a second and as a share of the machine's own peak.

The yardstick is physical: 6 × parameters without the embedding × tokens, over time, against the product of two square
matrices in the same dtype and threads, measured in the same run. Tokens are random; nothing is written.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from rwkv_spec.data.batch import Batch
from rwkv_spec.errors import UserError
from rwkv_spec.model.build import build_model
from rwkv_spec.model.language_model import LanguageModel
from rwkv_spec.model.shapes import parameter_groups
from rwkv_spec.objective.cross_entropy import cross_entropy
from rwkv_spec.planning import Planned, make_planned, make_world
from rwkv_spec.preflight import Inputs
from rwkv_spec.preparing import foreseen
from rwkv_spec.train.engine import Engine, available_device, decide_precision
from rwkv_spec.train.loop import steps
from rwkv_spec.train.optimizer import build_optimizer

_WARMUP_STEPS = 3
_PEAK_SIZE = 2048


@dataclass(frozen=True)
class Report:
    """Medians over the timed steps. Times are seconds, rates are per second, memory is bytes of the whole process."""

    shape: str
    precision: str
    backend: str
    num_threads: int
    num_steps: int
    tokens_per_s: float
    tokens_per_s_slowest: float
    tokens_per_s_fastest: float
    flop_per_s: float
    peak_flop_per_s: float
    share_of_peak: float
    step_seconds: float
    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float
    peak_memory_bytes: int | None

    def as_dict(self) -> dict[str, object]:
        return asdict(self)

    def __str__(self) -> str:
        memory = "not known here" if self.peak_memory_bytes is None else f"{self.peak_memory_bytes / 1e6:,.0f} MB"
        parts = {"forward": self.forward_seconds, "backward": self.backward_seconds, "update": self.optimizer_seconds}
        split = ", ".join(f"{name} {1e3 * seconds:,.0f} ms" for name, seconds in parts.items())
        return "\n".join(
            (
                f"{self.shape}, {self.precision}, kernels {self.backend}, {self.num_threads} threads",
                f"speed        {self.tokens_per_s:,.0f} tokens/s (median of {self.num_steps} steps; "
                f"{self.tokens_per_s_slowest:,.0f} to {self.tokens_per_s_fastest:,.0f})",
                f"of the peak  {100 * self.share_of_peak:.0f}% = {self.flop_per_s / 1e9:,.0f} of "
                f"{self.peak_flop_per_s / 1e9:,.0f} GFLOP/s ({_PEAK_SIZE}³ product, same dtype and threads)",
                f"a step       {1e3 * self.step_seconds:,.0f} ms; a micro-batch alone: {split}",
                f"peak memory  {memory}",
            )
        )


def measure(inputs: Inputs, *, num_steps: int) -> Report:
    """Time `num_steps` optimizer steps of the spec's model and batch on random tokens."""
    if num_steps < 1:
        raise UserError(f"--steps {num_steps}: at least one step must be timed")
    spec = inputs.spec
    precision = decide_precision(spec.train.precision, device=available_device())
    engine = Engine(precision=precision.name, trackers=(), log_dir=spec.work_dir)
    try:
        if engine.num_processes > 1:
            raise UserError("bench measures one process; start it without a launcher")
        world = make_world(spec, shape=inputs.shape, precision=precision, num_threads=engine.num_threads)
        planned = make_planned(spec, shape=inputs.shape, data=foreseen(inputs), world=world)
        return _measure(inputs, planned, engine, num_steps)
    finally:
        engine.end()


def _measure(inputs: Inputs, planned: Planned, engine: Engine, num_steps: int) -> Report:
    spec, plan, shape = inputs.spec, planned.plan, inputs.shape
    model = build_model(shape, dropout=spec.dropout, backend=plan.backend, seed=spec.seed)
    if plan.precision == "fp64":
        model = model.double()
    optimizer = build_optimizer(
        dict(model.named_parameters()),
        groups=parameter_groups(shape),
        lr=0.0,
        betas=spec.optimizer.betas,
        eps=spec.optimizer.eps,
        weight_decay=spec.optimizer.weight_decay,
    )
    wrapped, prepared = engine.prepare(model, optimizer)
    batch = _random_batch(spec.train.batch_size, spec.train.ctx_len, shape.vocab_size)
    objective = partial(cross_entropy, l2wrap=spec.train.l2wrap)
    results = steps(
        wrapped,
        _repeated(batch, _WARMUP_STEPS + num_steps),
        objective,
        engine=engine,
        optimizer=prepared,
        lr_at=lambda step: 0.0,
        first_step=0,
        num_micro_batches=plan.accumulate,
        micro_batch_size=plan.micro_batch_size,
        grad_clip=spec.train.grad_clip,
        seed=spec.seed,
        should_stop=lambda: False,
    )
    seconds = [result.seconds for result in results][_WARMUP_STEPS:]
    median = statistics.median(seconds)
    forward, backward, update = _split(
        model, prepared, batch.split(plan.micro_batch_size, plan.accumulate)[0], engine, objective
    )
    num_tokens = plan.tokens_per_step
    num_multiplied = planned.sizes.num_parameters - shape.vocab_size * shape.n_embd
    peak = _peak(engine, plan.precision)
    flop_per_s = 6 * num_multiplied * num_tokens / median
    return Report(
        shape=(
            f"{shape.type} L{shape.n_layer} D{shape.n_embd} V{shape.vocab_size}, "
            f"{spec.train.batch_size}×{spec.train.ctx_len}"
        ),
        precision=plan.precision,
        backend=plan.backend,
        num_threads=engine.num_threads,
        num_steps=num_steps,
        tokens_per_s=num_tokens / median,
        tokens_per_s_slowest=num_tokens / max(seconds),
        tokens_per_s_fastest=num_tokens / min(seconds),
        flop_per_s=flop_per_s,
        peak_flop_per_s=peak,
        share_of_peak=flop_per_s / peak,
        step_seconds=median,
        forward_seconds=forward,
        backward_seconds=backward,
        optimizer_seconds=update,
        peak_memory_bytes=_peak_memory(),
    )


def _random_batch(num_rows: int, ctx_len: int, vocab_size: int) -> Batch:
    tokens = np.random.default_rng(0).integers(0, vocab_size, (num_rows, ctx_len + 1), dtype=np.int64)
    numbers = np.arange(num_rows, dtype=np.int64)
    return Batch(
        ids_BT=tokens[:, :-1].copy(),
        targets_BT=tokens[:, 1:].copy(),
        weights_BT=np.ones((num_rows, ctx_len), np.float32),
        starts_BT=np.zeros((num_rows, ctx_len), np.bool_),
        sequence_B=numbers,
        window_B=numbers,
    )


def _repeated(batch: Batch, count: int) -> Iterator[Batch]:
    for _ in range(count):
        yield batch


def _split(
    model: LanguageModel,
    optimizer: torch.optim.Optimizer,
    micro: Batch,
    engine: Engine,
    objective: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> tuple[float, float, float]:
    """Median seconds of forward with loss, backward, and clip with update, of one micro-batch."""
    ids, targets, weights = (
        torch.from_numpy(array).to(engine.device) for array in (micro.ids_BT, micro.targets_BT, micro.weights_BT)
    )
    seeds = torch.from_numpy(micro.sequence_B).to(engine.device)
    rows = []
    for _ in range(5):
        marks = [_now(engine)]
        with engine.autocast():
            logits_BTV = model(ids, dropout_seed_B=seeds)
        loss, _ = objective(logits_BTV, targets, weights)
        marks.append(_now(engine))
        engine.backward(loss)
        marks.append(_now(engine))
        engine.clip(model, 1.0)
        optimizer.step()
        marks.append(_now(engine))
        optimizer.zero_grad(set_to_none=True)
        rows.append([after - before for before, after in pairwise(marks)])
    forward, backward, update = (statistics.median(column) for column in zip(*rows[1:], strict=True))
    return forward, backward, update


def _peak(engine: Engine, precision: str) -> float:
    """Floating-point operations a second of a square matrix product in the run's dtype: the median of ten."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}[precision]
    left, right = (torch.randn(_PEAK_SIZE, _PEAK_SIZE, device=engine.device).to(dtype) for _ in range(2))
    seconds = []
    for _ in range(12):
        started = _now(engine)
        torch.mm(left, right)
        seconds.append(_now(engine) - started)
    return 2 * _PEAK_SIZE**3 / statistics.median(seconds[2:])


def _now(engine: Engine) -> float:
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)
    return time.perf_counter()


def _peak_memory() -> int | None:
    """The largest resident size that this process had; None where the system does not tell."""
    if sys.platform == "win32":
        return None
    import resource

    # Linux counts kilobytes, macOS bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
