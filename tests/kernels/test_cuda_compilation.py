"""kernels/compile_cuda.py: the kernels compile without local memory, and it sees what does not."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from rwkv_spec.ops.build import with_headers
from rwkv_spec.ops.build_cuda import CHUNK_LENGTH
from tests.kernels.cuda_cases import SOURCES, included_by

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc on PATH")

PTXAS = """ptxas info    : Compiling entry function '_Z8backwardIfE' for 'sm_80'
ptxas info    : Function properties for _Z8backwardIfE
    {stack} bytes stack frame, {stores} bytes spill stores, 0 bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers, 520 bytes cmem[0]
"""


@pytest.fixture(scope="module")
def compile_cuda() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compile_cuda", SOURCES.parent / "compile_cuda.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("stack", "stores", "registers", "problem"),
    [
        (0, 0, 168, ""),
        (0, 0, 169, "169 registers, at most 168"),
        (8, 0, 100, "local memory (8 bytes of stack, 0 bytes spilled)"),
        (0, 4, 100, "local memory (0 bytes of stack, 4 bytes spilled)"),
    ],
)
def test_local_memory_and_too_many_registers_are_problems(
    compile_cuda: ModuleType, stack: int, stores: int, registers: int, problem: str
) -> None:
    text = PTXAS.format(stack=stack, stores=stores, registers=registers) * 6
    problems = compile_cuda.judge("wkv7", 64, 1, text)
    assert len(problems) == (6 if problem else 0)
    assert all(f"wkv7 backward, head size 64, sm_80: {problem}" in each for each in problems)


def test_a_kernel_that_ptxas_does_not_speak_of_is_a_problem(compile_cuda: ModuleType) -> None:
    text = PTXAS.format(stack=0, stores=0, registers=1) * 5
    assert compile_cuda.judge("wkv7", 64, 1, text) == ["wkv7.cu, head size 64: ptxas speaks of 5 kernels"]


def test_a_kernel_of_a_fused_operator_that_ptxas_does_not_speak_of_is_a_problem(compile_cuda: ModuleType) -> None:
    text = PTXAS.format(stack=0, stores=0, registers=1)
    assert compile_cuda.judge("norm_mix", 0, 1, text * 24) == []
    assert compile_cuda.judge("norm_mix", 0, 1, text * 6) == ["norm_mix.cu, head size 0: ptxas speaks of 6 kernels"]


def test_it_compiles_what_the_product_compiles(compile_cuda: ModuleType) -> None:
    text = (SOURCES.parent / "compile_cuda.py").read_text(encoding="utf-8")
    assert f'"-DCHUNK_LENGTH={CHUNK_LENGTH}"' in text
    assert compile_cuda.ARCHITECTURES == (80, 86, 89, 90, 100, 120)
    for source in SOURCES.glob("*.cu"):
        assert set(with_headers([source])) == included_by(source)


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in SOURCES.glob("*.cu")))
def test_a_kernel_compiles_without_problems(compile_cuda: ModuleType, name: str) -> None:
    size = 0 if 0 in compile_cuda.OTHER_REGISTERS.get(name, {}) else 64
    assert compile_cuda.compile_one(name, size, architectures=(80,)) == []


@needs_nvcc
@pytest.mark.slow
def test_spilled_registers_and_errors_are_found(compile_cuda: ModuleType, tmp_path: Path) -> None:
    for path in SOURCES.glob("*.cu*"):
        text = path.read_text(encoding="utf-8")
        # More blocks than there are registers for, and a name that is not there.
        text = text.replace("(BACKWARD_THREADS, BACKWARD_BLOCKS)", "(BACKWARD_THREADS, 4)")
        (tmp_path / path.name).write_text(text, encoding="utf-8")
    problems = compile_cuda.compile_one("wkv7", 64, tmp_path, (80,))
    assert len(problems) == 3
    assert all("local memory" in problem for problem in problems)
    (tmp_path / "wkv7.cu").write_text("int x = unknown;\n", encoding="utf-8")
    (problem,) = compile_cuda.compile_one("wkv7", 64, tmp_path, (80,))
    assert 'identifier "unknown" is undefined' in problem
