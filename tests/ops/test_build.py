"""The build: one for many processes, nothing half-written is loaded, and a way on where none can be made."""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from rwkv_spec.errors import KernelError
from rwkv_spec.lock import this_process
from rwkv_spec.ops import publish as publish_module
from rwkv_spec.ops.build import (
    FLAGS,
    HEAD_SIZES,
    NoCompiler,
    Recipe,
    build_key,
    build_operator,
    cache_folder,
    find_compiler,
    source_folder,
    sources_of,
)
from rwkv_spec.ops.publish import is_whole, publish
from rwkv_spec.ops.wkv import operator_of_this_machine, resolve_backend, wkv7
from tests.ops.cases import compiled

ROOT = Path(__file__).parents[2]
STUB = 'extern "C" const char* instructions() { return "stub"; }\n'


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """Sources that build in a moment."""
    folder = tmp_path / "a folder's sources"
    folder.mkdir()
    (folder / "wkv7.cpp").write_text('#include "wkv7.hpp"\n', encoding="utf-8")
    (folder / "wkv7.hpp").write_text("", encoding="utf-8")
    (folder / "instructions.cpp").write_text(STUB, encoding="utf-8")
    return folder


def no_check(library: ctypes.CDLL) -> None:
    assert library.instructions


def fake_compiler(path: Path, *lines: str) -> Path:
    """A shell script in a compiler's place."""
    path.write_text("\n".join(("#!/bin/sh", *lines, "")), encoding="utf-8")
    path.chmod(0o755)
    return path


def run_python(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


# ---- many processes ----


@compiled
@pytest.mark.slow
def test_six_processes_build_at_once_in_an_empty_cache(tmp_path: Path) -> None:
    script = (
        "import torch\n"
        "from rwkv_spec.ops.wkv import wkv7\n"
        "xs = [torch.ones(1, 2, 1, 16) for _ in range(6)]\n"
        "print(float(wkv7(*xs, backend='cpu')[0].sum()))\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path), "LOCALAPPDATA": str(tmp_path)}
    processes = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
        for _ in range(6)
    ]
    outputs = {process.communicate(timeout=300)[0] for process in processes}
    assert [process.returncode for process in processes] == [0] * 6
    assert len(outputs) == 1
    left = sorted(path.name for path in (tmp_path / "rwkv_spec" / "kernels").iterdir())
    assert len(left) == 1, left


def test_processes_that_publish_at_once_build_once_and_agree(tmp_path: Path) -> None:
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from rwkv_spec.ops.publish import publish\n"
        "def build(folder):\n"
        "    time.sleep(0.3)\n"
        "    (folder / 'library').write_bytes(b'whole')\n"
        "    with open(sys.argv[1] + '/builds', 'a') as file: file.write('x')\n"
        "folder = publish(Path(sys.argv[1]) / 'key', 'library', build)\n"
        "assert (folder / 'library').read_bytes() == b'whole'\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    processes = [subprocess.Popen(command, cwd=ROOT) for _ in range(6)]
    assert [process.wait(timeout=60) for process in processes] == [0] * 6
    assert (tmp_path / "builds").read_text(encoding="utf-8") == "x"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["builds", "key"]


# ---- locks ----


def write(folder: Path) -> None:
    (folder / "library").write_bytes(b"whole")


def dead_process() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


@pytest.mark.parametrize("kind", ["dead owner", "empty", "not ours"])
def test_a_lock_left_behind_does_not_stop_a_build(tmp_path: Path, kind: str) -> None:
    lock = tmp_path / "key.lock"
    dead = json.dumps(asdict(replace(this_process(), pid=dead_process())))
    lock.write_text({"dead owner": dead, "empty": "", "not ours": "[1, 2"}[kind], encoding="utf-8")
    started = time.monotonic()
    publish(tmp_path / "key", "library", write)
    assert time.monotonic() - started < 5
    assert not lock.exists()


def test_an_owner_elsewhere_is_waited_for_and_then_passed_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "key.lock"
    lock.write_text(json.dumps(asdict(replace(this_process(), host="another.example"))), encoding="utf-8")
    monkeypatch.setattr(publish_module, "LOCK_SECONDS", 0.5)
    started = time.monotonic()
    publish(tmp_path / "key", "library", write)
    assert 0.4 < time.monotonic() - started < 5
    assert lock.exists()


# ---- what lies in the cache ----


@compiled
@pytest.mark.parametrize("damage", ["cut off", "empty", "gone", "no checksum"])
def test_a_damaged_library_is_built_again_and_never_loaded(tmp_path: Path, stub: Path, damage: str) -> None:
    cache = tmp_path / "cache"
    compiler = find_compiler()
    build_operator("wkv7", compiler, stub, cache, no_check)
    (folder,) = cache.iterdir()
    (library,) = (path for path in folder.iterdir() if path.name != "sha256")
    whole = library.read_bytes()
    # A new file, not the old one cut short: that one is mapped into this process.
    library.unlink()
    if damage == "no checksum":
        library.write_bytes(whole)
        (folder / "sha256").unlink()
    elif damage != "gone":
        library.write_bytes(whole[: len(whole) // 2] if damage == "cut off" else b"")
    assert not is_whole(folder, library.name)
    assert build_operator("wkv7", compiler, stub, cache, no_check).instructions == "stub"
    assert library.read_bytes() == whole


@compiled
def test_a_build_that_fails_its_check_is_not_kept(tmp_path: Path, stub: Path) -> None:
    def refuse(library: ctypes.CDLL) -> None:
        raise KernelError("wrong numbers")

    with pytest.raises(KernelError, match="wrong numbers"):
        build_operator("wkv7", find_compiler(), stub, tmp_path / "cache", refuse)
    assert list((tmp_path / "cache").iterdir()) == []


@compiled
def test_a_cache_that_cannot_be_written_is_replaced_by_a_temporary_folder(tmp_path: Path, stub: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder", encoding="utf-8")
    kernels = build_operator("wkv7", find_compiler(), stub, blocked / "kernels", no_check)
    assert kernels.instructions == "stub"
    assert "cannot be written" in kernels.remark
    assert "each start builds anew" in kernels.remark


@compiled
@pytest.mark.skipif(os.name != "posix", reason="uses a shell script as a compiler")
def test_a_cache_without_room_is_replaced_by_a_temporary_folder(tmp_path: Path, stub: Path) -> None:
    real, cache = find_compiler(), tmp_path / "cache"
    script = fake_compiler(
        tmp_path / "full",
        f'case "$PWD" in {cache}/*) echo "cannot write: No space left on device" >&2; exit 1;; esac',
        f'exec {shlex.join(real.command)} "$@"',
    )
    kernels = build_operator("wkv7", replace(real, command=(str(script),)), stub, cache, no_check)
    assert kernels.instructions == "stub"
    assert f"{cache} cannot be written (No space left on device)" in kernels.remark
    assert list(cache.iterdir()) == []


@compiled
def test_a_compile_error_carries_the_compilers_message(tmp_path: Path, stub: Path) -> None:
    (stub / "wkv7.cpp").write_text("int main( { return nonsense; }\n", encoding="utf-8")
    with pytest.raises(KernelError, match=r"(?s)compiling wkv7.*choose kernels: torch.*wkv7\.cpp:1.*error"):
        build_operator("wkv7", find_compiler(), stub, tmp_path / "cache", no_check)
    assert list((tmp_path / "cache").iterdir()) == []


@compiled
def test_the_key_follows_sources_compiler_and_flags(stub: Path) -> None:
    def key(text: str = "", flags: tuple[str, ...] = FLAGS) -> str:
        compiler = find_compiler()
        if text:
            compiler = replace(compiler, version_text=text)
        return build_key(Recipe("wkv7", compiler, flags, sources_of("wkv7", stub), (64,)))

    keys = {key(), key("another version"), key(flags=(*FLAGS, "-g"))}
    (stub / "wkv7.cpp").write_text('#include "wkv7.hpp"\n// changed\n', encoding="utf-8")
    keys.add(key())
    (stub / "wkv7.hpp").write_text('#include "more.hpp"\n', encoding="utf-8")
    (stub / "more.hpp").write_text("", encoding="utf-8")
    keys.add(key())
    (stub / "more.hpp").write_text("// changed\n", encoding="utf-8")
    keys.add(key())
    assert len(keys) == 6
    # Another operator's sources are nothing to this one.
    (stub / "other.cpp").write_text("", encoding="utf-8")
    assert key() in keys


def test_the_cache_lies_where_the_platform_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    variable = "LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME"
    monkeypatch.setenv(variable, str(tmp_path))
    assert cache_folder() == tmp_path / "rwkv_spec" / "kernels"
    # The specification of XDG says that a relative path is to be ignored.
    monkeypatch.setenv(variable, "relative")
    assert cache_folder().is_absolute()


# ---- compilers ----


def test_without_a_compiler_auto_falls_back_and_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    operator_of_this_machine.cache_clear()
    try:
        backend = resolve_backend("auto", device="cpu", dtype=torch.float32, operator="wkv7", head_size=64)
        assert backend.name == "torch"
        assert "no C++ compiler on PATH" in backend.reason
        assert "\n" not in backend.reason
        with pytest.raises(KernelError, match=r"no C\+\+ compiler on PATH"):
            resolve_backend("cpu", device="cpu", dtype=torch.float32, operator="wkv7", head_size=64)
        xs = [torch.ones(1, 2, 1, 16) for _ in range(6)]
        assert torch.isfinite(wkv7(*xs)[0]).all()
    finally:
        operator_of_this_machine.cache_clear()


@compiled
def test_cxx_chooses_the_compiler_with_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = find_compiler()
    monkeypatch.setenv("CXX", f"{shlex.quote(plain.command[0])} -DANYTHING")
    assert find_compiler().command == (*plain.command, "-DANYTHING")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(KernelError, match="CXX=no-such-compiler: there is no such compiler"):
        find_compiler()
    monkeypatch.setenv("CXX", 'g++ "-O2')
    with pytest.raises(KernelError, match=r'CXX=g\+\+ "-O2: No closing quotation; correct or unset CXX'):
        find_compiler()


@pytest.mark.skipif(os.name != "posix", reason="uses a shell script as a compiler")
def test_a_chosen_compiler_that_does_not_work_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path / "dumb", "exit 3")))
    with pytest.raises(KernelError, match=r"dumb --version failed \(exit status 3\); .* torch\nit said nothing"):
        find_compiler()


@pytest.mark.skipif(os.name != "posix", reason="uses a shell script as a compiler")
def test_a_compiler_that_does_not_work_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_compiler(tmp_path / "c++", "echo install the developer tools >&2", "exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(NoCompiler):
        find_compiler()


def test_the_sources_are_found_and_every_size_is_a_multiple_of_16() -> None:
    assert (source_folder() / "dropout.cpp").is_file()
    assert tuple(range(16, 129, 16)) == HEAD_SIZES


def test_importing_builds_nothing(tmp_path: Path) -> None:
    script = "import rwkv_spec.ops.wkv, rwkv_spec.ops.dropout"
    result = run_python(script, XDG_CACHE_HOME=str(tmp_path), LOCALAPPDATA=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert list(tmp_path.iterdir()) == []
