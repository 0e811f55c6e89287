"""The CUDA kernels' own source, run by the emulator: every result against float64, in every order of threads."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rwkv_spec.ops.build_cuda import CHUNK_LENGTH, HEAD_SIZES
from rwkv_spec.ops.recurrence import RECURRENCES
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
from tests.ops.cases import error_ratio

pytestmark = emulated
Build = Callable[[str, int], ctypes.CDLL]
every_operator = pytest.mark.parametrize("name", list(RECURRENCES))


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    @functools.cache
    def once(name: str, head_size: int) -> ctypes.CDLL:
        return build_kernel(name, head_size, tmp_path_factory.mktemp("cuda"))

    return once


def check(case: Case, got: tuple[Tensor, ...]) -> None:
    for name, x, want in zip(result_names(case.name), got, expected(case), strict=False):
        assert torch.isfinite(x).all(), name
        assert error_ratio(x, want) < GATE[case.r.dtype if x.dtype == case.r.dtype else torch.float32], name
        if name == "dw_raw" and x.dim() == 4 and case.starts is not None:
            # The decay of a token that starts anew acts on nothing.
            assert not x[case.starts].any()


def check_in_every_order(library: ctypes.CDLL, case: Case) -> None:
    """Right, and the same to the last bit whichever thread runs first."""
    first = results(library, case, order=FORWARD)
    check(case, first)
    for order in ORDERS[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results(library, case, order=order), first, strict=True)), order


def check_all_dtypes(library: ctypes.CDLL, name: str, T: int, N: int) -> None:
    case = make_case(name, T, N, H=1)
    check_in_every_order(library, case)
    one_document = dataclasses.replace(case, starts=None)
    check(one_document, results(library, one_document))
    for dtype in (torch.bfloat16, torch.float16):
        case = make_case(name, T, N, dtype, H=1)
        check(case, results(library, case, order=SHUFFLED))


@every_operator
@pytest.mark.parametrize("T", [1, 15, 16, 17])
def test_every_result_matches_float64(build: Build, name: str, T: int) -> None:
    check_all_dtypes(build(name, 64), name, T, 64)


@every_operator
def test_every_result_matches_float64_over_257_tokens(build: Build, name: str) -> None:
    check_in_every_order(build(name, 64), make_case(name, 257, 64, B=1, H=1))


@every_operator
def test_every_result_of_a_wide_head_matches_float64(build: Build, name: str) -> None:
    check_all_dtypes(build(name, 128), name, 17, 128)


@pytest.mark.slow
@every_operator
@pytest.mark.parametrize("dtype", list(GATE), ids=["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("N", [64, 128])
def test_every_dtype_over_257_tokens(build: Build, name: str, N: int, dtype: torch.dtype) -> None:
    check_in_every_order(build(name, N), make_case(name, 257, N, dtype, H=1))


@pytest.mark.slow
@every_operator
@pytest.mark.parametrize("T", [1, 15, 16])
def test_every_result_of_a_wide_head_at_the_borders_of_a_chunk(build: Build, name: str, T: int) -> None:
    check_all_dtypes(build(name, 128), name, T, 128)


@pytest.mark.slow
@every_operator
@pytest.mark.parametrize("N", HEAD_SIZES)
def test_every_head_size(build: Build, name: str, N: int) -> None:
    check_all_dtypes(build(name, N), name, 2 * CHUNK_LENGTH + 1, N)


@every_operator
def test_null_means_no_starts_and_zeros(build: Build, name: str) -> None:
    case = make_case(name, 33, 64)
    for changed in (
        dataclasses.replace(case, starts=None),
        dataclasses.replace(case, state=None),
        dataclasses.replace(case, dy=None),
        dataclasses.replace(case, dstate_out=None),
    ):
        check(changed, results(build(name, 64), changed))
    nothing = dataclasses.replace(case, starts=None, state=None, dy=None, dstate_out=None)
    assert all(not x.any() for x in results(build(name, 64), nothing)[2:])
    with_dstate = results(build(name, 64), case)
    without_dstate = results(build(name, 64), case, need_dstate=False)
    assert all(torch.equal(x, y) for x, y in zip(without_dstate, with_dstate[:-1], strict=True))


@every_operator
def test_what_is_not_to_be_saved_changes_nothing(build: Build, name: str) -> None:
    case = make_case(name, 2 * CHUNK_LENGTH + 1, 64)
    B, _, H, N = case.r.shape
    y, state = torch.empty_like(case.r), torch.empty(B, H, N, N)
    kept = [None] * RECURRENCES[name].num_kept
    inputs = (*case.inputs, case.state, case.starts)
    assert call(build(name, 64), f"{name}_forward", case.r, (*inputs, y, state, *kept)) == 0
    assert all(torch.equal(x, z) for x, z in zip((y, state), results(build(name, 64), case), strict=False))


@every_operator
def test_no_tokens_hand_the_state_on_and_no_heads_are_no_work(build: Build, name: str) -> None:
    case = dataclasses.replace(make_case(name, 1, 64), starts=None)
    r = case.r
    tokens = len(RECURRENCES[name].tokens)
    empty = (*(x[:, :0] for x in case.inputs[:tokens]), *case.inputs[tokens:])
    no_tokens = dataclasses.replace(case, inputs=empty, dy=r[:, :0])
    y, state, *gradients, dstate = results(build(name, 64), no_tokens)
    assert not y.numel()
    assert case.state is not None
    assert case.dstate_out is not None
    assert torch.equal(state, case.state)
    assert torch.equal(dstate, case.dstate_out)
    assert all(not x.any() for x in gradients)
    outputs = [r, *[None] * (1 + RECURRENCES[name].num_kept)]
    inputs = (*case.inputs, None, None)
    assert call(build(name, 64), f"{name}_forward", r[:0], (*inputs, *outputs)) == 0


@every_operator
def test_what_a_kernel_cannot_take_is_refused(build: Build, name: str) -> None:
    case = make_case(name, 2, 64)
    assert case.state is not None
    y, state, library = torch.empty_like(case.r), torch.empty_like(case.state), build(name, 64)
    kept = [None] * RECURRENCES[name].num_kept
    inputs = [*case.inputs, case.state, case.starts]
    inputs[1] = torch.empty(case.inputs[1].numel() + 1)[1:].view(case.inputs[1].shape)
    misaligned, invalid = 716, 1
    assert call(library, f"{name}_forward", case.r, (*inputs, y, state, *kept)) == misaligned
    function = getattr(library, f"{name}_forward_64")
    addresses = [ctypes.c_void_p(None)] * (len(inputs) + 3 + len(kept))
    for B, T, H, dtype in ((1, 1, 1, 3), (1, 1, 1, -1), (-1, 1, 1, 0), (1, 2**31, 1, 0), (2**20, 1, 2**12, 0)):
        sizes = [ctypes.c_int64(size) for size in (B, T, H)]
        assert function(*sizes, ctypes.c_int(dtype), *addresses) == invalid, (B, T, H, dtype)
