"""The fused CUDA operators under the emulator: their C interface called on fenced tensors, all results by name.

Tensors that a call has to fill are not a number before it; no band around a tensor may change.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rwkv_spec.ops.fused import ROWS_OF_A_PIECE_ON_CUDA, num_pieces
from rwkv_spec.ops.recurrence import DTYPE_CODES
from rwkv_spec.ops.softmax_loss import softmax_loss_reference
from tests.kernels.cuda_cases import FORWARD, ORDERS, Fenced
from tests.ops.cases import error_ratio
from tests.ops.fused_cases import (
    Case,
    Tensors,
    expected,
    gated_norm_case,
    norm_mix_case,
    relu2_case,
    sigmoid_gate_case,
    token_mix_case,
    wkv7_prepare_case,
)

# Of each result's own dtype: what is float32 among rows of 16 bits stays so.
GATE = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
PIECE = ROWS_OF_A_PIECE_ON_CUDA


def call(
    library: ctypes.CDLL,
    function: str,
    sizes: Sequence[int],
    dtype: torch.dtype | int,
    tensors: Sequence[Tensor | None],
    scalars: Sequence[float] = (),
) -> int:
    """One C function, on no stream. Gives its code."""
    return int(
        getattr(library, function)(
            (ctypes.c_int64 * len(sizes))(*sizes),
            ctypes.c_int(dtype if isinstance(dtype, int) else DTYPE_CODES[dtype]),
            (ctypes.c_void_p * len(tensors))(*(None if x is None else x.data_ptr() for x in tensors)),
            (ctypes.c_float * len(scalars))(*scalars),
            ctypes.c_void_p(None),
        )
    )


@dataclass(frozen=True)
class Launch:
    """Calls of one library, in one order of threads."""

    library: ctypes.CDLL
    dtype: torch.dtype
    order: int

    def __call__(
        self,
        function: str,
        sizes: Sequence[int],
        given: Sequence[Tensor | None],
        made: Sequence[Tensor | None],
        after: Sequence[Tensor | None] = (),
        scalars: Sequence[float] = (),
    ) -> list[Tensor | None]:
        """What the call made, in tensors like those of `made`; its tensors are given, made, after."""
        self.library.cuemu_set_order(self.order)
        fence = Fenced()
        outputs = [fence.of(x, poison=True) for x in made]
        tensors = (*(fence.of(x) for x in given), *outputs, *(fence.of(x) for x in after))
        code = call(self.library, function, sizes, self.dtype, tensors, scalars)
        assert code == 0, self.library.cuemu_message().decode()
        assert fence.whole(), f"{function} wrote outside of a tensor"
        return outputs


def flows_of(case: Case, outputs: Mapping[str, Tensor]) -> Tensors:
    return {name: case.upstream(name, x) for name, x in outputs.items()}


def named(names: Sequence[str], values: Sequence[Tensor | None]) -> Tensors:
    return {name: x for name, x in zip(names, values, strict=True) if x is not None}


def norm_mix_results(launch: Launch, case: Case, starts: Tensor | None) -> Tensors:
    x = case.inputs
    B, T, C = x["x"].shape
    M, eps = len(x["shares"]), (1e-5,)
    added, first = x.get("added"), x.get("first")
    sizes = (B, T, C, M, PIECE)
    rows = torch.empty(B, T, C, dtype=case.dtype)
    inputs = (x["x"], added, x["weight"], x["bias"], x["shares"], first, starts)
    made = (None if added is None else x["x"], torch.empty(B, T, 2), torch.empty(B, C), None, *M * [rows])
    total, stats, last, _, *mixed = launch("norm_mix_forward", sizes, inputs, made, scalars=eps)
    outputs = named(
        ("sum", "last", *(f"mixed_{m}" for m in range(M))), (x["x"] if total is None else total, last, *mixed)
    )
    flows = flows_of(case, outputs)
    kept = (outputs["sum"], stats, *inputs[2:])
    dsum = flows["sum"] if added is not None else None
    own = added is not None and case.dtype != torch.float32
    made = (
        x["x"],
        rows if own else None,
        None if first is None else first,
        torch.empty(B * num_pieces(T, PIECE), M + 2, C),
        None,
    )
    grads = [flows[f"mixed_{m}"] for m in range(M)]
    dx, dadded, dfirst, sums, _ = launch(
        "norm_mix_backward", sizes, (*kept, dsum, flows["last"]), made, after=grads, scalars=eps
    )
    assert dx is not None and sums is not None
    if added is None:
        # The sum is x itself, so what flows into it does not pass through the operator.
        dx = dx + flows["sum"]
    total_KC = sums.sum(dim=0)
    gradients = (dx, total_KC[M], total_KC[M + 1], total_KC[:M], dadded if own else dx, dfirst)
    names = ("x", "weight", "bias", "shares", "added", "first")
    return {**outputs, **{f"d{name}": y for name, y in named(names, gradients).items() if name in x}}


def relu2_results(launch: Launch, case: Case) -> Tensors:
    x = case.inputs["x"].clone()
    launch.library.cuemu_set_order(launch.order)
    fence = Fenced()
    y = fence.of(x)
    assert y is not None
    assert call(launch.library, "relu2_forward", (x.numel(),), case.dtype, (y,)) == 0
    assert fence.whole(), "relu2_forward wrote outside of a tensor"
    (dx,) = launch("relu2_backward", (x.numel(),), (y, flows_of(case, {"y": y})["y"]), (x,))
    return named(("y", "dx"), (y, dx))


def gated_norm_results(launch: Launch, case: Case, N: int) -> Tensors:
    x = case.inputs
    R, C = x["y"].shape
    sizes, eps, rows = (R, C // N, N, PIECE), (1e-3,), x["y"]
    names = ("y", "gate", "r", "k", "v", "weight", "bias", "r_k")
    inputs = tuple(x.get(name) for name in names)
    (out,) = launch("gated_norm_forward", sizes, inputs, (rows,), scalars=eps)
    assert out is not None
    made = (rows, rows, *(x.get(name) for name in "rkv"), torch.empty(num_pieces(R, PIECE), 3, C))
    given = (*inputs, flows_of(case, {"out": out})["out"])
    *gradients, sums = launch("gated_norm_backward", sizes, given, made, scalars=eps)
    assert sums is not None
    dweight, dbias, dr_k = sums.sum(dim=0)
    by_name = named(names, (*gradients, dweight, dbias, dr_k.view(C // N, N)))
    return {"out": out, **{f"d{name}": y for name, y in by_name.items() if name in x}}


def wkv7_prepare_results(launch: Launch, case: Case, N: int) -> Tensors:
    x = case.inputs
    R, C = x["k"].shape
    sizes, rows = (R, C // N, N, PIECE), x["k"]
    mixes = "v_low" in x
    names = ("w_low", "a_low", "k", "v", "v_low", "v_first", "w0", "a0", "v0", "k_k", "k_a")
    inputs = [None if name == "v" and not mixes else x.get(name) for name in names]
    mixed = rows if mixes else None
    made = launch("wkv7_prepare_forward", sizes, inputs, (rows, rows, mixed, rows, rows))
    outputs = named(("w_raw", "k_out", "v_out", "a", "b"), made)
    flows = flows_of(case, outputs)
    into = [flows.get(name) for name in ("w_raw", "k_out", "v_out", "a", "b")]
    made = (rows, rows, mixed, mixed, mixed, torch.empty(num_pieces(R, PIECE), 5, C))
    *gradients, sums = launch("wkv7_prepare_backward", sizes, (*inputs[1:6], *inputs[7:], *into), made)
    assert sums is not None
    dw0, da0, dv0, dk_k, dk_a = sums.sum(dim=0)
    by_name = named(names, (flows["w_raw"], *gradients, dw0, da0, dv0 if mixes else None, dk_k, dk_a))
    if not mixes:
        # Block 0 hands the value on.
        outputs["v_out"], by_name["v"] = x["v"], case.upstream("v_out", x["v"])
    return {**outputs, **{f"d{name}": y for name, y in by_name.items()}}


def token_mix_results(launch: Launch, case: Case, starts: Tensor | None) -> Tensors:
    x = case.inputs
    B, T, C = x["x"].shape
    M, rows, first = len(x["shares"]), x["x"], x.get("first")
    sizes, inputs = (B, T, C, M, PIECE), (x["x"], x["added"], x["shares"], first, starts)
    mixed = launch("token_mix_forward", sizes, inputs, M * [rows])
    outputs = named([f"mixed_{m}" for m in range(M)], mixed)
    grads = list(flows_of(case, outputs).values())
    made = (rows, x["added"], first, torch.empty(B * num_pieces(T, PIECE), M + 1, C))
    dx, dadded, dfirst, sums = launch("token_mix_backward", sizes, inputs, made, after=grads)
    assert sums is not None
    gradients = (dx, dadded, dfirst, sums[:, :M].sum(dim=0))
    return {**outputs, **named(("dx", "dadded", "dfirst", "dshares"), gradients)}


def sigmoid_gate_results(launch: Launch, case: Case) -> Tensors:
    gate, value = case.inputs["gate"], case.inputs["value"]
    outputs = named(("out",), launch("sigmoid_gate_forward", (gate.numel(),), (gate, value), (value,)))
    given = (gate, value, flows_of(case, outputs)["out"])
    gradients = launch("sigmoid_gate_backward", (gate.numel(),), given, (gate, value))
    return {**outputs, **named(("dgate", "dvalue"), gradients)}


@dataclass(frozen=True)
class CudaCase:
    """A case of an operator, and how its results come from a library."""

    operator: str
    case: Case
    results: Callable[[Launch, Case], Tensors]

    def by(self, library: ctypes.CDLL, order: int = FORWARD) -> Tensors:
        return self.results(Launch(library, self.case.dtype, order), self.case)

    def worst(self, library: ctypes.CDLL, order: int = FORWARD) -> float:
        """The largest error ratio, in units of the gate of the result's dtype."""
        want = expected(self.case)
        got = self.by(library, order)
        assert got.keys() == want.keys()
        ratios = [error_ratio(x, want[name]) / GATE[x.dtype] for name, x in got.items()]
        return float(torch.tensor(ratios).nan_to_num(float("inf")).max())

    def check(self, library: ctypes.CDLL, order: int = FORWARD) -> Tensors:
        got, want = self.by(library, order), expected(self.case)
        assert got.keys() == want.keys()
        for name, x in got.items():
            ratio = error_ratio(x, want[name])
            assert ratio < GATE[x.dtype], f"{self.operator} {name}: error ratio {ratio:.1e}"
        return got

    def check_in_every_order(self, library: ctypes.CDLL) -> None:
        """Right, and the same to the last bit whichever thread runs first."""
        first = self.check(library)
        for order in ORDERS[1:]:
            got = self.by(library, order)
            assert all(torch.equal(x, got[name]) for name, x in first.items()), order


def starts_of(T: int) -> Tensor:
    """For two sequences; among the marked are a first token, one in the middle, and one behind a piece's border."""
    flags = torch.rand((2, T), generator=torch.Generator().manual_seed(T)) < 0.1
    flags[0, 0], flags[1, 0], flags[1, T // 2] = True, False, T > 1
    flags[0, PIECE - 1 : PIECE + 1] = torch.tensor([False, True])[: max(T - PIECE + 1, 0)]
    return flags


def norm_mix_cuda(T: int, C: int, dtype: torch.dtype, *, starts: bool = True, **options: int | bool) -> CudaCase:
    flags = starts_of(T)
    case = norm_mix_case(T, C, dtype, starts=starts, flags=flags, **options)  # type: ignore[arg-type]
    return CudaCase("norm_mix", case, lambda launch, case: norm_mix_results(launch, case, flags if starts else None))


def token_mix_cuda(T: int, C: int, dtype: torch.dtype, *, first: bool = True, starts: bool = True) -> CudaCase:
    flags = starts_of(T)
    case = token_mix_case(T, C, dtype, first=first, starts=starts, flags=flags)
    return CudaCase("token_mix", case, lambda launch, case: token_mix_results(launch, case, flags if starts else None))


def sigmoid_gate_cuda(R: int, C: int, dtype: torch.dtype) -> CudaCase:
    return CudaCase("sigmoid_gate", sigmoid_gate_case(R, C, dtype), sigmoid_gate_results)


def relu2_cuda(count: int, dtype: torch.dtype) -> CudaCase:
    return CudaCase("relu2", relu2_case(count, dtype), relu2_results)


def gated_norm_cuda(R: int, C: int, N: int, dtype: torch.dtype, *, bonus: bool) -> CudaCase:
    case = gated_norm_case(R, C // N, N, dtype, bonus=bonus)
    return CudaCase("gated_norm", case, lambda launch, case: gated_norm_results(launch, case, N))


def wkv7_prepare_cuda(R: int, C: int, N: int, dtype: torch.dtype, *, residual: bool) -> CudaCase:
    case = wkv7_prepare_case(R, C // N, N, dtype, residual=residual)
    return CudaCase("wkv7_prepare", case, lambda launch, case: wkv7_prepare_results(launch, case, N))


# ---- softmax_loss, which is in place and has no backward ----

L2WRAP = 0.3


def softmax_inputs(P: int, V: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, targets and weights; one of the rows, if there are several, weighs nothing and holds no numbers."""
    generator = torch.Generator().manual_seed(1000 * P + V)
    logits = (4 * torch.randn(P, V, generator=generator)).to(dtype)
    targets = torch.randint(V, (P,), generator=generator)
    targets[0], targets[-1] = 0, V - 1
    weights = torch.rand(P, generator=generator) + 0.1
    if P > 2:
        logits[1], weights[1] = float("nan"), 0.0
    return logits, targets, weights


def softmax_results(
    library: ctypes.CDLL,
    inputs: Sequence[Tensor],
    *,
    want_gradient: bool = True,
    order: int = FORWARD,
    shift: int = 0,
) -> tuple[Tensor, Tensor]:
    """Losses, and the logits after the call, which lay `shift` numbers behind a multiple of 16 bytes."""
    library.cuemu_set_order(order)
    logits, targets, weights = inputs
    fence = Fenced()
    whole = fence.of(torch.zeros(logits.numel() + shift, dtype=logits.dtype))
    loss = fence.of(weights, poison=True)
    assert whole is not None and loss is not None
    inner = whole[shift:].view(logits.shape)
    inner.copy_(logits)
    tensors = (inner, fence.of(targets), fence.of(weights), loss)
    code = call(library, "softmax_loss", logits.shape, logits.dtype, tensors, (L2WRAP, float(want_gradient)))
    assert code == 0, library.cuemu_message().decode()
    assert fence.whole(), "written outside of a tensor"
    assert not whole[:shift].any()
    return loss, inner.clone()


def softmax_expected(inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    logits, targets, weights = inputs
    wide = logits.double()
    loss = softmax_loss_reference(wide, targets, weights.double(), l2wrap=L2WRAP, want_gradient=True)
    return loss, wide
