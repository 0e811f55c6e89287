"""wkv5(), wkv6(), wkv7(): the recurrences with gradients, over compiled kernels for the CPU and CUDA, or plain torch.

Promises: every tensor is checked before C sees it; any T, an initial and a final state with gradients of both, resets.
A build is tried against the reference before it is kept.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rwkv_spec.errors import KernelError
from rwkv_spec.ops import build, build_cuda
from rwkv_spec.ops.backend import Backend, choose_backend, dtype_name
from rwkv_spec.ops.build import Kernels, load_operator
from rwkv_spec.ops.build_cuda import load_cuda_operator
from rwkv_spec.ops.recurrence import CHUNK_LENGTHS, RECURRENCES, Recurrence, register
from rwkv_spec.ops.reference import (
    wkv5_reference,
    wkv5_torch,
    wkv6_reference,
    wkv6_torch,
    wkv7_reference,
    wkv7_torch,
)

HEAD_SIZES = {"cpu": build.HEAD_SIZES, "cuda": build_cuda.HEAD_SIZES}
Operator = Callable[..., tuple[Tensor, Tensor]]
FALLBACKS: dict[str, Operator] = {"wkv5": wkv5_torch, "wkv6": wkv6_torch, "wkv7": wkv7_torch}
REFERENCES: dict[str, Operator] = {"wkv5": wkv5_reference, "wkv6": wkv6_reference, "wkv7": wkv7_reference}


def resolve_backend(
    kernels: str, *, device: str | torch.device, dtype: torch.dtype, operator: str, head_size: int
) -> Backend:
    """The backend of a recurrence for `kernels: auto | cpu | cuda | torch`; builds it where it is wanted.

    Raises KernelError where what is asked for by name cannot be.
    """
    where = torch.device(device)
    sizes = HEAD_SIZES.get(where.type, ())
    hindrance = ""
    if head_size not in sizes:
        listed = ", ".join(str(size) for size in sizes)
        hindrance = f"{operator}: head size {head_size} is not compiled (there are {listed})"

    def load() -> Kernels:
        return compiled_operator(operator, head_size, where)

    return choose_backend(kernels, device=where, dtype=dtype, load=load, hindrance=hindrance)


def wkv5(
    r_BTHN: Tensor,
    k_BTHN: Tensor,
    v_BTHN: Tensor,
    w_raw_HN: Tensor,
    u_HN: Tensor,
    state_BHNN: Tensor | None = None,
    *,
    starts_BT: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """RWKV-5.2: as wkv6 with one decay exp(-exp(w_raw)) for each channel, in float32 (float64 for float64 inputs)."""
    return _run("wkv5", (r_BTHN, k_BTHN, v_BTHN), (w_raw_HN, u_HN), state_BHNN, starts_BT, backend)


def wkv6(
    r_BTHN: Tensor,
    w_raw_BTHN: Tensor,
    k_BTHN: Tensor,
    v_BTHN: Tensor,
    u_HN: Tensor,
    state_BHNN: Tensor | None = None,
    *,
    starts_BT: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """RWKV-6: y = r (S + (u k) v^T), then S = diag(exp(-exp(w_raw))) S + k v^T.

    y [B, T, H, N] in r's dtype and the final state [B, H, key, value] in float32 (float64 for float64 inputs), as u is.
    starts_BT, the absent state and autocast are as in wkv7.
    """
    return _run("wkv6", (r_BTHN, w_raw_BTHN, k_BTHN, v_BTHN), (u_HN,), state_BHNN, starts_BT, backend)


def wkv7(
    r_BTHN: Tensor,
    w_raw_BTHN: Tensor,
    k_BTHN: Tensor,
    v_BTHN: Tensor,
    a_BTHN: Tensor,
    b_BTHN: Tensor,
    state_BHNN: Tensor | None = None,
    *,
    starts_BT: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """RWKV-7: S = S diag(exp(-exp(-1/2) sigmoid(w_raw))) + (S a) b^T + v k^T, then y = S r.

    y [B, T, H, N] in r's dtype and the final state [B, H, value, key] in float32 (float64 for float64 inputs).
    starts_BT (bool) clears the state before its token; no gradient crosses it. No state given is a state of zeros.
    Under autocast the inputs are cast to its dtype, as the published training does.
    """
    tokens = (r_BTHN, w_raw_BTHN, k_BTHN, v_BTHN, a_BTHN, b_BTHN)
    return _run("wkv7", tokens, (), state_BHNN, starts_BT, backend)


def _run(
    name: str,
    tokens: tuple[Tensor, ...],
    heads: tuple[Tensor, ...],
    state_BHNN: Tensor | None,
    starts_BT: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    kind = tokens[0].device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        tokens = tuple(x.to(dtype) if x.dtype == torch.float32 else x for x in tokens)
    _check(RECURRENCES[name], tokens, heads, state_BHNN, starts_BT)
    r = tokens[0]
    if _choose(name, backend, str(r.device), r.dtype, r.shape[3]) == "torch":
        return FALLBACKS[name](*tokens, *heads, state_BHNN, starts_BT=starts_BT)
    save = torch.is_grad_enabled() and (
        any(x.requires_grad for x in (*tokens, *heads)) or (state_BHNN is not None and state_BHNN.requires_grad)
    )
    y, state, *_ = getattr(torch.ops.rwkv_spec, f"{name}_forward")(
        *(x.contiguous() for x in (*tokens, *heads)),
        None if state_BHNN is None else state_BHNN.contiguous(),
        None if starts_BT is None else starts_BT.contiguous(),
        save,
    )
    return y, state


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _choose(operator: str, backend: str, device: str, dtype: torch.dtype, head_size: int) -> str:
    """A constant for torch.compile, which must not trace the build."""
    return resolve_backend(backend, device=device, dtype=dtype, operator=operator, head_size=head_size).name


def _check(
    recurrence: Recurrence,
    tokens: tuple[Tensor, ...],
    heads: tuple[Tensor, ...],
    state_BHNN: Tensor | None,
    starts_BT: Tensor | None,
) -> None:
    name, r = recurrence.name, tokens[0]
    if r.dim() != 4:
        raise KernelError(f"{name}: r must be [B, T, H, N], got {list(r.shape)}; reshape it to one row a head")
    for argument, x in zip(recurrence.tokens, tokens, strict=True):
        if x.shape != r.shape:
            raise KernelError(f"{name}: {argument} must have r's shape {list(r.shape)}, got {list(x.shape)}")
        if x.dtype != r.dtype:
            raise KernelError(
                f"{name}: {argument} must be {dtype_name(r.dtype)} as r is, got {dtype_name(x.dtype)}; cast one of them"
            )
        if x.device != r.device:
            raise KernelError(f"{name}: {argument} must be on {r.device} where r is, got {x.device}; move one of them")
    if not r.dtype.is_floating_point:
        raise KernelError(f"{name}: r must hold floating-point numbers, got {dtype_name(r.dtype)}")
    B, T, H, N = r.shape
    wide = torch.float64 if r.dtype == torch.float64 else torch.float32
    wanted: list[tuple[str, Tensor | None, list[int], torch.dtype]] = [
        *((argument, x, [H, N], wide) for argument, x in zip(recurrence.heads, heads, strict=True)),
        ("state", state_BHNN, [B, H, N, N], wide),
        ("starts", starts_BT, [B, T], torch.bool),
    ]
    for argument, given, sizes, dtype in wanted:
        if given is not None and (list(given.shape) != sizes or given.dtype != dtype or given.device != r.device):
            raise KernelError(
                f"{name}: {argument} must be {dtype_name(dtype)} {sizes} on {r.device}, "
                f"got {dtype_name(given.dtype)} {list(given.shape)} on {given.device}"
            )


# ---- the gate of a fresh build ----


def compiled_operator(name: str, head_size: int, device: torch.device) -> Kernels:
    """A compiled recurrence for a device; a build is tried against the reference before it is kept."""
    if device.type == "cuda":
        return _cuda_operator(name, head_size, torch.cuda.get_device_capability(device))
    return operator_of_this_machine(name)


@functools.cache
def operator_of_this_machine(name: str) -> Kernels:
    """The compiled recurrence for the CPU, of all head sizes."""
    return load_operator(name, lambda library: check_library(RECURRENCES[name], library, build.HEAD_SIZES))


@functools.cache
def _cuda_operator(name: str, head_size: int, capability: tuple[int, int]) -> Kernels:
    def check(library: ctypes.CDLL) -> None:
        check_library(RECURRENCES[name], library, (head_size,), device="cuda")

    return load_cuda_operator(name, head_size, capability, check)


def check_library(
    recurrence: Recurrence, library: ctypes.CDLL, head_sizes: Sequence[int], *, device: str = "cpu"
) -> None:
    """A short float32 call of every head size, forward and backward, against the reference in float64."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device, enabled=False):
        for head_size in head_sizes:
            worst = _worst_error(recurrence, library, head_size, device)
            # Not written as a comparison with >, which a result that is not a number would pass.
            if not worst < 1e-5:
                raise KernelError(
                    f"{recurrence.name}: the compiler made a kernel that computes wrong numbers (head size "
                    f"{head_size}, error {worst:.1e}); try another compiler, or choose kernels: torch"
                )


def _worst_error(recurrence: Recurrence, library: ctypes.CDLL, head_size: int, device: str) -> float:
    generator = torch.Generator(device=device).manual_seed(head_size)
    B, T, H, N = 1, CHUNK_LENGTHS[device] + 2, 2, head_size

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device=device)

    kappa = torch.nn.functional.normalize(normal(B, T, H, N), dim=-1)
    # What an argument needs for the recurrence to stay bounded; all others are normal.
    special = {"a": -kappa, "b": kappa * 0.5}
    inputs = (
        *(special[name] if name in special else normal(B, T, H, N) for name in recurrence.tokens),
        *(normal(H, N) for _ in recurrence.heads),
        normal(B, H, N, N),
    )
    dy, dstate_out = normal(B, T, H, N), normal(B, H, N, N)
    starts = torch.arange(T, device=device).unsqueeze(0) == 5
    y, state, *kept = recurrence.forward_outputs(inputs[0], save=True)
    gradients = recurrence.backward_outputs(inputs[0], need_dstate_in=True)
    recurrence.run(library, "forward", inputs[0], (*inputs, starts), (y, state, *kept))
    recurrence.run(library, "backward", inputs[0], (*inputs, starts, *kept, dy, dstate_out), gradients)
    leaves = [x.double().requires_grad_() for x in inputs]
    outputs = REFERENCES[recurrence.name](*leaves, starts_BT=starts)
    expected = (*outputs, *torch.autograd.grad(outputs, leaves, [dy.double(), dstate_out.double()]))
    # Those of the [H, N] inputs come for each of the sequences apart, of which there is one here.
    errors = [
        torch.linalg.vector_norm(got.double().view(want.shape) - want.detach())
        / torch.linalg.vector_norm(want.detach())
        for got, want in zip((y, state, *gradients), expected, strict=True)
    ]
    return float(torch.stack(errors).max())


# ---- the compiled recurrences as torch operators ----

_LIBRARY = torch.library.Library("rwkv_spec", "FRAGMENT")


def _library_for(name: str, r: Tensor) -> ctypes.CDLL:
    return compiled_operator(name, r.shape[3], r.device).library


register(RECURRENCES["wkv5"], _LIBRARY, functools.partial(_library_for, "wkv5"))
register(RECURRENCES["wkv6"], _LIBRARY, functools.partial(_library_for, "wkv6"))
register(RECURRENCES["wkv7"], _LIBRARY, functools.partial(_library_for, "wkv7"))
