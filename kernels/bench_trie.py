"""Times encoding with the World vocabulary on one core: first the gate, then the processor's clock.

python kernels/bench_trie.py
python kernels/bench_trie.py --megabytes 5 --repeats 9 --write --note "quiet machine"
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Protocol

from bench import commit, cpu_name

from rwkv_spec.errors import UserError
from rwkv_spec.ops.build import find_compiler
from rwkv_spec.tokenizer.compiled_trie import CompiledTrie
from rwkv_spec.tokenizer.trie import Match, Trie
from rwkv_spec.tokenizer.world import WorldTokenizer

PAGE = Path(__file__).parent / "BENCH.md"
TABLE = "| date | CPU | compiler | commit | text | MB | matching | encode_many | encode | plain Python | note |"
DOCUMENT = 3000
# Megabytes a second: the median and the best of the repeats.
Rate = tuple[float, float]


class Matches(Protocol):
    def match(self, documents: Sequence[bytes]) -> Match: ...


def make_texts(world: WorldTokenizer, num_bytes: int) -> dict[str, list[str]]:
    """Documents of some kilobytes. English and code are those of Python's own library; Chinese and Russian are words
    drawn evenly from the vocabulary, which is harder on a cache than prose."""
    draw = random.Random(0)
    words = [token.decode("utf-8", errors="ignore") for token in world.tokens.values()]
    chinese = [word for word in words if re.fullmatch("[\u4e00-\u9fff]+", word)]
    russian = [word for word in words if re.fullmatch(" ?[\u0400-\u04ff]+", word)]
    library = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    code, size = [], 0
    while size < num_bytes * 2 // 5:
        for path in draw.sample(library, 50):
            code.append(path.read_text(encoding="utf-8", errors="ignore"))
            size += len(code[-1])
    parts = {
        "English and code": "".join(code)[: num_bytes * 2 // 5],
        "Chinese": "".join(draw.choices(chinese, k=num_bytes // 5 // 3)),
        "Russian": "".join(draw.choices(russian, k=num_bytes // 5 // 7)),
        "digits": " ".join(str(draw.randrange(10**7)) for _ in range(num_bytes // 5 // 8)),
    }
    texts = {name: [text[at : at + DOCUMENT] for at in range(0, len(text), DOCUMENT)] for name, text in parts.items()}
    mixed = [document for documents in texts.values() for document in documents]
    draw.shuffle(mixed)
    return {"all mixed": mixed, **texts}


def gate(world: WorldTokenizer, trie: Matches, texts: dict[str, list[str]]) -> list[str]:
    """What is wrong: one line for each kind of text of which the trie finds other ids; empty where it may be timed."""
    plain, red = Trie(world.tokens), []
    for name, documents in texts.items():
        some = [document.encode() for document in documents[:100]]
        want, got = plain.match(some), trie.match(some)
        same = want.ids.tolist() == got.ids.tolist() and want.counts.tolist() == got.counts.tolist()
        if not same or world.decode_bytes(got.ids) != b"".join(some):
            red.append(f"trie, {name}: other ids than the plain form")
    return red


def clock(job: Callable[[], object], num_bytes: int, repeats: int) -> Rate:
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        job()
        seconds.append(time.process_time() - start)
    return num_bytes / statistics.median(seconds) / 1e6, num_bytes / min(seconds) / 1e6


def time_text(world: WorldTokenizer, trie: Matches, documents: list[str], repeats: int) -> list[str]:
    """The cells of a row: size, and four rates."""
    data, whole = [document.encode() for document in documents], "".join(documents)
    size = sum(map(len, data))
    few = data[: len(data) // 20 + 1]
    plain = Trie(world.tokens)
    rates = [
        clock(lambda: trie.match(data), size, repeats),
        clock(lambda: world.encode_many(documents), size, repeats),
        clock(lambda: world.encode(whole), size, repeats),
        clock(lambda: plain.match(few), sum(map(len, few)), repeats),
    ]
    return [f"{size / 1e6:.1f}", *(f"{median:.1f}, {best:.1f}" for median, best in rates)]


def append_rows(rows: Sequence[str]) -> None:
    """Put rows under the last one of their own table: another one follows it on the page."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    at = lines.index(TABLE)
    while at < len(lines) and lines[at].startswith("|"):
        at += 1
    PAGE.write_text("\n".join([*lines[:at], *rows, *lines[at:], ""]), encoding="utf-8")


def main(arguments: Sequence[str] | None = None, *, trie: Matches | None = None) -> int:
    """Exit status 0; 1 where the gate is red; 2 where the user can fix it. `trie` stands in for the compiled one."""
    parser = argparse.ArgumentParser(description="Gates, then times the compiled trie. Rates are MB/s: median, best.")
    parser.add_argument("--megabytes", type=float, default=20.0, help="of text in all")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--write", action="store_true", help=f"add the rows to {PAGE.name}")
    parser.add_argument("--note", default="", help="what the machine was doing")
    options = parser.parse_args(arguments)
    if options.repeats < 1 or options.megabytes < 0.1:
        parser.error("--repeats must be at least 1, --megabytes at least 0.1")
    try:
        world = WorldTokenizer()
        timed, compiler = trie or CompiledTrie(world.tokens), find_compiler().name
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    texts = make_texts(world, int(options.megabytes * 1e6))
    red = gate(world, timed, texts)
    if red:
        print("\n".join([*red, "the gate is red: nothing was timed"]), file=sys.stderr)
        return 1
    rows = []
    for name, documents in texts.items():
        cells = [str(date.today()), cpu_name(), compiler, commit(), name]
        cells += [*time_text(world, timed, documents, options.repeats), options.note]
        rows.append(f"| {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    if options.write:
        append_rows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
