"""relu2(): max(x, 0) squared, in place, with the squares alone saved for the backward."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rwkv_spec.ops.fused import FusedOperator, call, normal, try_build


def relu2(x: Tensor, *, backend: str) -> Tensor:
    """max(x, 0) squared, of any shape, in x's dtype. x is overwritten where compiled code runs: its values are gone.

    Saved for the backward: the result, whose root is max(x, 0) again.
    """
    library = RELU2.library(backend, x.device, rows=(x,), dtype=x.dtype)
    if library is None or not x.is_contiguous() or (x.is_leaf and x.requires_grad):
        return relu2_reference(x)
    y: Tensor = _Relu2.apply(library, x)  # type: ignore[no-untyped-call]
    return y


def relu2_reference(x: Tensor) -> Tensor:
    """The same in plain torch; x stays as it is."""
    return torch.relu(x).square()


class _Relu2(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, library: ctypes.CDLL, x: Tensor) -> Tensor:
        call(library, "relu2_forward", (x.numel(),), x.dtype, (x,))
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        ctx.library = library
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        (y,) = ctx.saved_tensors
        grad = grads[0].contiguous()
        dx = torch.empty_like(y)
        call(ctx.library, "relu2_backward", (y.numel(),), y.dtype, (y, grad, dx))
        return None, dx


def _check(library: ctypes.CDLL, device: str = "cpu") -> None:
    def compiled(library: ctypes.CDLL, x: Tensor) -> tuple[Tensor]:
        # A leaf could not be overwritten.
        return (_Relu2.apply(library, x * 1.0),)  # type: ignore[no-untyped-call]

    def reference(x: Tensor) -> tuple[Tensor]:
        return (relu2_reference(x),)

    try_build("relu2", library, normal(4, (333,)), compiled, reference, device)


RELU2 = FusedOperator("relu2", _check)
