"""wkv7(): the recurrence of RWKV-7 with gradients, over the compiled CPU kernel or plain torch.

Promises: every tensor is checked before C sees it; any T, an initial and a final state with gradients of both, resets.
The compiled kernel keeps for the backward its inputs and, in float32, the state before every 32nd token and the product
of each token's a with the state before it.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from rwkv_spec.errors import KernelError
from rwkv_spec.ops.build import CHUNK_LENGTH, HEAD_SIZES, Kernels, NoCompiler, load_kernels, thread_pool
from rwkv_spec.ops.reference import wkv7_reference, wkv7_torch

COMPILED_DTYPES = (torch.float32, torch.bfloat16)
NAMES = ("r", "w_raw", "k", "v", "a", "b")


@dataclass(frozen=True)
class Backend:
    """What runs the operators: `cpu` (compiled) or `torch`; and why, as a sentence for a person."""

    name: str
    reason: str


def resolve_backend(kernels: str, *, device: str | torch.device, dtype: torch.dtype) -> Backend:
    """The backend for `kernels: auto | cpu | torch`; builds the operators where they are wanted and not yet there."""
    device_type = torch.device(device).type
    if kernels not in ("auto", "cpu", "torch"):
        raise KernelError(f"kernels: there is no backend {kernels!r}; choose auto, cpu or torch")
    if kernels == "torch":
        return Backend("torch", "torch: plain torch operators, as asked for")
    hindrance = ""
    if device_type != "cpu":
        hindrance = f"the compiled operators are for the CPU, not for {device_type}"
    elif dtype not in COMPILED_DTYPES:
        hindrance = f"the compiled operators take float32 and bfloat16, not {_name(dtype)}"
    if hindrance:
        if kernels == "cpu":
            raise KernelError(f"kernels: cpu cannot be used: {hindrance}; choose kernels: auto or torch")
        return Backend("torch", f"torch: {hindrance}")
    try:
        loaded = kernels_of_this_machine()
    except NoCompiler as error:
        if kernels == "cpu":
            raise
        return Backend("torch", f"torch, several times slower: {error}")
    reason = f"compiled CPU kernel, {loaded.compiler}, {loaded.instructions}"
    if thread_pool() is None:
        reason += ", one thread (torch's OpenMP runtime was not found)"
    return Backend("cpu", f"{reason}; {loaded.remark}" if loaded.remark else reason)


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
    """y [B, T, H, N] in r's dtype and the final state [B, H, value, key] in float32 (float64 for float64 inputs).

    starts_BT (bool) clears the state before its token; no gradient crosses it. No state given is a state of zeros.
    Under autocast the six inputs are cast to its dtype, as the published training does.
    """
    inputs = (r_BTHN, w_raw_BTHN, k_BTHN, v_BTHN, a_BTHN, b_BTHN)
    if r_BTHN.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        inputs = tuple(x.to(dtype) if x.dtype == torch.float32 else x for x in inputs)  # type: ignore[assignment]
    _check(inputs, state_BHNN, starts_BT)
    name = _choose(backend, inputs[0].device.type, inputs[0].dtype, inputs[0].shape[3])
    if name == "torch":
        return wkv7_torch(*inputs, state_BHNN, starts_BT=starts_BT)
    save = torch.is_grad_enabled() and (
        any(x.requires_grad for x in inputs) or (state_BHNN is not None and state_BHNN.requires_grad)
    )
    y, state, _, _ = torch.ops.rwkv_spec.wkv7_forward(
        *(x.contiguous() for x in inputs),
        None if state_BHNN is None else state_BHNN.contiguous(),
        None if starts_BT is None else starts_BT.contiguous(),
        save,
    )
    return y, state


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _choose(backend: str, device_type: str, dtype: torch.dtype, head_size: int) -> str:
    """A constant for torch.compile, which must not trace the build."""
    name = resolve_backend(backend, device=device_type, dtype=dtype).name
    if name == "torch" or head_size in HEAD_SIZES:
        return name
    if backend == "auto":
        return "torch"
    sizes = ", ".join(str(size) for size in HEAD_SIZES)
    raise KernelError(f"wkv7: head size {head_size} is not compiled (there are {sizes}); choose kernels: torch")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check(inputs: tuple[Tensor, ...], state_BHNN: Tensor | None, starts_BT: Tensor | None) -> None:
    r = inputs[0]
    if r.dim() != 4:
        raise KernelError(f"wkv7: r must be [B, T, H, N], got {list(r.shape)}; reshape it to one row a head")
    for name, x in zip(NAMES, inputs, strict=True):
        if x.shape != r.shape:
            raise KernelError(f"wkv7: {name} must have r's shape {list(r.shape)}, got {list(x.shape)}")
        if x.dtype != r.dtype:
            raise KernelError(f"wkv7: {name} must be {_name(r.dtype)} as r is, got {_name(x.dtype)}; cast one of them")
        if x.device != r.device:
            raise KernelError(f"wkv7: {name} must be on {r.device} where r is, got {x.device}; move one of them")
    if not r.dtype.is_floating_point:
        raise KernelError(f"wkv7: r must hold floating-point numbers, got {_name(r.dtype)}")
    B, T, H, N = r.shape
    if state_BHNN is not None:
        dtype = torch.float64 if r.dtype == torch.float64 else torch.float32
        if state_BHNN.shape != (B, H, N, N) or state_BHNN.dtype != dtype or state_BHNN.device != r.device:
            raise KernelError(
                f"wkv7: state must be {_name(dtype)} {[B, H, N, N]} on {r.device}, "
                f"got {_name(state_BHNN.dtype)} {list(state_BHNN.shape)} on {state_BHNN.device}"
            )
    if starts_BT is not None and (
        starts_BT.shape != (B, T) or starts_BT.dtype != torch.bool or starts_BT.device != r.device
    ):
        raise KernelError(
            f"wkv7: starts must be bool {[B, T]} on {r.device}, "
            f"got {_name(starts_BT.dtype)} {list(starts_BT.shape)} on {starts_BT.device}"
        )


# ---- the compiled kernel as torch operators: what each takes and gives, for eager, compile and autograd ----

_INPUTS = "Tensor r, Tensor w_raw, Tensor k, Tensor v, Tensor a, Tensor b, Tensor? state, Tensor? starts"
_LIBRARY = torch.library.Library("rwkv_spec", "FRAGMENT")
_LIBRARY.define(f"wkv7_forward({_INPUTS}, bool save) -> (Tensor, Tensor, Tensor, Tensor)")
_LIBRARY.define(
    f"wkv7_backward({_INPUTS}, Tensor chunk_states, Tensor sa, Tensor? dy, Tensor? dstate_out, bool need_dstate_in)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _forward_outputs(r: Tensor, save: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    B, T, H, N = r.shape
    chunks = max((T + CHUNK_LENGTH - 1) // CHUNK_LENGTH - 1, 0) if save else 0
    state = r.new_empty((B, H, N, N), dtype=torch.float32)
    chunk_states = r.new_empty((B, H, chunks, N, N), dtype=torch.float32)
    return torch.empty_like(r), state, chunk_states, r.new_empty(r.shape if save else (0,), dtype=torch.float32)


def _backward_outputs(r: Tensor, need_dstate_in: bool) -> tuple[Tensor, ...]:
    B, _, H, N = r.shape
    shape = (B, H, N, N) if need_dstate_in else (0,)
    return (*(torch.empty_like(r) for _ in NAMES), r.new_empty(shape, dtype=torch.float32))


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _run(
    library: ctypes.CDLL,
    name: str,
    r: Tensor,
    inputs: tuple[Tensor | None, ...],
    outputs: tuple[Tensor | None, ...],
) -> None:
    """Calls one C function: sizes, dtype, the addresses of inputs and outputs in the order of its header, threads."""
    B, T, H, N = r.shape
    function = getattr(library, f"{name}_{N}")
    sizes = [ctypes.c_int64(size) for size in (B, T, H)]
    addresses = [ctypes.c_void_p(_address(x)) for x in (*inputs, *outputs)]
    code = function(
        *sizes,
        ctypes.c_int(r.dtype == torch.bfloat16),
        *addresses,
        ctypes.c_int64(torch.get_num_threads()),
        ctypes.c_void_p(thread_pool()),
    )
    if code != 0:
        raise KernelError(f"{name}: no memory left for the threads' work space; use fewer threads")


def _forward_cpu(
    r: Tensor,
    w_raw: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor | None,
    starts: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    outputs = _forward_outputs(r, save)
    inputs = (r, w_raw, k, v, a, b, state, starts)
    library = kernels_of_this_machine().library
    _run(library, "wkv7_forward", r, inputs, outputs if save else (*outputs[:2], None, None))
    return outputs


def _backward_cpu(
    r: Tensor,
    w_raw: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor | None,
    starts: Tensor | None,
    chunk_states: Tensor,
    sa: Tensor,
    dy: Tensor | None,
    dstate_out: Tensor | None,
    need_dstate_in: bool,
) -> tuple[Tensor, ...]:
    dy = None if dy is None else dy.contiguous()
    dstate_out = None if dstate_out is None else dstate_out.contiguous()
    outputs = _backward_outputs(r, need_dstate_in)
    inputs = (r, w_raw, k, v, a, b, state, starts, chunk_states, sa, dy, dstate_out)
    library = kernels_of_this_machine().library
    _run(library, "wkv7_backward", r, inputs, (*outputs[:6], outputs[6] if need_dstate_in else None))
    return outputs


def _forward_fake(r: Tensor, *others: Tensor | bool | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _forward_outputs(r, bool(others[-1]))


def _backward_fake(r: Tensor, *others: Tensor | bool | None) -> tuple[Tensor, ...]:
    return _backward_outputs(r, bool(others[-1]))


def _save_for_backward(
    ctx: torch.autograd.function.FunctionCtx,
    inputs: tuple[Tensor | bool | None, ...],
    output: tuple[Tensor, ...],
) -> None:
    ctx.save_for_backward(*inputs[:8], *output[2:])  # type: ignore[arg-type]
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: torch.autograd.function.BackwardCFunction, dy: Tensor | None, dstate_out: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    if dy is None and dstate_out is None:
        return (None,) * 9
    need_dstate_in = bool(ctx.needs_input_grad[6])  # type: ignore[misc]
    gradients = torch.ops.rwkv_spec.wkv7_backward(*ctx.saved_tensors, dy, dstate_out, need_dstate_in)
    return (*gradients[:6], gradients[6] if need_dstate_in else None, None, None)


_LIBRARY.impl("wkv7_forward", _forward_cpu, "CPU")
_LIBRARY.impl("wkv7_backward", _backward_cpu, "CPU")
torch.library.register_fake("rwkv_spec::wkv7_forward", _forward_fake, lib=_LIBRARY)
torch.library.register_fake("rwkv_spec::wkv7_backward", _backward_fake, lib=_LIBRARY)
torch.library.register_autograd(
    "rwkv_spec::wkv7_forward", _differentiate, setup_context=_save_for_backward, lib=_LIBRARY
)


# ---- the gate of a fresh build ----


@functools.lru_cache(maxsize=1)
def kernels_of_this_machine() -> Kernels:
    """The compiled operators; a build is tried against the reference before it is kept."""
    return load_kernels(check_library)


def check_library(library: ctypes.CDLL) -> None:
    """A short float32 call of every head size, forward and backward, against the reference in float64."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        for head_size in HEAD_SIZES:
            worst = _worst_error(library, head_size)
            # Not written as a comparison with >, which a result that is not a number would pass.
            if not worst < 1e-5:
                raise KernelError(
                    f"wkv7: the compiler made a kernel that computes wrong numbers (head size {head_size}, error "
                    f"{worst:.1e}); try another compiler by CXX=..., or choose kernels: torch"
                )


def _worst_error(library: ctypes.CDLL, head_size: int) -> float:
    generator = torch.Generator(device="cpu").manual_seed(head_size)
    B, T, H, N = 1, CHUNK_LENGTH + 2, 2, head_size

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    kappa = torch.nn.functional.normalize(normal(B, T, H, N), dim=-1)
    rest = (4.0 * normal(B, T, H, N), normal(B, T, H, N), normal(B, T, H, N), -kappa, kappa * 0.5)
    inputs = (normal(B, T, H, N), *rest, normal(B, H, N, N))
    dy, dstate_out = normal(B, T, H, N), normal(B, H, N, N)
    starts = torch.arange(T, device="cpu").unsqueeze(0) == 5
    y, state, *saved = _forward_outputs(inputs[0], save=True)
    gradients = _backward_outputs(inputs[0], need_dstate_in=True)
    _run(library, "wkv7_forward", inputs[0], (*inputs, starts), (y, state, *saved))
    _run(library, "wkv7_backward", inputs[0], (*inputs, starts, *saved, dy, dstate_out), gradients)
    leaves = [x.double().requires_grad_() for x in inputs]
    outputs = wkv7_reference(*leaves, starts_BT=starts)
    expected = (*outputs, *torch.autograd.grad(outputs, leaves, [dy.double(), dstate_out.double()]))
    errors = [
        torch.linalg.vector_norm(got.double() - want.detach()) / torch.linalg.vector_norm(want.detach())
        for got, want in zip((y, state, *gradients), expected, strict=True)
    ]
    return float(torch.stack(errors).max())
