"""Starting is quick because little is imported: what may be loaded, and what may not, held without a clock."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rwkv_spec.ops import build
from tests.tiny import tiny_spec

HEAVY = {"torch", "accelerate", "safetensors", "transformers", "deepspeed", "scipy", "pandas", "rwkv", "ninja"}


def loaded(*words: str) -> set[str]:
    """The modules that a fresh process has loaded when it is done with a command."""
    code = (
        "import sys; before = set(sys.modules); from rwkv_spec.cli import main; status = main(sys.argv[1:]); "
        "print(*sorted(set(sys.modules) - before), file=sys.stderr); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


@pytest.mark.parametrize("kernels", ["auto", "cpu"])
def test_checking_a_spec_loads_no_torch_and_nothing_that_trains(kernels: str, tmp_path: Path) -> None:
    spec = tmp_path / "tiny.yaml"
    spec.write_text(yaml.safe_dump(tiny_spec(tmp_path, kernels=kernels)))
    modules = loaded("check", str(spec))
    assert "jsonschema" in modules and not HEAVY & modules
    not_needed = ("rwkv_spec.preparing", "rwkv_spec.planning", "rwkv_spec.train", "rwkv_spec.benchmark")
    assert not [name for name in modules if name.startswith(not_needed)]
    assert "rwkv_spec.spec.plan" not in modules


@pytest.mark.parametrize("words", [["--help"], ["schema"], ["new"]])
def test_words_that_open_no_spec_load_no_torch(words: list[str]) -> None:
    assert not HEAVY & loaded(*words)


def test_a_process_asks_the_compiler_once_however_many_operators_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.name != "posix":
        pytest.skip("the counting compiler is a shell script")
    count = tmp_path / "count"
    script = tmp_path / "counting-c++"
    script.write_text(f'#!/bin/sh\necho asked >> "{count}"\necho "g++ 1.2.3"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    compilers = [build.find_compiler() for _ in range(12)]
    assert len(set(compilers)) == 1 and count.read_text().count("asked") == 1
