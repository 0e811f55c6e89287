"""Inputs that a model can emit for each recurrence, and three ways to all results: float64, C interface, autograd."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rwkv_spec.ops.build import (
    CHUNK_LENGTH,
    FLAGS,
    Kernels,
    NoCompiler,
    build_operator,
    find_compiler,
    machine_flags,
    source_folder,
    sources_of,
)
from rwkv_spec.ops.recurrence import RECURRENCES
from rwkv_spec.ops.wkv import REFERENCES, Operator, wkv5, wkv6, wkv7

GATE = {torch.float32: 1e-6, torch.bfloat16: 4e-3}
OPERATORS: dict[str, Operator] = {"wkv5": wkv5, "wkv6": wkv6, "wkv7": wkv7}

every_operator = pytest.mark.parametrize("operator", list(OPERATORS))


def why_no_compiler() -> str:
    try:
        find_compiler()
    except NoCompiler as error:
        return str(error)
    return ""


compiled = pytest.mark.skipif(bool(why_no_compiler()), reason=why_no_compiler())


def build_changed(
    operator: str, tmp_path: Path, right: str, wrong: str, check: Callable[[ctypes.CDLL], None]
) -> Kernels:
    """The operator of kernels/cpu with one place of its source exchanged, tried as any fresh build is."""
    folder = tmp_path / "cpu"
    shutil.copytree(source_folder(), folder)
    path = folder / f"{operator}.cpp"
    source = path.read_text(encoding="utf-8")
    assert source.count(right) == 1
    path.write_text(source.replace(right, wrong), encoding="utf-8")
    return build_operator(operator, find_compiler(), folder, tmp_path / "cache", check)


def build_mutant(operator: str, head_size: int, folder: Path, old: str, new: str) -> ctypes.CDLL:
    """The operator for one head size (0 where it has none), with one text of its sources exchanged, built for once."""
    places = 0
    for path in sources_of(operator, source_folder()):
        text = path.read_text(encoding="utf-8")
        places += text.count(old)
        (folder / path.name).write_text(text.replace(old, new), encoding="utf-8")
    assert places == 1, "the mutant's place is gone from the sources"
    # It runs on a few tokens: without optimisation both together take the least time.
    flags = (*FLAGS, *machine_flags(find_compiler()), "-w", "-O0", f"-DHEAD_SIZE={head_size}", "-shared")
    library = folder / "mutant.so"
    subprocess.run([*find_compiler().command, *flags, str(folder / f"{operator}.cpp"), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


@dataclass(frozen=True)
class Case:
    """Inputs that a model can emit, rounded to the dtype under test, the state last; what flows into the outputs."""

    operator: str
    inputs: tuple[Tensor, ...]
    starts: Tensor | None
    dy: Tensor
    dstate_out: Tensor

    @property
    def results(self) -> tuple[str, ...]:
        """The names of all results, in their order."""
        return ("y", "state", *(f"d{name}" for name in RECURRENCES[self.operator].inputs), "dstate")

    def double(self) -> Case:
        inputs = tuple(x.double() for x in self.inputs)
        return Case(self.operator, inputs, self.starts, self.dy.double(), self.dstate_out.double())


def make_case(
    T: int,
    N: int,
    dtype: torch.dtype,
    *,
    operator: str = "wkv7",
    B: int = 2,
    H: int = 2,
    starts: bool = True,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed * 1000 + T * 200 + N)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def argument(name: str, *shape: int) -> Tensor:
        if name == "w_raw":
            return torch.rand(shape, generator=generator) * 20 - 12
        if name == "a":
            return -kappa
        return kappa * torch.sigmoid(normal(*shape)) if name == "b" else normal(*shape)

    kappa = torch.nn.functional.normalize(normal(B, T, H, N), dim=-1)
    recurrence = RECURRENCES[operator]
    tokens = [argument(name, B, T, H, N).to(dtype) for name in recurrence.tokens]
    heads = [argument(name, H, N) for name in recurrence.heads]
    flags = torch.rand((B, T), generator=generator) < 0.1
    # A first token that starts anew, one in a chunk and one on a chunk's border are always among them; and a sequence
    # that goes on from the initial state.
    flags[-1, 0] = False
    flags[0, 0] = B > 1
    flags[-1, T // 2] = True
    if T > CHUNK_LENGTH:
        flags[0, CHUNK_LENGTH] = True
    return Case(
        operator,
        (*tokens, *heads, normal(B, H, N, N)),
        flags if starts else None,
        normal(B, T, H, N).to(dtype),
        normal(B, H, N, N),
    )


def expected(case: Case) -> tuple[Tensor, ...]:
    leaves = [x.double().requires_grad_() for x in case.inputs]
    outputs = REFERENCES[case.operator](*leaves, starts_BT=case.starts)
    gradients = torch.autograd.grad(outputs, leaves, [case.dy.double(), case.dstate_out.double()])
    return tuple(x.detach() for x in (*outputs, *gradients))


def poisoned(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(x.fill_(float("nan")) for x in tensors)


def through_library(library: ctypes.CDLL, case: Case) -> tuple[Tensor, ...]:
    """Outputs and all gradients from the C interface itself, which must fill every place of its NaN-filled outputs."""
    r = case.inputs[0]
    recurrence = RECURRENCES[case.operator]
    y, state, *kept = poisoned(recurrence.forward_outputs(r, save=True))
    gradients = poisoned(recurrence.backward_outputs(r, need_dstate_in=True))
    recurrence.run(library, "forward", r, (*case.inputs, case.starts), (y, state, *kept))
    saved = (*case.inputs, case.starts, *kept, case.dy, case.dstate_out)
    recurrence.run(library, "backward", r, saved, gradients)
    # Those of the [H, N] inputs come for each sequence apart.
    first, last = len(recurrence.tokens), len(recurrence.inputs)
    return (y, state, *gradients[:first], *(x.sum(dim=0) for x in gradients[first:last]), *gradients[last:])


def through_autograd(case: Case, backend: str) -> tuple[Tensor, ...]:
    leaves = [x.detach().clone().requires_grad_() for x in case.inputs]
    outputs = OPERATORS[case.operator](*leaves, starts_BT=case.starts, backend=backend)
    gradients = torch.autograd.grad(outputs, leaves, [case.dy, case.dstate_out])
    return tuple(x.detach() for x in (*outputs, *gradients))


def error_ratio(got: Tensor, want: Tensor) -> float:
    if not want.any():
        return float("inf") if got.any() else 0.0
    return float((got.double() - want).square().mean().sqrt() / want.square().mean().sqrt())


def worst(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    ratios = [error_ratio(x, y) for x, y in zip(got, want, strict=True)]
    return float("inf") if any(ratio != ratio for ratio in ratios) else max(ratios)
