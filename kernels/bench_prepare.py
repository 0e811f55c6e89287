"""Times the preparation of data, in one process and on all cores, and how long training waits for a batch of it.

python kernels/bench_prepare.py
python kernels/bench_prepare.py --megabytes 20 --repeats 3 --write --note "quiet machine"

The gate comes first: compiled code and plain Python must make the same stores, byte for byte.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np
from bench import commit, cpu_name

from rwkv_spec.data import compiled_lines, encode
from rwkv_spec.data.batch import batches
from rwkv_spec.data.pool import num_cores
from rwkv_spec.data.prepare import prepare
from rwkv_spec.data.store import Store
from rwkv_spec.errors import UserError
from rwkv_spec.ops.build import find_compiler
from rwkv_spec.tokenizer.integer import AngleTokenizer
from rwkv_spec.tokenizer.protocol import Tokenizer
from rwkv_spec.tokenizer.vocab import VocabTokenizer, create_vocab_file_from_tokens

PAGE = Path(__file__).parent / "BENCH.md"
TABLE = "| date | CPU | cores | compiler | commit | input | MB | tokens | one core | all cores | plain | batch | note |"
SECTION = f"""## Preparation

Rows by `python kernels/bench_prepare.py --write`: million tokens a second from a file to a finished store, by the
wall's clock, the median and the best of some runs. "Plain" is once and on one core, with lines and integers read by
Python and numpy; a vocabulary's trie stays compiled. Integers are angles in documents of some hundred, text is words of
a vocabulary of 9,000 entries. "Batch" is how many microseconds training waits for one of 16 x 512 tokens: the mean of a
thousand, and their mean by the processor's clock, which other programs do not change.

{TABLE}
{"|---" * (TABLE.count("|") - 1)}|
"""
NUM_ENTRIES = 9000
# Enough for compiled code to be used.
GATE_BYTES = 5_000_000
BATCH, LENGTH, NUM_BATCHES = 16, 512, 1000
# Million tokens a second: the median and the best of the repeats.
Rate = tuple[float, float]


@dataclass(frozen=True)
class Input:
    name: str
    path: Path
    tokenizer: Tokenizer


MakeStore = Callable[[Input, Path, int], Store]


def make_vocabulary(path: Path, rng: np.random.Generator) -> list[str]:
    """A vocabulary file of single bytes and words, most with a space in front; returns the words."""
    syllables = [a + b for a in "bcdfghjklmnpqrstvwz" for b in "aeiou"]
    words: dict[str, None] = {}
    while len(words) < NUM_ENTRIES - 256:
        word = "".join(syllables[i] for i in rng.integers(0, len(syllables), rng.integers(1, 5)))
        words[f" {word}" if rng.random() < 0.8 else word] = None
    create_vocab_file_from_tokens([*(bytes([i]) for i in range(256)), *words], path)
    return list(words)


def make_inputs(folder: Path, num_bytes: int) -> list[Input]:
    """Four files of about so many bytes each, the same at every call."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    words = np.array(make_vocabulary(folder / "vocab.txt", rng))
    # Some words are frequent and most are rare, as in a language.
    ranks = np.cumsum(1 / np.arange(1, len(words) + 1))
    angles = np.cumsum(rng.integers(-2, 3, 1 << 16)) * 10 % 360

    def numbers() -> str:
        start, count = rng.integers(0, len(angles) - 900), rng.integers(300, 900)
        return " ".join(map(str, angles[start : start + count].tolist()))

    def text() -> str:
        drawn = np.searchsorted(ranks, rng.random(rng.integers(200, 900)) * ranks[-1])
        return "".join(words[drawn].tolist()).strip()

    vocabulary = VocabTokenizer(folder / "vocab.txt")
    inputs = [
        Input("integers, jsonl", folder / "integers.jsonl", AngleTokenizer()),
        Input("integers, npy", folder / "integers.npy", AngleTokenizer()),
        Input("text, jsonl", folder / "text.jsonl", vocabulary),
        Input("text, txt", folder / "text.txt", vocabulary),
    ]
    _write(inputs[0].path, num_bytes, lambda: json.dumps({"month": int(rng.integers(1, 13)), "text": numbers()}))
    np.save(inputs[1].path, rng.integers(0, 360, (num_bytes // 8 // 500, 500)))
    _write(inputs[2].path, num_bytes, lambda: json.dumps({"text": text()}))
    _write(inputs[3].path, num_bytes, text)
    return inputs


def _write(path: Path, num_bytes: int, line: Callable[[], str]) -> None:
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < num_bytes:
            file.write(f"{line()}\n")


@contextmanager
def without_compiled_code() -> Iterator[None]:
    """Python and numpy do all but the matching of a vocabulary: as if no data were worth a compiler."""
    before = compiled_lines.SMALL_BYTES, encode.MANY_IDS
    compiled_lines.SMALL_BYTES = encode.MANY_IDS = 1 << 62
    try:
        yield
    finally:
        compiled_lines.SMALL_BYTES, encode.MANY_IDS = before


def store_of(given: Input, folder: Path, processes: int) -> Store:
    """A store of its own, that replaces the one before."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        return prepare(sources=[given.path], tokenizer=given.tokenizer, store=Path(place), processes=processes)


def gate(inputs: Sequence[Input], folder: Path, make_store: MakeStore) -> list[str]:
    """What is wrong: one line for each input of which compiled code makes another store; empty where all is right."""
    red = []
    for given in inputs:
        found = {make_store(given, folder, processes).hash for processes in {1, num_cores()}}
        with without_compiled_code():
            if found != {store_of(given, folder, 1).hash}:
                red.append(f"{given.name}: another store than by plain Python")
    return red


def clock(given: Input, folder: Path, processes: int, repeats: int) -> Rate:
    rates = []
    for _ in range(repeats):
        start = time.perf_counter()
        store = store_of(given, folder, processes)
        rates.append(store.manifest.train_tokens / (time.perf_counter() - start) / 1e6)
    return statistics.median(rates), max(rates)


def clock_batches(given: Input, folder: Path) -> tuple[float, float]:
    """Microseconds for one shuffled batch, by the wall's and by the processor's clock."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        stream = prepare(sources=[given.path], tokenizer=given.tokenizer, store=Path(place)).train
        made = batches(
            stream, ctx_len=LENGTH, batch_size=BATCH, order="shuffle", seed=0, total_sequences=BATCH * NUM_BATCHES
        )
        start, started = time.perf_counter(), time.thread_time()
        count = sum(1 for _ in made)
        wall, worked = time.perf_counter() - start, time.thread_time() - started
    return wall / count * 1e6, worked / count * 1e6


def time_input(given: Input, folder: Path, repeats: int) -> list[str]:
    """The cells of a row: size, tokens, three rates and the batches."""
    store_of(given, folder, 1)
    rates = [clock(given, folder, processes, repeats) for processes in (1, num_cores())]
    with without_compiled_code():
        rates.append(clock(given, folder, 1, 1))
    tokens = store_of(given, folder, 1).manifest.train_tokens
    wall, worked = clock_batches(given, folder)
    cells = [f"{given.path.stat().st_size / 1e6:.1f}", f"{tokens / 1e6:.2f} M"]
    return [*cells, *(f"{middle:.1f}, {best:.1f}" for middle, best in rates), f"{wall:.0f}, {worked:.0f}"]


def append_rows(rows: Sequence[str]) -> None:
    """Put rows under the last one of their own table; its section is made before the first other one where it lacks."""
    text = PAGE.read_text(encoding="utf-8")
    if SECTION not in text:
        before, heading, rest = text.partition("## ")
        text = f"{before}{SECTION}\n{heading}{rest}"
    lines = text.splitlines()
    at = lines.index(TABLE)
    while at < len(lines) and lines[at].startswith("|"):
        at += 1
    PAGE.write_text("\n".join([*lines[:at], *rows, *lines[at:], ""]), encoding="utf-8")


def main(arguments: Sequence[str] | None = None, *, make_store: MakeStore | None = None) -> int:
    """Exit status 0; 1 where the gate is red; 2 where the user can fix it. `make_store` stands in for store_of."""
    parser = argparse.ArgumentParser(description="Gates, then times the preparation of data.")
    parser.add_argument("--megabytes", type=float, default=80.0, help="of each input")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--write", action="store_true", help=f"add the rows to {PAGE.name}")
    parser.add_argument("--note", default="", help="what the machine was doing")
    options = parser.parse_args(arguments)
    if options.repeats < 1 or options.megabytes < 0.1:
        parser.error("--repeats must be at least 1, --megabytes at least 0.1")
    rows = []
    with tempfile.TemporaryDirectory(prefix="rwkv_spec-bench-") as name:
        folder = Path(name)
        try:
            compiler = find_compiler().name
            red = gate(make_inputs(folder / "gate", GATE_BYTES), folder, make_store or store_of)
            if red:
                print("\n".join([*red, "the gate is red: nothing was timed"]), file=sys.stderr)
                return 1
            for given in make_inputs(folder / "timed", int(options.megabytes * 1e6)):
                cells = [str(date.today()), cpu_name(), str(num_cores()), compiler, commit(), given.name]
                cells += [*time_input(given, folder, options.repeats), options.note]
                rows.append(f"| {' | '.join(cells)} |")
                print(rows[-1], flush=True)
        except UserError as error:
            print(error, file=sys.stderr)
            return 2
    if options.write:
        append_rows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
