"""make_plan: all numbers that follow from a spec, the data, the model and the processes. Opens nothing.

A Plan is what a run does: the modules below it get plain numbers from here, and `describe` prints it for people.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from rwkv_spec.errors import Problem, SpecError
from rwkv_spec.spec.cadence import Cadence, exact
from rwkv_spec.spec.memory import Bytes, Disk, activation_bytes, disk_use, resident_bytes
from rwkv_spec.spec.split import MicroBatch, num_micro_batches, pays, sizes_to_compare
from rwkv_spec.spec.types import Spec


@dataclass(frozen=True)
class DataStats:
    """The prepared data; approximate figures come from the head of the sources. magic_prime is for rwkv-lm order."""

    num_tokens: int
    num_documents: int
    num_eval_documents: int
    num_eval_tokens: int
    approximate: bool = False
    magic_prime: int | None = None


@dataclass(frozen=True)
class ModelSizes:
    """The model: `parameters_by_group` sums to `num_parameters`; `num_state_values` is for one sequence.

    `checkpoint_rows` is the number of vocabulary rows in the checkpoint that it starts from, None where there is none.
    """

    type: str
    n_layer: int
    n_embd: int
    head_size: int
    vocab_size: int
    parameters_by_group: Mapping[str, int]
    num_parameters: int
    num_state_values: int
    checkpoint_rows: int | None = None


@dataclass(frozen=True)
class World:
    """The processes and what each has. `memory_bytes` is one process's share; None where it is not known.

    `precision` and `backend` are decided, and the reasons say by what.
    """

    num_processes: int
    engine: str
    device: str
    num_threads: int
    memory_bytes: int | None
    precision: str
    precision_reason: str
    backend: str
    backend_reason: str


@dataclass(frozen=True)
class Plan:
    """The numbers of one run. Steps count from 1: step n is the n-th finished optimizer update.

    `num_windows` is W, the sequences of an epoch; `steps_per_epoch` is W / batch_size and need not be whole.
    `total_tokens` is the length of the learning-rate schedule: train.tokens as given, else whole steps.
    `accumulate` is the number of micro-batches that every process runs a step. `sizes_to_compare` are the micro-batch
    sizes among which the fastest is to be measured, none where the size is settled; `compares_sizes` is true if a run
    does that before it trains, since it is long enough. `eval_batch_size` is the documents scored at once.
    """

    num_tokens: int
    num_documents: int
    num_eval_documents: int
    num_eval_tokens: int
    approximate: bool
    num_windows: int
    steps_per_epoch: float
    total_steps: int
    total_sequences: int
    tokens_per_step: int
    total_tokens: int
    warmup_steps: int
    lr_final: float
    batch_size: int
    micro_batch_size: int
    accumulate: int
    sizes_to_compare: tuple[int, ...]
    compares_sizes: bool
    eval_batch_size: int
    num_processes: int
    vocab_size: int
    precision: str
    backend: str
    eval_cadence: Cadence
    save_cadence: Cadence
    log_cadence: Cadence
    bytes: Bytes
    disk: Disk
    notes: tuple[str, ...]

    def evaluates_at(self, step: int) -> bool:
        """True if the held-out documents are scored after this step: at each period, and at the end of the run."""
        return self.num_eval_documents > 0 and (self.eval_cadence.fires(step) or step == self.total_steps)

    def saves_at(self, step: int) -> str | None:
        """The name, without ending, of the numbered save after this step. rwkv-final at the end is another file.

        The k-th save by epochs is rwkv-(k-1), counted from the start of the run; others bear their step.
        """
        if not self.save_cadence.fires(step):
            return None
        if self.save_cadence.every.epochs is not None:
            return f"rwkv-{self.save_cadence.num_fired(step) - 1}"
        return f"rwkv-step{step}"

    def logs_at(self, step: int) -> bool:
        """True if this step gives a row: the first, the last, and at each period."""
        return step in (1, self.total_steps) or self.log_cadence.fires(step)

    def epoch_at(self, step: int) -> float:
        """Passes over the training data after this step."""
        return min(step * self.batch_size, self.total_sequences) / self.num_windows


@dataclass(frozen=True)
class _Length:
    num_windows: int
    total_sequences: int
    total_steps: int
    warmup_steps: int


def make_plan(
    spec: Spec, *, sizes: ModelSizes, data: DataStats, world: World, micro_batch: MicroBatch | None = None
) -> Plan:
    """The plan of a run, or a SpecError with every reason why there is none.

    `micro_batch` settles a train.micro_batch_size that is auto; without it, auto is the largest that fits.
    """
    train = spec.train
    length = _length(spec, data, world)
    split = _split(spec, length, sizes, world, micro_batch)
    eval_cadence, save_cadence, log_cadence = (
        Cadence(every, train.batch_size, train.ctx_len, length.num_windows, length.total_sequences)
        for every in (spec.eval.every, spec.save.every, spec.log.every)
    )
    num_untrained = sizes.parameters_by_group.get("untrained", 0)
    return Plan(
        num_tokens=data.num_tokens,
        num_documents=data.num_documents,
        num_eval_documents=data.num_eval_documents,
        num_eval_tokens=data.num_eval_tokens,
        approximate=data.approximate,
        num_windows=length.num_windows,
        steps_per_epoch=length.num_windows / train.batch_size,
        total_steps=length.total_steps,
        total_sequences=length.total_sequences,
        tokens_per_step=train.ctx_len * train.batch_size,
        total_tokens=train.tokens or length.total_steps * train.ctx_len * train.batch_size,
        warmup_steps=length.warmup_steps,
        lr_final=_lr_final(spec),
        batch_size=train.batch_size,
        micro_batch_size=split.size,
        accumulate=num_micro_batches(split.share, split.size),
        sizes_to_compare=split.sizes_to_compare,
        compares_sizes=split.compares_sizes,
        eval_batch_size=split.eval_batch_size,
        num_processes=world.num_processes,
        vocab_size=sizes.vocab_size,
        precision=world.precision,
        backend=world.backend,
        eval_cadence=eval_cadence,
        save_cadence=save_cadence,
        log_cadence=log_cadence,
        bytes=resident_bytes(
            sizes.num_parameters,
            num_untrained,
            activations=_activations(spec, split.size, sizes, world),
            precision=world.precision,
        ),
        disk=disk_use(
            sizes.num_parameters,
            num_untrained,
            num_numbered=min(spec.save.keep, save_cadence.num_fired(length.total_steps)),
            has_best=data.num_eval_documents > 0,
            save_dtype=spec.save.dtype,
            precision=world.precision,
        ),
        notes=split.notes,
    )


def _length(spec: Spec, data: DataStats, world: World) -> _Length:
    """How long the run is, or a SpecError with all that is in its way."""
    train = spec.train
    problems: list[Problem] = []
    if world.num_processes > train.batch_size:
        what = f"{train.batch_size} sequences cannot be shared by {world.num_processes} processes"
        fix = f"use at least {world.num_processes}, or fewer processes"
        problems.append(spec.problem("train.batch_size", what, fix))
    num_windows = _num_windows(spec, data, problems)
    total_sequences = _total_sequences(spec, num_windows)
    total_steps = math.ceil(Fraction(total_sequences, train.batch_size))
    warmup_steps = min(10, total_steps // 10)
    if spec.scheduler.warmup_steps != "auto":
        warmup_steps = spec.scheduler.warmup_steps
        if warmup_steps > 0 and warmup_steps >= total_steps and num_windows:
            what = f"{warmup_steps} is not below the {total_steps} steps of this run"
            problems.append(spec.problem("scheduler.warmup_steps", what, "use fewer, or auto, or a longer run"))
    if problems:
        raise SpecError(problems)
    return _Length(num_windows, total_sequences, total_steps, warmup_steps)


def _num_windows(spec: Spec, data: DataStats, problems: list[Problem]) -> int:
    """W: windows of an epoch, the magic prime in rwkv-lm order. 0 with a problem if nothing can be trained."""
    if data.num_tokens < 2:
        what = f"there are {data.num_tokens} tokens to train on; a token to predict needs one before it"
        problems.append(spec.problem("data.train", what, "name more data, or hold out less"))
        return 0
    if spec.data.order == "rwkv-lm":
        if data.magic_prime is None:
            what = f"{data.num_tokens} tokens are too few for the rwkv-lm order with windows of {spec.train.ctx_len}"
            problems.append(spec.problem("data.order", what, "use order: shuffle, or a smaller train.ctx_len"))
            return 0
        return data.magic_prime
    return math.ceil(Fraction(data.num_tokens - 1, spec.train.ctx_len))


def _total_sequences(spec: Spec, num_windows: int) -> int:
    """Sequences of the whole run: whole epochs need not fill the last step, all else is whole steps."""
    train = spec.train
    if train.epochs is not None:
        return math.ceil(exact(train.epochs) * num_windows)
    if train.tokens is not None:
        return math.ceil(Fraction(train.tokens, train.ctx_len * train.batch_size)) * train.batch_size
    assert train.steps is not None
    return train.steps * train.batch_size


def _lr_final(spec: Spec) -> float:
    if spec.scheduler.lr_final is None:
        return spec.optimizer.lr
    if spec.scheduler.lr_final == "auto":
        # A tenth in decimal: 6e-4 becomes 6e-5, not its neighbour 5.9999999999999995e-05.
        return float(exact(spec.optimizer.lr) / 10)
    return spec.scheduler.lr_final


@dataclass(frozen=True)
class _Split:
    share: int
    size: int
    eval_batch_size: int
    notes: tuple[str, ...] = ()
    sizes_to_compare: tuple[int, ...] = ()
    compares_sizes: bool = False


def _split(spec: Spec, length: _Length, sizes: ModelSizes, world: World, micro_batch: MicroBatch | None) -> _Split:
    """Sequences that a process runs at once, and what is worth telling about it."""
    train = spec.train
    share = math.ceil(Fraction(train.batch_size, world.num_processes))
    given = train.micro_batch_size
    if given != "auto":
        size = min(given, share)
        # What a state recorded was measured for training: documents are scored as they were before the resume.
        at_once = size if spec.is_given("train.micro_batch_size") else _largest(spec, share, sizes, world)
        note = f"train.micro_batch_size {given} is cut to {share}, a process's whole share of batch_size"
        return _Split(share, size, at_once, (note,) if given > share else ())
    largest = _largest(spec, share, sizes, world)
    if micro_batch is not None:
        notes = (micro_batch.reason,) if micro_batch.reason else ()
        return _Split(share, min(micro_batch.size, share), largest, notes)
    if world.device != "cpu" or largest == 1:
        return _Split(share, largest, largest)
    among = sizes_to_compare(share, largest)
    if not pays(among, num_sequences=length.total_sequences // world.num_processes):
        return _Split(share, largest, largest, sizes_to_compare=among)
    note = f"micro-batch {largest} of {share}, unless a smaller one turns out faster: measured at the start of the run"
    return _Split(share, largest, largest, (note,), among, compares_sizes=True)


def _largest(spec: Spec, share: int, sizes: ModelSizes, world: World) -> int:
    """Sequences of `share` whose activations fit into two fifths of a process's memory."""
    size = share
    if world.memory_bytes is not None:
        while size > 1 and _activations(spec, size, sizes, world) > 0.4 * world.memory_bytes:
            size = math.ceil(size / 2)
    return size


def _activations(spec: Spec, micro_batch_size: int, sizes: ModelSizes, world: World) -> int:
    return activation_bytes(
        micro_batch_size * spec.train.ctx_len,
        type=sizes.type,
        n_layer=sizes.n_layer,
        n_embd=sizes.n_embd,
        head_size=sizes.head_size,
        vocab_size=sizes.vocab_size,
        precision=world.precision,
        dropout=spec.dropout > 0,
        compiled=world.device == "cpu" and world.backend == "cpu",
        grad_checkpoint=spec.train.grad_checkpoint,
    )
