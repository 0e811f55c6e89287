"""Nothing is timed whose operators compute wrong numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from rwkv_spec.benchmark.gate import check_operators, worst_error
from rwkv_spec.cli import STATUS_USER, main
from rwkv_spec.model.shapes import TYPES
from rwkv_spec.ops.build import (
    FLAGS,
    Recipe,
    build_key,
    cache_folder,
    compile_into,
    find_compiler,
    machine_flags,
    sizes_of,
    source_folder,
    sources_of,
)
from rwkv_spec.ops.publish import publish
from rwkv_spec.ops.wkv import operator_of_this_machine
from tests.benchmark.workloads import tiny_workload
from tests.ops.cases import compiled
from tests.ops.test_mutants import HEAD_SIZE, MUTANTS7
from tests.tiny import tiny_spec

CPU = torch.device("cpu")


@compiled
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("type", TYPES)
def test_true_operators_pass(type: str, precision: str) -> None:
    check_operators(tiny_workload(type, precision=precision), CPU)


def test_plain_torch_is_off_by_its_roundings_alone() -> None:
    small = tiny_workload(backend="torch").small()
    assert 0 < worst_error(small, CPU, "fp32")[0] < 1e-5
    assert 1e-4 < worst_error(small, CPU, "bf16")[0] < 1e-1


@compiled
@pytest.mark.parametrize("mutant", ["decay of zero", "no delta term", "gradient lost between chunks"])
def test_a_wrong_operator_is_told_and_nothing_is_timed(
    mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    operator_of_this_machine("wkv7")
    cache = tmp_path / "cache" / "rwkv_spec" / "kernels"
    cache.mkdir(parents=True)
    for folder in cache_folder().glob("*-*"):
        if not folder.name.startswith("wkv7-"):
            (cache / folder.name).symlink_to(folder, target_is_directory=True)
    plant(cache, tmp_path / "sources", *MUTANTS7[mutant])
    # The processes that measure find the mutant in their cache, where it passed for the true operator.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = {"n_embd": 2 * HEAD_SIZE, "head_size": HEAD_SIZE}
    spec = tmp_path / "tiny.yaml"
    spec.write_text(yaml.safe_dump(tiny_spec(tmp_path, model=model)))
    assert main(["bench", str(spec), "--steps", "1", "kernels=cpu"]) == STATUS_USER
    said = capsys.readouterr()
    assert "compute wrong numbers" in said.err and "nothing was timed" in said.err and not said.out


def plant(cache: Path, folder: Path, old: str, new: str) -> None:
    """The operator with one text of its sources exchanged, in the place of the true one."""
    sources = sources_of("wkv7", source_folder())
    recipe = Recipe("wkv7", find_compiler(), (*FLAGS, *machine_flags(find_compiler())), sources, sizes_of("wkv7"))
    folder.mkdir()
    for path in sources:
        (folder / path.name).write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    wrong = replace(recipe, sources=tuple(folder / path.name for path in sources))
    publish(cache / f"wkv7-{build_key(recipe)}", recipe.file_name, lambda target: compile_into(target, wrong))
