"""sigmoid_gate: every result against float64, and for gates that are wide open or shut; shapes that differ."""

from __future__ import annotations

import pytest
import torch

from rwkv_spec.ops.sigmoid_gate import sigmoid_gate, sigmoid_gate_reference
from tests.ops.cases import compiled
from tests.ops.fused_cases import (
    CHANNELS,
    assert_case,
    every_dtype,
    every_number_of_rows,
    expected,
    results,
    sigmoid_gate_case,
)


@compiled
@every_dtype
@every_number_of_rows
def test_results_and_gradients_are_those_of_the_reference(rows: int, dtype: torch.dtype) -> None:
    for C in CHANNELS:
        assert_case(sigmoid_gate_case(rows, C, dtype), f"C={C}")


@compiled
@pytest.mark.parametrize("gate", [100.0, -100.0, 15.0, -15.0, 0.0])
def test_a_gate_wide_open_or_shut_is_right_at_every_place(gate: float) -> None:
    case = sigmoid_gate_case(17, 16, torch.float32)
    case.inputs["gate"][::2] = gate
    got, want = results(case, "cpu"), expected(case)
    for name, x in got.items():
        assert ((x - want[name]).abs() <= 1e-5 * want[name].abs() + 1e-30).all(), name


@compiled
def test_a_gate_of_another_shape_is_spread_by_the_reference() -> None:
    gate, value = torch.randn(32), torch.randn(3, 5, 32)
    out = sigmoid_gate(gate, value, backend="cpu")
    assert torch.equal(out, sigmoid_gate_reference(gate, value))
    assert out.shape == value.shape
