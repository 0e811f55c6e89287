"""The wheel and the source archive are complete: installed anywhere, the package trains with compiled kernels."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUNTIME = {"accelerate", "torch", "numpy", "pyyaml", "jsonschema", "safetensors", "ninja"}


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def distribution_of(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found.group(0)).lower()


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command with an environment in which nothing leads back to this checkout."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=inherited | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout[-8000:]
    return result


def test_runtime_dependencies_are_the_promised_ones() -> None:
    metadata = project()["project"]
    assert isinstance(metadata, dict)
    assert {distribution_of(requirement) for requirement in metadata["dependencies"]} == RUNTIME
    assert metadata["optional-dependencies"].keys() == {"test", "dev", "tensorboard", "wandb", "trackio"}
    assert metadata["scripts"] == {"rwkv-spec": "rwkv_spec.cli:main"}


def test_every_direct_dependency_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line.strip() and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", pin) for pin in pins)
    pinned = [distribution_of(pin) for pin in pins]
    assert len(set(pinned)) == len(pinned)
    assert "torch==2.13.0" in pins
    metadata = project()["project"]
    assert isinstance(metadata, dict)
    direct = [
        *metadata["dependencies"],
        *(one for extra in metadata["optional-dependencies"].values() for one in extra),
    ]
    assert {distribution_of(one) for one in direct} - {"rwkv-spec"} <= set(pinned)


def test_the_version_is_said_once() -> None:
    import rwkv_spec

    metadata = project()["project"]
    assert isinstance(metadata, dict)
    assert metadata["version"] == rwkv_spec.__version__
    assert f"## {rwkv_spec.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_license_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive and the wheel made from that archive, not from the checkout."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    return out


def native_sources() -> set[str]:
    folders = [ROOT / "kernels" / device for device in ("cpu", "cuda")]
    return {path.relative_to(ROOT / "kernels").as_posix() for folder in folders for path in folder.iterdir()}


@pytest.mark.slow
def test_the_wheel_carries_kernels_and_schema_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "rwkv_spec").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    kernels = {f"rwkv_spec/_kernels/{source}" for source in native_sources()}
    assert "rwkv_spec/spec/schema.json" in package and kernels
    assert {name for name in names if not name.startswith("rwkv_spec-")} == package | kernels
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "py3-none-any" in wheel.name


@pytest.mark.slow
def test_the_source_archive_is_the_whole_checkout(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.split("/", 1)[1] for name in tar.getnames() if "/" in name}
    assert {"README.md", "LICENSE", "constraints.txt", "pyproject.toml", "CHANGELOG.md", "specs/angles.yaml"} <= names
    assert {f"kernels/{source}" for source in native_sources()} <= names
    assert "tests/test_packaging.py" in names
    assert not [name for name in names if name.startswith(("runs/", ".git/", "dist/")) or "__pycache__" in name]


SPEC = """\
version: 1
data: {train: numbers.jsonl, eval: {documents: 1}}
tokenizer: {type: integer, max_value: 9}
model: {type: x070, n_layer: 1, n_embd: 32, head_size: 16}
train: {ctx_len: 16, batch_size: 2, steps: 3}
kernels: cpu
"""


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="needs a C++ compiler")
def test_an_installed_wheel_trains_with_compiled_kernels(built: Path, tmp_path: Path) -> None:
    home, folder = tmp_path / "venv", tmp_path / "empty"
    folder.mkdir()
    venv.create(home, with_pip=True)
    scripts = home / ("Scripts" if os.name == "nt" else "bin")
    python = scripts / ("python.exe" if os.name == "nt" else "python")
    (wheel,) = built.glob("*.whl")
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", wheel, cwd=folder)
    # The dependencies come from this environment; of a path file found there nothing is followed, so the checkout, if
    # it is installed as editable, stays out of reach.
    site = Path(run(python, "-c", "import site; print(site.getsitepackages()[-1])", cwd=folder).stdout.strip())
    places = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "dependencies.pth").write_text("\n".join(sorted(places)) + "\n", encoding="utf-8")
    origin = run(python, "-c", "import rwkv_spec; print(rwkv_spec.__file__)", cwd=folder).stdout.strip()
    assert Path(origin).is_relative_to(home)

    rows = [json.dumps({"text": [(start + step) % 10 for step in range(40)]}) for start in range(6)]
    (folder / "numbers.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    (folder / "tiny.yaml").write_text(SPEC, encoding="utf-8")
    cache = tmp_path / "cache"
    output = run(
        scripts / "rwkv-spec",
        "tiny.yaml",
        cwd=folder,
        HOME=str(tmp_path),
        XDG_CACHE_HOME=str(cache),
        LOCALAPPDATA=str(cache),
        ACCELERATE_USE_CPU="true",
    ).stdout
    assert (folder / "runs" / "tiny" / "out" / "rwkv-final.pth").is_file(), output
    assert json.loads((folder / "runs" / "tiny" / "run.json").read_text(encoding="utf-8"))["status"] == "done"
    # `kernels: cpu` admits no other backend; and the library was compiled here and now.
    assert any(path.suffix in (".so", ".dylib", ".dll") for path in cache.rglob("*")), output
