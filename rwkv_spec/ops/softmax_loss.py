"""softmax_loss(): the losses of rows of logits and, over the logits themselves, their gradient. Not differentiable."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from rwkv_spec.errors import KernelError
from rwkv_spec.ops.fused import FusedOperator, call, compare, normal


def softmax_loss(
    logits_PV: Tensor, targets_P: Tensor, weights_P: Tensor, *, l2wrap: float, want_gradient: bool, backend: str
) -> Tensor:
    """weight * (log of the sum of exp(logits) - logits[target]) of each row, [P] in the dtype of the weights.

    If wanted, the logits become weight * (softmax - 1 at the target + l2wrap * m at the largest logit m, the first if
    several are equal). A row of weight 0 has a loss and a gradient of exactly 0, whatever it holds. targets: int64,
    weights: float32 (float64 for float64 logits). A target that is no place in its row is a KernelError from compiled
    code for the CPU, NaN from that for CUDA, and torch's own error from plain torch.
    """
    library = SOFTMAX_LOSS.library(
        backend, logits_PV.device, rows=(logits_PV,), dtype=logits_PV.dtype, wide=(weights_P,)
    )
    if library is None or not logits_PV.is_contiguous():
        return softmax_loss_reference(logits_PV, targets_P, weights_P, l2wrap=l2wrap, want_gradient=want_gradient)
    return _compiled(library, logits_PV, targets_P, weights_P, l2wrap, want_gradient)


def softmax_loss_reference(
    logits_PV: Tensor, targets_P: Tensor, weights_P: Tensor, *, l2wrap: float, want_gradient: bool
) -> Tensor:
    """The same in plain torch, for any dtype and device."""
    wide_PV = logits_PV.to(weights_P.dtype)
    weights_P1 = weights_P.unsqueeze(1)
    max_P1, place_P1 = wide_PV.max(dim=1, keepdim=True)
    softmax_PV = (wide_PV - max_P1).exp_()
    sum_P1 = softmax_PV.sum(dim=1, keepdim=True)
    own_P1 = wide_PV.gather(1, targets_P.unsqueeze(1))
    # Zero times a number that is not finite would be no number.
    loss_P1 = torch.where(weights_P1 != 0, (sum_P1.log() + (max_P1 - own_P1)) * weights_P1, 0.0)
    if want_gradient:
        softmax_PV.div_(sum_P1)
        softmax_PV.scatter_add_(1, targets_P.unsqueeze(1), torch.full_like(max_P1, -1.0))
        softmax_PV.scatter_add_(1, place_P1, max_P1 * l2wrap)
        logits_PV.copy_(torch.where(weights_P1 != 0, softmax_PV.mul_(weights_P1), 0.0))
    return loss_P1.squeeze(1)


def _compiled(
    library: ctypes.CDLL, logits_PV: Tensor, targets_P: Tensor, weights_P: Tensor, l2wrap: float, want_gradient: bool
) -> Tensor:
    num_logits = logits_PV.shape[1]
    foreign_P = (weights_P != 0) & ((targets_P < 0) | (targets_P >= num_logits))
    # A device would have to be waited for.
    if not logits_PV.is_cuda and foreign_P.any():
        raise KernelError(
            f"softmax_loss: targets must be from 0 to {num_logits - 1}, got {int(targets_P[foreign_P][0])}; "
            "give rows that have no target a weight of 0"
        )
    loss_P = torch.empty_like(weights_P, memory_format=torch.contiguous_format)
    tensors = (logits_PV, targets_P.contiguous(), weights_P.contiguous(), loss_P)
    scalars = (l2wrap, float(want_gradient))
    call(library, "softmax_loss", tuple(logits_PV.shape), logits_PV.dtype, tensors, scalars=scalars)
    return loss_P


def _check(library: ctypes.CDLL, device: str = "cpu") -> None:
    # A width of whole vectors, and one that is not.
    for width in (77, 80):
        with torch.inference_mode(False):
            logits, weights = (x.to(device, copy=True) for x in normal(4, (19, width), (19,)))
            logits *= 3
            weights[0] = 0.0
            targets = torch.arange(19, device=device) * 4
            wide = logits.double()
            want = softmax_loss_reference(wide, targets, weights.double(), l2wrap=0.1, want_gradient=True)
            got = _compiled(library, logits, targets, weights, 0.1, True)
            compare("softmax_loss", (got, logits), (want, wide))


SOFTMAX_LOSS = FusedOperator("softmax_loss", _check)
