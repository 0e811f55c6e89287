"""The CUDA build: nvcc is found or its absence explained, and what it makes is a library that loads without a GPU."""

from __future__ import annotations

import ctypes
import shutil
import sys
from pathlib import Path

import pytest

from rwkv_spec.errors import KernelError
from rwkv_spec.ops import build_cuda
from rwkv_spec.ops.build import Compiler, NoCompiler, build_key, load_recipe
from rwkv_spec.ops.build_cuda import FLAGS, cuda_recipe, find_nvcc

with_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc on PATH")
on_linux = pytest.mark.skipif(sys.platform == "win32", reason="the CUDA operators are built on Linux only")
STUB = """#include "wkv7.cuh"
extern "C" int JOIN(size_of, HEAD_SIZE)() { return HEAD_SIZE; }
extern "C" int launch(void* stream) {
    nothing<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>();
    return static_cast<int>(cudaGetLastError());
}
"""
HEADER = """#define JOIN_(name, size) name##_##size
#define JOIN(name, size) JOIN_(name, size)
__global__ void nothing() {}
"""


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "wkv7.cu").write_text(STUB, encoding="utf-8")
    (tmp_path / "wkv7.cuh").write_text(HEADER, encoding="utf-8")
    monkeypatch.setattr(build_cuda, "source_folder", lambda device: tmp_path)
    return tmp_path


@with_nvcc
@on_linux
def test_a_library_is_built_for_one_architecture_and_loads_without_a_gpu(stub: Path, tmp_path: Path) -> None:
    recipe = cuda_recipe("wkv7", 64, "80", find_nvcc())
    checked: list[ctypes.CDLL] = []
    library, remark = load_recipe(recipe, tmp_path / "cache", checked.append)
    assert (library.size_of_64(), remark, len(checked)) == (64, "", 1)


@with_nvcc
@on_linux
def test_a_launch_that_no_device_takes_is_a_code_and_no_crash(stub: Path, tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a device here that would take it")
    library, _ = load_recipe(cuda_recipe("wkv7", 64, "80", find_nvcc()), tmp_path / "cache", lambda library: None)
    assert library.launch(None) != 0


@on_linux
def test_the_key_follows_headers_head_size_and_architecture(stub: Path) -> None:
    nvcc = Compiler(("nvcc",), "nvcc 13.0", "13.0")

    def key(head_size: int = 64, architecture: str = "80") -> str:
        return build_key(cuda_recipe("wkv7", head_size, architecture, nvcc))

    keys = {key(), key(128), key(64, "90")}
    (stub / "wkv7.cuh").write_text(HEADER + "// changed\n", encoding="utf-8")
    keys.add(key())
    assert len(keys) == 4
    assert any("CHUNK_LENGTH" in flag for flag in FLAGS)


@on_linux
def test_without_nvcc_the_error_says_where_it_was_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(shutil, "which", lambda command: None)
    with pytest.raises(NoCompiler, match=r"no nvcc .*CUDACXX, CUDA_HOME, CUDA_PATH, PATH.*choose kernels: torch"):
        find_nvcc()
    monkeypatch.setenv("CUDACXX", "no-such-nvcc")
    with pytest.raises(KernelError, match="CUDACXX=no-such-nvcc: there is no such compiler"):
        find_nvcc()


@with_nvcc
@on_linux
def test_cuda_home_comes_before_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDACXX", raising=False)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").symlink_to(str(shutil.which("nvcc")))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert find_nvcc().command == (str(tmp_path / "bin" / "nvcc"),)
