"""A fused CUDA operator with a planted fault fails the gate, in at least one order of threads."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from rwkv_spec.ops.wkv7_prepare import NORMALIZE_EPS
from tests.kernels.cuda_cases import ORDERS, build_kernel, emulated
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

pytestmark = emulated
ROWS, DTYPE = 2 * PIECE + 3, torch.float32


def near_the_epsilon(cuda: CudaCase) -> CudaCase:
    """Rows whose variance is as small as what is added to it."""
    small = {name: 1e-3 * cuda.case.inputs[name] for name in ("x", "added")}
    return CudaCase(cuda.operator, cuda.case.changed(**small), cuda.results)


CASES: dict[str, list[CudaCase]] = {
    "norm_mix": [norm_mix_cuda(ROWS, 160, DTYPE, M=2), near_the_epsilon(norm_mix_cuda(2, 48, DTYPE, M=2))],
    "token_mix": [token_mix_cuda(ROWS, 160, DTYPE)],
    "sigmoid_gate": [sigmoid_gate_cuda(5, 48, DTYPE)],
    "relu2": [relu2_cuda(1029, DTYPE)],
    "gated_norm": [gated_norm_cuda(ROWS, 96, 48, DTYPE, bonus=bonus) for bonus in (True, False)],
    "wkv7_prepare": [wkv7_prepare_cuda(ROWS, 96, 48, DTYPE, residual=True)],
}
SUM_OF_LANES = ("distance < width; distance *= 2) x +=", "distance < width / 2; distance *= 2) x +=")
FAULTS = {
    "norm_mix": {
        "forgotten share of the next token": ("total.x[i] - moved.x[i] + later.x[i]", "total.x[i] - moved.x[i]"),
        "a share that moves on and stays": ("total.x[i] - moved.x[i] + later.x[i]", "total.x[i] + later.x[i]"),
        "forgotten starts": ("__ldg(starts + first_row + t) != 0", "__ldg(starts + first_row + t) > 1"),
        "gradient across a start": ("moved = clear ? Floats<4>{} : flow.moved;", "moved = flow.moved;"),
        "gradient across a start between pieces": (
            "if (t + 1 == z.T || z.marked(call.tensor<uint8_t>(6), t + 1))",
            "if (t + 1 == z.T)",
        ),
        "gradient lost between pieces": ("moved = flow_of_next<M, T>(call, z, z.end - 1, c);", "moved{};"),
        "norm lost between pieces": ("if (z.begin > 0) before =", "if (z.begin > z.T) before ="),
        "stats of the wrong row": ("stats[t - z.begin + 1]", "stats[t < z.begin ? 1 : t - z.begin + 1]"),
        "forgotten first": ("else if (call.tensors[5] != nullptr)", "else if (call.tensors[5] == nullptr)"),
        "forgotten first in the shares' gradient": ("has_first = call.tensors[5] != nullptr", "has_first = t > z.T"),
        "forgotten bias at a beginning": ("scaled(x, weight, get(call.tensor<float>(3) + c))", "scaled(x, weight, {})"),
        "forgotten gradient of first": ("(11) + z.of_sequence(c), moved)", "(11) + z.of_sequence(c), {})"),
        "forgotten gradient of last": ("t == z.T - 1, dlast", "t == z.T, dlast"),
        "forgotten gradient of the sum": ("get_if(call.tensors[7] != nullptr,", "get_if(call.tensors[7] == nullptr,"),
        "no mean term": ("weight.x[i] - pull.mean - x.x[i]", "weight.x[i] - x.x[i]"),
        "no slope term": (" - x.x[i] * pull.scale)", ")"),
        "no epsilon": ("LANES) / C + eps)", "LANES) / C)"),
        "weight's gradient of one token only": ("dweight.x[i] += ", "dweight.x[i] = "),
        "bias' gradient of one token only": ("dbias.x[i] += ", "dbias.x[i] = "),
        "shares' gradient of one token only": ("dshares[m].x[i] += ", "dshares[m].x[i] = "),
        "channels behind a warp's first left out of the pull": (
            "#pragma unroll 1\n    for (int c = 4 * lane; c < z.C;",
            "#pragma unroll 1\n    for (int c = 4 * lane; c < z.C && c < 128;",
        ),
        "a sum of some lanes": SUM_OF_LANES,
    },
    "relu2": {
        "no square": ("x < 0.0f ? 0.0f : x * x", "x < 0.0f ? 0.0f : x"),
        "negative numbers squared too": ("x < 0.0f ? 0.0f :", "x < -9.0f ? 0.0f :"),
        "no slope": ("2.0f * sqrtf(square)", "sqrtf(square)"),
        "forgotten last numbers": ("if (n >= call.sizes[0]) return;", "return;"),
    },
    "gated_norm": {
        "no mean term": ("(dvalue.x[i] - one - x.x[i]", "(dvalue.x[i] - x.x[i]"),
        "no slope term": ("- one - x.x[i] * slope)", "- one)"),
        "no epsilon": ("/ z.N + eps", "/ z.N"),
        "lanes without channels in the deviation": ("    if (z.works)\n#pragma unroll", "#pragma unroll"),
        "bonus left out": ("if (BONUS) value += v.x[i] * bonus;", ""),
        "bonus left out of the gate's gradient": ("grad * (value + v.x[i] * bonus)", "grad * value"),
        "bonus left out of v's gradient": ("dv.x[i] = slope * bonus;", "dv.x[i] = 0.0f;"),
        "r_k's gradient of one row only": ("dr_k.x[i] += ", "dr_k.x[i] = "),
        "weight's gradient of one row only": ("dweight.x[i] += ", "dweight.x[i] = "),
        "bias' gradient of one row only": ("dbias.x[i] += ", "dbias.x[i] = "),
        "SiLU's slope without its second part": ("half.value * (1.0f + opened * half.rest)", "half.value"),
        "no sigmoid in the gate": ("value * gate.x[i] * sigmoid(gate.x[i]).value", "value * gate.x[i]"),
        "no sigmoid in the norm's gradient": ("slope = grad * opened * half.value", "slope = grad * opened"),
        "last rows left out": ("begin + call.sizes[3] : call.sizes[0]", "begin + call.sizes[3] : call.sizes[0] - 1"),
        "a sum of some lanes": SUM_OF_LANES,
    },
    "wkv7_prepare": {
        "no part along the direction": ("(dkappa.x[i] - kappa * along)", "dkappa.x[i]"),
        "no removal in the key's gradient": (" + pull * k_k.x[i]", ""),
        "no key in the rate's gradient": ("db.x[i] * kappa + dk_out.x[i] * k.x[i] * k_a.x[i]", "db.x[i] * kappa"),
        "no removal in the rate's gradient": ("(db.x[i] * kappa + dk_out", "(dk_out"),
        "rate's gradient without its slope": (" * rate[i].slope()", ""),
        "a's gradient left out": ("rate[i].value - da.x[i]", "rate[i].value"),
        "removal with the wrong sign": ("a.x[i] = -kappa;", "a.x[i] = kappa;"),
        "key not mixed": ("k.x[i] * (1.0f - rate.rest * k_a.x[i])", "k.x[i]"),
        "k_a's gradient by the rate": ("k.x[i] * rate[i].rest;", "k.x[i] * rate[i].value;"),
        "value's gradient not shared out": ("grad.x[i] * share.rest", "grad.x[i]"),
        "share's gradient without its slope": (" * share.slope()", ""),
        "w0's gradient of one row only": ("dw0.x[i] += ", "dw0.x[i] = "),
        "a0's gradient of one row only": ("da0.x[i] += ", "da0.x[i] = "),
        "v0's gradient of one row only": ("dv0.x[i] += ", "dv0.x[i] = "),
        "k_k's gradient of one row only": ("dk_k.x[i] += ", "dk_k.x[i] = "),
        "a sum of some lanes": SUM_OF_LANES,
    },
}
FAULTS["token_mix"] = {
    "forgotten starts": FAULTS["norm_mix"]["forgotten starts"],
    "gradient across a start": ("later.x[i] = clear ? 0.0f : moved.x[i];", "later.x[i] = moved.x[i];"),
    "gradient across a start between pieces": (
        "if (z.end == z.T || z.marked(call.tensor<uint8_t>(4), z.end))",
        "if (z.end == z.T)",
    ),
    "gradient lost between pieces": ("later = handed_back<T>(call, z, c)", "later{}"),
    "x lost between pieces": ("z.begin > 0 ? get(", "z.begin > z.T ? get("),
    "forgotten first": ("get_if(call.tensors[3] != nullptr,", "get_if(call.tensors[3] == nullptr,"),
    "forgotten gradient of first": ("(7) + z.of_sequence(c), later)", "(7) + z.of_sequence(c), {})"),
    "what moves on stays": ("dx.x[i] -= moved.x[i];", ""),
    "shares without what is added": ("return plus(get(call.tensor<float>(2) + m * z.C + c), get(", "return (get("),
    "shares' gradient of one token only": ("dshares[m] = plus(dshares[m], product);", "dshares[m] = product;"),
}
FAULTS["sigmoid_gate"] = {
    "no sigmoid": ("value.x[i] * sigmoid(gate.x[i]).value", "value.x[i] * gate.x[i]"),
    "no slope": (" * opened.slope()", ""),
    "value's gradient without the gate": ("grad.x[i] * opened.value", "grad.x[i]"),
    "last numbers left out": ("4 * (static_cast<int64_t>", "16 + 4 * (static_cast<int64_t>"),
}
# What has no other thread wait for it.
BARRIERS = {
    "forward": ("    __syncthreads();\n    const uint8_t* const starts", "    const uint8_t* const starts"),
    "backward": ("    __syncthreads();\n    for (int c = 4", "    for (int c = 4"),
}
SOFTMAX = {
    "no largest taken away": ("(logf(sum) + (largest - own))", "(logf(sum) - own)"),
    "each thread's own largest": ("tally.sum * expf(tally.largest - largest)", "tally.sum"),
    "a sum that is not made smaller": ("sum *= expf(largest - most);", ""),
    "no target in the gradient": (" / sum - 1.0f)", " / sum)"),
    "no regulariser": ("weight * call.scalars[0] * largest;", "0.0f;"),
    "the largest's own share left out": ("written(factor + pull)", "written(pull)"),
    "the weight left out of the gradient": ("there ? weight / sum : own", "there ? 1.0f / sum : own"),
    "a row of weight zero as any other": ("if (weight == 0.0f) {", "if (weight < 0.0f) {"),
    "numbers of the first turn only": (
        "n < length; n += K * THREADS) tally",
        "n < K * THREADS; n += K * THREADS) tally",
    ),
    "results of the first warp only": ("for (int n = 1; n < WARPS; n++)", "for (int n = WARPS; n < WARPS; n++)"),
    "a missing barrier": ("    __syncthreads();\n    Value result", "    Value result"),
}


def only_what_the_cases_need() -> dict[str, str]:
    """Changes of norm_mix that leave float32 and two mixed outputs: all 24 kernels take long to compile."""
    changes = {}
    for direction in ("forward", "backward"):
        dtypes = [f"{direction}<M, {dtype}>" for dtype in ("float", "__nv_bfloat16", "__half")]
        changes["{" + ", ".join(dtypes) + "}"] = "{" + ", ".join(3 * dtypes[:1]) + "}"
        for label, M in (("case 1", 1), ("case 4", 4), ("default", 6)):
            changes[f"{label}: return start_{direction}<{M}>(call, dtype, blocks, stream);"] = f"{label}: return 3;"
    return changes


def check_that_it_fails(name: str, change: tuple[str, str], folder: Path) -> None:
    fewer = only_what_the_cases_need() if name == "norm_mix" else {}
    library = build_kernel(name, 0, folder, {**fewer, change[0]: change[1]})
    # In units of the gate; what is not a number is infinite.
    assert max(case.worst(library, order) for case in CASES[name] for order in ORDERS) > 5


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fault"), [(name, fault) for name in FAULTS for fault in FAULTS[name]])
def test_a_mutant_fails(name: str, fault: str, tmp_path: Path) -> None:
    check_that_it_fails(name, FAULTS[name][fault], tmp_path)


@pytest.mark.parametrize("direction", BARRIERS)
def test_a_missing_barrier_in_norm_mix_fails(direction: str, tmp_path: Path) -> None:
    check_that_it_fails("norm_mix", BARRIERS[direction], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("fault", SOFTMAX)
def test_a_mutant_of_softmax_loss_fails(fault: str, tmp_path: Path) -> None:
    library = build_kernel("softmax_loss", 0, tmp_path, dict([SOFTMAX[fault]]))
    errors = []
    for V in (2049, 2052):
        inputs = softmax_inputs(4, V, DTYPE)
        want = softmax_expected(inputs)
        for order in ORDERS:
            got = softmax_results(library, inputs, order=order)
            errors += [error_ratio(x, y) for x, y in zip(got, want, strict=True)]
    assert float(torch.tensor(errors).nan_to_num(float("inf")).max()) > 5 * GATE[DTYPE]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_what_is_no_mutant_passes(name: str, tmp_path: Path) -> None:
    same = f"OPERATOR({name}_forward)"
    fewer = only_what_the_cases_need() if name == "norm_mix" else {}
    library = build_kernel(name, 0, tmp_path, {**fewer, same: same})
    assert max(case.worst(library, order) for case in CASES[name] for order in ORDERS) < 1


# ---- what no usual numbers show ----

FLOORS = {
    "none": ("norm < NORM_FLOOR ? NORM_FLOOR : norm", "norm < NORM_FLOOR ? NORM_FLOOR : norm"),
    "forward": ("norm < NORM_FLOOR ? NORM_FLOOR : norm", "norm"),
    "backward": ("inverse < 1.0f / NORM_FLOOR ? total * inverse : 0.0f", "total * inverse"),
}


def key_gradient(library: ctypes.CDLL, key: float) -> torch.Tensor:
    """Of the key of one head of 16 equal values, where a one flows into each place of a, relative to the floor."""
    ones, zeros = torch.ones(1, 16), torch.zeros(1, 16)
    dk = torch.empty(1, 16)
    given = (zeros, torch.full((1, 16), key), None, None, None, zeros[0], None, ones[0], zeros[0])
    into = (zeros, zeros, None, ones, zeros)
    outputs = (torch.empty(1, 16), dk, None, None, None, torch.empty(1, 5, 16))
    library.cuemu_set_order(0)
    assert call(library, "wkv7_prepare_backward", (1, 1, 16, PIECE), DTYPE, (*given, *into, *outputs)) == 0
    return dk * NORMALIZE_EPS


@pytest.mark.slow
@pytest.mark.parametrize("direction", FLOORS)
def test_a_forgotten_floor_is_seen(direction: str, tmp_path: Path) -> None:
    library = build_kernel("wkv7_prepare", 0, tmp_path, dict([FLOORS[direction]]))
    got = key_gradient(library, key=0.1 * NORMALIZE_EPS)
    assert torch.allclose(got, torch.tensor(-1.0), atol=1e-5) == (direction == "none")
