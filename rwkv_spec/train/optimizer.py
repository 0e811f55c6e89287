"""AdamW with the published parameter groups, and its state keyed by parameter name instead of by position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from rwkv_spec.errors import CheckpointError
from rwkv_spec.model.shapes import DECAY, DOUBLE, PLAIN

# Optimizer group -> (share of the learning rate, whether weight decay applies).
GROUP_SETTINGS: Final = {DECAY: (1.0, True), PLAIN: (1.0, False), DOUBLE: (2.0, False)}
MOMENTS: Final = ("exp_avg", "exp_avg_sq")


def build_optimizer(
    parameters: Mapping[str, Tensor],
    *,
    groups: Mapping[str, str],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> torch.optim.AdamW:
    """Fused AdamW over named parameters; `groups` gives each name its group, and every name must have one.

    Each group carries "group" (its name) and "lr_scale", which set_lr multiplies with.
    """
    members: dict[str, list[Tensor]] = {group: [] for group in GROUP_SETTINGS}
    for name, parameter in parameters.items():
        group = groups.get(name)
        if group not in members:
            raise ValueError(f"parameter {name} is in group {group!r}; trained groups are {', '.join(members)}")
        members[group].append(parameter)
    param_groups = []
    for group, tensors in members.items():
        lr_scale, decays = GROUP_SETTINGS[group]
        if tensors:
            param_groups.append(
                {
                    "params": tensors,
                    "group": group,
                    "lr": lr * lr_scale,
                    "lr_scale": lr_scale,
                    "weight_decay": weight_decay if decays else 0.0,
                }
            )
    return torch.optim.AdamW(param_groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group its share of `lr`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def optimizer_state(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`name.exp_avg`, `name.exp_avg_sq` and `name.step` of every parameter: the optimizer's own tensors, not copies.

    Parameters that were never updated give zeros, which load to the same behaviour.
    """
    state: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        own = optimizer.state.get(parameter) or _fresh_state(parameter)
        for part in (*MOMENTS, "step"):
            state[f"{name}.{part}"] = own[part]
    return state


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], state: Mapping[str, Tensor]
) -> None:
    """Put back what optimizer_state gave. Strict: a missing, unknown or misshapen entry is a CheckpointError.

    Nothing is changed unless everything fits.
    """
    expected = {f"{name}.{part}" for name in parameters for part in (*MOMENTS, "step")}
    problems = [f"{key} is missing" for key in sorted(expected - state.keys())]
    problems += [f"{key} belongs to no parameter" for key in sorted(state.keys() - expected)]
    for name, parameter in parameters.items():
        for part in MOMENTS:
            moment = state.get(f"{name}.{part}")
            if moment is not None and moment.shape != parameter.shape:
                problems.append(f"{name}.{part} has shape {list(moment.shape)}, not {list(parameter.shape)}")
        step = state.get(f"{name}.step")
        if step is not None and step.numel() != 1:
            problems.append(f"{name}.step holds {step.numel()} numbers, not one")
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise CheckpointError(f"optimizer state: {shown}; it was saved from another model")
    for name, parameter in parameters.items():
        own = _fresh_state(parameter)
        for part, tensor in own.items():
            with torch.no_grad():
                tensor.copy_(state[f"{name}.{part}"].reshape(tensor.shape))
        optimizer.state[parameter] = own


def _fresh_state(parameter: Tensor) -> dict[str, Tensor]:
    # The layout that fused AdamW makes at its first update: float32 step beside the parameter, moments in its dtype.
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format).detach(),
        "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format).detach(),
    }
