"""Times the compiled operators: first the gate, then the clock. A kernel that is wrong is never timed.

python kernels/bench.py                          all operators in the two usual shapes
python kernels/bench.py --operator wkv6 --shape 4,4096,12,64 --dtype bf16 --threads 2 --write --note "quiet machine"
"""

from __future__ import annotations

import argparse
import functools
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
from torch import Tensor

from rwkv_spec.errors import UserError
from rwkv_spec.ops.dropout import dropout, dropout_torch
from rwkv_spec.ops.recurrence import RECURRENCES
from rwkv_spec.ops.wkv import REFERENCES, Operator, operator_of_this_machine, wkv5, wkv6, wkv7

# Error ratio = RMS error / RMS of the reference in float64.
GATES = {"fp32": 1e-6, "bf16": 4e-3}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
GATE_TIMES = (1, 15, 16, 17, 33, 257)
SHAPES = ((16, 512, 2, 64), (8, 1024, 12, 64))
PAGE = Path(__file__).parent / "BENCH.md"

Shape = tuple[int, int, int, int]
# What is timed, by the names of the rows.
Jobs = list[tuple[str, Callable[[], object]]]

COMPILED: dict[str, Operator] = {
    name: functools.partial(operator, backend="cpu")
    for name, operator in (("wkv5", wkv5), ("wkv6", wkv6), ("wkv7", wkv7))
}


@dataclass(frozen=True)
class Row:
    """One timing: microseconds of a whole call, and of one token of one head."""

    operator: str
    shape: Shape
    dtype: str
    median_us: float
    quartiles_us: tuple[float, float]
    best_us: float

    def of_a_token_and_head(self, call_us: float) -> float:
        B, T, H, _ = self.shape
        return call_us / (B * T * H)


def make_inputs(name: str, B: int, T: int, H: int, N: int, dtype: torch.dtype) -> list[Tensor]:
    """What a recurrence takes, as a model gives it; the state last."""
    generator = torch.Generator().manual_seed(T)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def argument(name: str, *shape: int) -> Tensor:
        if name == "w_raw":
            return torch.rand(shape, generator=generator) * 20 - 12
        if name == "a":
            return -kappa
        return kappa * torch.sigmoid(normal(*shape)) if name == "b" else normal(*shape)

    kappa = torch.nn.functional.normalize(normal(B, T, H, N), dim=-1)
    tokens = [argument(name, B, T, H, N).to(dtype) for name in RECURRENCES[name].tokens]
    return [*tokens, *(argument(name, H, N) for name in RECURRENCES[name].heads), normal(B, H, N, N)]


def error_ratio(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).square().mean().sqrt() / want.square().mean().sqrt())


def gate_recurrence(name: str, operator: Operator, *, head_size: int, dtype: str) -> list[str]:
    """What is wrong with the operator: one line for each result over its gate; empty where it may be timed."""
    results_of = ("y", "state", *(f"d{argument}" for argument in RECURRENCES[name].inputs), "dstate")
    red = []
    for T in GATE_TIMES:
        inputs = make_inputs(name, 2, T, 2, head_size, DTYPES[dtype])
        starts = torch.zeros(2, T, dtype=torch.bool)
        starts[0, T // 3] = True
        dy = torch.randn(2, T, 2, head_size, generator=torch.Generator().manual_seed(1)).to(DTYPES[dtype])
        results = []
        for function, leaves in (
            (operator, [x.clone().requires_grad_() for x in inputs]),
            (REFERENCES[name], [x.double().requires_grad_() for x in inputs]),
        ):
            y, state = function(*leaves, starts_BT=starts)
            loss = (y * dy.to(y.dtype)).sum() + (state * inputs[-1].to(state.dtype)).sum()
            gradients = torch.autograd.grad(loss, leaves)
            results.append([x.detach() for x in (y, state, *gradients)])
        for result, got, want in zip(results_of, *results, strict=True):
            ratio = error_ratio(got, want)
            # Written so that a result that is not a number is red too.
            if not ratio < GATES[dtype]:
                place = f"{name} {dtype} N={head_size} T={T}"
                red.append(f"{place}: {result} error ratio {ratio:.1e}, gate {GATES[dtype]:.0e}")
    return red


def gate_dropout(dtype: str) -> list[str]:
    x = torch.randn(3, 65, 100, generator=torch.Generator().manual_seed(0)).to(DTYPES[dtype])
    seed = torch.tensor([1, -2, 3])
    same = torch.equal(
        dropout(x, p=0.3, seed_B=seed, site=1, backend="cpu"), dropout_torch(x, p=0.3, seed_B=seed, site=1)
    )
    return [] if same else [f"dropout {dtype}: compiled and plain form differ"]


def clock(function: Callable[[], object], seconds: float) -> list[float]:
    """Microseconds of each call, for at least so long and at least five times."""
    # One thread is timed by the processor's clock, which stands still while another process has the core.
    timer = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    function()
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(samples) < 5:
        start = timer()
        function()
        samples.append((timer() - start) * 1e6)
    return samples


def jobs_of(name: str, shape: Shape, dtype: str) -> Jobs:
    """What is timed of an operator."""
    B, T, H, N = shape
    operators = torch.ops.rwkv_spec
    if name == "dropout":
        x_BTC, seed_B = torch.randn(B, T, H * N).to(DTYPES[dtype]), torch.arange(B)
        return [("dropout", lambda: operators.dropout(x_BTC, seed_B, 0.1, 0, 0))]
    *inputs, _ = make_inputs(name, *shape, DTYPES[dtype])
    forward, backward = getattr(operators, f"{name}_forward"), getattr(operators, f"{name}_backward")
    y, _, *kept = forward(*inputs, None, None, True)
    return [
        (f"{name} forward, no gradients", lambda: forward(*inputs, None, None, False)),
        (f"{name} forward", lambda: forward(*inputs, None, None, True)),
        (f"{name} backward", lambda: backward(*inputs, None, None, *kept, y, None, False)),
    ]


def time_jobs(jobs: Jobs, shape: Shape, dtype: str, seconds: float) -> list[Row]:
    rows = []
    for row_name, job in jobs:
        samples = clock(job, seconds)
        low, median, high = statistics.quantiles(samples, n=4)
        rows.append(Row(row_name, shape, dtype, median, (low, high), min(samples)))
    return rows


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit() -> str:
    command = ["git", "-C", str(PAGE.parent), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "-"


def table_rows(rows: Sequence[Row], note: str) -> list[str]:
    kernels = operator_of_this_machine("wkv7")
    machine = (
        f"{date.today()} | {cpu_name()}, {kernels.instructions} | {torch.get_num_threads()} | "
        f"{torch.__version__} | {kernels.compiler} | {commit()}"
    )
    lines = []
    for row in rows:
        shape = "x".join(str(size) for size in row.shape)
        low, high = row.quartiles_us
        lines.append(
            f"| {machine} | {row.operator} | {shape} | {row.dtype} | {row.median_us:.0f} | {low:.0f} to {high:.0f} | "
            f"{row.best_us:.0f} | {row.of_a_token_and_head(row.median_us):.3f} | "
            f"{row.of_a_token_and_head(row.best_us):.3f} | {note} |"
        )
    return lines


def parse_shape(text: str) -> Shape:
    try:
        B, T, H, N = (int(size) for size in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not B,T,H,N such as 16,512,2,64") from None
    if min(B, T, H, N) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: every size must be at least 1")
    return B, T, H, N


def parse_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def parse(arguments: Sequence[str] | None, names: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Gates, then times the compiled operators.")
    parser.add_argument("--operator", choices=names, action="append", help="may be given several times; default: all")
    parser.add_argument("--shape", type=parse_shape, action="append", help="B,T,H,N; may be given several times")
    parser.add_argument("--dtype", choices=list(DTYPES), action="append", help="default: both")
    parser.add_argument("--threads", type=parse_count, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=2.0, help="for each operator and shape")
    parser.add_argument("--write", action="store_true", help=f"append the rows to {PAGE.name}")
    parser.add_argument("--note", default="", help="what the machine was doing")
    options = parser.parse_args(arguments)
    options.operator = options.operator or list(names)
    options.shape, options.dtype = options.shape or list(SHAPES), options.dtype or list(DTYPES)
    return options


def gate(options: argparse.Namespace, operators: Mapping[str, Operator]) -> list[str]:
    red = []
    head_sizes = sorted({shape[3] for shape in options.shape})
    for name in options.operator:
        for dtype in options.dtype:
            if name == "dropout":
                red += gate_dropout(dtype)
                continue
            for head_size in head_sizes:
                red += gate_recurrence(name, operators[name], head_size=head_size, dtype=dtype)
    return red


def run(options: argparse.Namespace, is_red: Callable[[], list[str]], jobs: Callable[[str, Shape, str], Jobs]) -> int:
    """Exit status 0; 1 where the gate is red, and nothing is timed then; 2 where the user can fix it."""
    torch.set_num_threads(options.threads)
    try:
        red = is_red()
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    if red:
        print("\n".join([*red, "the gate is red: nothing was timed"]), file=sys.stderr)
        return 1
    for dtype in options.dtype:
        for shape in options.shape:
            for name in options.operator:
                rows = time_jobs(jobs(name, shape, dtype), shape, dtype, options.seconds)
                lines = table_rows(rows, options.note)
                print("\n".join(lines), flush=True)
                if options.write:
                    with PAGE.open("a", encoding="utf-8") as file:
                        file.write("\n".join(lines) + "\n")
    return 0


def main(arguments: Sequence[str] | None = None, *, operators: Mapping[str, Operator] = COMPILED) -> int:
    """`operators` go through the gate."""
    options = parse(arguments, [*COMPILED, "dropout"])
    return run(options, lambda: gate(options, operators), jobs_of)


if __name__ == "__main__":
    sys.exit(main())
