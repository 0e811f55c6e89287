"""The references of wkv5 and wkv6 themselves against their definition: sums over all earlier tokens, in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rwkv_spec.ops.recurrence import RECURRENCES
from rwkv_spec.ops.reference import wkv5_reference, wkv6_reference
from rwkv_spec.ops.wkv import FALLBACKS, REFERENCES
from tests.ops.cases import make_case


def by_definition(
    tokens: tuple[np.ndarray, ...], u: np.ndarray, state: np.ndarray, starts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """One head; r, w_raw, k, v [T, N], state [key, value]: what a token left decays by the decays of those after it."""
    r, w_raw, k, v = tokens
    T, N = r.shape
    decay = np.exp(-np.exp(w_raw))
    left = np.zeros((T + 1, N, N))
    for t in range(T + 1):
        # The token at which the present document started; 0 with the initial state before it if none did.
        begun = np.flatnonzero(starts[: t + 1])
        first = int(begun[-1]) if len(begun) else 0
        if not len(begun):
            left[t] += np.prod(decay[:t], axis=0)[:, None] * state
        for s in range(first, t):
            left[t] += np.prod(decay[s + 1 : t], axis=0)[:, None] * np.outer(k[s], v[s])
    y = np.stack([r[t] @ left[t] + (r[t] * u * k[t]).sum() * v[t] for t in range(T)])
    return y, left[T]


@pytest.mark.parametrize("operator", ["wkv5", "wkv6"])
@pytest.mark.parametrize("starts", [False, True], ids=["one document", "starts"])
def test_the_reference_is_what_the_definition_says(operator: str, starts: bool) -> None:
    case = make_case(9, 16, torch.float32, operator=operator, starts=starts).double()
    reference = wkv5_reference if operator == "wkv5" else wkv6_reference
    y, last = reference(*case.inputs, starts_BT=case.starts)
    flags = torch.zeros(2, 9, dtype=torch.bool) if case.starts is None else case.starts
    if operator == "wkv5":
        r, k, v, w_raw_HN, u, state = case.inputs
        w_raw = w_raw_HN.expand(r.shape)
    else:
        r, w_raw, k, v, u, state = case.inputs
    for row in range(2):
        for head in range(2):
            tokens = tuple(x[row, :, head].numpy() for x in (r, w_raw, k, v))
            want_y, want_last = by_definition(tokens, u[head].numpy(), state[row, head].numpy(), flags[row].numpy())
            np.testing.assert_allclose(y[row, :, head].numpy(), want_y, rtol=0, atol=1e-12)
            np.testing.assert_allclose(last[row, head].numpy(), want_last, rtol=0, atol=1e-12)


def test_the_references_gradients_are_those_of_small_steps() -> None:
    case = make_case(4, 2, torch.float32, operator="wkv6", H=1).double()
    leaves = [x.requires_grad_() for x in case.inputs]
    # Where a decay is almost whole or almost nothing, a small step shows nothing.
    leaves[1] = (leaves[1].detach() / 6).requires_grad_()
    assert torch.autograd.gradcheck(lambda *xs: wkv6_reference(*xs, starts_BT=case.starts), leaves)


@pytest.mark.parametrize("operator", ["wkv5", "wkv6"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_decay_of_nothing_has_no_gradient_and_is_no_nan(operator: str, dtype: torch.dtype) -> None:
    for functions in (REFERENCES, FALLBACKS):
        case = make_case(5, 16, torch.float32, operator=operator)
        place = RECURRENCES[operator].inputs.index("w_raw")
        leaves = [x.to(dtype).requires_grad_() for x in case.inputs]
        with torch.no_grad():
            leaves[place].fill_(1e4)
        y, state = functions[operator](*leaves)
        gradients = torch.autograd.grad(y.sum() + state.sum(), leaves)
        assert all(torch.isfinite(x).all() for x in (y, state, *gradients))
        assert not gradients[place].any()
