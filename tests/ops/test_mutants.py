"""Kernels that are wrong on purpose: each must fail the gates that the true ones pass, in float32 and in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest

from rwkv_spec.errors import KernelError
from rwkv_spec.ops import wkv
from rwkv_spec.ops.build import CHUNK_LENGTH
from rwkv_spec.ops.recurrence import RECURRENCES
from tests.ops.cases import GATE, build_mutant, compiled, every_operator, expected, make_case, through_library, worst

# More than one register wide, wherever it is built.
HEAD_SIZE = 32
CLEARED_GRADIENT = "{0} std::memset(m.G, 0, sizeof m.G);"
FORWARD_ALONE = "sizeof m.u);\n    std::memset(m.folded, 0, sizeof m.folded);\n    if"

MUTANTS7 = {
    "decay of zero": ("store(rows + n, decay);", "store(rows + n, V{});"),
    "no delta term": ("s[q] += sa[q] * b_j;", ""),
    "no delta term in the backward": (" + load(in + N + q * W) * dsa_i;", ";"),
    "forgotten initial state": ("transpose<N>(m.flipped, m.state);", "std::memset(m.state, 0, sizeof m.state);"),
    "gradient lost between chunks": (
        "look_ahead<N>(c, m, item, n, at, rows);",
        CLEARED_GRADIENT.format("look_ahead<N>(c, m, item, n, at, rows);"),
    ),
    "forgotten chunk state": ("if (n > 0) std::memcpy(m.start,", "if (n < 0) std::memcpy(m.start,"),
    "forgotten final state's gradient": ("if (c.dstate_out != nullptr)", "if (c.dstate_out == nullptr)"),
    "forgotten starts": ("starts != nullptr && starts[t] != 0", "starts != nullptr && starts[t] > 1"),
    "gradient across a start": ("clear ? V{} : decay * before", "decay * before"),
    "sa of the chunk before": ("std::memcpy(m.sa, m.sa + rows * N, N * sizeof(float));", ""),
}
SHARED_MUTANTS = {
    "decay of zero": ("store(rows + n, decay.minus_one());", "store(rows + n, all(-1.0f));"),
    "no decay": ("S[n][q] += S[n][q] * fade_j;", ""),
    "no decay in the backward": ("G[n] += G[n] * fade;", ""),
    "forgotten initial state": ("if (c.state_in != nullptr)", "if (c.state_in == nullptr)"),
    "no u term": (" * m.bonus[t]);\n    int i = 0;", " * 0.0f);\n    int i = 0;"),
    "no u term in r's gradient": ("u * k * dyv", "V{}"),
    "no u term in k's gradient": ("u * r * dyv", "V{}"),
    "no u term in v's gradient": (" + load(m.dy + n) * m.bonus[t]", ""),
    "u's gradient of one token only": ("du += r * k * dyv;", "du = r * k * dyv;"),
    "u's gradient of one chunk only": ("m.du[j + n] += du[n];", "m.du[j + n] = du[n];"),
    "read after the update": (
        "y[q] += S[n][q] * r_j;\n                S[n][q] += S[n][q] * fade_j;",
        "S[n][q] += S[n][q] * fade_j;\n                y[q] += S[n][q] * r_j;",
    ),
    "decay's gradient of a later state": ("load(S + n * W);", "load(S + (VALUES + n) * W);"),
    "v's gradient of some keys only": ("j == 0 ? V{} : load(partial + n * W);", "V{};"),
    "gradient lost between chunks": (
        "look_ahead<N, OWN>(c, m, item, n, at, rows);",
        CLEARED_GRADIENT.format("look_ahead<N, OWN>(c, m, item, n, at, rows);"),
    ),
    "forgotten chunk state": ("n > 0 ? c.chunk_states", "n < 0 ? c.chunk_states"),
    "forgotten final state's gradient": ("c.dstate_out == nullptr ? nullptr", "c.dstate_out != nullptr ? nullptr"),
    "forgotten starts": ("starts != nullptr && starts[t] != 0", "starts != nullptr && starts[t] > 1"),
    "gradient across a start": ("G[n] = V{};", ";"),
}
MUTANTS = {
    "wkv5": {
        **SHARED_MUTANTS,
        "decay's gradient of one token only": ("of_head += load(m.ddecay + n);", "of_head = load(m.ddecay + n);"),
        "decay's gradient of one chunk only": ("m.ddecay_of_head[j + n] +=", "m.ddecay_of_head[j + n] ="),
        "decay of the first head": ("static_cast<const float*>(w_raw) + head * N", "static_cast<const float*>(w_raw)"),
        "decay's gradient without its slope": ("m.ddecay_of_head[j] * m.slope[j]", "m.ddecay_of_head[j]"),
    },
    "wkv6": {
        **SHARED_MUTANTS,
        "decay's gradient without its slope": (" * load(m.slope + n)", ""),
        "u of the first head": (f"c.u + head * N, {FORWARD_ALONE}", f"c.u, {FORWARD_ALONE}"),
    },
    "wkv7": MUTANTS7,
}


@compiled
@every_operator
def test_what_is_no_mutant_passes(operator: str, tmp_path: Path) -> None:
    same = f"JOIN({operator}_forward"
    library = build_mutant(operator, HEAD_SIZE, tmp_path, same, same)
    for dtype, gate in GATE.items():
        case = make_case(CHUNK_LENGTH + 8, HEAD_SIZE, dtype, operator=operator)
        assert worst(through_library(library, case), expected(case)) < gate


# What is planted in the source that wkv5 shares with wkv6 is tried with wkv5 only where there is time for it.
@compiled
@pytest.mark.parametrize(
    ("operator", "name"),
    [
        pytest.param(operator, name, marks=[pytest.mark.slow] if operator == "wkv5" and name in SHARED_MUTANTS else [])
        for operator, mutants in MUTANTS.items()
        for name in mutants
    ],
)
def test_a_mutant_fails(operator: str, name: str, tmp_path: Path) -> None:
    mutant = build_mutant(operator, HEAD_SIZE, tmp_path, *MUTANTS[operator][name])
    for dtype, gate in GATE.items():
        case = make_case(CHUNK_LENGTH + 8, HEAD_SIZE, dtype, operator=operator)
        assert worst(through_library(mutant, case), expected(case)) > 5 * gate


@compiled
@every_operator
def test_the_check_of_a_fresh_build_refuses_a_mutant(operator: str, tmp_path: Path) -> None:
    mutant = build_mutant(operator, HEAD_SIZE, tmp_path, *MUTANTS[operator]["forgotten chunk state"])
    with pytest.raises(KernelError, match="wrong numbers"):
        wkv.check_library(RECURRENCES[operator], mutant, (HEAD_SIZE,))
