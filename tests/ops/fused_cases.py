"""Inputs that a model can emit for each fused operator, and all results of one call: outputs and every gradient.

All that a call does not fill is NaN: results are computed on memory that torch fills with it.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from rwkv_spec.ops.fused import ROWS_OF_A_PIECE, FusedOperator
from rwkv_spec.ops.gated_norm import GATED_NORM, Bonus, gated_norm
from rwkv_spec.ops.norm_mix import NORM_MIX, norm_mix
from rwkv_spec.ops.relu2 import RELU2, relu2
from rwkv_spec.ops.sigmoid_gate import SIGMOID_GATE, sigmoid_gate
from rwkv_spec.ops.token_mix import TOKEN_MIX, token_mix
from rwkv_spec.ops.wkv7_prepare import WKV7_PREPARE, Residual, wkv7_prepare
from tests.ops.cases import GATE, error_ratio

# Around a vector, around a piece, and several pieces with a short one at the end.
ROWS = (1, 15, 16, 17, ROWS_OF_A_PIECE - 1, ROWS_OF_A_PIECE, ROWS_OF_A_PIECE + 1, 257)
CHANNELS = (16, 48, 128, 208)
# Heads and channels of a head, which make the same widths.
HEADS = ((1, 16), (3, 16), (1, 48), (2, 64), (1, 128), (13, 16))

every_number_of_rows = pytest.mark.parametrize("rows", ROWS)
every_dtype = pytest.mark.parametrize("dtype", list(GATE), ids=["float32", "bfloat16"])

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A call: its inputs by name, rounded to the dtype where that is theirs, and how they give outputs by name.

    `run(inputs, dtype, backend)` must not change the inputs.
    """

    dtype: torch.dtype
    inputs: Tensors
    run: Callable[[Tensors, torch.dtype, str], Tensors]

    def double(self) -> Case:
        return Case(torch.float64, {name: x.double() for name, x in self.inputs.items()}, self.run)

    def changed(self, **inputs: Tensor) -> Case:
        return replace(self, inputs={**self.inputs, **inputs})

    def upstream(self, name: str, output: Tensor) -> Tensor:
        """What flows back into an output: the same for any dtype to the places of this case's."""
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return torch.randn(output.shape, generator=generator).to(self.dtype).to(output)


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Whatever torch makes without filling it is NaN."""
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was)


def outputs_of(case: Case, backend: str) -> tuple[Tensors, Tensors]:
    """Leaves and outputs, with the graph between them."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in case.inputs.items()}
    return leaves, case.run(leaves, case.dtype, backend)


def results(case: Case, backend: str, *, only: Sequence[str] = (), upstream: Tensors | None = None) -> Tensors:
    """Outputs, and as dNAME the gradients of what flows into them all, or into those of `only`."""
    with poisoned_memory():
        leaves, outputs = outputs_of(case, backend)
        into = [name for name in outputs if name in only or not only]
        flows = upstream or {name: case.upstream(name, outputs[name]) for name in into}
        gradients = torch.autograd.grad(
            [outputs[name] for name in into],
            list(leaves.values()),
            [flows[name].to(outputs[name].dtype) for name in into],
            materialize_grads=True,
        )
    named = {f"d{name}": x for name, x in zip(leaves, gradients, strict=True)}
    return {**{name: x.detach() for name, x in outputs.items()}, **named}


def expected(case: Case, *, only: Sequence[str] = ()) -> Tensors:
    """The same by the reference in float64."""
    outputs = {name: x.detach() for name, x in outputs_of(case, "torch")[1].items()}
    upstream = {name: case.upstream(name, x) for name, x in outputs.items()}
    return results(case.double(), "torch", only=only, upstream=upstream)


def assert_right(got: Mapping[str, Tensor], want: Mapping[str, Tensor], place: object = "") -> None:
    """Every result within the gate of its own dtype: what is computed in float32 stays so among bfloat16."""
    assert got.keys() == want.keys()
    for name, x in got.items():
        ratio = error_ratio(x, want[name])
        assert ratio < GATE[x.dtype], f"{place} {name}: error ratio {ratio:.1e}"


def assert_case(case: Case, place: object = "", *, only: Sequence[str] = ()) -> None:
    assert_right(results(case, "cpu", only=only), expected(case, only=only), place)


class Maker:
    """Random tensors, the same for the same sizes."""

    def __init__(self, dtype: torch.dtype, *sizes: int) -> None:
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(sum(size * 1009**n for n, size in enumerate(sizes)))

    def wide(self, *shape: int, scale: float = 1.0, middle: float = 0.0) -> Tensor:
        return torch.randn(shape, generator=self.generator) * scale + middle

    def rows(self, *shape: int, scale: float = 1.0) -> Tensor:
        return self.wide(*shape, scale=scale).to(self.dtype)

    def share(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator)

    def starts(self, B: int, T: int) -> Tensor:
        """Among the marked tokens: a first one, one in the middle, the last of a piece and the first of the next."""
        flags = torch.rand((B, T), generator=self.generator) < 0.1
        flags[0, 0], flags[-1, 0] = B > 1, False
        flags[-1, T // 2] = T > 1
        flags[0, ROWS_OF_A_PIECE : ROWS_OF_A_PIECE + 1] = True
        flags[-1, ROWS_OF_A_PIECE - 1 : ROWS_OF_A_PIECE + 1] = torch.tensor([True, False])[: max(T - 63, 0)]
        return flags


def norm_mix_case(
    T: int,
    C: int,
    dtype: torch.dtype,
    *,
    B: int = 2,
    M: int = 2,
    added: bool = True,
    first: bool = True,
    starts: bool = True,
    flags: Tensor | None = None,
) -> Case:
    make = Maker(dtype, B, T, C, M)
    inputs = {
        "x": make.wide(B, T, C, scale=2.0, middle=0.3),
        "weight": make.wide(C, scale=0.3, middle=1.0),
        "bias": make.wide(C, scale=0.3),
        "shares": make.share(M, C),
        **({"added": make.rows(B, T, C)} if added else {}),
        **({"first": make.wide(B, C)} if first else {}),
    }
    starts_BT = (make.starts(B, T) if flags is None else flags) if starts else None

    def run(x: Tensors, dtype: torch.dtype, backend: str) -> Tensors:
        mixed = norm_mix(
            x["x"],
            x.get("added"),
            x["weight"],
            x["bias"],
            x["shares"],
            first_BC=x.get("first"),
            starts_BT=None if starts_BT is None else starts_BT.to(x["x"].device),
            dtype=dtype,
            eps=1e-5,
            backend=backend,
        )
        each = {f"mixed_{m}": y for m, y in enumerate(mixed.mixed_BTC)}
        return {"sum": mixed.sum_BTC, "last": mixed.last_BC, **each}

    return Case(dtype, inputs, run)


def relu2_case(count: int, dtype: torch.dtype) -> Case:
    make = Maker(dtype, count)

    def run(x: Tensors, dtype: torch.dtype, backend: str) -> Tensors:
        # What is overwritten must not be an input.
        return {"y": relu2(x["x"].clone(), backend=backend)}

    return Case(dtype, {"x": make.rows(count, scale=2.0)}, run)


def gated_norm_case(R: int, H: int, N: int, dtype: torch.dtype, *, bonus: bool) -> Case:
    make = Maker(dtype, R, H, N)
    C = H * N
    inputs = {
        "y": make.rows(R, C, scale=3.0),
        "gate": make.rows(R, C, scale=2.0),
        "weight": make.wide(C, scale=0.3, middle=1.0),
        "bias": make.wide(C, scale=0.3),
    }
    if bonus:
        inputs |= {name: make.rows(R, C) for name in ("r", "k", "v")}
        # So that the sum over a head is none of numbers that cancel: of a single row it would have few right digits.
        inputs["k"] = (0.5 * inputs["k"] + inputs["r"]).to(dtype)
        inputs["r_k"] = make.wide(H, N, scale=0.3, middle=0.5)

    def run(x: Tensors, dtype: torch.dtype, backend: str) -> Tensors:
        own = Bonus(x["r"], x["k"], x["v"], x["r_k"]) if bonus else None
        main = (x["y"], x["gate"], x["weight"], x["bias"])
        return {"out": gated_norm(*main, bonus=own, num_heads=H, eps=1e-3, backend=backend)}

    return Case(dtype, inputs, run)


def wkv7_prepare_case(R: int, H: int, N: int, dtype: torch.dtype, *, residual: bool) -> Case:
    make = Maker(dtype, R, H, N)
    C = H * N
    inputs = {name: make.rows(R, C) for name in ("w_low", "a_low", "k", "v")}
    inputs |= {name: make.wide(C) for name in ("w0", "a0", "k_k", "k_a")}
    if residual:
        inputs |= {"v_low": make.rows(R, C), "v_first": make.rows(R, C), "v0": make.wide(C)}

    def run(x: Tensors, dtype: torch.dtype, backend: str) -> Tensors:
        prepared = wkv7_prepare(
            *(x[name] for name in ("w_low", "a_low", "k", "v")),
            Residual(x["v_low"], x["v_first"], x["v0"]) if residual else None,
            w0_C=x["w0"],
            a0_C=x["a0"],
            k_k_C=x["k_k"],
            k_a_C=x["k_a"],
            head_size=N,
            backend=backend,
        )
        return dict(zip(("w_raw", "k_out", "v_out", "a", "b"), prepared, strict=True))

    return Case(dtype, inputs, run)


def token_mix_case(
    T: int,
    C: int,
    dtype: torch.dtype,
    *,
    B: int = 2,
    first: bool = True,
    starts: bool = True,
    flags: Tensor | None = None,
) -> Case:
    make = Maker(dtype, B, T, C)
    inputs = {"x": make.rows(B, T, C), "added": make.rows(5, B * T, C, scale=0.3), "shares": make.share(5, C)}
    if first:
        inputs["first"] = make.wide(B, C)
    starts_BT = (make.starts(B, T) if flags is None else flags) if starts else None

    def run(x: Tensors, dtype: torch.dtype, backend: str) -> Tensors:
        main = (x["x"], x["added"], x["shares"])
        flags_BT = None if starts_BT is None else starts_BT.to(x["x"].device)
        mixed = token_mix(*main, first_BC=x.get("first"), starts_BT=flags_BT, backend=backend)
        return {f"mixed_{m}": y for m, y in enumerate(mixed)}

    return Case(dtype, inputs, run)


def sigmoid_gate_case(R: int, C: int, dtype: torch.dtype) -> Case:
    make = Maker(dtype, R, C)

    def run(x: Tensors, dtype: torch.dtype, backend: str) -> Tensors:
        return {"out": sigmoid_gate(x["gate"], x["value"], backend=backend)}

    return Case(dtype, {"gate": make.rows(R, C, scale=2.0), "value": make.rows(R, C)}, run)


@dataclass(frozen=True)
class Example:
    """A usual call of an operator, for what is promised of all of them."""

    operator: FusedOperator
    make: Callable[[int, int, torch.dtype], Case]


# Of so many rows and channels, these a multiple of 32; each operator once with and once without what is optional.
EXAMPLES = {
    "norm_mix": Example(NORM_MIX, lambda R, C, dtype: norm_mix_case(R, C, dtype, B=1)),
    "norm_mix of x alone": Example(
        NORM_MIX, lambda R, C, dtype: norm_mix_case(R, C, dtype, B=1, M=6, added=False, first=False, starts=False)
    ),
    "relu2": Example(RELU2, lambda R, C, dtype: relu2_case(R * C, dtype)),
    "gated_norm": Example(GATED_NORM, lambda R, C, dtype: gated_norm_case(R, C // 16, 16, dtype, bonus=False)),
    "gated_norm with bonus": Example(
        GATED_NORM, lambda R, C, dtype: gated_norm_case(R, C // 16, 16, dtype, bonus=True)
    ),
    "wkv7_prepare": Example(WKV7_PREPARE, lambda R, C, dtype: wkv7_prepare_case(R, C // 16, 16, dtype, residual=True)),
    "wkv7_prepare of block 0": Example(
        WKV7_PREPARE, lambda R, C, dtype: wkv7_prepare_case(R, C // 16, 16, dtype, residual=False)
    ),
    "token_mix": Example(TOKEN_MIX, lambda R, C, dtype: token_mix_case(R, C, dtype, B=1)),
    "token_mix of x alone": Example(
        TOKEN_MIX, lambda R, C, dtype: token_mix_case(R, C, dtype, B=1, first=False, starts=False)
    ),
    "sigmoid_gate": Example(SIGMOID_GATE, sigmoid_gate_case),
}
every_example = pytest.mark.parametrize("example", EXAMPLES.values(), ids=list(EXAMPLES))

OPERATORS = {example.operator.name: example.operator for example in EXAMPLES.values()}
every_operator = pytest.mark.parametrize("operator", list(OPERATORS))
