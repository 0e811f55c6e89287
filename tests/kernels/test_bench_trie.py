"""kernels/bench_trie.py: no timing of a red trie; rows land in their own table of BENCH.md."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from rwkv_spec.tokenizer.trie import Match, Trie
from tests.tokenizer.vocabularies import compiled, world, world_file

FOLDER = Path(__file__).parents[2] / "kernels"
SMALL = ["--megabytes", "0.2", "--repeats", "1"]


@pytest.fixture
def bench_trie(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    world_file()
    # As for a script: its own folder comes first.
    monkeypatch.syspath_prepend(FOLDER)
    spec = importlib.util.spec_from_file_location("kernels_bench_trie", FOLDER / "bench_trie.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # A helper of such a common name stays with this test.
    sys.modules.pop("bench", None)
    page = tmp_path / "BENCH.md"
    page.write_bytes(module.PAGE.read_bytes())
    monkeypatch.setattr(module, "PAGE", page)
    return module


class Shortest:
    """Single bytes only: correct text, other ids."""

    def match(self, documents: Sequence[bytes]) -> Match:
        return Trie({byte + 1: bytes([byte]) for byte in range(256)}).match(documents)


def test_a_trie_with_other_ids_is_not_timed(bench_trie: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    before = bench_trie.PAGE.read_bytes()
    assert bench_trie.main([*SMALL, "--write"], trie=Shortest()) == 1
    printed = capsys.readouterr()
    assert "trie, Chinese: other ids than the plain form" in printed.err and "nothing was timed" in printed.err
    assert printed.out == "" and bench_trie.PAGE.read_bytes() == before


@compiled
def test_rows_go_under_the_last_row_of_their_own_table(
    bench_trie: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    before = bench_trie.PAGE.read_text(encoding="utf-8").splitlines()
    assert bench_trie.main([*SMALL, "--write", "--note", "a test"]) == 0
    rows = capsys.readouterr().out.splitlines()
    after = bench_trie.PAGE.read_text(encoding="utf-8").splitlines()
    assert len(rows) == 5 and all(row.count("|") == bench_trie.TABLE.count("|") for row in rows)
    at = after.index(rows[0])
    assert after[:at] + after[at + 5 :] == before
    assert before[at - 1].startswith("|") and not before[at].startswith("|")
    assert bench_trie.TABLE in before[:at] and "| a test |" in rows[0]


def test_texts_are_of_the_size_asked_for_and_of_every_kind(bench_trie: ModuleType) -> None:
    texts = bench_trie.make_texts(world(), 1_000_000)
    assert list(texts) == ["all mixed", "English and code", "Chinese", "Russian", "digits"]
    sizes = {name: sum(len(text.encode()) for text in documents) for name, documents in texts.items()}
    assert 0.8e6 < sizes["all mixed"] < 1.3e6 and sizes["all mixed"] == sum(sizes.values()) - sizes["all mixed"]
