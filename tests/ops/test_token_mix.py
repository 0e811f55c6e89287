"""token_mix: every result against float64, with first and starts and without; where gradients stop."""

from __future__ import annotations

import itertools

import pytest
import torch

from rwkv_spec.ops.fused import ROWS_OF_A_PIECE
from tests.ops.cases import compiled
from tests.ops.fused_cases import (
    CHANNELS,
    assert_case,
    every_dtype,
    every_number_of_rows,
    outputs_of,
    results,
    token_mix_case,
)


@compiled
@every_dtype
@every_number_of_rows
def test_results_and_gradients_are_those_of_the_reference(rows: int, dtype: torch.dtype) -> None:
    for C in CHANNELS:
        for first, starts in itertools.product((True, False), repeat=2):
            case = token_mix_case(rows, C, dtype, first=first, starts=starts)
            assert_case(case, f"C={C} first={first} starts={starts}")


@compiled
@every_dtype
@pytest.mark.parametrize("start", [0, 5, ROWS_OF_A_PIECE - 1, ROWS_OF_A_PIECE, ROWS_OF_A_PIECE + 1])
def test_no_gradient_crosses_a_start(start: int, dtype: torch.dtype) -> None:
    flags = torch.zeros(1, ROWS_OF_A_PIECE + 6, dtype=torch.bool)
    for marked in (False, True):
        flags[0, start] = marked
        case = token_mix_case(ROWS_OF_A_PIECE + 6, 48, dtype, B=1, flags=flags)
        _, outputs = outputs_of(case, "cpu")
        # Nothing flows into what stands before the start.
        upstream = {name: case.upstream(name, output) for name, output in outputs.items()}
        for grad in upstream.values():
            grad[:, :start] = 0.0
        got = results(case, "cpu", upstream=upstream)
        before = got["dfirst"] if start == 0 else got["dx"][:, start - 1]
        assert before.any() == (not marked)
        assert not got["dx"][:, : max(start - 1, 0)].any()


@compiled
@every_dtype
def test_a_sequence_cut_in_two_gives_the_same_bits(dtype: torch.dtype) -> None:
    T, cut = ROWS_OF_A_PIECE + 6, 30
    case = token_mix_case(T, 48, dtype, B=1, starts=False)
    whole = case.run(case.inputs, dtype, "cpu")
    x, added = case.inputs["x"], case.inputs["added"]
    early = case.run({**case.inputs, "x": x[:, :cut], "added": added[:, :cut]}, dtype, "cpu")
    later = {"x": x[:, cut:], "added": added[:, cut:], "first": x[:, cut - 1].float()}
    late = case.run({**case.inputs, **later}, dtype, "cpu")
    for name, output in whole.items():
        assert torch.equal(output, torch.cat((early[name], late[name]), dim=1))


@compiled
@every_dtype
def test_shares_of_nothing_give_x_itself(dtype: torch.dtype) -> None:
    case = token_mix_case(17, 48, dtype)
    none = case.changed(shares=torch.zeros(5, 48), added=torch.zeros_like(case.inputs["added"]))
    assert all(torch.equal(output, case.inputs["x"]) for output in none.run(none.inputs, dtype, "cpu").values())
