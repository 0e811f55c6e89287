"""relu2: every result against float64 for any count; in place where it may be, and never where it may not."""

from __future__ import annotations

import pytest
import torch

from rwkv_spec.ops.relu2 import relu2, relu2_reference
from tests.ops.cases import compiled
from tests.ops.fused_cases import assert_case, every_dtype, relu2_case

# Around a vector of any kind, and around a piece of the compiled form.
COUNTS = (1, 3, 4, 7, 8, 9, 15, 16, 17, 33, 16383, 16384, 16385, 2 * 16384 + 5)


@compiled
@every_dtype
@pytest.mark.parametrize("count", COUNTS)
def test_results_and_gradients_are_those_of_the_reference(count: int, dtype: torch.dtype) -> None:
    assert_case(relu2_case(count, dtype))


@compiled
@every_dtype
def test_what_it_gives_has_the_bits_of_torch(dtype: torch.dtype) -> None:
    values = [0.0, -0.0, 1e-30, -1e-30, 3e38, -3e38, float("inf"), -float("inf"), float("nan")]
    x = torch.cat((torch.tensor(values), torch.randn(100, generator=torch.Generator().manual_seed(0)))).to(dtype)
    torch.testing.assert_close(relu2(x.clone(), backend="cpu"), relu2_reference(x), rtol=0, atol=0, equal_nan=True)


@compiled
@every_dtype
def test_x_is_overwritten(dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, dtype=dtype)
    want = relu2_reference(x)
    y = relu2(x, backend="cpu")
    assert y.data_ptr() == x.data_ptr()
    assert torch.equal(x, want)


@compiled
def test_nothing_past_the_end_is_written() -> None:
    memory = torch.full((40,), -3.0)
    relu2(memory[:17], backend="cpu")
    assert not memory[:17].any()
    assert torch.equal(memory[17:], torch.full((23,), -3.0))


@compiled
def test_a_leaf_that_learns_stays_as_it_was() -> None:
    x = torch.randn(33).requires_grad_()
    before = x.detach().clone()
    y = relu2(x, backend="cpu")
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(x, before)
    assert torch.equal(dx, 2 * torch.relu(before))


@compiled
def test_a_view_with_strides_stays_as_it_was() -> None:
    memory = torch.randn(8, 6)
    before = memory.clone()
    y = relu2(memory.t(), backend="cpu")
    assert torch.equal(y, relu2_reference(before.t()))
    assert torch.equal(memory, before)


@compiled
def test_what_another_operation_still_needs_is_not_lost_in_silence() -> None:
    x = torch.randn(33).requires_grad_()
    hidden = torch.sigmoid(x)
    y = relu2(hidden, backend="cpu")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.sum(), x)
