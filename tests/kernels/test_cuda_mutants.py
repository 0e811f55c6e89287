"""A CUDA kernel with a planted fault fails the gate, in at least one order of threads: the gate sees what it must."""

from __future__ import annotations

from pathlib import Path

import pytest

from rwkv_spec.ops.build_cuda import CHUNK_LENGTH
from tests.kernels.cuda_cases import ORDERS, build_kernel, emulated, expected, make_case, results
from tests.ops.cases import worst

pytestmark = emulated
GATE = 2e-6

# Text of the sources, and what takes its place.
STARTS = ("(__ldg(starts + token + t) != 0)", "(__ldg(starts + token + t) > 1)")
CHUNK_STATE = ("return chunk > 0 ? matrix_of_chunk", "return chunk < 0 ? matrix_of_chunk")
SUM_OF_HALF = ("for (int distance = L::SHORT / 2; distance > 0;", "for (int distance = L::SHORT / 2; distance > 1;")
BARRIER = "        __syncthreads();\n"

WKV7 = {
    "decay of zero": ("return expf((w_raw < 0.0f ? e : 1.0f)", "return 0.0f * ((w_raw < 0.0f ? e : 1.0f)"),
    "no delta term": ("__fmaf_rn(sa[s], b.x[e], x * decay.x[e])", "(x * decay.x[e])"),
    "no delta term in the backward": ("__fmaf_rn(dsa[s], a.x[e], ", "("),
    "no delta term for the keys": ("__fmaf_rn(a.x[s], dsa.x[e], g * decay.x[s])", "g * decay.x[s]"),
    "forgotten initial state": ("S.load_short_rows(matrix_of_block<N>(c.state_in), lay)", "S.clear()"),
    "forgotten chunk state": CHUNK_STATE,
    "a value's gradient lost between chunks": (
        "        read_chunks<T>(c, ahead, behind, number);\n",
        "        read_chunks<T>(c, ahead, behind, number);\n"
        "        if (number + 1 < num_chunks(c.shape.T)) by_value.clear();\n",
    ),
    "a key's gradient lost between chunks": (
        "        read_chunks<T>(c, ahead, behind, number);\n",
        "        read_chunks<T>(c, ahead, behind, number);\n"
        "        if (number + AHEAD + 1 < num_chunks(c.shape.T)) by_key.clear();\n",
    ),
    "forgotten final state's gradient for values": (
        "by_value.load_short_rows(dstate_out",
        "by_value.load_short_rows(nullptr",
    ),
    "forgotten final state's gradient for keys": ("by_key.load_long_rows(dstate_out", "by_key.load_long_rows(nullptr"),
    "forgotten starts": STARTS,
    "a value's gradient across a start": ("            G.clear();\n            continue;\n", ""),
    "a key's gradient across a start": ("if (n.clears(t)) decay = a = Floats<L::SHORT>{};", ""),
    "a state across a start in the backward": ("        if (n.clears(t)) S.clear();\n", ""),
    "a decay's gradient without its token": ("m.P[at] = m.k[at] * one_k + m.b[at] * one_b;", "m.P[at] = 0.0f;"),
    "a slope of one": ("return e * y * y * -RATE;", "return e * y * 0.0f + 1.0f;"),
    "a sum of some lanes": SUM_OF_HALF,
    "sa of some lanes": (
        "distance < L::GROUPS; distance *= 2)\n#pragma",
        "distance < L::GROUPS / 2; distance *= 2)\n#pragma",
    ),
    "rows of the wrong chunk": ("AHEAD * (~number & 1)", "AHEAD * (number & 1)"),
}
WKV7_BARRIERS = {
    "forward, after reading": (f"{BARRIER}        for (int t = 0; t < rows;)", "        for (int t = 0; t < rows;)"),
    "forward, before reading": (f"        // The next chunk's rows take the place of these.\n{BARRIER}", ""),
    "backward, after reading": (
        f"read_chunks<T>(c, ahead, behind, number);\n{BARRIER}",
        "read_chunks<T>(c, ahead, behind, number);\n",
    ),
    "backward, after the sweeps": (
        f"{BARRIER}        // What this reads nobody writes",
        "        // What this reads nobody writes",
    ),
}
WKV6 = {
    "decay of zero": ("return expf(-expf(w_raw));", "return 0.0f * w_raw;"),
    "read after the update": (
        "sum[s] += x * r_.x[e];\n",
        "x = __fmaf_rn(v_.x[s], k_.x[e], x * decay_.x[e]); sum[s] += x * r_.x[e];\n",
    ),
    "no bonus": ("one + v[lay.one()] * bonus", "one + 0.0f * bonus"),
    "no bonus in dr": ("ahead[t] + u * k * vdy[t]", "ahead[t]"),
    "no bonus in dk": ("dk = u * r[t] * vdy[t]", "dk = 0.0f"),
    "no bonus in dv": ("(t == s ? u.x[e] : 1.0f)", "(t == s ? 0.0f * u.x[e] : 1.0f)"),
    "forgotten initial state": ("S.load_long_rows(matrix_of_block<N>(c.state_in), L(thread_number()))", "S.clear()"),
    "forgotten chunk state": CHUNK_STATE,
    "a key's gradient lost between chunks": ("pass_over<true>(by_key, m, rows);", "by_key.clear();"),
    "a value's gradient lost between chunks": ("pass_over<false>(by_value, m, rows);", "by_value.clear();"),
    "forgotten final state's gradient for keys": (
        "by_key.load_short_rows(matrix_of_block<N>(c.dstate_out)",
        "by_key.load_short_rows(nullptr",
    ),
    "forgotten final state's gradient for values": (
        "by_value.load_long_rows(matrix_of_block<N>(c.dstate_out)",
        "by_value.load_long_rows(nullptr",
    ),
    "forgotten starts": STARTS,
    "products across a start": (
        "const float keep = t > s ? keeps(starts, t) : 1.0f;",
        "const float keep = starts == ~0u ? 0.0f : 1.0f;",
    ),
    "a state across a start": (
        "m.decay[t * ROW + key] * (t + 1 < CHUNK ? keeps(starts, t + 1) : 1.0f)",
        "m.decay[t * ROW + key]",
    ),
    "a gradient across a chunk's first start": ("through = keeps(starts, 0)", "through = 1.0f"),
    "a token's own product in the decay": ("for (int later = t + 1;", "for (int later = t;"),
    "no way through the chunk for the decay": ("ddecay_t += product * end;", ""),
    "tokens behind the last decay too": ("FILL && t >= rows ? 1.0f", "FILL && t > 32 ? 1.0f"),
    "a slope of one": ("return decay > 0.0f ? -decay * expf(w_raw) : 0.0f;", "return decay + 0.0f * w_raw;"),
    "a sum of some lanes": SUM_OF_HALF,
}
WKV6_BARRIERS = {
    "forward, before reading": (
        f"        // The rows of the chunk before are still read, and those of the head not yet written.\n{BARRIER}",
        "",
    ),
    "forward, after reading": (f"{BARRIER}        sum_bonus", "        sum_bonus"),
    "forward, after the bonus": (f"{BARRIER}        for (int t = 0; t < rows;)", "        for (int t = 0; t < rows;)"),
    "backward, after reading": (
        f"{BARRIER}        if (KEYS && works) multiply_keys",
        "        if (KEYS && works) multiply_keys",
    ),
    "backward, after the products": (
        f"{BARRIER}        if (KEYS && thread_in_role() < N)\n",
        "        if (KEYS && thread_in_role() < N)\n",
    ),
    "backward, after the keys": (f"{BARRIER}        if (VALUES && works) {{", "        if (VALUES && works) {"),
    "backward, before reading": (f"        // The next chunk's rows take the place of these.\n{BARRIER}", ""),
}
WKV5 = {
    "a decay of the first head": ("(w_raw)[static_cast<int64_t>(head) * N + j]", "(w_raw)[j]"),
    "u of the first head": ("u[static_cast<int64_t>(head) * N + j]", "u[j]"),
    "tokens behind the last decay too": ("n / N < rows ? fixed[n % N] : 1.0f", "fixed[n % N]"),
    "a decay's gradient of the last chunk alone": ("ddecay += ddecay_t;", "ddecay = ddecay_t;"),
    "a slope of one": ("ddecay * Decay::slope(w_raw, m.fixed[key])", "ddecay * w_raw"),
}
FAULTS = {"wkv7": WKV7, "wkv6": WKV6, "wkv5": WKV5}
LOGIC = [(name, fault) for name, faults in FAULTS.items() for fault in faults]


def check_that_it_fails(name: str, head_size: int, change: tuple[str, str], folder: Path) -> None:
    library = build_kernel(name, head_size, folder, dict([change]))
    case = make_case(name, 2 * CHUNK_LENGTH + 8, head_size)
    want = expected(case)
    # A difference with a number that is not one is infinite.
    assert max(worst(results(library, case, order=order), want) for order in ORDERS) > 5 * GATE


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fault"), LOGIC)
def test_a_mutant_fails(name: str, fault: str, tmp_path: Path) -> None:
    check_that_it_fails(name, 32, FAULTS[name][fault], tmp_path)


@pytest.mark.parametrize("fault", WKV7_BARRIERS)
def test_a_missing_barrier_fails(fault: str, tmp_path: Path) -> None:
    check_that_it_fails("wkv7", 64, WKV7_BARRIERS[fault], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("fault", WKV6_BARRIERS)
def test_a_missing_barrier_in_wkv6_fails(fault: str, tmp_path: Path) -> None:
    check_that_it_fails("wkv6", 64, WKV6_BARRIERS[fault], tmp_path)


@pytest.mark.slow
def test_a_missing_barrier_between_the_sweeps_of_a_wide_head_fails(tmp_path: Path) -> None:
    check_that_it_fails("wkv7", 80, ("        if (AHEAD == 0) __syncthreads();\n", ""), tmp_path)
