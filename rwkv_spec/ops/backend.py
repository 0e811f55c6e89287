"""Who runs an operator: compiled code or plain torch. The choice is made once, and says why in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rwkv_spec.errors import KernelError
from rwkv_spec.ops.build import Kernels, NoCompiler, thread_pool

NAMES = ("auto", "cpu", "cuda", "torch")
# What the compiled operators of each kind of device take.
COMPILED_DTYPES = {
    "cpu": (torch.float32, torch.bfloat16),
    "cuda": (torch.float32, torch.bfloat16, torch.float16),
}


@dataclass(frozen=True)
class Backend:
    """What runs the operators: `cpu` or `cuda` (compiled) or `torch`; and why, as a sentence for a person."""

    name: str
    reason: str


def choose_backend(
    kernels: str,
    *,
    device: str | torch.device,
    dtype: torch.dtype,
    load: Callable[[], Kernels],
    hindrance: str = "",
) -> Backend:
    """The backend of an operator for `kernels: auto | cpu | cuda | torch`; `load` builds it if it is not there yet.

    `hindrance` is a reason of the operator's own against compiled code, a clause.
    """
    kind = torch.device(device).type
    if kernels not in NAMES:
        raise KernelError(f"kernels: there is no backend {kernels!r}; choose {', '.join(NAMES[:-1])} or {NAMES[-1]}")
    if kernels == "torch":
        return Backend("torch", "torch: plain torch operators, as asked for")
    compiled = COMPILED_DTYPES.get(kind)
    if compiled is None:
        hindrance = f"the compiled operators are for the CPU and for CUDA, not for {kind}"
    elif kernels in COMPILED_DTYPES and kernels != kind:
        hindrance = f"the device is {kind}"
    elif dtype not in compiled:
        *names, last = map(dtype_name, compiled)
        hindrance = f"the compiled operators take {', '.join(names)} and {last}, not {dtype_name(dtype)}"
    if hindrance:
        if kernels != "auto":
            raise KernelError(f"kernels: {kernels} cannot be used: {hindrance}; choose kernels: auto or torch")
        return Backend("torch", f"torch: {hindrance}")
    try:
        loaded = load()
    except NoCompiler as error:
        if kernels != "auto":
            raise
        return Backend("torch", f"torch, several times slower: {error}")
    reason = f"compiled {kind.upper()} kernel, {loaded.compiler}, {loaded.instructions}"
    if kind == "cpu" and thread_pool() is None:
        reason += ", one thread (torch's OpenMP runtime was not found)"
    return Backend(kind, f"{reason}; {loaded.remark}" if loaded.remark else reason)


def dtype_name(dtype: torch.dtype) -> str:
    """float32 for torch.float32."""
    return str(dtype).removeprefix("torch.")
