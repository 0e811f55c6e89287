"""Finds the fastest micro-batch size by a short measurement on this machine, and remembers it for the next run.

Only speed follows from it. Whatever goes wrong, a full disk or a damaged note of an earlier measurement, costs at most
the measurement: then the largest size that fits is taken. All processes of a world take the size of the first.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from rwkv_spec.atomic import write_json
from rwkv_spec.data.batch import random_batch
from rwkv_spec.errors import KernelError
from rwkv_spec.model.build import build_model
from rwkv_spec.model.language_model import LanguageModel
from rwkv_spec.model.shapes import ModelShape
from rwkv_spec.objective.cross_entropy import cross_entropy
from rwkv_spec.ops.build import cache_folder, machine_text, source_folder
from rwkv_spec.planning import Planned
from rwkv_spec.spec.split import PASSES, MicroBatch, measured_choice, num_micro_batches, rows_each
from rwkv_spec.train.engine import Engine
from rwkv_spec.train.loop import accumulate_gradients

MOST_SECONDS = 10.0
# A size so many times slower than another in a first pass is not tried again, and no larger one is tried.
_HOPELESS = 1.5
# What decides how fast a pass is; everything else of the package may change without a new measurement.
_CODE = ("model", "objective", "ops", "train")


@dataclass(frozen=True)
class Work:
    """What is measured: `share` sequences of a process a step, in micro-batches of each of the rising `sizes`."""

    shape: ModelShape
    ctx_len: int
    share: int
    sizes: tuple[int, ...]
    precision: str
    backend: str
    num_threads: int
    dropout: float
    l2wrap: float


def noted_choice(planned: Planned, shape: ModelShape, *, notes: Path) -> Planned:
    """The plan with the size that an earlier run measured on this machine; as it is where a run would measure none."""
    choice = read_note(_work(planned, shape), notes=notes) if planned.plan.compares_sizes else None
    return planned if choice is None else planned.with_micro_batch(choice)


def settled(planned: Planned, shape: ModelShape, engine: Engine, *, notes: Path) -> Planned:
    """The plan that every process of the run follows. All of them have to call this: they wait for the first one."""
    plan = planned.plan
    if planned.spec.train.micro_batch_size != "auto":
        return planned
    choice = None
    if engine.is_main and plan.compares_sizes:
        choice = find_choice(_work(planned, shape), engine, notes=notes)
    if engine.num_processes > 1:
        # Also where nothing is measured: other machines of this world may have less memory, or another note.
        size = 0 if not engine.is_main else plan.micro_batch_size if choice is None else choice.size
        (agreed,) = engine.sum([float(size)])
        if not engine.is_main:
            choice = MicroBatch(int(agreed), f"micro-batch {int(agreed)}, as the first process has it")
    return planned if choice is None else planned.with_micro_batch(choice)


def find_choice(work: Work, engine: Engine, *, notes: Path) -> MicroBatch:
    """The size noted before, else the fastest one by a measurement that is noted for the next time."""
    noted = read_note(work, notes=notes)
    if noted is not None:
        return noted
    kept = f"micro-batch {work.sizes[-1]} of {work.share}, the largest that fits: "
    try:
        timer = pass_timer(work, engine)
        seconds = compared(work.sizes, timer, share=work.share, most_seconds=MOST_SECONDS)
    except (RuntimeError, MemoryError, KernelError) as error:
        # torch says so when memory is short; a run that cannot do with less will say it again.
        said = str(error).partition("\n")[0][:200]
        return MicroBatch(work.sizes[-1], f"{kept}comparing it with smaller ones failed ({said})")
    if seconds is None:
        return MicroBatch(work.sizes[-1], f"{kept}{MOST_SECONDS:.0f} s were too short to compare it with smaller ones")
    write_note(work, seconds, notes=notes)
    return measured_choice(seconds, share=work.share, sizes=work.sizes)


def _work(planned: Planned, shape: ModelShape) -> Work:
    spec, plan = planned.spec, planned.plan
    return Work(
        shape=shape,
        ctx_len=spec.train.ctx_len,
        share=-(-plan.batch_size // plan.num_processes),
        sizes=plan.sizes_to_compare,
        precision=plan.precision,
        backend=plan.backend,
        num_threads=planned.world.num_threads,
        dropout=spec.dropout,
        l2wrap=spec.train.l2wrap,
    )


# ---- measuring ----


def compared(
    sizes: Sequence[int], seconds_of: Callable[[int], float], *, share: int, most_seconds: float
) -> dict[int, float] | None:
    """Median seconds a sequence of each rising size that is worth it; None where `most_seconds` decide nothing.

    `seconds_of` runs one micro-batch of a size. Sizes take turns, so that a disturbance meets more than one of them.
    """
    tried, spent = _tried(sizes, seconds_of, share, most_seconds)
    if not tried:
        return None
    promising = [size for size, seconds in tried.items() if seconds <= _HOPELESS * min(tried.values())]
    timed: dict[int, list[float]] = {size: [] for size in promising}
    a_round = sum(tried[size] * rows_each(share, size) for size in promising)
    for _ in range(PASSES - 1):
        if spent + a_round > most_seconds:
            break
        for size, seconds in timed.items():
            seconds.append(seconds_of(size))
            spent += seconds[-1]
    if not all(timed.values()):
        return None
    medians = {
        size: statistics.median(seconds) * num_micro_batches(share, size) / share for size, seconds in timed.items()
    }
    # Each size was faster than the one before when time ran out: nobody knows what the next would have been.
    was_cut = max(tried) != sizes[-1] and max(tried) in promising
    return None if was_cut and min(medians, key=lambda size: medians[size]) == max(medians) else medians


def _tried(
    sizes: Sequence[int], seconds_of: Callable[[int], float], share: int, most_seconds: float
) -> tuple[dict[int, float], float]:
    """Seconds a row of the first pass of each size, up to a hopeless one; and the seconds that were spent.

    Rows of filler count as rows here: that one size needs much of it says nothing of the next.
    """
    tried: dict[int, float] = {}
    # Threads start and memory is cleared in the very first pass: it only says how long a pass may be.
    expected = spent = seconds_of(sizes[0])
    for size in sizes:
        if tried:
            expected = tried[max(tried)] * rows_each(share, size)
        # A size that cannot be timed afterwards need not be tried.
        if spent + 2 * expected > most_seconds:
            break
        seconds = seconds_of(size)
        spent += seconds
        tried[size] = seconds / rows_each(share, size)
        if tried[size] > _HOPELESS * min(tried.values()):
            break
    return tried, spent


def pass_timer(work: Work, engine: Engine) -> Callable[[int], float]:
    """Seconds of forward, loss and backward of one micro-batch of a size, in the loop of the run, on random tokens."""
    model = _any_model(work).to(engine.device).train()
    objective = partial(cross_entropy, l2wrap=work.l2wrap)

    def seconds_of(size: int) -> float:
        batch = random_batch(rows_each(work.share, size), ctx_len=work.ctx_len, vocab_size=work.shape.vocab_size)
        started = time.perf_counter()
        # Gradients stay, as they do between the micro-batches of a step.
        accumulate_gradients(model, [batch], objective, engine, total_weight=float(batch.weights_BT.size), seed=0)
        return time.perf_counter() - started

    return seconds_of


def _any_model(work: Work) -> LanguageModel:
    """The model of the run, with small random weights: its true start takes long to draw, and no value is looked at."""
    model = build_model(work.shape, dropout=work.dropout, backend=work.backend, seed=None)
    generator, bound = torch.Generator().manual_seed(0), work.shape.n_embd**-0.5
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-bound, bound, generator=generator)
    return model.double() if work.precision == "fp64" else model


# ---- what was measured before ----


def notes_folder() -> Path:
    """Where measurements of this user are noted, beside the compiled operators."""
    return cache_folder().parent / "micro-batches"


def read_note(work: Work, *, notes: Path) -> MicroBatch | None:
    """The choice by an earlier measurement of the same work on this machine. What is no such note counts as none."""
    facts = _facts(work)
    try:
        note = json.loads(_place(facts, notes).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(note, dict) or note.get("measured") != facts:
        return None
    found = note.get("seconds_a_sequence")
    if not isinstance(found, dict) or not found:
        return None
    seconds = {size: found[str(size)] for size in work.sizes if str(size) in found}
    if len(seconds) != len(found) or not all(_is_time(value) for value in seconds.values()):
        return None
    return measured_choice(seconds, share=work.share, sizes=work.sizes)


def write_note(work: Work, seconds: Mapping[int, float], *, notes: Path) -> None:
    """Keep a measurement. Where that cannot be written, the next run measures again."""
    facts, times = _facts(work), {str(size): value for size, value in seconds.items()}
    with contextlib.suppress(OSError):
        write_json(_place(facts, notes), {"measured": facts, "seconds_a_sequence": times})


def _is_time(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value) and value > 0


def _place(facts: Mapping[str, object], notes: Path) -> Path:
    return notes / f"{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]}.json"


def _facts(work: Work) -> dict[str, object]:
    """All that the times depend on, as JSON has it."""
    return {
        **asdict(work),
        "sizes": list(work.sizes),
        # How much is dropped, and how much the regulariser weighs, costs no time.
        "dropout": work.dropout > 0,
        "l2wrap": work.l2wrap > 0,
        "machine": machine_text(),
        "torch": str(torch.__version__),
        "code": _code_hash(),
    }


def _code_hash() -> str:
    package = Path(__file__).parent
    files = [path for folder in _CODE for path in (package / folder).glob("*.py")]
    with contextlib.suppress(KernelError):
        files += [path for path in source_folder().iterdir() if path.is_file()]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:32]
