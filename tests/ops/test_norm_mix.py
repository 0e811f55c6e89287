"""norm_mix: every result against float64, whatever is left out; where gradients stop; what x and added share."""

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
    norm_mix_case,
    outputs_of,
    results,
)

COUNTS = (1, 2, 4, 6)
OPTIONS = list(itertools.product((True, False), repeat=3))


@compiled
@every_dtype
@every_number_of_rows
def test_results_and_gradients_are_those_of_the_reference(rows: int, dtype: torch.dtype) -> None:
    for n, C in enumerate(CHANNELS):
        for m, (added, first, starts) in enumerate(OPTIONS):
            # Each count of outputs meets each width, and each option over the widths.
            M = COUNTS[(m + n) % len(COUNTS)]
            case = norm_mix_case(rows, C, dtype, M=M, added=added, first=first, starts=starts)
            assert_case(case, f"C={C} M={M} added={added} first={first} starts={starts}")


@compiled
@every_dtype
def test_more_mixed_outputs_than_compiled_ones_come_from_the_reference(dtype: torch.dtype) -> None:
    case = norm_mix_case(17, 48, dtype, M=3)
    got, want = results(case, "cpu"), results(case, "torch")
    assert all(torch.equal(x, want[name]) for name, x in got.items())


@compiled
@every_dtype
@pytest.mark.parametrize("start", [0, 5, ROWS_OF_A_PIECE - 1, ROWS_OF_A_PIECE, ROWS_OF_A_PIECE + 1])
def test_no_gradient_crosses_a_start(start: int, dtype: torch.dtype) -> None:
    case = norm_mix_case(ROWS_OF_A_PIECE + 6, 48, dtype, B=1, starts=False)
    flags = torch.zeros(1, ROWS_OF_A_PIECE + 6, dtype=torch.bool)
    for marked in (False, True):
        flags[0, start] = marked
        marked_case = norm_mix_case(ROWS_OF_A_PIECE + 6, 48, dtype, B=1, flags=flags).changed(**case.inputs)
        _, outputs = outputs_of(marked_case, "cpu")
        # Nothing flows into what stands before the start.
        upstream = {name: marked_case.upstream(name, outputs[name]) for name in ("mixed_0", "mixed_1")}
        for grad in upstream.values():
            grad[:, :start] = 0.0
        got = results(marked_case, "cpu", only=list(upstream), upstream=upstream)
        before = got["dfirst"] if start == 0 else got["dx"][:, start - 1]
        assert before.any() == (not marked)
        assert not got["dx"][:, : max(start - 1, 0)].any()


@compiled
@every_dtype
def test_a_start_makes_two_sequences_of_one(dtype: torch.dtype) -> None:
    T, cut = ROWS_OF_A_PIECE + 6, 9
    flags = torch.zeros(1, T, dtype=torch.bool)
    flags[0, cut] = True
    case = norm_mix_case(T, 48, dtype, B=1, flags=flags)
    whole = case.run(case.inputs, dtype, "cpu")
    late = norm_mix_case(T, 48, dtype, B=1, first=False, starts=False)
    cut_off = {
        name: case.inputs[name][:, cut:] if name in ("x", "added") else case.inputs[name] for name in late.inputs
    }
    part = late.run(cut_off, dtype, "cpu")
    assert torch.equal(whole["mixed_1"][:, cut:], part["mixed_1"])
    assert torch.equal(whole["last"], part["last"])


@compiled
@every_dtype
def test_a_sequence_cut_in_two_gives_the_same_bits(dtype: torch.dtype) -> None:
    T, cut = ROWS_OF_A_PIECE + 6, 30
    case = norm_mix_case(T, 48, dtype, starts=False)
    whole = case.run(case.inputs, dtype, "cpu")
    early = case.run(
        {**case.inputs, "x": case.inputs["x"][:, :cut], "added": case.inputs["added"][:, :cut]}, dtype, "cpu"
    )
    later = {"x": case.inputs["x"][:, cut:], "added": case.inputs["added"][:, cut:], "first": early["last"]}
    late = case.run({**case.inputs, **later}, dtype, "cpu")
    for name in ("sum", "mixed_0", "mixed_1"):
        assert torch.equal(whole[name], torch.cat((early[name], late[name]), dim=1))
    assert torch.equal(whole["last"], late["last"])


@compiled
def test_a_share_of_zeros_gives_the_norm_itself() -> None:
    case = norm_mix_case(17, 48, torch.float32)
    case = case.changed(shares=torch.zeros_like(case.inputs["shares"]))
    outputs = case.run(case.inputs, torch.float32, "cpu")
    assert torch.equal(outputs["mixed_0"][:, -1], outputs["last"])


@compiled
def test_without_anything_added_the_sum_is_x_itself() -> None:
    case = norm_mix_case(17, 48, torch.float32, added=False)
    leaves, outputs = outputs_of(case, "cpu")
    assert outputs["sum"] is leaves["x"]


@compiled
@every_dtype
def test_the_sum_has_the_bits_of_torch(dtype: torch.dtype) -> None:
    case = norm_mix_case(17, 48, dtype)
    assert torch.equal(case.run(case.inputs, dtype, "cpu")["sum"], case.inputs["x"] + case.inputs["added"])


@compiled
@every_dtype
def test_the_gradients_of_x_and_of_what_is_added_share_no_memory(dtype: torch.dtype) -> None:
    leaves, outputs = outputs_of(norm_mix_case(17, 48, dtype), "cpu")
    outputs["mixed_0"].sum().backward()
    dx, dadded = leaves["x"].grad, leaves["added"].grad
    assert dx is not None
    assert dadded is not None
    before = dadded.clone()
    dx.add_(1.0)
    assert torch.equal(dadded, before)
