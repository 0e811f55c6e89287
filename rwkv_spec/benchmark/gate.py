"""Nothing is timed whose numbers are wrong: the model with compiled operators against the same one in plain torch.

Loss and gradients of a small model of the run's widths must be about as near to float64 as those of plain torch in the
same precision. All weights are moved off their start, of which many are zeros, behind which no error would show.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from rwkv_spec.benchmark.workload import Workload, random_batch
from rwkv_spec.errors import KernelError
from rwkv_spec.model.build import build_model, load_state, weights
from rwkv_spec.model.language_model import LanguageModel
from rwkv_spec.objective.cross_entropy import cross_entropy

# How far off a gradient may be (RMS error over RMS) in any case, and else in terms of plain torch's own distance: other
# orders of sums differ by less than twice, at any width.
_SMALL_ERROR = {"fp32": 5e-6, "bf16": 1e-2}
_TIMES_PLAIN = 2.5
_LOSS = "the loss"


def check_operators(workload: Workload, device: torch.device) -> None:
    """Raises KernelError where the compiled operators are not what their references say; plain torch passes."""
    if workload.backend == "torch":
        return
    small = workload.small()
    # float32 shows what is wrong far below the roundings of bf16, which has kernels of its own.
    for precision in dict.fromkeys(("fp32", workload.precision)):
        error, name = worst_error(small, device, precision)
        plain, _ = worst_error(replace(small, backend="torch"), device, precision)
        # Written so that what is not a number is no agreement.
        if not error < max(_TIMES_PLAIN * plain, _SMALL_ERROR[precision]):
            raise KernelError(
                f"the compiled operators ({workload.backend}) compute wrong numbers in {precision}: {name} is off by "
                f"{error:.1e} of its size, in plain torch by {plain:.1e}; nothing was timed; try another compiler by "
                "CXX=..., or choose kernels: torch"
            )


def worst_error(small: Workload, device: torch.device, precision: str) -> tuple[float, str]:
    """The largest error of the loss and all gradients against plain torch in float64, and whose it is."""
    model = build_model(small.shape, dropout=small.dropout, backend=small.backend, seed=small.seed)
    plain = build_model(small.shape, dropout=small.dropout, backend="torch", seed=None).double()
    _shake(model)
    load_state(plain, weights(model))
    got = _results(model.to(device), small, device, precision)
    want = _results(plain.to(device), small, device, "fp64")
    # A gradient that is next to nothing beside the others has no digits of its own.
    floor = 1e-3 * max(_rms(x) for name, x in want.items() if name != _LOSS)
    errors = {
        name: _rms(got[name].double() - want[name]) / max(_rms(want[name]), 0.0 if name == _LOSS else floor, 1e-30)
        for name in want
    }
    # max() would pass over what is not a number.
    name = max(errors, key=lambda name: float("inf") if math.isnan(errors[name]) else errors[name])
    return errors[name], name


def _shake(model: LanguageModel) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            # A product with a matrix of such numbers keeps the size of what it is given, or makes it smaller.
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.4 * model.shape.n_embd**-0.5)


def _results(model: LanguageModel, small: Workload, device: torch.device, precision: str) -> dict[str, Tensor]:
    batch = random_batch(small)
    ids, targets, weights_BT, seeds = (
        torch.from_numpy(array).to(device)
        for array in (batch.ids_BT, batch.targets_BT, batch.weights_BT, batch.sequence_B)
    )
    with _autocast(device, precision):
        loss, weight = model(
            ids,
            dropout_seed_B=seeds,
            loss=lambda hidden, head: cross_entropy(
                hidden, head, targets, weights_BT, l2wrap=small.l2wrap, backend=model.backend
            ),
        )
    (loss / weight).backward()
    gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return {_LOSS: loss.detach(), **{f"the gradient of {name}": grad for name, grad in gradients.items()}}


@contextlib.contextmanager
def _autocast(device: torch.device, precision: str) -> Iterator[None]:
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
        yield


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())
