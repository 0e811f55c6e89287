"""wkv7_prepare: every result against float64, with a residual and without; heads below the floor; rounding."""

from __future__ import annotations

import pytest
import torch

from rwkv_spec.ops.wkv7_prepare import NORMALIZE_EPS, wkv7_prepare
from tests.ops.cases import compiled
from tests.ops.fused_cases import (
    HEADS,
    assert_case,
    assert_right,
    every_dtype,
    every_number_of_rows,
    expected,
    results,
    wkv7_prepare_case,
)


@compiled
@every_dtype
@every_number_of_rows
def test_results_and_gradients_are_those_of_the_reference(rows: int, dtype: torch.dtype) -> None:
    for H, N in HEADS:
        for residual in (True, False):
            assert_case(wkv7_prepare_case(rows, H, N, dtype, residual=residual), f"H={H} N={N} residual={residual}")


@compiled
@every_dtype
@pytest.mark.parametrize("size", [0.0, 1e-3 * NORMALIZE_EPS, 1e3 * NORMALIZE_EPS])
def test_a_head_near_the_floor_is_right_and_changes_no_other(size: float, dtype: torch.dtype) -> None:
    case = wkv7_prepare_case(5, 3, 16, dtype, residual=True)
    plain = results(case, "cpu")
    case.inputs["k"][2, 16:32] *= size
    got, want = results(case, "cpu"), expected(case)
    # Its gradients are about 1 / floor: they would hide all others.
    small = torch.zeros(5, 48, dtype=torch.bool)
    small[2, 16:32] = True
    of_rows = [name for name, x in got.items() if x.shape == small.shape]
    for name in of_rows:
        assert torch.equal(got[name][~small], plain[name][~small]), name
    assert_right({name: got[name][small] for name in of_rows}, {name: want[name][small] for name in of_rows})
    of_parameters = got.keys() - set(of_rows)
    assert_right({name: got[name] for name in of_parameters}, {name: want[name] for name in of_parameters})


@compiled
@pytest.mark.parametrize("value", [100.0, -100.0, 15.0, -15.0])
def test_a_rate_or_share_near_0_or_1_is_right_at_every_place(value: float) -> None:
    case = wkv7_prepare_case(17, 2, 16, torch.float32, residual=True)
    case.inputs["a_low"][::2], case.inputs["v_low"][1::2] = value, value
    got, want = results(case, "cpu"), expected(case)
    for name, x in got.items():
        # Relative to the row: a sum over its head is as exact as its largest term.
        size = want[name].abs().amax(dim=-1, keepdim=True)
        assert ((x - want[name]).abs() <= 1e-5 * size + 1e-30).all(), name


@compiled
def test_in_block_0_the_value_is_handed_on_itself() -> None:
    case = wkv7_prepare_case(3, 1, 16, torch.float32, residual=False)
    assert case.run(case.inputs, case.dtype, "cpu")["v_out"] is case.inputs["v"]


@compiled
def test_bfloat16_is_rounded_as_torch_rounds() -> None:
    ties = torch.tensor([1.0 + n / 256 for n in range(1, 33)])
    other = torch.randn(64, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-32.0, 32.0)
    edges = [0.0, -0.0, 1e-45, -1e-40, 3.3895e38, 3.4e38, -3.4e38, float("inf"), -float("inf"), float("nan")]
    w0_C = torch.cat((ties, torch.nextafter(ties, 2 * ties), -ties, other, torch.tensor(edges), torch.zeros(6)))
    # What is added to it changes no bit.
    nothing_1C = torch.full((1, len(w0_C)), -0.0, dtype=torch.bfloat16)
    ones_C = torch.ones(len(w0_C))
    prepared = wkv7_prepare(
        *(nothing_1C for _ in range(4)),
        None,
        w0_C=w0_C,
        a0_C=ones_C,
        k_k_C=ones_C,
        k_a_C=ones_C,
        head_size=16,
        backend="cpu",
    )
    got_C, want_C = prepared.w_raw_RC[0], w0_C.to(torch.bfloat16)
    assert torch.equal(got_C.isnan(), want_C.isnan())
    number = ~want_C.isnan()
    assert torch.equal(got_C[number].view(torch.int16), want_C[number].view(torch.int16))
