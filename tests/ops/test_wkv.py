"""wkv5, wkv6 and wkv7: every result of the compiled kernels and of the fallbacks against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rwkv_spec.ops.build import CHUNK_LENGTH, HEAD_SIZES
from rwkv_spec.ops.wkv import FALLBACKS, REFERENCES, operator_of_this_machine
from tests.ops.cases import (
    GATE,
    OPERATORS,
    compiled,
    error_ratio,
    every_operator,
    expected,
    make_case,
    through_autograd,
    through_library,
    worst,
)

every_dtype = pytest.mark.parametrize("dtype", list(GATE), ids=["float32", "bfloat16"])


# ---- rule 9: output, final state and every gradient ----


@compiled
@pytest.mark.parametrize("starts", [False, True], ids=["one document", "starts"])
@every_dtype
@pytest.mark.parametrize("T", [1, 15, 16, 17, CHUNK_LENGTH, CHUNK_LENGTH + 1])
@pytest.mark.parametrize("N", HEAD_SIZES)
@every_operator
def test_every_result_matches_float64(operator: str, N: int, T: int, dtype: torch.dtype, starts: bool) -> None:
    case = make_case(T, N, dtype, operator=operator, starts=starts)
    results = through_library(operator_of_this_machine(operator).library, case)
    for name, got, want in zip(case.results, results, expected(case), strict=True):
        assert error_ratio(got, want) < GATE[dtype], name
        assert torch.isfinite(got).all(), name


@compiled
@every_dtype
@pytest.mark.parametrize("N", [16, 32, 64, 128])
@every_operator
def test_every_result_matches_float64_over_257_tokens(operator: str, N: int, dtype: torch.dtype) -> None:
    for starts in (False, True):
        case = make_case(257, N, dtype, operator=operator, starts=starts)
        results = through_library(operator_of_this_machine(operator).library, case)
        for name, got, want in zip(case.results, results, expected(case), strict=True):
            assert error_ratio(got, want) < GATE[dtype], (name, starts)


@compiled
@every_operator
def test_autograd_gives_what_the_kernel_gives(operator: str) -> None:
    case = make_case(33, 64, torch.float32, operator=operator)
    direct = through_library(operator_of_this_machine(operator).library, case)
    for name, got, want in zip(case.results, through_autograd(case, "cpu"), direct, strict=True):
        assert torch.equal(got, want), name


@pytest.mark.parametrize("T", [1, 17, 40])
@every_operator
def test_the_fallback_is_the_reference(operator: str, T: int) -> None:
    for starts in (False, True):
        case = make_case(T, 16, torch.float32, operator=operator, starts=starts)
        assert worst(through_autograd(case.double(), "torch"), expected(case)) < 1e-12
        assert worst(through_autograd(case, "torch"), expected(case)) < GATE[torch.float32]


@every_operator
def test_the_fallback_in_bfloat16_passes_the_gate(operator: str) -> None:
    case = make_case(40, 16, torch.bfloat16, operator=operator)
    assert worst(through_autograd(case, "torch"), expected(case)) < GATE[torch.bfloat16]


@every_operator
def test_the_fallback_keeps_a_state_a_chunk_not_a_state_a_token(operator: str) -> None:
    case = make_case(256, 64, torch.float32, operator=operator, B=1, H=1)
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    leaves = [x.clone().requires_grad_() for x in case.inputs]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        FALLBACKS[operator](*leaves)
    inputs = sum(x.nbytes for x in leaves)
    states = 17 * 64 * 64 * 4
    assert sum(kept.values()) <= inputs + 2 * states


# ---- decays that no healthy model has ----


@compiled
@pytest.mark.parametrize("w_raw", [-1e4, -90.0, 4.5, 20.0, 90.0, 1e4])
@pytest.mark.parametrize("operator", ["wkv5", "wkv6"])
def test_a_decay_beyond_all_bounds_is_none_or_whole(operator: str, w_raw: float) -> None:
    case = make_case(CHUNK_LENGTH + 8, 32, torch.float32, operator=operator)
    place = case.results.index("dw_raw") - 2
    case.inputs[place].fill_(w_raw)
    results = through_library(operator_of_this_machine(operator).library, case)
    assert all(torch.isfinite(x).all() for x in results)
    # Here the reference would overflow, so it gets a raw decay that means the same.
    case.inputs[place].fill_(max(-40.0, min(w_raw, 5.0)))
    for name, got, want in zip(case.results, results, expected(case), strict=True):
        if name == "dw_raw":
            assert got.abs().max() < 1e-30
        else:
            assert error_ratio(got, want) < GATE[torch.float32], name


@compiled
@pytest.mark.parametrize("operator", ["wkv5", "wkv6"])
def test_a_raw_decay_that_is_not_a_number_is_not_hidden(operator: str) -> None:
    case = make_case(3, 32, torch.float32, operator=operator, starts=False)
    case.inputs[case.results.index("dw_raw") - 2][..., 5] = float("nan")
    y, state = OPERATORS[operator](*case.inputs, backend="cpu")
    assert torch.isnan(state[:, :, 5]).all()
    assert torch.isnan(y[:, 1:]).all()


@compiled
def test_one_slow_decay_for_all_tokens_loses_no_digits() -> None:
    case = make_case(800, 16, torch.float32, operator="wkv5", B=1, H=1, starts=False)
    # Rounded to a float32, each of these decays would be wrong by up to 3e-8 at every token, always to the same side.
    case.inputs[3].copy_(torch.linspace(-9, -6, 16))
    want = expected(case)[:2]
    assert worst(OPERATORS["wkv5"](*case.inputs, backend="cpu"), want) < GATE[torch.float32]
    assert worst(REFERENCES["wkv5"](*case.inputs), want) > 3 * GATE[torch.float32]
