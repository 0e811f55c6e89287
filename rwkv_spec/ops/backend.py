"""Who runs an operator: compiled code or plain torch. The choice is made once, and says why in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rwkv_spec.errors import KernelError
from rwkv_spec.ops.build import Kernels, NoCompiler, thread_pool

COMPILED_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Backend:
    """What runs the operators: `cpu` (compiled) or `torch`; and why, as a sentence for a person."""

    name: str
    reason: str


def choose_backend(
    kernels: str, *, device: str | torch.device, dtype: torch.dtype, load: Callable[[], Kernels]
) -> Backend:
    """The backend of an operator for `kernels: auto | cpu | torch`; `load` builds it if it is not there yet."""
    device_type = torch.device(device).type
    if kernels not in ("auto", "cpu", "torch"):
        raise KernelError(f"kernels: there is no backend {kernels!r}; choose auto, cpu or torch")
    if kernels == "torch":
        return Backend("torch", "torch: plain torch operators, as asked for")
    hindrance = ""
    if device_type != "cpu":
        hindrance = f"the compiled operators are for the CPU, not for {device_type}"
    elif dtype not in COMPILED_DTYPES:
        hindrance = f"the compiled operators take float32 and bfloat16, not {dtype_name(dtype)}"
    if hindrance:
        if kernels == "cpu":
            raise KernelError(f"kernels: cpu cannot be used: {hindrance}; choose kernels: auto or torch")
        return Backend("torch", f"torch: {hindrance}")
    try:
        loaded = load()
    except NoCompiler as error:
        if kernels == "cpu":
            raise
        return Backend("torch", f"torch, several times slower: {error}")
    reason = f"compiled CPU kernel, {loaded.compiler}, {loaded.instructions}"
    if thread_pool() is None:
        reason += ", one thread (torch's OpenMP runtime was not found)"
    return Backend("cpu", f"{reason}; {loaded.remark}" if loaded.remark else reason)


def dtype_name(dtype: torch.dtype) -> str:
    """float32 for torch.float32."""
    return str(dtype).removeprefix("torch.")
