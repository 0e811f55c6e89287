"""sigmoid_gate(): the end of x052's and x060's channel-mix in one pass."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rwkv_spec.ops.fused import FusedOperator, call, contiguous, normal, try_build


def sigmoid_gate(gate: Tensor, value: Tensor, *, backend: str) -> Tensor:
    """value * sigmoid(gate), both [..., C] of one dtype, computed in float32 or wider. Saved for the backward: both."""
    library = SIGMOID_GATE.library(
        backend, value.device, rows=(gate, value), dtype=value.dtype, channels=value.shape[-1]
    )
    if library is None or gate.shape != value.shape:
        return sigmoid_gate_reference(gate, value)
    out: Tensor = _SigmoidGate.apply(library, gate, value)  # type: ignore[no-untyped-call]
    return out


def sigmoid_gate_reference(gate: Tensor, value: Tensor) -> Tensor:
    """The same in plain torch, for any dtype and device."""
    wide = torch.promote_types(value.dtype, torch.float32)
    return (torch.sigmoid(gate.to(wide)) * value.to(wide)).to(value.dtype)


class _SigmoidGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, library: ctypes.CDLL, gate: Tensor, value: Tensor) -> Tensor:
        gate, value = contiguous(gate), contiguous(value)
        out = torch.empty_like(value)
        call(library, "sigmoid_gate_forward", (value.numel(),), value.dtype, (gate, value, out))
        ctx.save_for_backward(gate, value)
        ctx.library = library
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, Tensor]:
        gate, value = ctx.saved_tensors
        dgate, dvalue = torch.empty_like(gate), torch.empty_like(value)
        given = (gate, value, contiguous(grads[0]))
        call(ctx.library, "sigmoid_gate_backward", (value.numel(),), value.dtype, (*given, dgate, dvalue))
        return None, dgate, dvalue


def _check(library: ctypes.CDLL, device: str = "cpu") -> None:
    def compiled(library: ctypes.CDLL, *x: Tensor) -> tuple[Tensor]:
        return (_SigmoidGate.apply(library, *x),)  # type: ignore[no-untyped-call]

    def reference(*x: Tensor) -> tuple[Tensor]:
        return (sigmoid_gate_reference(*x),)

    try_build("sigmoid_gate", library, normal(7, (5, 48), (5, 48)), compiled, reference, device)


SIGMOID_GATE = FusedOperator("sigmoid_gate", _check)
