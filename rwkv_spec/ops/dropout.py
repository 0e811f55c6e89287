"""Dropout without a state: the mask is a pure function of (seed of the row, site, time, channel), and of nothing else.

Promises: the same bits compiled and in plain torch, forward and backward, for any split of a batch over calls,
processes and threads. Saved for the backward: the seeds.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from rwkv_spec.errors import KernelError
from rwkv_spec.ops.backend import choose_backend
from rwkv_spec.ops.build import Kernels, load_operator, thread_pool

# A mask of the low 32 bits; the integer form works on int64, whose products wrap as those of uint64 do.
LOW_32 = 0xFFFFFFFF


def dropout(x_BTC: Tensor, *, p: float, seed_B: Tensor, site: int, start_T: int = 0, backend: str = "auto") -> Tensor:
    """x / (1 - p) where an element stays (probability 1 - p), else 0; x itself for p = 0.

    seed_B (int64) tells rows apart, `site` the places in a model that drop; start_T is the time of the first column.
    """
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout: p must be at least 0 and below 1, got {p}")
    if p == 0.0:
        return x_BTC
    if x_BTC.dim() != 3:
        raise KernelError(f"dropout: x must be [B, T, C], got {list(x_BTC.shape)}")
    if seed_B.shape != x_BTC.shape[:1] or seed_B.dtype != torch.int64 or seed_B.device != x_BTC.device:
        raise KernelError(
            f"dropout: seed must be int64 [{x_BTC.shape[0]}] on {x_BTC.device}, "
            f"got {str(seed_B.dtype).removeprefix('torch.')} {list(seed_B.shape)} on {seed_B.device}"
        )
    if _choose(backend, x_BTC.device.type, x_BTC.dtype) == "torch":
        return dropout_torch(x_BTC, p=p, seed_B=seed_B, site=site, start_T=start_T)
    y_BTC: Tensor = torch.ops.rwkv_spec.dropout(x_BTC.contiguous(), seed_B.contiguous(), p, site, start_T)
    return y_BTC


def dropout_torch(x_BTC: Tensor, *, p: float, seed_B: Tensor, site: int, start_T: int = 0) -> Tensor:
    """The integer form in plain torch: any device and floating dtype, the same bits as the compiled kernel."""
    keep_BTC = kept(seed_B, num_times=x_BTC.shape[1], num_channels=x_BTC.shape[2], p=p, site=site, start_T=start_T)
    # A float32 factor as in the kernel, which multiplies bfloat16 in float32 and rounds once, as torch does.
    scale = 1.0 / (1.0 - p) if x_BTC.dtype == torch.float64 else _scale(p)
    return torch.where(keep_BTC, x_BTC * scale, torch.zeros((), dtype=x_BTC.dtype, device=x_BTC.device))


def kept(seed_B: Tensor, *, num_times: int, num_channels: int, p: float, site: int, start_T: int = 0) -> Tensor:
    """The mask [B, T, C] (bool), true where an element stays."""
    times_T = torch.arange(start_T + 1, start_T + 1 + num_times, device=seed_B.device)
    channels_C = torch.arange(num_channels, device=seed_B.device)
    row_B1 = _mix(seed_B + _signed((site + 1) * 0x9E3779B97F4A7C15)).unsqueeze(1)
    key_BT1 = _mix(row_B1 + times_T * _signed(0xD1342543DE82EF95)).unsqueeze(2)
    low_BT1, high_BT1 = key_BT1 & LOW_32, (key_BT1 >> 32) & LOW_32
    x = (channels_C * 0x9E3779B9 + low_BT1) & LOW_32
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & LOW_32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & LOW_32
    x = ((x ^ (x >> 16) ^ high_BT1) * 0x27D4EB2F) & LOW_32
    return (x ^ (x >> 15)) >= _threshold(p)


def _threshold(p: float) -> int:
    return min(round(p * 2**32), LOW_32)


def _scale(p: float) -> float:
    return ctypes.c_float(1.0 / (1.0 - p)).value


def _signed(x: int) -> int:
    """The int64 with the low 64 bits of x."""
    return (x + 2**63) % 2**64 - 2**63


def _mix(z: Tensor) -> Tensor:
    """The finaliser of splitmix64; int64 shifts copy the sign, which the masks take away."""
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _signed(0x94D049BB133111EB)
    return z ^ ((z >> 31) & (2**33 - 1))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _choose(backend: str, device_type: str, dtype: torch.dtype) -> str:
    if device_type == "cuda" and backend in ("auto", "cuda"):
        # There is no CUDA operator for it: the plain form drops the same elements.
        return "torch"
    return choose_backend(backend, device=device_type, dtype=dtype, load=dropout_of_this_machine).name


@functools.cache
def dropout_of_this_machine() -> Kernels:
    """The compiled operator; a build is tried against the plain form before it is kept."""
    return load_operator("dropout", check_library)


def check_library(library: ctypes.CDLL) -> None:
    """Raises KernelError unless a short call gives the bits of the plain form."""
    with torch.inference_mode(False):
        x_BTC = torch.arange(2.0 * 3 * 37, device="cpu", dtype=torch.float32).view(2, 3, 37)
        seed_B = torch.tensor([1, -2], device="cpu")
        if not torch.equal(
            _call(library, x_BTC, seed_B, 0.4, 3, 5), dropout_torch(x_BTC, p=0.4, seed_B=seed_B, site=3, start_T=5)
        ):
            raise KernelError(
                "dropout: the compiler made a kernel that drops other elements than it must; try another compiler by "
                "CXX=..., or choose kernels: torch"
            )


# ---- the compiled kernel as a torch operator ----

_LIBRARY = torch.library.Library("rwkv_spec", "FRAGMENT")
_LIBRARY.define("dropout(Tensor x, Tensor seed, float p, int site, int start) -> Tensor")


def _dropout_cpu(x: Tensor, seed: Tensor, p: float, site: int, start: int) -> Tensor:
    return _call(dropout_of_this_machine().library, x, seed, p, site, start)


def _call(library: ctypes.CDLL, x: Tensor, seed: Tensor, p: float, site: int, start: int) -> Tensor:
    B, T, C = x.shape
    x = x.contiguous()
    y = torch.empty_like(x)
    code = library.dropout(
        ctypes.c_int64(B),
        ctypes.c_int64(T),
        ctypes.c_int64(C),
        ctypes.c_int(x.dtype == torch.bfloat16),
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_void_p(seed.data_ptr()),
        ctypes.c_void_p(y.data_ptr()),
        ctypes.c_uint32(_threshold(p)),
        ctypes.c_float(_scale(p)),
        ctypes.c_int64(_signed(site)),
        ctypes.c_int64(start),
        ctypes.c_int64(torch.get_num_threads()),
        ctypes.c_void_p(thread_pool()),
    )
    if code != 0:
        raise KernelError("dropout: no memory left for the threads' work space; use fewer threads")
    return y


def _dropout_fake(x: Tensor, seed: Tensor, p: float, site: int, start: int) -> Tensor:
    return x.new_empty(x.shape)


def _save_for_backward(
    ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, Tensor, float, int, int], output: Tensor
) -> None:
    _, seed, ctx.p, ctx.site, ctx.start = inputs  # type: ignore[attr-defined]
    ctx.save_for_backward(seed)


def _differentiate(ctx: torch.autograd.function.BackwardCFunction, dy: Tensor) -> tuple[Tensor | None, ...]:
    (seed,) = ctx.saved_tensors
    dx = torch.ops.rwkv_spec.dropout(dy, seed, ctx.p, ctx.site, ctx.start)  # type: ignore[attr-defined]
    return dx, None, None, None, None


_LIBRARY.impl("dropout", _dropout_cpu, "CPU")
torch.library.register_fake("rwkv_spec::dropout", _dropout_fake, lib=_LIBRARY)
torch.library.register_autograd("rwkv_spec::dropout", _differentiate, setup_context=_save_for_backward, lib=_LIBRARY)
