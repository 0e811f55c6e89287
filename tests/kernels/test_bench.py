"""kernels/bench.py: no timing of a red kernel; rows as BENCH.md has them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.ops.cases import OPERATORS, compiled, every_operator

SMALL = ["--shape", "1,20,1,16", "--dtype", "fp32", "--seconds", "0"]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    path = Path(__file__).parents[2] / "kernels" / "bench.py"
    spec = importlib.util.spec_from_file_location("kernels_bench", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "kernels_bench", module)
    spec.loader.exec_module(module)
    page = tmp_path / "BENCH.md"
    page.write_text(module.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(module, "PAGE", page)
    threads = torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)


@compiled
@every_operator
def test_a_red_kernel_is_not_timed(bench: ModuleType, capsys: pytest.CaptureFixture[str], operator: str) -> None:
    before = bench.PAGE.read_text(encoding="utf-8")

    def forgets_the_state(*xs: Tensor, starts_BT: Tensor) -> tuple[Tensor, Tensor]:
        return OPERATORS[operator](*xs[:-1], xs[-1] * 0, starts_BT=starts_BT)

    arguments = [*SMALL, "--write", "--operator", operator, "--operator", "dropout"]
    assert bench.main(arguments, operators={operator: forgets_the_state}) == 1
    captured = capsys.readouterr()
    assert f"{operator} fp32 N=16 T=33: y error ratio" in captured.err
    assert "the gate is red: nothing was timed" in captured.err
    assert captured.out == ""
    assert bench.PAGE.read_text(encoding="utf-8") == before


@compiled
def test_a_row_fits_the_table(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([*SMALL, "--write", "--note", "a test"]) == 0
    lines = bench.PAGE.read_text(encoding="utf-8").splitlines()
    header = next(line for line in lines if line.startswith("| date") and "| operator |" in line)
    rows = [line for line in lines if line.endswith("| a test |")]
    assert len(rows) == 10
    assert all(row.count("|") == header.count("|") for row in rows)
    assert capsys.readouterr().out.splitlines() == rows


@compiled
@pytest.mark.parametrize(("operator", "number"), [("wkv5", 3), ("wkv6", 3), ("wkv7", 3), ("dropout", 1)])
def test_one_operator_alone_is_timed(
    bench: ModuleType, capsys: pytest.CaptureFixture[str], operator: str, number: int
) -> None:
    assert bench.main([*SMALL, "--operator", operator]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [f"| {operator}" in row for row in rows] == [True] * number


def test_a_wrong_shape_is_refused(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--shape", "16,512"])
    assert "is not B,T,H,N such as 16,512,2,64" in capsys.readouterr().err


@pytest.mark.parametrize("threads", ["0", "-1", "two"])
def test_a_number_of_threads_that_cannot_be_is_refused(
    bench: ModuleType, capsys: pytest.CaptureFixture[str], threads: str
) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--threads", threads])
    assert f"'{threads}' is not a whole number of at least 1" in capsys.readouterr().err


@compiled
def test_a_head_size_that_is_not_compiled_is_named(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--shape", "1,4,1,24", "--dtype", "fp32"]) == 2
    assert "head size 24 is not compiled" in capsys.readouterr().err
