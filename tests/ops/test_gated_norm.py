"""gated_norm: every result against float64, with a bonus and without, and for gates that are wide open or shut."""

from __future__ import annotations

import pytest
import torch

from tests.ops.cases import compiled
from tests.ops.fused_cases import (
    HEADS,
    assert_case,
    every_dtype,
    every_number_of_rows,
    expected,
    gated_norm_case,
    results,
)


@compiled
@every_dtype
@every_number_of_rows
def test_results_and_gradients_are_those_of_the_reference(rows: int, dtype: torch.dtype) -> None:
    for H, N in HEADS:
        for bonus in (True, False):
            assert_case(gated_norm_case(rows, H, N, dtype, bonus=bonus), f"H={H} N={N} bonus={bonus}")


@compiled
@pytest.mark.parametrize("gate", [100.0, -100.0, 30.0, -30.0, 0.0])
@pytest.mark.parametrize("bonus", [True, False])
def test_a_gate_wide_open_or_shut_is_right_at_every_place(bonus: bool, gate: float) -> None:
    case = gated_norm_case(17, 2, 16, torch.float32, bonus=bonus)
    case.inputs["gate"][::2] = gate
    got, want = results(case, "cpu"), expected(case)
    for name, x in got.items():
        # Relative to the row: a sum over its head is as exact as its largest term.
        size = want[name].abs().amax(dim=-1, keepdim=True)
        assert ((x - want[name]).abs() <= 1e-5 * size + 1e-30).all(), name


@compiled
@every_dtype
def test_a_head_of_equal_values_gives_the_bias(dtype: torch.dtype) -> None:
    case = gated_norm_case(5, 2, 16, dtype, bonus=True)
    case.inputs["y"][2, :16] = 7.0
    case.inputs["r"][2] = 0.0
    got = case.run(case.inputs, dtype, "cpu")["out"]
    want = case.inputs["bias"][:16] * case.inputs["gate"][2, :16]
    assert torch.equal(got[2, :16], want.to(dtype))
    assert_case(case)
