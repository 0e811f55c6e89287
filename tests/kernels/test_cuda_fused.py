"""The fused CUDA operators' source, run by the emulator: every result against float64, in every order of threads."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import pytest
import torch

from rwkv_spec.ops.build_cuda import HEAD_SIZES
from rwkv_spec.ops.softmax_loss import SOFTMAX_LOSS
from tests.kernels.cuda_cases import ORDERS, SHUFFLED, build_kernel, emulated
from tests.kernels.cuda_fused_cases import (
    GATE,
    PIECE,
    CudaCase,
    call,
    gated_norm_cuda,
    norm_mix_cuda,
    relu2_cuda,
    sigmoid_gate_cuda,
    softmax_expected,
    softmax_inputs,
    softmax_results,
    token_mix_cuda,
    wkv7_prepare_cuda,
)
from tests.ops.cases import error_ratio
from tests.ops.fused_cases import OPERATORS

pytestmark = emulated
Build = Callable[[str], ctypes.CDLL]
every_dtype = pytest.mark.parametrize("dtype", list(GATE), ids=["float32", "bfloat16", "float16"])
every_number_of_rows = pytest.mark.parametrize("rows", [1, 15, 16, 17, 257])
every_width = pytest.mark.parametrize("C", [16, 48, 768, 2048])
NAMES = (*OPERATORS, "softmax_loss")


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    @functools.cache
    def once(name: str) -> ctypes.CDLL:
        return build_kernel(name, 0, tmp_path_factory.mktemp("cuda"))

    return once


def check(build: Build, *cases: CudaCase) -> None:
    """In every order of threads; in 16 bits in one, for it is the same source."""
    for case in cases:
        if case.case.dtype == torch.float32:
            case.check_in_every_order(build(case.operator))
        else:
            case.check(build(case.operator), SHUFFLED)


def head_cases(R: int, C: int, N: int, dtype: torch.dtype) -> list[CudaCase]:
    """Both operators over heads, with and without what is optional."""
    return [
        make
        for optional in (True, False)
        for make in (
            gated_norm_cuda(R, C, N, dtype, bonus=optional),
            wkv7_prepare_cuda(R, C, N, dtype, residual=optional),
        )
    ]


@pytest.mark.parametrize("name", NAMES)
def test_the_check_of_a_fresh_build_takes_the_emulated_library(build: Build, name: str) -> None:
    """So Python and the CUDA source agree on sizes, tensors and scalars; both are called alike, up to the stream."""
    operator = SOFTMAX_LOSS if name == "softmax_loss" else OPERATORS[name]
    build(name).cuemu_set_order(0)
    operator.check(build(name))


# ---- norm_mix ----


@every_dtype
@every_number_of_rows
def test_norm_mix_over_any_number_of_tokens(build: Build, rows: int, dtype: torch.dtype) -> None:
    check(build, norm_mix_cuda(rows, 48, dtype, M=6))


@every_dtype
@every_width
def test_norm_mix_of_any_width(build: Build, C: int, dtype: torch.dtype) -> None:
    check(build, norm_mix_cuda(PIECE + 1, C, dtype, M=6))


@every_dtype
@pytest.mark.parametrize("M", [1, 2, 4, 6])
def test_norm_mix_of_any_number_of_outputs_and_without_what_is_optional(
    build: Build, M: int, dtype: torch.dtype
) -> None:
    for absent in ("nothing", "added", "first", "starts"):
        check(build, norm_mix_cuda(PIECE + 2, 48, dtype, M=M, **({} if absent == "nothing" else {absent: False})))


# ---- token_mix and sigmoid_gate ----


@every_dtype
@every_number_of_rows
def test_token_mix_over_any_number_of_tokens(build: Build, rows: int, dtype: torch.dtype) -> None:
    check(build, token_mix_cuda(rows, 48, dtype))


@every_dtype
@every_width
def test_token_mix_of_any_width_and_without_what_is_optional(build: Build, C: int, dtype: torch.dtype) -> None:
    check(build, token_mix_cuda(PIECE + 1, C, dtype))
    check(build, token_mix_cuda(PIECE + 1, C, dtype, first=False), token_mix_cuda(3, C, dtype, starts=False))


@every_dtype
@every_number_of_rows
def test_sigmoid_gate_of_any_count(build: Build, rows: int, dtype: torch.dtype) -> None:
    check(build, sigmoid_gate_cuda(rows, 16, dtype), sigmoid_gate_cuda(rows, 208, dtype))


# ---- over heads ----


@every_dtype
@every_number_of_rows
def test_heads_over_any_number_of_rows(build: Build, rows: int, dtype: torch.dtype) -> None:
    check(build, *head_cases(rows, 96, 48, dtype))


@every_dtype
@pytest.mark.parametrize(("C", "N"), [(16, 16), (48, 16), (48, 48), (768, 64), (2048, 64), (2048, 128)])
def test_heads_of_any_width(build: Build, C: int, N: int, dtype: torch.dtype) -> None:
    check(build, *head_cases(PIECE + 1, C, N, dtype))


@pytest.mark.parametrize("N", HEAD_SIZES)
def test_every_head_size(build: Build, N: int) -> None:
    # One head more than a block has.
    check(build, *head_cases(3, 33 * N, N, torch.float32))


def test_no_head_sees_what_is_no_number_in_another(build: Build) -> None:
    for case in head_cases(3, 144, 48, torch.float32):
        for name, x in case.case.inputs.items():
            poisoned = {**case.case.inputs, name: x.clone()}
            # Of the first head, which lanes without channels of their own look at.
            poisoned[name].view(-1, 144)[:, :48] = float("nan")
            got = CudaCase(case.operator, case.case.changed(**poisoned), case.results).by(build(case.operator))
            clean = case.by(build(case.operator))
            for result, y in got.items():
                others = (z.reshape(-1, 144)[:, 48:] for z in (y, clean[result]))
                assert torch.equal(*others), (name, result)


# ---- relu2 ----


@every_dtype
@pytest.mark.parametrize("count", [1, 3, 4, 5, 1023, 1024, 1025, 4100])
def test_relu2_of_any_count(build: Build, count: int, dtype: torch.dtype) -> None:
    check(build, relu2_cuda(count, dtype))


@every_dtype
def test_relu2_at_any_address_and_of_what_is_no_number(build: Build, dtype: torch.dtype) -> None:
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 3.0, -3.0], dtype=dtype)
    for shift in (0, 1, 2):
        memory = torch.full((11,), 7.0, dtype=dtype)
        x = memory[shift : shift + 6]
        x.copy_(special)
        assert call(build("relu2"), "relu2_forward", (6,), dtype, (x,)) == 0
        torch.testing.assert_close(x, torch.relu(special).square(), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(memory[shift + 6 :], torch.full((5 - shift,), 7.0, dtype=dtype))


# ---- softmax_loss ----


@every_dtype
@pytest.mark.parametrize("V", [1, 2, 15, 16, 17, 361, 1024, 65536])
def test_softmax_loss_of_any_width(build: Build, V: int, dtype: torch.dtype) -> None:
    for P in (1, 5):
        inputs = softmax_inputs(P, V, dtype)
        want = softmax_expected(inputs)
        first = softmax_results(build("softmax_loss"), inputs)
        assert error_ratio(first[0], want[0]) < GATE[torch.float32]
        assert error_ratio(first[1], want[1]) < GATE[dtype]
        for order in ORDERS[1:]:
            got = softmax_results(build("softmax_loss"), inputs, order=order)
            assert all(torch.equal(x, y) for x, y in zip(got, first, strict=True)), order
        loss, kept = softmax_results(build("softmax_loss"), inputs, want_gradient=False)
        assert torch.equal(loss, first[0])
        assert torch.equal(kept.view(torch.uint8), inputs[0].view(torch.uint8))


@every_dtype
def test_softmax_loss_at_any_address(build: Build, dtype: torch.dtype) -> None:
    inputs = softmax_inputs(3, 64, dtype)
    want = softmax_expected(inputs)
    for shift in (1, 2, 4):
        loss, gradient = softmax_results(build("softmax_loss"), inputs, shift=shift)
        assert error_ratio(loss, want[0]) < GATE[torch.float32]
        assert error_ratio(gradient, want[1]) < GATE[dtype]


@pytest.mark.parametrize("V", [37, 40])
@pytest.mark.parametrize("target", [0, 5, 30])
def test_the_first_of_the_largest_logits_is_pulled(build: Build, target: int, V: int) -> None:
    logits = torch.zeros(1, V)
    logits[0, [5, 6, 20, 36]] = 2.0
    inputs = (logits, torch.tensor([target]), torch.tensor([0.5]))
    torch.testing.assert_close(softmax_results(build("softmax_loss"), inputs)[1].double(), softmax_expected(inputs)[1])


def test_logits_out_of_the_usual_range(build: Build) -> None:
    lowest = -float("inf")
    logits = torch.tensor(
        [[1e4, -1e4, 0.0, 9999.0], [-1e4] * 4, [lowest, lowest, 1.0, lowest], [3e38, -3e38, 0.0, 1.0]]
    )
    inputs = (logits, torch.tensor([0, 2, 2, 0]), torch.ones(4))
    got, want = softmax_results(build("softmax_loss"), inputs), softmax_expected(inputs)
    torch.testing.assert_close(got[0].double(), want[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got[1].double(), want[1], rtol=1e-6, atol=1e-6)


def test_what_is_no_number_is_seen_in_its_row_alone(build: Build) -> None:
    for garbage in (float("nan"), float("inf")):
        logits, targets, weights = softmax_inputs(5, 361, torch.float32)
        logits[3, 360] = garbage
        loss, gradient = softmax_results(build("softmax_loss"), (logits, targets, weights))
        assert loss.isfinite().tolist() == [True, True, True, False, True]
        assert gradient.isfinite().all(dim=1).tolist() == [True, True, True, False, True]
        assert not gradient[1].any() and loss[1] == 0.0


@pytest.mark.parametrize("target", [-1, 361, 2**40])
def test_a_target_that_is_no_logit_gives_no_number_and_reads_nothing_else(build: Build, target: int) -> None:
    logits, targets, weights = softmax_inputs(5, 361, torch.float32)
    targets[3] = target
    loss, gradient = softmax_results(build("softmax_loss"), (logits, targets, weights))
    assert loss.isfinite().tolist() == [True, True, True, False, True]
    assert gradient[3].isnan().all() and gradient[4].isfinite().all()


# ---- what is refused ----

INVALID, MISALIGNED = 1, 716
SIZES = {
    "norm_mix_forward": ((1, 1, 16, 1, PIECE), 12),
    "norm_mix_backward": ((1, 1, 16, 1, PIECE), 15),
    "gated_norm_forward": ((1, 1, 16, PIECE), 9),
    "gated_norm_backward": ((1, 1, 16, PIECE), 15),
    "wkv7_prepare_forward": ((1, 1, 16, PIECE), 16),
    "wkv7_prepare_backward": ((1, 1, 16, PIECE), 20),
    "token_mix_forward": ((1, 1, 16, 5, PIECE), 10),
    "token_mix_backward": ((1, 1, 16, 5, PIECE), 14),
    "sigmoid_gate_forward": ((16,), 3),
    "sigmoid_gate_backward": ((16,), 5),
    "relu2_forward": ((4,), 1),
    "relu2_backward": ((4,), 3),
    "softmax_loss": ((1, 16), 4),
}
# By the place of a size, what it must not be; for heads and channels also what no vector fills, and blocks that no
# grid holds.
WRONG_SIZES = [
    *((name, place, -1) for name in SIZES for place in range(len(SIZES[name][0]))),
    *((name, 3, M) for name in SIZES if "_mix" in name for M in (0, 3, 7)),
    *((name, 4, run) for name in SIZES if "_mix" in name for run in (0, 2**20)),
    *((name, 2, C) for name in SIZES if "_mix" in name for C in (24, 2**30)),
    *((name, 0, 2**31) for name in SIZES if not name.startswith(("relu2", "sigmoid"))),
    *((f"sigmoid_gate_{direction}", 0, count) for direction in ("forward", "backward") for count in (24, 2**62)),
    *((name, 2, N) for name in SIZES if name.startswith(("gated", "wkv7")) for N in (0, 24, 144)),
    *((name, 0, 2**62) for name in ("relu2_forward", "relu2_backward")),
    ("softmax_loss", 1, 2**31),
]


@pytest.mark.parametrize(("function", "place", "wrong"), WRONG_SIZES)
def test_sizes_that_a_kernel_cannot_take_are_refused(build: Build, function: str, place: int, wrong: int) -> None:
    library = build(function.removesuffix("_forward").removesuffix("_backward"))
    sizes, count = SIZES[function]
    changed = (*sizes[:place], wrong, *sizes[place + 1 :])
    assert call(library, function, changed, torch.float32, [None] * count, (0.0, 0.0)) == INVALID


@pytest.mark.parametrize("function", SIZES)
def test_other_dtypes_are_refused_and_no_rows_are_no_work(build: Build, function: str) -> None:
    library = build(function.removesuffix("_forward").removesuffix("_backward"))
    sizes, count = SIZES[function]
    for dtype in (-1, 3):
        assert call(library, function, sizes, dtype, [None] * count, (0.0, 0.0)) == INVALID
    assert call(library, function, (0, *sizes[1:]), torch.float32, [None] * count, (0.0, 0.0)) == 0


@pytest.mark.parametrize("function", [name for name in SIZES if name not in ("relu2_forward", "softmax_loss")])
def test_rows_at_odd_addresses_are_refused_where_fours_are_read(build: Build, function: str) -> None:
    name = function.removesuffix("_forward").removesuffix("_backward")
    sizes, count = SIZES[function]
    memory = torch.zeros(count, 64)
    for odd in range(count):
        tensors = [row[1 if n == odd else 0 :] for n, row in enumerate(memory)]
        # That of bytes may lie anywhere, as all of relu2 may.
        anywhere = name == "relu2" or (name, odd) in (("norm_mix", 6), ("token_mix", 4))
        code = call(build(name), function, sizes, torch.float32, tensors, (1e-5, 0.0))
        assert code == (0 if anywhere else MISALIGNED), odd
