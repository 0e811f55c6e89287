"""kernels/bench_fused.py: no timing of a red operator; each row beside that of plain torch, as BENCH.md has them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.ops.cases import compiled

FOLDER = Path(__file__).parents[2] / "kernels"
SMALL = ["--shape", "1,20,1,16", "--dtype", "fp32", "--seconds", "0"]
NAMES = ("norm_mix", "relu2", "gated_norm", "wkv7_prepare", "token_mix", "sigmoid_gate")


@pytest.fixture
def bench_fused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    # As for a script: its own folder comes first.
    monkeypatch.syspath_prepend(FOLDER)
    spec = importlib.util.spec_from_file_location("kernels_bench_fused", FOLDER / "bench_fused.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "kernels_bench_fused", module)
    spec.loader.exec_module(module)
    # A helper of such a common name stays with this test.
    bench = sys.modules.pop("bench")
    page = tmp_path / "BENCH.md"
    page.write_text(bench.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(bench, "PAGE", page)
    module.PAGE = page
    threads = torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)


@compiled
@pytest.mark.parametrize("operator", NAMES)
@pytest.mark.parametrize("wrong", [1.001, float("nan")])
def test_a_red_operator_is_not_timed(
    bench_fused: ModuleType, capsys: pytest.CaptureFixture[str], operator: str, wrong: float
) -> None:
    before = bench_fused.PAGE.read_text(encoding="utf-8")

    def made(make: object) -> object:
        call = bench_fused.FUSED[operator](make)

        def run(x: dict[str, Tensor], dtype: torch.dtype, backend: str) -> tuple[Tensor, ...]:
            *others, last = call.run(x, dtype, backend)
            return *others, last * (1.0 if backend == "torch" else wrong)

        return replace(call, run=run)

    arguments = [*SMALL, "--write", "--operator", operator]
    assert bench_fused.main(arguments, operators={operator: made}) == 1
    captured = capsys.readouterr()
    assert f"{operator} fp32 N=16 T=33: output" in captured.err
    assert "the gate is red: nothing was timed" in captured.err
    assert captured.out == ""
    assert bench_fused.PAGE.read_text(encoding="utf-8") == before


@compiled
def test_rows_fit_the_table_and_stand_beside_those_of_plain_torch(
    bench_fused: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_fused.main([*SMALL, "--write", "--note", "a test"]) == 0
    lines = bench_fused.PAGE.read_text(encoding="utf-8").splitlines()
    header = next(line for line in lines if line.startswith("| date") and "| operator |" in line)
    rows = [line for line in lines if line.endswith("| a test |")]
    column = header.split("|").index(" operator ")
    wanted = [
        f" {title} {direction} "
        for name in NAMES
        for title in (name, f"reference of {name}")
        for direction in ("forward", "backward")
    ]
    assert [row.split("|")[column] for row in rows] == wanted
    assert all(row.count("|") == header.count("|") for row in rows)
    assert capsys.readouterr().out.splitlines() == rows


@compiled
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_is_timed_as_compiled_is_compiled(bench_fused: ModuleType, dtype: str) -> None:
    for name in NAMES:
        call = bench_fused.FUSED[name](bench_fused.Maker((1, 20, 2, 16), bench_fused.DTYPES[dtype]))
        leaves = bench_fused.differentiable(call.inputs)
        for backend, is_compiled in (("cpu", True), ("torch", False)):
            outputs = call.run(leaves, bench_fused.DTYPES[dtype], backend)
            nodes = {type(x.grad_fn).__name__ for x in outputs}
            assert any(node.startswith("_") for node in nodes) == is_compiled, (name, nodes)


@compiled
def test_a_head_size_that_no_vector_fills_is_named(bench_fused: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_fused.main(["--shape", "1,4,1,24", "--dtype", "fp32"]) == 2
    assert "head size 24 is no multiple of 16" in capsys.readouterr().err
