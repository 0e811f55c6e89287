"""Each script in examples/ runs as a person would start it, from a folder of their own, and shows what it should."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rwkv_spec

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run_example(name: str, cwd: Path, *words: str) -> str:
    """What the script prints. PYTHONPATH stands in for `pip install -e .`."""
    finished = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / f"{name}.py"), *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=600,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stderr == ""
    return finished.stdout


@pytest.mark.slow
def test_integers_from_an_array_are_learnt_far_below_the_uniform_loss(tmp_path: Path) -> None:
    text = run_example("integers", tmp_path, "my run")
    found = re.search(r"held-out loss ([\d.]+) nats a value; knowing nothing costs ln 1000 = ([\d.]+)", text)
    assert found is not None, text
    loss, uniform = map(float, found.groups())
    assert uniform == pytest.approx(math.log(1000), abs=1e-3)
    assert loss < 3.0
    continuation = re.search(r"after 500 the model goes on with ([\d ]+)\n", text)
    assert continuation is not None and len(continuation.group(1).split()) == 12
    assert rwkv_spec.inspect(tmp_path / "my run" / "out" / "rwkv-final.pth").vocab_size == 1001


@pytest.mark.slow
def test_a_custom_tokenizer_trains_and_generates(tmp_path: Path) -> None:
    text = run_example("custom_tokenizer", tmp_path)
    # Without an argument the run lies in runs/ of the folder that the script was started from.
    assert (tmp_path / "runs" / "custom_tokenizer" / "out" / "rwkv-final.pth").is_file()
    (line,) = re.findall(r"^the fox and the owl went to the river \. there \| (.+)$", text, re.MULTILINE)
    assert line.endswith("again .")


def test_every_example_has_a_test() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    assert EXAMPLES and all(f'run_example("{path.stem}"' in source for path in EXAMPLES)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_says_at_its_top_how_to_start_it(path: Path) -> None:
    assert f"python examples/{path.name} [WORK_DIR]" in path.read_text(encoding="utf-8").split('"""')[1]
