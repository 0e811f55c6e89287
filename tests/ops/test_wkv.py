"""wkv7: every result of the compiled kernel and of the fallback against float64; mutants of the kernel must fail."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rwkv_spec.errors import KernelError
from rwkv_spec.ops import wkv
from rwkv_spec.ops.build import CHUNK_LENGTH, FLAGS, HEAD_SIZES, find_compiler, machine_flags, source_folder
from rwkv_spec.ops.recurrence import RECURRENCES
from rwkv_spec.ops.reference import wkv7_torch
from tests.ops.cases import (
    GATE,
    RESULTS,
    Case,
    compiled,
    error_ratio,
    expected,
    make_case,
    through_autograd,
    through_library,
    worst,
)


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return wkv.operator_of_this_machine("wkv7").library


# ---- rule 9: output, final state and every gradient ----


@compiled
@pytest.mark.parametrize("starts", [False, True], ids=["one document", "starts"])
@pytest.mark.parametrize("dtype", list(GATE), ids=["float32", "bfloat16"])
@pytest.mark.parametrize("T", [1, 15, 16, 17, CHUNK_LENGTH, CHUNK_LENGTH + 1])
@pytest.mark.parametrize("N", HEAD_SIZES)
def test_every_result_matches_float64(library: ctypes.CDLL, N: int, T: int, dtype: torch.dtype, starts: bool) -> None:
    case = make_case(T, N, dtype, starts=starts)
    want = expected(case)
    for name, got, reference in zip(RESULTS, through_library(library, case), want, strict=True):
        assert error_ratio(got, reference) < GATE[dtype], name
        assert torch.isfinite(got).all(), name


@compiled
@pytest.mark.parametrize("dtype", list(GATE), ids=["float32", "bfloat16"])
@pytest.mark.parametrize("N", [16, 32, 64, 128])
def test_every_result_matches_float64_over_257_tokens(library: ctypes.CDLL, N: int, dtype: torch.dtype) -> None:
    for starts in (False, True):
        case = make_case(257, N, dtype, starts=starts)
        want = expected(case)
        for name, got, reference in zip(RESULTS, through_library(library, case), want, strict=True):
            assert error_ratio(got, reference) < GATE[dtype], (name, starts)


@compiled
def test_autograd_gives_what_the_kernel_gives(library: ctypes.CDLL) -> None:
    case = make_case(33, 64, torch.float32)
    for name, got, want in zip(RESULTS, through_autograd(case, "cpu"), through_library(library, case), strict=True):
        assert torch.equal(got, want), name


@pytest.mark.parametrize("T", [1, 17, 40])
def test_the_fallback_is_the_reference(T: int) -> None:
    for starts in (False, True):
        case = make_case(T, 16, torch.float32, starts=starts)
        double = Case(tuple(x.double() for x in case.inputs), case.starts, case.dy.double(), case.dstate_out.double())
        assert worst(through_autograd(double, "torch"), expected(case)) < 1e-12
        assert worst(through_autograd(case, "torch"), expected(case)) < GATE[torch.float32]


def test_the_fallback_in_bfloat16_passes_the_gate() -> None:
    case = make_case(40, 16, torch.bfloat16)
    assert worst(through_autograd(case, "torch"), expected(case)) < GATE[torch.bfloat16]


def test_the_fallback_keeps_a_state_a_chunk_not_a_state_a_token() -> None:
    case = make_case(256, 64, torch.float32, B=1, H=1)
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    leaves = [x.clone().requires_grad_() for x in case.inputs]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        wkv7_torch(*leaves)
    inputs = sum(x.nbytes for x in leaves)
    states = 17 * 64 * 64 * 4
    assert sum(kept.values()) <= inputs + 2 * states


# ---- mutants ----

MUTANTS = {
    "decay of zero": ("store(rows + n, decay);", "store(rows + n, V{});"),
    "no delta term": ("s[q] += sa[q] * b_j;", ""),
    "no delta term in the backward": (" + load(in + N + q * W) * dsa_i;", ";"),
    "forgotten initial state": ("transpose<N>(m.flipped, m.state);", "std::memset(m.state, 0, sizeof m.state);"),
    "gradient lost between chunks": (
        "look_ahead<N>(c, m, item, n, at, rows);",
        "look_ahead<N>(c, m, item, n, at, rows);\n        std::memset(m.G, 0, sizeof m.G);",
    ),
    "forgotten chunk state": ("if (n > 0) std::memcpy(m.start,", "if (n < 0) std::memcpy(m.start,"),
    "forgotten final state's gradient": ("if (c.dstate_out != nullptr)", "if (c.dstate_out == nullptr)"),
    "forgotten starts": ("starts != nullptr && starts[t] != 0", "starts != nullptr && starts[t] > 1"),
    "gradient across a start": ("clear ? V{} : decay * before", "decay * before"),
    "sa of the chunk before": ("std::memcpy(m.sa, m.sa + rows * N, N * sizeof(float));", ""),
}


def build_mutant(folder: Path, old: str, new: str) -> ctypes.CDLL:
    places = 0
    for path in source_folder().glob("*.[ch]pp"):
        text = path.read_text(encoding="utf-8")
        places += text.count(old)
        (folder / path.name).write_text(text.replace(old, new), encoding="utf-8")
    assert places == 1, "the mutant's place is gone from the sources"
    flags = (*FLAGS, *machine_flags(), "-w", "-DHEAD_SIZE=16", "-shared")
    command = [*find_compiler().command, *flags, str(folder / "wkv7.cpp"), "-o", str(folder / "mutant.so")]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(folder / "mutant.so"))


@compiled
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails(name: str, tmp_path: Path) -> None:
    mutant = build_mutant(tmp_path, *MUTANTS[name])
    for dtype, gate in GATE.items():
        case = make_case(CHUNK_LENGTH + 8, 16, dtype)
        assert worst(through_library(mutant, case), expected(case)) > 5 * gate


@compiled
def test_the_check_of_a_fresh_build_refuses_a_mutant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = build_mutant(tmp_path, *MUTANTS["forgotten chunk state"])
    monkeypatch.setattr(wkv, "HEAD_SIZES", (16,))
    with pytest.raises(KernelError, match="wrong numbers"):
        wkv.check_library(RECURRENCES["wkv7"], mutant)
