"""Next-token cross-entropy with the published logit regulariser (L2Wrap), as a weighted sum and its weight.

L2Wrap acts on the gradient alone: the reported value is plain cross-entropy. Rows of weight 0 are not looked at:
whatever they and their targets hold, they add nothing to the value and exactly zero to the gradient. The logits are
made here, from the last hidden vectors and the head's matrix, a piece of the rows at a time: never all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rwkv_spec.ops.softmax_loss import softmax_loss

# Logits of a piece, at most: enough rows for a matrix product at its full rate, little beside what a model keeps.
_LOGITS: Final = 1 << 26
_ROWS: Final = 2048


def cross_entropy(
    hidden_BTC: Tensor,
    head_VC: Tensor,
    targets_BT: Tensor,
    weights_BT: Tensor,
    *,
    l2wrap: float = 0.0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """(sum of weight * cross-entropy, sum of weights), float32, or float64 for float64 hidden vectors.

    The logits are hidden @ head.T, computed in the dtype of `hidden`. `l2wrap` adds weight * l2wrap * m to the gradient
    of each row's largest logit m (the first, if several are equal). Saved for the backward: the gradients of hidden and
    head, which it scales in place, so that torch refuses a second backward pass.
    """
    if hidden_BTC.shape[:-1] != targets_BT.shape or targets_BT.shape != weights_BT.shape:
        raise ValueError(
            f"hidden vectors {list(hidden_BTC.shape)}, targets {list(targets_BT.shape)} and weights "
            f"{list(weights_BT.shape)} do not belong together"
        )
    # Autograd tells its functions only which tensors could have a gradient, not whether any is wanted.
    want_gradient = torch.is_grad_enabled() and (hidden_BTC.requires_grad or head_VC.requires_grad)
    wide = torch.float64 if hidden_BTC.dtype == torch.float64 else torch.float32
    weights_BT = weights_BT.to(wide)
    # Autocast would give the products another dtype than the places that take them.
    with torch.autocast(hidden_BTC.device.type, enabled=False):
        value: Tensor = _HeadAndLoss.apply(  # type: ignore[no-untyped-call]
            hidden_BTC.reshape(-1, hidden_BTC.shape[-1]),
            head_VC,
            torch.where(weights_BT != 0, targets_BT, 0).reshape(-1),
            weights_BT.reshape(-1),
            l2wrap,
            backend,
            want_gradient,
        )
    return value, weights_BT.sum()


class _HeadAndLoss(torch.autograd.Function):
    """Makes the gradients in the forward, while a piece's logits are there: they are made once."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RC: Tensor,
        head_VC: Tensor,
        targets_R: Tensor,
        weights_R: Tensor,
        l2wrap: float,
        backend: str,
        want_gradient: bool,
    ) -> Tensor:
        product_VC = head_VC.to(hidden_RC.dtype)
        unweighted_R1 = (weights_R == 0).unsqueeze(1)
        if unweighted_R1.any():
            # Zero times a number that is not finite would be no number.
            hidden_RC = hidden_RC.masked_fill(unweighted_R1, 0.0)
        loss_R = torch.empty_like(weights_R)
        if want_gradient:
            dhidden_RC = torch.empty_like(hidden_RC)
            dhead_VC = torch.zeros_like(head_VC)
        for rows in _pieces(len(hidden_RC), len(head_VC)):
            logits_PV = hidden_RC[rows] @ product_VC.t()
            loss_R[rows] = softmax_loss(
                logits_PV,
                targets_R[rows],
                weights_R[rows],
                l2wrap=l2wrap,
                want_gradient=want_gradient,
                backend=backend,
            )
            if want_gradient:
                torch.mm(logits_PV, product_VC, out=dhidden_RC[rows])
                # Added up in the dtype of the weights, however coarse that of the products is.
                if dhead_VC.dtype == logits_PV.dtype:
                    dhead_VC.addmm_(logits_PV.t(), hidden_RC[rows])
                else:
                    dhead_VC += logits_PV.t() @ hidden_RC[rows]
        if want_gradient:
            ctx.save_for_backward(dhidden_RC, dhead_VC)
        return loss_R.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        dhidden_RC, dhead_VC = ctx.saved_tensors
        return dhidden_RC.mul_(upstream[0]), dhead_VC.mul_(upstream[0]), None, None, None, None, None


def _pieces(num_rows: int, num_logits: int) -> Iterator[slice]:
    size = min(_ROWS, max(1, _LOGITS // max(1, num_logits)))
    for start in range(0, num_rows, size):
        yield slice(start, min(start + size, num_rows))
