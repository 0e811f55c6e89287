"""Fused operators that are wrong on purpose: the check of a fresh build refuses each, at ten times the tests' gate."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rwkv_spec.errors import KernelError
from rwkv_spec.ops.fused import ROWS_OF_A_PIECE, call
from rwkv_spec.ops.wkv7_prepare import NORMALIZE_EPS
from tests.ops.cases import build_mutant, compiled
from tests.ops.fused_cases import OPERATORS, every_operator

SHARE, ADDED = "get(shares + m * C + c)", "get(added[m] + c)"
LAST_ROW = "row++) {\n        const T *a_low"
MUTANTS = {
    "norm_mix": {
        "forgotten share of the next token": ("total - part + get(moved + c);", "total - part;"),
        "a share that moves on and stays": ("V dn = total - part +", "V dn = total +"),
        "forgotten starts": ("starts != nullptr && starts[t] != 0", "starts != nullptr && starts[t] > 1"),
        "gradient across a start": ("clear ? V{} : part", "part"),
        "gradient across a start between pieces": ("end < z.T && !marked(starts, end)", "end < z.T"),
        "gradient lost between pieces": ("if (end < z.T && !", "if (end > z.T && !"),
        "gradient of another sequence's piece": ("row0 + end, C)", "end, C)"),
        "norm lost between pieces": ("if (begin > 0) {", "if (begin > z.T) {"),
        "norm lost behind a start": ("if (clear && t > begin) norm_again(t - 1, before);", ""),
        "forgotten first": ("else if (first != nullptr)", "else if (first == nullptr)"),
        "forgotten first in the shares' gradient": ("(t == 0 && first == nullptr)", "t == 0"),
        "forgotten gradient of first": (
            "std::memcpy(call.row<float>(11, b, C), moved,",
            "std::memset(call.row<float>(11, b, C), 0,",
        ),
        "forgotten gradient of last": ("t == z.T - 1) dn +=", "t == z.T) dn +="),
        "forgotten gradient of the sum": ("if (dsum != nullptr)", "if (dsum == nullptr)"),
        "no mean term": ("(get(dnormed + c) - one - x * slope)", "(get(dnormed + c) - x * slope)"),
        "no slope term": ("(get(dnormed + c) - one - x * slope)", "(get(dnormed + c) - one)"),
        "no epsilon": ("/ C + eps", "/ C"),
        "weight's gradient of one token only": ("add_to(dweight + c,", "put(dweight + c,"),
        "bias' gradient of one token only": ("add_to(dbias + c,", "put(dbias + c,"),
        "shares' gradient of one token only": ("add_to(sums + m * C + c,", "put(sums + m * C + c,"),
    },
    "relu2": {
        "no square": ("value * value", "value"),
        "negative numbers squared too": ("value < 0.0f ? V{} :", "value < -9.0f ? V{} :"),
        "no slope": ("2.0f * root(square)", "root(square)"),
        "forgotten last numbers": ("std::memcpy(out + n, result, (end - n) * sizeof(T));", ""),
    },
    "gated_norm": {
        "no mean term": ("- one - x * slope)", "- x * slope)"),
        "no slope term": ("- one - x * slope)", "- one)"),
        "no epsilon": ("/ N + eps", "/ N"),
        "bonus left out": ("if (BONUS) value += get(v + c) * bonus;", ""),
        "bonus left out of the gate's gradient": ("grad * (value + own * bonus)", "grad * value"),
        "bonus left out of v's gradient": ("put(dv + c, dvalue * bonus);", "put(dv + c, V{});"),
        "bonus' gradient of one vector only": ("along_v += ", "along_v = "),
        "r_k's gradient of one row only": ("add_to(dr_k + c,", "put(dr_k + c,"),
        "weight's gradient of one row only": ("add_to(dweight + c,", "put(dweight + c,"),
        "bias' gradient of one row only": ("add_to(dbias + c,", "put(dbias + c,"),
        "SiLU's slope without its second part": ("half.value * (1.0f + opened * half.rest)", "half.value"),
        "no sigmoid in the gate": ("value * opened * sigmoid(opened).value", "value * opened"),
        "no sigmoid in the norm's gradient": ("BONUS ? opened : opened * sigmoid(opened).value", "opened"),
    },
    "wkv7_prepare": {
        "no part along the direction": (" - kappa * along)", ")"),
        "no removal in the key's gradient": ("mixing) + direction * scale", "mixing)"),
        "no key in the rate's gradient": ("grad_b * kappa + grad_key * key * mixing", "grad_b * kappa"),
        "no removal in the rate's gradient": ("(grad_b * kappa + grad_key", "(grad_key"),
        "rate's gradient without its slope": (" * rate.slope()", ""),
        "a's gradient left out": ("rate.value - get(da + c) - kappa", "rate.value - kappa"),
        "removal with the wrong sign": ("put(a + c, -kappa)", "put(a + c, kappa)"),
        "key not mixed": ("key * (1.0f - rate.rest * get(k_a + c))", "key"),
        "k_a's gradient by the rate": ("-grad_key * key * rate.rest", "grad_key * key * rate.value"),
        "value's gradient not shared out": ("put(dv + c, grad * share.rest)", "put(dv + c, grad)"),
        "share's gradient without its slope": (" * share.slope()", ""),
        "w0's gradient of one row only": ("add_to(dw0 + c,", "put(dw0 + c,"),
        "a0's gradient of one row only": ("add_to(da0 + c,", "put(da0 + c,"),
        "v0's gradient of one row only": ("add_to(dv0 + c,", "put(dv0 + c,"),
        "k_k's gradient of one row only": ("add_to(dk_k + c,", "put(dk_k + c,"),
        "last rows left out": (f"row < z.end; {LAST_ROW}", f"row < z.end - 1; {LAST_ROW}"),
    },
    "token_mix": {
        "gradient across a start": ("clear ? V{} : moved", "moved"),
        "forgotten share of the next token": ("get(own + c) + handed_on", "get(own + c)"),
        "a share that moves on and stays": ("total - moved", "total"),
        "forgotten starts": ("starts != nullptr && starts[t] != 0", "starts != nullptr && starts[t] > 1"),
        "gradient across a start between pieces": ("end < z.T && !marked(starts, end)", "end < z.T"),
        "gradient lost between pieces": ("= end < z.T && !", "= end > z.T && !"),
        "gradient of another sequence's piece": ("row = b * z.T + end;", "row = end;"),
        "forgotten first": (": call.row<float>(first_tensor, b, C))", ": nullptr)"),
        "forgotten gradient of first": ("put(dfirst + c, handed_on)", "put(dfirst + c, V{})"),
        "added left out": (f"own + delta * ({SHARE} + {ADDED})", f"own + delta * {SHARE}"),
        "added left out of x's gradient": (f"moved += grad * ({SHARE} + {ADDED})", f"moved += grad * {SHARE}"),
        "added left out between pieces": (f"share = {SHARE} + get(", f"share = {SHARE} + 0.0f * get("),
        "shares' gradient of one token only": ("add_to(sums + m * C + c,", "put(sums + m * C + c,"),
    },
    "sigmoid_gate": {
        "gate's gradient without its slope": (" * opened.slope()", ""),
        "no value in the gate's gradient": ("grad * get(value + n)", "grad"),
        "value's gradient not gated": ("grad * opened.value", "grad"),
        "last numbers left out": ("n < end; n += W) put(out", "n + W < end; n += W) put(out"),
    },
}


@compiled
@every_operator
def test_what_is_no_mutant_passes(operator: str, tmp_path: Path) -> None:
    same = f"OPERATOR({operator}_forward)"
    OPERATORS[operator].check(build_mutant(operator, 0, tmp_path, same, same))


@compiled
@pytest.mark.parametrize(("operator", "name"), [(operator, name) for operator in MUTANTS for name in MUTANTS[operator]])
def test_a_mutant_is_refused(operator: str, name: str, tmp_path: Path) -> None:
    mutant = build_mutant(operator, 0, tmp_path, *MUTANTS[operator][name])
    with pytest.raises(KernelError, match=f"{operator}: the compiler made a kernel that computes wrong numbers"):
        OPERATORS[operator].check(mutant)


# ---- what no usual numbers show ----

FLOORS = {
    "forward": ("(norm < FLOOR ? FLOOR : norm)", "norm"),
    "backward": ("inverse < 1.0f / FLOOR ? sum_of(product) * inverse : 0.0f", "sum_of(product) * inverse"),
}


def key_gradient(library: ctypes.CDLL, key: float) -> Tensor:
    """Of the key of one head of 16 equal values, where a one flows into each place of a, relative to the floor."""
    ones, zeros = torch.ones(1, 16), torch.zeros(1, 16)
    k = torch.full((1, 16), key)
    dk = torch.empty(1, 16)
    given = (zeros, k, None, None, None, ones[0], None, ones[0], ones[0], zeros, zeros, None, ones, zeros)
    outputs = (torch.empty(1, 16), dk, None, None, None, torch.empty(1, 5, 16))
    call(library, "wkv7_prepare_backward", (1, 1, 16, ROWS_OF_A_PIECE), torch.float32, (*given, *outputs))
    return dk * NORMALIZE_EPS


@compiled
@pytest.mark.parametrize("direction", ["none", *FLOORS])
def test_a_forgotten_floor_is_seen(direction: str, tmp_path: Path) -> None:
    right = FLOORS["forward"][0]
    library = build_mutant("wkv7_prepare", 0, tmp_path, *FLOORS.get(direction, (right, right)))
    got = key_gradient(library, key=0.1 * NORMALIZE_EPS)
    assert torch.allclose(got, torch.tensor(-1.0), atol=1e-5) == (direction == "none")
