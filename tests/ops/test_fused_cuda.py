"""Who runs a fused operator on a CUDA device: the choice, and the build, without one at hand."""

from __future__ import annotations

import ctypes
import shutil
import sys
from pathlib import Path

import pytest
import torch

from rwkv_spec.errors import KernelError
from rwkv_spec.ops.build import NoCompiler
from rwkv_spec.ops.fused import CHANNELS_OF_A_VECTOR, FusedOperator, num_pieces, rows_of_a_piece
from tests.kernels.cuda_cases import SOURCES
from tests.ops.fused_cases import OPERATORS

on_linux = pytest.mark.skipif(sys.platform == "win32", reason="the CUDA operators are built on Linux only")
with_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc on PATH")
DEVICE = torch.device("cuda", 0)


def library_of(name: str, backend: str, dtype: torch.dtype, tried: list[str]) -> ctypes.CDLL | None:
    """By an operator of its own, for which nothing was chosen yet. `tried` takes the devices a build is tried on."""

    def check(library: ctypes.CDLL, device: str = "cpu") -> None:
        tried.append(device)

    operator = FusedOperator(name, check)
    return operator.library(backend, DEVICE, rows=(), dtype=dtype, channels=CHANNELS_OF_A_VECTOR)


@pytest.fixture
def a_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What torch would say of one, and a cache that is empty."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CUDACXX", raising=False)


def test_every_fused_operator_has_a_cuda_source() -> None:
    assert all((SOURCES / f"{name}.cu").is_file() for name in (*OPERATORS, "softmax_loss"))


def test_what_has_no_cuda_source_is_run_by_the_reference() -> None:
    tried: list[str] = []
    for backend in ("auto", "cuda"):
        assert library_of("dropout", backend, torch.float32, tried) is None
    assert not tried


def test_another_backend_or_dtype_is_run_by_the_reference() -> None:
    tried: list[str] = []
    for backend, dtype in (("torch", torch.float32), ("cpu", torch.float32), ("auto", torch.float64)):
        assert library_of("relu2", backend, dtype, tried) is None
    assert not tried


@on_linux
def test_without_nvcc_auto_runs_the_reference_and_cuda_says_why(
    a_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda command: None)
    tried: list[str] = []
    assert library_of("relu2", "auto", torch.float32, tried) is None
    with pytest.raises(NoCompiler, match="no nvcc"):
        library_of("relu2", "cuda", torch.float32, tried)
    assert not tried


@on_linux
@with_nvcc
def test_with_nvcc_a_build_is_tried_on_the_device_once_for_all_dtypes(a_device: None) -> None:
    tried: list[str] = []

    def check(library: ctypes.CDLL, device: str = "cpu") -> None:
        tried.append(device)

    operator = FusedOperator("relu2", check)
    libraries = [
        operator.library(backend, DEVICE, rows=(), dtype=dtype)
        for backend in ("auto", "cuda")
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ]
    assert tried == ["cuda"]
    assert all(isinstance(library, ctypes.CDLL) and library.relu2_forward for library in libraries)


@on_linux
@with_nvcc
def test_a_build_that_computes_wrong_numbers_is_not_kept(a_device: None, tmp_path: Path) -> None:
    def check(library: ctypes.CDLL, device: str = "cpu") -> None:
        raise KernelError("wrong numbers")

    operator = FusedOperator("relu2", check)
    with pytest.raises(KernelError, match="wrong numbers"):
        operator.library("auto", DEVICE, rows=(), dtype=torch.float32)
    assert not list(tmp_path.rglob("*.so"))


def test_a_device_takes_shorter_pieces_than_a_processor() -> None:
    on_device, on_cpu = rows_of_a_piece(DEVICE), rows_of_a_piece(torch.device("cpu"))
    assert on_device < on_cpu
    assert [num_pieces(rows, on_device) for rows in (0, 1, on_device, on_device + 1)] == [0, 1, 1, 2]
