"""`bench SPEC` from end to end: programs run in turn, round by round, and their times become one report.

The yardstick is physical: 6 × parameters without the embedding × tokens, over time, against the product of two square
matrices in the same dtype and threads, measured in the same process. Nothing is written but temporary files.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from rwkv_spec.benchmark.machine import device_name
from rwkv_spec.benchmark.programs import (
    Program,
    ProgramFailed,
    busy_core,
    chosen_peers,
    own_program,
    peer_program,
    split_program,
)
from rwkv_spec.benchmark.report import Machine, Peer, Ratio, Report, Speed
from rwkv_spec.benchmark.timed import OwnTimes, Times
from rwkv_spec.benchmark.workload import Workload, workload_of
from rwkv_spec.errors import UserError
from rwkv_spec.planning import make_planned, make_world
from rwkv_spec.preflight import Inputs
from rwkv_spec.preparing import foreseen
from rwkv_spec.spec.split import MicroBatch
from rwkv_spec.train.engine import Engine, available_device, decide_precision


@dataclass(frozen=True)
class Request:
    """What to measure beside the spec. `num_steps` are timed in each of `num_rounds` processes of each program."""

    num_steps: int = 12
    num_rounds: int | None = None
    against: tuple[str, ...] = ()
    beside_busy: bool = False
    peer_python: Path | None = None
    peer_limit_seconds: float = 600.0

    @property
    def rounds(self) -> int:
        """By default three where programs take turns, so that a ratio has a range."""
        return self.num_rounds or (3 if self.against or self.beside_busy else 1)


def measure(inputs: Inputs, request: Request) -> Report:
    """Time optimizer steps of the spec's model and batch on random tokens, and those of the peers beside it."""
    if request.num_steps < 1:
        raise UserError(f"--steps {request.num_steps}: at least one step must be timed")
    if request.num_rounds is not None and request.num_rounds < 1:
        raise UserError(f"--rounds {request.num_rounds}: at least one round must be run")
    workload, plain = _workloads(inputs)
    own = own_program(workload, num_steps=request.num_steps)
    peers = [
        peer_program(
            name,
            plain,
            num_steps=request.num_steps,
            limit_seconds=request.peer_limit_seconds,
            peer_python=request.peer_python,
        )
        for name in chosen_peers(request.against, workload, request.peer_python)
    ]
    series = _Series(own, peers)
    for number in range(request.rounds):
        series.run(busy=False, detailed=number == 0)
        if request.beside_busy:
            with busy_core():
                series.run(busy=True, detailed=False)
    return series.report(workload, request)


def _workloads(inputs: Inputs) -> tuple[Workload, Workload]:
    """The step that a long run would do here, in one process; and in as few micro-batches as fit, for peers."""
    spec = inputs.spec
    precision = decide_precision(spec.train.precision, device=available_device())
    engine = Engine(precision=precision.name, trackers=(), log_dir=spec.work_dir)
    try:
        if engine.num_processes > 1:
            raise UserError("bench measures one process; start it without a launcher")
        world = make_world(spec, shape=inputs.shape, precision=precision, num_threads=engine.num_threads)
        planned = make_planned(spec, shape=inputs.shape, data=foreseen(inputs), world=world)
        make = partial(
            workload_of,
            spec,
            shape=inputs.shape,
            num_parameters=planned.sizes.num_parameters,
            num_threads=engine.num_threads,
        )
        plain = make(plan=planned.plan)
        choice = _choice(plain, planned.plan.sizes_to_compare)
        return plain if choice is None else make(plan=planned.with_micro_batch(choice).plan), plain
    finally:
        engine.end()


def _choice(plain: Workload, sizes: tuple[int, ...]) -> MicroBatch | None:
    """Found in a process of its own, which gives its memory back. None where there is nothing to choose from."""
    if not sizes:
        return None
    try:
        return MicroBatch(**split_program(plain, sizes).measure())  # type: ignore[arg-type]
    except ProgramFailed:
        # The process that times the steps will say what is wrong, if it is still.
        return None


class _Series:
    """The times of all programs, by round; a peer that failed is not started again."""

    def __init__(self, own: Program, peers: Sequence[Program]) -> None:
        self._own, self._peers = own, peers
        self._own_times: dict[bool, list[OwnTimes]] = {False: [], True: []}
        self._peer_times: dict[tuple[str, bool], list[Times]] = {}
        self._problems: dict[str, str] = {}

    def run(self, *, busy: bool, detailed: bool) -> None:
        """One process of each program, ours first: nothing else is timed where its operators are wrong."""
        try:
            self._own_times[busy].append(OwnTimes(**self._own.measure(detailed=detailed)))  # type: ignore[arg-type]
        except ProgramFailed as failure:
            raise RuntimeError(f"the process that measures ours failed: {failure}") from failure
        for peer in self._peers:
            if peer.name in self._problems:
                continue
            try:
                times = Times(**peer.measure())  # type: ignore[arg-type]
            except (ProgramFailed, UserError) as failure:
                # What a peer says that a user can fix is a reason like any other.
                self._problems[peer.name] = str(failure)
                continue
            self._peer_times.setdefault((peer.name, busy), []).append(times)

    def report(self, workload: Workload, request: Request) -> Report:
        quiet, busy, first = self._own_times[False], self._own_times[True], self._own_times[False][0]
        speed = _speed(quiet, workload)
        seconds = statistics.median(second for times in quiet for second in times.seconds)
        rate = statistics.median(times.product_rate for times in quiet)
        shape = workload.shape
        return Report(
            shape=(
                f"{shape.type} L{shape.n_layer} D{shape.n_embd} V{shape.vocab_size}, "
                f"{workload.batch_size}×{workload.ctx_len}"
            ),
            machine=_machine(workload),
            num_parameters=workload.num_parameters,
            micro_batch_size=workload.micro_batch_size,
            num_steps=request.num_steps,
            num_rounds=request.rounds,
            tokens_per_s=speed.tokens_per_s,
            tokens_per_s_slowest=speed.tokens_per_s_slowest,
            tokens_per_s_fastest=speed.tokens_per_s_fastest,
            rounds=speed.rounds,
            flop_per_s=workload.flop_per_step / seconds,
            peak_flop_per_s=rate,
            share_of_peak=workload.flop_per_step / seconds / rate,
            step_seconds=seconds,
            data_wait_seconds=statistics.median(second for times in quiet for second in times.wait_seconds),
            forward_seconds=first.forward_seconds,
            backward_seconds=first.backward_seconds,
            optimizer_seconds=first.optimizer_seconds,
            peak_memory_bytes=_largest(quiet),
            shares=first.shares,
            beside_busy=_speed(busy, workload) if busy else None,
            peers=tuple(self._reported(peer.name, workload) for peer in self._peers),
        )

    def _reported(self, name: str, workload: Workload) -> Peer:
        quiet, busy = (self._peer_times.get((name, kind), []) for kind in (False, True))
        problem = self._problems.get(name, "")
        if not quiet:
            return Peer(name, problem)
        return Peer(
            name,
            problem,
            num_parameters=quiet[0].num_parameters,
            speed=_speed(quiet, workload),
            peak_memory_bytes=_largest(quiet),
            ratio=_ratio(self._own_times[False], quiet),
            beside_busy=_speed(busy, workload) if busy else None,
            beside_busy_ratio=_ratio(self._own_times[True], busy) if busy else None,
        )


def _machine(workload: Workload) -> Machine:
    return Machine(
        device=device_name(available_device()),
        num_threads=workload.num_threads,
        torch=torch.__version__,
        python=platform.python_version(),
        precision=workload.precision,
        backend=workload.backend,
    )


def _speed(rounds: Sequence[Times], workload: Workload) -> Speed:
    seconds = [second for times in rounds for second in times.seconds]
    tokens = workload.tokens_per_step
    return Speed(
        tokens_per_s=tokens / statistics.median(seconds),
        tokens_per_s_slowest=tokens / max(seconds),
        tokens_per_s_fastest=tokens / min(seconds),
        rounds=tuple(tokens / statistics.median(times.seconds) for times in rounds),
    )


def _ratio(ours: Sequence[Times], theirs: Sequence[Times]) -> Ratio:
    """Of the rounds that both have: a peer may have failed in a later one."""
    ratios = [
        statistics.median(other.seconds) / statistics.median(own.seconds)
        for own, other in zip(ours, theirs, strict=False)
    ]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))


def _largest(rounds: Sequence[Times]) -> int | None:
    known = [times.peak_memory_bytes for times in rounds if times.peak_memory_bytes is not None]
    return max(known) if known else None
