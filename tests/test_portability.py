"""The package runs where POSIX ends: without fcntl, fork and compiler; from any folder; under any name of a folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import rwkv_spec
from rwkv_spec.train.engine import num_cores
from tests.tiny import tiny_spec

ROOT = Path(__file__).parents[1]

# What Windows lacks is taken away after torch was imported, which on this system needs some of it.
WITHOUT_POSIX = """
import sys, os, importlib, pkgutil, json
import torch, accelerate
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name in ("fcntl", "resource", "pwd", "grp", "termios"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules.pop(name, None)
for name in ("fork", "forkpty", "sysconf", "sched_getaffinity", "register_at_fork", "getuid", "geteuid"):
    if hasattr(os, name):
        delattr(os, name)
"""
IMPORT_ALL_AND_TRAIN = """
import rwkv_spec
for module in pkgutil.walk_packages(rwkv_spec.__path__, "rwkv_spec."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
run = rwkv_spec.run(json.loads(sys.argv[1]))
print("BACKEND", run.plan.backend, "STEPS", run.metrics[-1].step)
"""


def python(code: str, *words: str, cwd: Path, environment: dict[str, str] | None = None) -> str:
    """What a fresh interpreter prints when it runs `code`; the package comes from this checkout."""
    finished = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", **(environment or {})},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def two_steps(tmp_path: Path, **sections: object) -> dict[str, object]:
    spec = tiny_spec(tmp_path, **sections)
    spec["train"] = {**spec["train"], "steps": 2}  # type: ignore[dict-item]
    return spec


def test_without_posix_modules_and_compiler_it_trains_and_says_how_to_get_a_compiler(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    text = python(
        WITHOUT_POSIX + IMPORT_ALL_AND_TRAIN,
        json.dumps(two_steps(tmp_path)),
        cwd=empty,
        environment={"PATH": str(empty), "CXX": "", "XDG_CACHE_HOME": str(empty), "LOCALAPPDATA": str(empty)},
    )
    assert "BACKEND torch STEPS 2" in text
    # The plan is printed again once all data is read: the same line.
    (line,) = {line for line in text.splitlines() if line.startswith("kernels")}
    assert "torch, several times slower: no C++ compiler on PATH" in line
    assert "get one with" in line or "install g++" in line


def test_modules_that_windows_lacks_are_really_out_of_reach(tmp_path: Path) -> None:
    """The test above could not fail if its prelude took nothing away."""
    for module in ("fcntl", "resource", "termios"):
        with pytest.raises(AssertionError, match="ModuleNotFoundError"):
            python(f"{WITHOUT_POSIX}\nimport {module}", cwd=tmp_path)
    assert python(WITHOUT_POSIX + "\nprint(hasattr(os, 'fork'))", cwd=tmp_path).strip() == "False"


def test_kernels_cpu_without_a_compiler_is_a_problem_of_the_spec(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(two_steps(tmp_path, kernels="cpu")))
    finished = subprocess.run(
        [sys.executable, "-m", "rwkv_spec", str(path)],
        cwd=ROOT,
        env={**os.environ, "PATH": str(empty), "CXX": "", "XDG_CACHE_HOME": str(empty)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 2 and "Traceback" not in finished.stderr
    assert f"{path}:" in finished.stderr and "kernels" in finished.stderr and "compiler" in finished.stderr


def test_a_run_writes_into_its_work_dir_and_nowhere_else(tmp_path: Path) -> None:
    """From a folder that is not the checkout and that may be read only, with the spec by an absolute path."""
    inputs, foreign = tmp_path / "inputs", tmp_path / "foreign"
    inputs.mkdir(), foreign.mkdir()
    path = inputs / "spec.yaml"
    path.write_text(yaml.safe_dump(two_steps(inputs, work_dir=str(tmp_path / "work"))))
    foreign.chmod(0o555)
    before = sorted(inputs.iterdir())
    try:
        python(f"import sys; from rwkv_spec.cli import main; sys.exit(main([{str(path)!r}]))", cwd=foreign)
        assert list(foreign.iterdir()) == [] and sorted(inputs.iterdir()) == before
    finally:
        foreign.chmod(0o755)
    assert (tmp_path / "work" / "out" / "rwkv-final.pth").is_file()


def test_the_users_own_modules_are_not_shadowed_and_do_not_shadow(tmp_path: Path) -> None:
    """A folder with a model.py, data.py and train.py in it is a usual place to start from."""
    for name in ("model", "data", "train", "ops", "report", "spec", "errors", "worker", "tokenizer"):
        (tmp_path / f"{name}.py").write_text(f"MINE = '{name}'\n")
    code = (
        "import sys, json, rwkv_spec, model\nrwkv_spec.run(json.loads(sys.argv[1]))\n"
        "import data\nprint(model.MINE, data.MINE)"
    )
    assert python(code, json.dumps(two_steps(tmp_path)), cwd=tmp_path).endswith("model data\n")


def test_a_relative_work_dir_lies_in_the_current_folder_not_beside_the_spec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, here = tmp_path / "inputs", tmp_path / "here"
    inputs.mkdir(), here.mkdir()
    path = inputs / "spec.yaml"
    path.write_text(yaml.safe_dump(two_steps(inputs, work_dir="runs/mine", data={"train": "values.txt"})))
    monkeypatch.chdir(here)
    run = rwkv_spec.run(path)
    assert run.dir == here / "runs" / "mine" and run.checkpoint.is_file()
    assert sorted(child.name for child in inputs.iterdir()) == ["spec.yaml", "values.txt"]


# One name with everything a file may be called, and the same things one by one to find out which of them it was.
@pytest.mark.parametrize(
    "name",
    [
        "-größe  実行 🙂 100% #1, {x}: [y] a'b",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("with two  spaces", "größe-実行-🙂", "a'b\"c", "100% #1, {x}: [y]", "-dash")
        ),
    ],
)
def test_a_work_dir_of_any_name_trains_resumes_and_generates(tmp_path: Path, name: str) -> None:
    place = tmp_path / name
    place.mkdir()
    path = place / "spec.yaml"
    path.write_text(yaml.safe_dump(two_steps(place), allow_unicode=True), encoding="utf-8")
    run = rwkv_spec.run(path)
    assert run.dir == place / "run"
    again = rwkv_spec.run(place / "run" / "configs" / "resolved.yaml", overrides=["train.steps=3"])
    assert again.metrics[-1].step == 3 and again.dir == run.dir
    assert len(rwkv_spec.generate(place / "run", ["1 2"], max_new_tokens=2, temperature=0)) == 1


def test_a_work_dir_that_cannot_be_made_is_said_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(rwkv_spec.CheckpointError, match=r"cannot be used as work_dir.*name another"):
        rwkv_spec.run(two_steps(tmp_path, work_dir=str(tmp_path / "file" / "run")))


def test_a_work_dir_that_is_a_file_is_said_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(rwkv_spec.CheckpointError, match=r"cannot be used as work_dir.*name another"):
        rwkv_spec.run(two_steps(tmp_path, work_dir=str(tmp_path / "file")))
    assert (tmp_path / "file").read_text() == "in the way"


def test_one_openmp_thread_in_the_environment_does_not_idle_the_other_cores(tmp_path: Path) -> None:
    """accelerate launch sets OMP_NUM_THREADS=1 for what it starts; the run takes the machine's cores all the same."""
    code = (
        "import sys, json, torch, rwkv_spec\nassert torch.get_num_threads() == 1\n"
        "rwkv_spec.run(json.loads(sys.argv[1]))\nprint('THREADS', torch.get_num_threads())"
    )
    text = python(code, json.dumps(two_steps(tmp_path)), cwd=tmp_path, environment={"OMP_NUM_THREADS": "1"})
    cores = num_cores()
    assert f"THREADS {cores}\n" in text
    assert f"cpu, {cores} thread" in next(line for line in text.splitlines() if line.startswith("machine"))


def test_files_are_utf8_whatever_the_locale_says(tmp_path: Path) -> None:
    """LC_ALL=C with Python's UTF-8 mode off is what a bare container has."""
    (tmp_path / "text.txt").write_text("größe 実行\n" * 8, encoding="utf-8")
    spec = two_steps(tmp_path, tokenizer=None, eval=None, data={"train": str(tmp_path / "text.txt")})
    spec["tokenizer"] = {"type": "bytes"}
    spec["name"] = "größe"
    spec["data"].pop("eval")  # type: ignore[attr-defined]
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(spec, allow_unicode=True), encoding="utf-8")
    python(
        f"import sys; from rwkv_spec.cli import main; sys.exit(main([{str(path)!r}]))",
        cwd=tmp_path,
        environment={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"},
    )
    resolved = (tmp_path / "run" / "configs" / "resolved.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(resolved)["name"] == "größe"
