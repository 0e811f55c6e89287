"""WKV-7 on tensor cores under the emulator: the results of wkv7.cu within each dtype's gate, in every thread order.

bfloat16 takes one tf32 product for each product, float32 and float16 three; so with bfloat16 the states too have its
gate. A real device adds up a product's eight terms a little differently.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rwkv_spec.ops.build_cuda import CHUNK_LENGTH
from tests.kernels.cuda_cases import (
    FORWARD,
    GATE,
    ORDERS,
    SHUFFLED,
    Case,
    build_kernel,
    call,
    emulated,
    expected,
    make_case,
    result_names,
    results,
)
from tests.ops.cases import error_ratio, worst

pytestmark = emulated
Build = Callable[[int], ctypes.CDLL]
HEAD_SIZES = (16, 32, 48, 64)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    @functools.cache
    def once(head_size: int) -> ctypes.CDLL:
        return build_kernel("wkv7_tensor", head_size, tmp_path_factory.mktemp("tensor"))

    return once


def check(case: Case, got: tuple[Tensor, ...]) -> None:
    for name, x, want in zip(result_names("wkv7"), got, expected(case), strict=False):
        wide = case.r.dtype != torch.bfloat16 and x.dtype == torch.float32
        assert torch.isfinite(x).all(), name
        assert error_ratio(x, want) < GATE[torch.float32 if wide else case.r.dtype], name
        if name == "dw_raw" and case.starts is not None:
            # The decay of a token that starts anew acts on nothing.
            assert not x[case.starts].any()


def check_in_every_order(library: ctypes.CDLL, case: Case) -> None:
    first = results(library, case, order=FORWARD)
    check(case, first)
    for order in ORDERS[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results(library, case, order=order), first, strict=True)), order


def check_all_dtypes(library: ctypes.CDLL, T: int, N: int) -> None:
    for dtype in GATE:
        case = make_case("wkv7", T, N, dtype, H=1)
        check_in_every_order(library, case)
        one_document = dataclasses.replace(case, starts=None)
        check(one_document, results(library, one_document, order=SHUFFLED))


@pytest.mark.parametrize("T", [1, 15, 16, 17, 40])
def test_every_result_matches_float64(build: Build, T: int) -> None:
    check_all_dtypes(build(64), T, 64)


@pytest.mark.parametrize("dtype", list(GATE), ids=["float32", "bfloat16", "float16"])
def test_every_result_matches_float64_over_257_tokens(build: Build, dtype: torch.dtype) -> None:
    check_in_every_order(build(64), make_case("wkv7", 257, 64, dtype, B=1, H=2))


@pytest.mark.slow
@pytest.mark.parametrize("N", HEAD_SIZES)
def test_every_head_size(build: Build, N: int) -> None:
    check_all_dtypes(build(N), 2 * CHUNK_LENGTH + 1, N)


def test_null_means_no_starts_and_zeros(build: Build) -> None:
    case = make_case("wkv7", 33, 64)
    for changed in (
        dataclasses.replace(case, state=None),
        dataclasses.replace(case, dy=None),
        dataclasses.replace(case, dstate_out=None),
    ):
        check(changed, results(build(64), changed))
    nothing = dataclasses.replace(case, starts=None, state=None, dy=None, dstate_out=None)
    assert all(not x.any() for x in results(build(64), nothing)[2:])
    without_dstate = results(build(64), case, need_dstate=False)
    assert all(torch.equal(x, y) for x, y in zip(without_dstate, results(build(64), case)[:-1], strict=True))


def test_what_is_not_to_be_saved_changes_nothing_and_sa_is_never_written(build: Build) -> None:
    case = make_case("wkv7", 2 * CHUNK_LENGTH + 1, 64)
    B, _, H, N = case.r.shape
    for chunk_states in (None, torch.empty(B, H, 2, N, N)):
        y, state = torch.empty_like(case.r), torch.empty(B, H, N, N)
        sa = torch.full_like(case.r, float("nan"))
        outputs = (*case.inputs, case.state, case.starts, y, state, chunk_states, sa)
        assert call(build(64), "wkv7_forward", case.r, outputs) == 0
        assert all(torch.equal(x, z) for x, z in zip((y, state), results(build(64), case), strict=False))
        assert sa.isnan().all()


def test_no_tokens_hand_the_state_on(build: Build) -> None:
    case = dataclasses.replace(make_case("wkv7", 1, 64), starts=None)
    empty = tuple(x[:, :0] for x in case.inputs)
    y, state, *_, dstate = results(build(64), dataclasses.replace(case, inputs=empty, dy=case.r[:, :0]))
    assert case.state is not None
    assert case.dstate_out is not None
    assert not y.numel()
    assert torch.equal(state, case.state)
    assert torch.equal(dstate, case.dstate_out)


# ---- kernels with a planted fault ----

BARRIER = "        __syncthreads();\n"
FAULTS = {
    "no decay": ("expf(half == 0 ? -sum : sum)", "expf(0.0f * sum)"),
    "tokens behind the last have inputs": ("tensor == nullptr || t >= tokens.rows", "tensor == nullptr"),
    "tokens behind the last have a decay": ("if (t < tokens.rows) sum", "sum"),
    "scores across a start": (" || !masks.together(late, early)", ""),
    "a token sees itself": ("late < early + strict", "late < early"),
    "a state across a start": ("    keep_from_before(y, lane, masks);\n", ""),
    "forgotten starts": ("(__ldg(starts + token + t) != 0)", "(__ldg(starts + token + t) > 1)"),
    "forgotten initial state": ("S.load_rows(matrix_of_block<N>(c.state_in), Lane())", "S.clear()"),
    "wrong chunk state": ("return chunk > 0 ? matrix_of_chunk", "return chunk < 0 ? matrix_of_chunk"),
    "first correction forgotten": ("        mma(x[0], x[2], x[1], x[3], a.rest, b.big[half], b.big[half + 2]);\n", ""),
    "second correction forgotten": (
        "        mma(x[0], x[2], x[1], x[3], a.big, b.rest[half], b.rest[half + 2]);\n",
        "",
    ),
    "an inverse of two factors": ("exponent <= 8", "exponent <= 2"),
    "forgotten final state's gradient for values": (
        "by_value.load_rows(matrix_of_block<N>(c.dstate_out), Lane())",
        "by_value.clear()",
    ),
    "forgotten final state's gradient for keys": (
        "by_key.load_columns(matrix_of_block<N>(c.dstate_out), Lane())",
        "by_key.clear()",
    ),
    "a value's gradient lost between chunks": ("by_value.scale_columns<true>(f.decays, Lane())", "by_value.clear()"),
    "a key's gradient lost between chunks": ("by_key.scale_rows<true>(f.decays, Lane())", "by_key.clear()"),
    "a gradient across a start": ("    keep_to_the_end(x.dv, lane, masks);\n", ""),
    "a decay's gradient without its token": ("E = dw_log + f.v[place];", "E = dw_log;"),
    "a slope of one": ("return e * y * y * -RATE;", "return e * y * 0.0f + 1.0f;"),
}
BARRIERS = {
    "forward, before reading": (f"        // The rows and squares of the chunk before are still read.\n{BARRIER}", ""),
    "forward, after reading": (
        f"{BARRIER}        make_scores<THREE<T>>(m, masks);\n        S.",
        "        make_scores<THREE<T>>(m, masks);\n        S.",
    ),
    "forward, after the scores": (f"{BARRIER}        finish_tokens", "        finish_tokens"),
    "backward, before reading": (f"        // The rows and squares of the chunk behind are still read.\n{BARRIER}", ""),
    "backward, after reading": (
        f"{BARRIER}        make_scores<THREE<T>>(m, masks);\n        by",
        "        make_scores<THREE<T>>(m, masks);\n        by",
    ),
    "backward, after the scores": (f"{BARRIER}        finish_values", "        finish_values"),
    "backward, after the values": (f"{BARRIER}        make_gradients", "        make_gradients"),
    "backward, after the scores' gradients": (f"{BARRIER}        finish_keys", "        finish_keys"),
    "backward, after the keys": ("        __syncwarp();\n        decay_gradients", "        decay_gradients"),
}


def check_that_it_fails(head_size: int, change: tuple[str, str], folder: Path) -> None:
    library = build_kernel("wkv7_tensor", head_size, folder, dict([change]))
    case = make_case("wkv7", 2 * CHUNK_LENGTH + 8, head_size)
    want = expected(case)
    assert max(worst(results(library, case, order=order), want) for order in ORDERS) > 5 * GATE[torch.float32]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_mutant_fails(fault: str, tmp_path: Path) -> None:
    check_that_it_fails(32, FAULTS[fault], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("fault", BARRIERS)
def test_a_missing_barrier_fails(fault: str, tmp_path: Path) -> None:
    check_that_it_fails(64, BARRIERS[fault], tmp_path)
