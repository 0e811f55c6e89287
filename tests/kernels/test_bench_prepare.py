"""kernels/bench_prepare.py: no timing where stores differ; rows land in their own table of BENCH.md."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from rwkv_spec.data import compiled_lines
from rwkv_spec.data.store import Store
from rwkv_spec.tokenizer.byte import BytesTokenizer
from tests.tokenizer.vocabularies import compiled

FOLDER = Path(__file__).parents[2] / "kernels"
SMALL = ["--megabytes", "0.2", "--repeats", "1"]
INPUTS = ["integers, jsonl", "integers, npy", "text, jsonl", "text, txt"]


@pytest.fixture
def bench_prepare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    # As for a script: its own folder comes first.
    monkeypatch.syspath_prepend(FOLDER)
    spec = importlib.util.spec_from_file_location("kernels_bench_prepare", FOLDER / "bench_prepare.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks its module up.
    monkeypatch.setitem(sys.modules, "kernels_bench_prepare", module)
    spec.loader.exec_module(module)
    # A helper of such a common name stays with this test.
    sys.modules.pop("bench", None)
    page = tmp_path / "BENCH.md"
    page.write_bytes(module.PAGE.read_bytes())
    monkeypatch.setattr(module, "PAGE", page)
    monkeypatch.setattr(module, "GATE_BYTES", 50_000)
    monkeypatch.setattr(module, "NUM_BATCHES", 5)
    # So little data is not worth a compiler otherwise.
    monkeypatch.setattr(compiled_lines, "SMALL_BYTES", 0)
    return module


@compiled
def test_other_stores_are_not_timed(bench_prepare: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def wrong_for_text(given: object, folder: Path, processes: int) -> Store:
        if given.name == "text, txt":  # type: ignore[attr-defined]
            given = replace(given, tokenizer=BytesTokenizer())  # type: ignore[type-var]
        found: Store = bench_prepare.store_of(given, folder, processes)
        return found

    before = bench_prepare.PAGE.read_bytes()
    assert bench_prepare.main([*SMALL, "--write"], make_store=wrong_for_text) == 1
    printed = capsys.readouterr()
    assert printed.err.splitlines()[0] == "text, txt: another store than by plain Python"
    assert "nothing was timed" in printed.err and printed.out == "" and bench_prepare.PAGE.read_bytes() == before


@compiled
def test_rows_go_under_the_last_row_of_their_own_table(
    bench_prepare: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = []
    for note in ("first", "second"):
        assert bench_prepare.main([*SMALL, "--write", "--note", note]) == 0
        rows += capsys.readouterr().out.splitlines()
    assert [row.split(" | ")[5] for row in rows] == INPUTS * 2
    assert all(row.count("|") == bench_prepare.TABLE.count("|") for row in rows)
    after = bench_prepare.PAGE.read_text(encoding="utf-8").splitlines()
    at = after.index(rows[0])
    assert after[at : at + 8] == rows and after.count("## Preparation") == 1
    assert bench_prepare.TABLE in after[:at] and after[at + 8] == ""


@compiled
def test_the_section_is_made_where_it_lacks_and_nothing_else_changes(bench_prepare: ModuleType) -> None:
    page, section = bench_prepare.PAGE, bench_prepare.SECTION
    others = "# Costs\n\nWords.\n\n## One\n\n| a |\n|---|\n| 1 |\n\n## Operators\n\n| b |\n|---|\n| 2 |\n"
    page.write_text(others, encoding="utf-8")
    bench_prepare.append_rows(["| row |"])
    text = page.read_text(encoding="utf-8")
    assert text == others.replace("## One", f"{section}| row |\n\n## One")
    # The last section stays the last: rows of operators are put at the end of the page.
    bench_prepare.append_rows(["| next |"])
    assert page.read_text(encoding="utf-8") == text.replace("| row |\n", "| row |\n| next |\n")


def test_inputs_are_the_same_at_every_call_and_of_the_size_asked_for(bench_prepare: ModuleType, tmp_path: Path) -> None:
    one, other = (bench_prepare.make_inputs(tmp_path / name, 100_000) for name in ("a", "b"))
    assert [given.name for given in one] == INPUTS
    for given, again in zip(one, other, strict=True):
        assert given.path.read_bytes() == again.path.read_bytes()
        assert 95_000 < given.path.stat().st_size < 110_000
    assert one[2].tokenizer.vocab_size == bench_prepare.NUM_ENTRIES + 1
