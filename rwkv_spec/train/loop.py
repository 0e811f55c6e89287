"""The training loop: a generator of StepResult, one for each finished optimizer step.

It never saves, logs, evaluates or opens a file, and takes any iterator of Batch: whoever iterates decides what happens
between two steps. The loss of a step is the sum over its weighted tokens divided by the weight of the whole step, over
all micro-batches and processes, so that no split of the batch changes the result.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from rwkv_spec.data.batch import Batch
from rwkv_spec.errors import UserError
from rwkv_spec.train.engine import Engine
from rwkv_spec.train.optimizer import set_lr

# objective(hidden_BTC, head_VC, targets_BT, weights_BT) -> (weighted sum, weight)
Objective = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

_MASK64 = (1 << 64) - 1


@dataclass(frozen=True)
class StepResult:
    """One finished update. `step` counts from 1; loss_sum / weight is the step's loss in nats a token."""

    step: int
    loss_sum: float
    weight: float
    lr: float
    grad_norm: float
    num_tokens: int
    seconds: float
    stop: bool

    @property
    def loss(self) -> float:
        return self.loss_sum / self.weight


class NonFiniteLoss(UserError):
    """The loss or the gradient norm of a step is NaN or infinite; the weights are those before that step."""

    def __init__(self, what: str, *, step: int, windows: tuple[int, ...]) -> None:
        super().__init__(f"step {step}: {what}")
        self.what = what
        self.step = step
        self.windows = windows


def sequence_seeds(sequence_B: np.ndarray, *, seed: int) -> torch.Tensor:
    """One dropout seed a row, from the run's seed and the row's number in the run: the same in any world.

    The mixing constants are those of SplitMix64 (Steele, Lea and Flood 2014).
    """
    seeds = []
    for number in sequence_B.tolist():
        mixed = (seed * 0x9E3779B97F4A7C15 + (number + 1) * 0xBF58476D1CE4E5B9) & _MASK64
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK64
        seeds.append((mixed ^ (mixed >> 31)) >> 1)
    return torch.tensor(seeds, dtype=torch.int64)


def steps(
    model: torch.nn.Module,
    batches: Iterator[Batch],
    objective: Objective,
    *,
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    lr_at: Callable[[int], float],
    first_step: int,
    num_micro_batches: int,
    micro_batch_size: int,
    grad_clip: float,
    seed: int,
    should_stop: Callable[[], bool],
) -> Iterator[StepResult]:
    """Train on each Batch (this process's share of one optimizer step) and yield its StepResult.

    `first_step` updates are done already; `lr_at(k)` is the rate of update k counted from 0. Raises NonFiniteLoss
    before an update that would spoil the weights.
    """
    model.train()
    for done, batch in enumerate(batches, start=first_step):
        started = time.perf_counter()
        lr = lr_at(done)
        set_lr(optimizer, lr)
        (total_weight,) = engine.sum([float(batch.weights_BT.sum(dtype=np.float64))])
        optimizer.zero_grad(set_to_none=True)
        loss_sum = accumulate_gradients(
            model,
            batch.split(micro_batch_size, num_micro_batches),
            objective,
            engine,
            total_weight=total_weight,
            seed=seed,
        )
        grad_norm = engine.clip(model, grad_clip)
        loss_sum, stops, num_tokens = engine.sum(
            [loss_sum, float(should_stop()), float((batch.weights_BT > 0).sum(dtype=np.int64))]
        )
        _refuse_non_finite(loss_sum, grad_norm, step=done + 1, windows=tuple(batch.window_B.tolist()))
        optimizer.step()
        yield StepResult(
            step=done + 1,
            loss_sum=loss_sum,
            weight=total_weight,
            lr=lr,
            grad_norm=grad_norm,
            num_tokens=int(num_tokens),
            seconds=time.perf_counter() - started,
            stop=stops > 0,
        )


def accumulate_gradients(
    model: torch.nn.Module,
    micro_batches: list[Batch],
    objective: Objective,
    engine: Engine,
    *,
    total_weight: float,
    seed: int,
) -> float:
    """Forward, loss and backward of each micro-batch, gradients added up; this process's weighted sum of losses."""
    loss_sum = 0.0
    for index, micro in enumerate(micro_batches):
        ids, targets, weights = (
            torch.from_numpy(array).to(engine.device) for array in (micro.ids_BT, micro.targets_BT, micro.weights_BT)
        )
        starts = torch.from_numpy(micro.starts_BT).to(engine.device) if micro.starts_BT.any() else None
        seeds = sequence_seeds(micro.sequence_B, seed=seed).to(engine.device)
        with engine.accumulating(model, last=index == len(micro_batches) - 1):
            with engine.autocast():
                # Inside the model, so that no wrapper around it has to know of logits.
                loss = partial(_loss, objective, targets, weights)
                weighted_sum, _ = model(ids, starts_BT=starts, dropout_seed_B=seeds, loss=loss)
            # Processes average their gradients: times their number, this is the gradient of the sum over all of them.
            engine.backward(weighted_sum * (engine.num_processes / total_weight))
        loss_sum += float(weighted_sum.detach())
    return loss_sum


def _loss(
    objective: Objective,
    targets_BT: torch.Tensor,
    weights_BT: torch.Tensor,
    hidden_BTC: torch.Tensor,
    head_VC: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    return objective(hidden_BTC, head_VC, targets_BT, weights_BT)


def _refuse_non_finite(loss_sum: float, grad_norm: float, *, step: int, windows: tuple[int, ...]) -> None:
    if not math.isfinite(loss_sum):
        raise NonFiniteLoss(f"the loss is {loss_sum}", step=step, windows=windows)
    if not math.isfinite(grad_norm):
        raise NonFiniteLoss(f"the gradient norm is {grad_norm}", step=step, windows=windows)
