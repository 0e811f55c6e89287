"""Next-token cross-entropy with the published logit regulariser (L2Wrap), as a weighted sum and its weight.

L2Wrap acts on the gradient alone: the reported value is plain cross-entropy. Rows of weight 0 are not looked at:
whatever their logits and targets hold, they add nothing to the value and exactly zero to the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

# Rows are worked on in pieces of about this many logits, so that no second copy of all logits is ever held.
_PIECE: Final = 1 << 21


def cross_entropy(
    logits_BTV: Tensor, targets_BT: Tensor, weights_BT: Tensor, *, l2wrap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(sum of weight * cross-entropy, sum of weights), float32, or float64 for float64 logits.

    `l2wrap` adds weight * l2wrap * m to the gradient of each row's largest logit m (the first, if several are equal).
    The backward pass writes the gradient over the logits themselves unless they are a leaf: their values are gone after
    it, and a second backward pass through them is refused by torch.
    """
    if logits_BTV.shape[:-1] != targets_BT.shape or targets_BT.shape != weights_BT.shape:
        raise ValueError(
            f"logits {list(logits_BTV.shape)}, targets {list(targets_BT.shape)} and weights {list(weights_BT.shape)} "
            "do not belong together"
        )
    wide = torch.float64 if logits_BTV.dtype == torch.float64 else torch.float32
    weights_BT = weights_BT.to(wide)
    value: Tensor = _WeightedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits_BTV.reshape(-1, logits_BTV.shape[-1]),
        torch.where(weights_BT != 0, targets_BT, 0).reshape(-1),
        weights_BT.reshape(-1),
        l2wrap,
        logits_BTV.is_leaf,
    )
    return value, weights_BT.sum()


class _WeightedCrossEntropy(torch.autograd.Function):
    """Saves the logits and two numbers a row: the log of the sum of exponentials, the place of the largest logit."""

    @staticmethod
    def forward(
        ctx: Any, logits_RV: Tensor, targets_R: Tensor, weights_R: Tensor, l2wrap: float, keep_logits: bool
    ) -> Tensor:
        lse_R = torch.empty_like(weights_R)
        largest_R = torch.empty_like(targets_R)
        for rows in _pieces(logits_RV):
            piece_PV = logits_RV[rows].to(weights_R.dtype)
            max_P, largest_R[rows] = piece_PV.max(dim=-1)
            torch.add((piece_PV - max_P[:, None]).exp_().sum(dim=-1).log_(), max_P, out=lse_R[rows])
        own_R = logits_RV.gather(1, targets_R[:, None]).squeeze(1).to(weights_R.dtype)
        loss_R = torch.where(weights_R != 0, (lse_R - own_R) * weights_R, 0.0)
        ctx.save_for_backward(logits_RV, targets_R, weights_R, lse_R, largest_R)
        ctx.l2wrap = l2wrap
        ctx.keep_logits = keep_logits
        return loss_R.sum()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        logits_RV, targets_R, weights_R, lse_R, largest_R = ctx.saved_tensors
        grad_RV = torch.empty_like(logits_RV) if ctx.keep_logits else logits_RV
        scale_R = weights_R * upstream[0]
        for rows in _pieces(logits_RV):
            piece_PV = logits_RV[rows].to(weights_R.dtype)
            place_P1 = largest_R[rows, None]
            pull_P1 = piece_PV.gather(1, place_P1) * ctx.l2wrap
            # exp(logit - lse) in place where the gradient may lie over the logits, else in a piece of its own.
            in_place = piece_PV.data_ptr() == grad_RV[rows].data_ptr()
            softmax_PV = (piece_PV.sub_ if in_place else piece_PV.sub)(lse_R[rows, None]).exp_()
            softmax_PV.scatter_add_(1, targets_R[rows, None], torch.full_like(pull_P1, -1.0))
            softmax_PV.scatter_add_(1, place_P1, pull_P1)
            softmax_PV.mul_(scale_R[rows, None])
            if not in_place:
                grad_RV[rows] = softmax_PV
        unweighted_R = weights_R == 0
        if unweighted_R.any():
            # Zero times a number that is not finite would be NaN.
            grad_RV[unweighted_R] = 0.0
        return grad_RV, None, None, None, None


def _pieces(logits_RV: Tensor) -> Iterator[slice]:
    rows, width = logits_RV.shape
    size = max(1, _PIECE // max(1, width))
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))
