"""Times generation against the `rwkv` package on one checkpoint in one run, in turn: first the gate, then the clock.

python kernels/bench_generate.py                                   all generations, a small and a large model
python kernels/bench_generate.py --type x070 --shape 12,768,65536 --threads 2 --write --note "quiet machine"

Both go on greedily, each token from the one before: the package by its forward and an argmax, ours by `generate` with
its log-probabilities, for one sequence and for 32.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Protocol

import torch
from bench import commit, cpu_name, parse_count
from torch import Tensor

from rwkv_spec.checkpoint.format import write_weights
from rwkv_spec.generation.decode import generate
from rwkv_spec.inference import load_model
from rwkv_spec.model.build import build_model, weights
from rwkv_spec.model.language_model import LanguageModel
from rwkv_spec.model.shapes import TYPES, fresh_shape

SHAPES = ((3, 128, 361), (12, 768, 65536))
PAGE = Path(__file__).parent / "BENCH.md"
HEADING = "## Generation"
MANY = 32
# Both are within rounding of float64; another epsilon in a norm makes ten times as much.
GATE = 1e-4


class Theirs(Protocol):
    """The part of rwkv.model.RWKV that is used."""

    def forward(self, tokens: list[int], state: object) -> tuple[Tensor, object]: ...


@dataclass(frozen=True)
class Row:
    """Medians of tokens a second, and the medians of the ratios of neighbouring runs."""

    type: str
    shape: tuple[int, int, int]
    theirs: float
    one: float
    one_ratio: float
    many: float
    many_ratio: float


def make_checkpoint(path: Path, type: str, shape: tuple[int, int, int]) -> None:
    """A fresh model in which nothing is zero, so that its logits hang on every weight."""
    n_layer, n_embd, vocab_size = shape
    model = build_model(fresh_shape(type, n_layer=n_layer, n_embd=n_embd, head_size=64, vocab_size=vocab_size), seed=1)
    generator = torch.Generator().manual_seed(1)
    for name, tensor in weights(model).items():
        if name == "emb.weight":
            tensor.normal_(generator=generator)
        elif tensor.dim() > 1 and not bool(tensor.any()):
            tensor.normal_(std=0.02, generator=generator)
    write_weights(path, weights(model), format="pth", dtype="fp32")


def load_theirs(path: Path) -> Theirs:
    """Decides by environment variables when it is first imported, and prints as it loads."""
    from rwkv.model import RWKV

    with contextlib.redirect_stdout(io.StringIO()):
        model: Theirs = RWKV(model=str(path.with_suffix("")), strategy="cpu fp32")
    return model


def gate(theirs: Theirs, ours: LanguageModel) -> float:
    """The error of our logits against theirs after a few tokens, as a share of their size."""
    ids = [1, 2, 3, 5, 8, 13]
    state, logits_1V, expected_V = ours.initial_state(1), torch.empty(0), torch.empty(0)
    their_state: object = None
    with torch.no_grad():
        for index in ids:
            logits_1V, state = ours.step(torch.tensor([index]), state)
            expected_V, their_state = theirs.forward([index], their_state)
    return float(torch.linalg.vector_norm(logits_1V[0] - expected_V) / torch.linalg.vector_norm(expected_V))


def run_theirs(model: Theirs, num_tokens: int) -> int:
    logits_V, state = model.forward([1], None)
    for _ in range(num_tokens):
        logits_V, state = model.forward([int(logits_V.argmax())], state)
    return num_tokens + 1


def run_ours(model: LanguageModel, num_tokens: int, batch_size: int) -> int:
    prompts = [[1 + row % 7] for row in range(batch_size)]
    texts = generate(model, prompts, max_new_tokens=num_tokens + 1, temperature=0.0, stop_at_end_of_document=False)
    return sum(len(text.ids) for text in texts)


def pace(job: Callable[[], int]) -> float:
    """Tokens a second; one thread is timed by the processor's clock, which stands still for other processes."""
    timer = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = timer()
    num_tokens = job()
    return num_tokens / (timer() - start)


def measure(type: str, shape: tuple[int, int, int], repeats: int) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pth"
        make_checkpoint(path, type, shape)
        theirs, ours = load_theirs(path), load_model(path, device="cpu", dtype="fp32")
    error = gate(theirs, ours)
    if not error < GATE:
        raise SystemExit(f"{type} {shape}: the two differ by {error:.1e} (gate {GATE:.0e}): nothing was timed")
    # About half a second of theirs, but so many tokens that reading the prompt is a small part.
    run_theirs(theirs, 20)
    num_tokens = max(32, int(pace(lambda: run_theirs(theirs, 20)) / 2))
    jobs = {
        "theirs": lambda: run_theirs(theirs, num_tokens),
        "one": lambda: run_ours(ours, num_tokens, 1),
        "many": lambda: run_ours(ours, max(32, num_tokens // 4), MANY),
    }
    for job in jobs.values():
        job()
    found: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats):
        for name, job in jobs.items():
            found[name].append(pace(job))
    ratios = {
        name: statistics.median(own / other for own, other in zip(found[name], found["theirs"], strict=True))
        for name in ("one", "many")
    }
    theirs_pace, one, many = (statistics.median(found[name]) for name in jobs)
    return Row(type, shape, theirs_pace, one, ratios["one"], many, ratios["many"])


def table_row(row: Row, note: str) -> str:
    n_layer, n_embd, vocab_size = row.shape
    return (
        f"| {date.today()} | {cpu_name()} | {torch.get_num_threads()} | {torch.__version__} | "
        f"{importlib.metadata.version('rwkv')} | {commit()} | {row.type} | L{n_layer} D{n_embd} V{vocab_size} | "
        f"{row.theirs:,.1f} | {row.one:,.1f} | {row.one_ratio:.2f} | {row.many:,.0f} | {row.many_ratio:.1f} | {note} |"
    )


def append(lines: Sequence[str]) -> None:
    """Put the rows at the end of their table."""
    text = PAGE.read_text(encoding="utf-8")
    before, heading, after = text.partition(HEADING)
    table, gap, rest = after.partition("\n\n## ")
    PAGE.write_text(before + heading + table.rstrip() + "\n" + "\n".join(lines) + "\n" + gap + rest, encoding="utf-8")


def parse_shape(text: str) -> tuple[int, int, int]:
    try:
        n_layer, n_embd, vocab_size = (int(size) for size in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not layers,width,ids such as 12,768,65536") from None
    if min(n_layer, n_embd, vocab_size) < 1 or n_embd % 64 or vocab_size < 14:
        raise argparse.ArgumentTypeError(f"{text!r}: a width is a multiple of 64, and there are at least 14 ids")
    return n_layer, n_embd, vocab_size


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Times generation against the rwkv package.")
    parser.add_argument("--type", choices=TYPES, help="default: each, in a process of its own")
    parser.add_argument("--shape", type=parse_shape, action="append", help="layers,width,ids; may be repeated")
    parser.add_argument("--threads", type=parse_count, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=parse_count, default=5)
    parser.add_argument("--write", action="store_true", help=f"append the rows to {PAGE.name}")
    parser.add_argument("--note", default="", help="what the machine was doing")
    options = parser.parse_args(arguments)
    if options.type is None:
        # The package decides for one kind of model when it is imported.
        return max(os.spawnv(os.P_WAIT, sys.executable, [sys.executable, __file__, "--type", type, *sys.argv[1:]])
                   for type in TYPES)  # fmt: skip
    os.environ.update({"RWKV_JIT_ON": "1", "RWKV_CUDA_ON": "0"})
    if options.type == "x070":
        os.environ["RWKV_V7_ON"] = "1"
    torch.set_num_threads(options.threads)
    lines = []
    for shape in options.shape or SHAPES:
        lines.append(table_row(measure(options.type, shape, options.repeats), options.note))
        print(lines[-1], flush=True)
    if options.write:
        append(lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
