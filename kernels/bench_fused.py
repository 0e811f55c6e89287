"""Times the fused operators, each beside what plain torch and its autograd do instead: first the gate, then the clock.

python kernels/bench_fused.py                          all of them in the two usual shapes
python kernels/bench_fused.py --operator norm_mix --shape 16,512,2,64 --dtype fp32 --write --note "quiet machine"

Rows are those of kernels/bench.py: [B, T, C] with C = H N, and four times as many channels for relu2.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from bench import DTYPES, GATE_TIMES, GATES, Jobs, Shape, error_ratio, parse, run
from torch import Tensor

from rwkv_spec.errors import KernelError
from rwkv_spec.ops.fused import CHANNELS_OF_A_VECTOR
from rwkv_spec.ops.gated_norm import Bonus, gated_norm
from rwkv_spec.ops.norm_mix import norm_mix
from rwkv_spec.ops.relu2 import relu2
from rwkv_spec.ops.sigmoid_gate import sigmoid_gate
from rwkv_spec.ops.token_mix import NUM_OUTPUTS, token_mix
from rwkv_spec.ops.wkv7_prepare import Residual, wkv7_prepare

GATE_OF = {DTYPES[name]: gate for name, gate in GATES.items()}
Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Call:
    """An operator at work: its inputs by name, and outputs from inputs of any dtype by a backend.

    `forward` is what is timed where `run` does more than the operator.
    """

    inputs: dict[str, Tensor]
    run: Callable[[dict[str, Tensor], torch.dtype, str], Outputs]
    forward: Callable[[str], object] | None = None


class Maker:
    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        self.B, self.T, self.H, self.N = shape
        self.C = self.H * self.N
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(self.T)

    def wide(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, generator=self.generator)

    def rows(self) -> Tensor:
        return self.wide(self.B * self.T, self.C).to(self.dtype)


def call_norm_mix(make: Maker, outputs: int = 6) -> Call:
    """The beginning of x070's time-mix, with six mixed outputs."""
    sequences = (make.B, make.T, make.C)
    inputs = {
        "x": make.wide(*sequences),
        "added": make.rows().view(sequences),
        "weight": make.wide(make.C),
        "bias": make.wide(make.C),
        "shares": make.wide(outputs, make.C),
    }
    starts_BT = torch.zeros(sequences[:2], dtype=torch.bool)
    starts_BT[0, make.T // 3] = True

    def apply(x: dict[str, Tensor], dtype: torch.dtype, backend: str) -> Outputs:
        mixed = norm_mix(*x.values(), first_BC=None, starts_BT=starts_BT, dtype=dtype, eps=1e-5, backend=backend)
        return mixed.sum_BTC, *mixed.mixed_BTC, mixed.last_BC

    return Call(inputs, apply)


def call_relu2(make: Maker) -> Call:
    x_RF = torch.cat([make.rows() for _ in range(4)], dim=1)
    # Zeros and ones stay what they are, however often they are overwritten by their squares.
    hidden_RF = (x_RF > 0).to(make.dtype)

    def apply(x: dict[str, Tensor], dtype: torch.dtype, backend: str) -> Outputs:
        return (relu2(x["x"].clone(), backend=backend),)

    return Call({"x": x_RF}, apply, lambda backend: relu2(hidden_RF, backend=backend))


def call_gated_norm(make: Maker) -> Call:
    """The end of x070's time-mix, with its bonus."""
    inputs = {name: make.rows() for name in ("y", "gate", "r", "k", "v")}
    inputs |= {"weight": make.wide(make.C), "bias": make.wide(make.C), "r_k": make.wide(make.H, make.N)}

    def apply(x: dict[str, Tensor], dtype: torch.dtype, backend: str) -> Outputs:
        bonus = Bonus(x["r"], x["k"], x["v"], x["r_k"])
        main = (x["y"], x["gate"], x["weight"], x["bias"])
        return (gated_norm(*main, bonus=bonus, num_heads=make.H, eps=64e-5, backend=backend),)

    return Call(inputs, apply)


def call_wkv7_prepare(make: Maker) -> Call:
    inputs = {name: make.rows() for name in ("w_low", "a_low", "k", "v", "v_low", "v_first")}
    inputs |= {name: make.wide(make.C) for name in ("v0", "w0", "a0", "k_k", "k_a")}

    def apply(x: dict[str, Tensor], dtype: torch.dtype, backend: str) -> Outputs:
        return wkv7_prepare(
            *(x[name] for name in ("w_low", "a_low", "k", "v")),
            Residual(x["v_low"], x["v_first"], x["v0"]),
            w0_C=x["w0"],
            a0_C=x["a0"],
            k_k_C=x["k_k"],
            k_a_C=x["k_a"],
            head_size=make.N,
            backend=backend,
        )

    return Call(inputs, apply)


def call_token_mix(make: Maker) -> Call:
    sequences = (make.B, make.T, make.C)
    inputs = {
        "x": make.rows().view(sequences),
        "added": torch.stack([make.rows() for _ in range(NUM_OUTPUTS)]),
        "shares": make.wide(NUM_OUTPUTS, make.C),
    }

    def apply(x: dict[str, Tensor], dtype: torch.dtype, backend: str) -> Outputs:
        return token_mix(*x.values(), first_BC=None, starts_BT=None, backend=backend)

    return Call(inputs, apply)


def call_sigmoid_gate(make: Maker) -> Call:
    def apply(x: dict[str, Tensor], dtype: torch.dtype, backend: str) -> Outputs:
        return (sigmoid_gate(*x.values(), backend=backend),)

    return Call({"gate": make.rows(), "value": make.rows()}, apply)


FUSED: dict[str, Callable[[Maker], Call]] = {
    "norm_mix": call_norm_mix,
    "relu2": call_relu2,
    "gated_norm": call_gated_norm,
    "wkv7_prepare": call_wkv7_prepare,
    "token_mix": call_token_mix,
    "sigmoid_gate": call_sigmoid_gate,
}


def differentiable(inputs: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    return {name: x.to(dtype or x.dtype).detach().clone().requires_grad_() for name, x in inputs.items()}


def flows_into(outputs: Outputs) -> list[Tensor]:
    """What flows back into the outputs, rounded to their dtypes."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(x.shape, generator=generator).to(x.dtype) for x in outputs]


def gate_call(call: Call, dtype: torch.dtype, place: str) -> list[str]:
    """What is wrong: one line for each result over the gate of its own dtype."""
    leaves, wide = differentiable(call.inputs), differentiable(call.inputs, torch.float64)
    got, want = call.run(leaves, dtype, "cpu"), call.run(wide, torch.float64, "torch")
    upstream = flows_into(got)
    got_grads = torch.autograd.grad(got, list(leaves.values()), upstream)
    want_grads = torch.autograd.grad(want, list(wide.values()), [x.double() for x in upstream])
    red = []
    results = [*(f"output {n}" for n in range(len(got))), *(f"d{name}" for name in leaves)]
    for result, x, y in zip(results, (*got, *got_grads), (*want, *want_grads), strict=True):
        ratio = error_ratio(x.detach(), y.detach())
        # Written so that a result that is not a number is red too.
        if not ratio < GATE_OF[x.dtype]:
            red.append(f"{place}: {result} error ratio {ratio:.1e}, gate {GATE_OF[x.dtype]:.0e}")
    return red


def gate(options: argparse.Namespace, operators: Mapping[str, Callable[[Maker], Call]]) -> list[str]:
    red = []
    for N in sorted({shape[3] for shape in options.shape}):
        if N % CHANNELS_OF_A_VECTOR:
            raise KernelError(
                f"head size {N} is no multiple of {CHANNELS_OF_A_VECTOR}: fused operators leave it to torch"
            )
        for name in options.operator:
            for dtype in options.dtype:
                for T in GATE_TIMES:
                    call = operators[name](Maker((2, T, 2, N), DTYPES[dtype]))
                    red += gate_call(call, DTYPES[dtype], f"{name} {dtype} N={N} T={T}")
    return red


def jobs_of(name: str, shape: Shape, dtype: str) -> Jobs:
    """Forward and backward of the compiled form, then of plain torch."""
    call = FUSED[name](Maker(shape, DTYPES[dtype]))
    jobs: Jobs = []
    for title, backend in ((name, "cpu"), (f"reference of {name}", "torch")):
        leaves = differentiable(call.inputs)
        outputs = call.run(leaves, DTYPES[dtype], backend)
        jobs.append((f"{title} forward", functools.partial(forward, call, leaves, DTYPES[dtype], backend)))
        jobs.append((f"{title} backward", functools.partial(backward, outputs, leaves, flows_into(outputs))))
    return jobs


def forward(call: Call, leaves: dict[str, Tensor], dtype: torch.dtype, backend: str) -> object:
    return call.run(leaves, dtype, backend) if call.forward is None else call.forward(backend)


def backward(outputs: Outputs, leaves: dict[str, Tensor], upstream: list[Tensor]) -> object:
    return torch.autograd.grad(outputs, list(leaves.values()), upstream, retain_graph=True)


def main(arguments: Sequence[str] | None = None, *, operators: Mapping[str, Callable[[Maker], Call]] = FUSED) -> int:
    """`operators` go through the gate."""
    options = parse(arguments, list(FUSED))
    return run(options, lambda: gate(options, operators), jobs_of)


if __name__ == "__main__":
    sys.exit(main())
