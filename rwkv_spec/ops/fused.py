"""What the fused operators share: who runs one, how its C function is called, and how a fresh build is tried.

A fused operator does in one pass over memory what plain torch does in many. Each has a reference in plain torch, which
also runs it where there is no compiled form: other devices and dtypes, torch.compile, widths that no vector fills.
The CUDA forms were not measured on a GPU; an emulator runs them in the tests.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, overload

import torch
from torch import Tensor

from rwkv_spec.errors import KernelError
from rwkv_spec.ops.backend import COMPILED_DTYPES, choose_backend
from rwkv_spec.ops.build import Kernels, load_operator, source_folder, thread_pool
from rwkv_spec.ops.build_cuda import load_cuda_operator
from rwkv_spec.ops.recurrence import DTYPE_CODES, on_16_bytes

# Rows are worked on in pieces of this many, whose sums over rows are added up afterwards: fixed, so that neither the
# number of threads nor their order changes a bit. A GPU needs many pieces at once, each so small that it stays cached.
ROWS_OF_A_PIECE = 64
ROWS_OF_A_PIECE_ON_CUDA = 16
# Channels come in whole vectors of the widest kind.
CHANNELS_OF_A_VECTOR = 16


class Check(Protocol):
    """Tries a fresh build on a device; raises KernelError where it computes wrong numbers."""

    def __call__(self, library: ctypes.CDLL, device: str = "cpu") -> None: ...


@dataclass(frozen=True)
class FusedOperator:
    """One operator of kernels/cpu and, where it has a source there, of kernels/cuda."""

    name: str
    check: Check

    def library(
        self,
        backend: str,
        device: torch.device,
        *,
        rows: Sequence[Tensor | None],
        dtype: torch.dtype,
        wide: Sequence[Tensor | None] = (),
        channels: int = 0,
    ) -> ctypes.CDLL | None:
        """The compiled form, or None where the reference is to run.

        dtype is that of `rows`, made by matrix products or made for them; `wide` must be in float32.
        """
        if (
            torch.compiler.is_compiling()
            or channels % CHANNELS_OF_A_VECTOR
            or any(x is not None and (x.dtype != dtype or x.device != device) for x in rows)
            or any(x is not None and (x.dtype != torch.float32 or x.device != device) for x in wide)
        ):
            return None
        return _chosen(self, backend, device, dtype)


@functools.cache
def _chosen(operator: FusedOperator, backend: str, device: torch.device, dtype: torch.dtype) -> ctypes.CDLL | None:
    kind = device.type
    # Where a backend that was asked for cannot be had, the recurrence says so; the plain form is right everywhere.
    if dtype not in COMPILED_DTYPES.get(kind, ()) or (backend in COMPILED_DTYPES and backend != kind):
        return None
    if kind == "cuda" and not (source_folder("cuda") / f"{operator.name}.cu").is_file():
        return None
    chosen = choose_backend(backend, device=device, dtype=dtype, load=lambda: compiled_operator(operator, device))
    return None if chosen.name == "torch" else compiled_operator(operator, device).library


def compiled_operator(operator: FusedOperator, device: torch.device) -> Kernels:
    """The compiled operator for a device; a build is tried against the reference before it is kept."""
    if device.type == "cuda":
        return _cuda_operator(operator, torch.cuda.get_device_capability(device))
    return operator_of_this_machine(operator)


@functools.cache
def _cuda_operator(operator: FusedOperator, capability: tuple[int, int]) -> Kernels:
    return load_cuda_operator(operator.name, 0, capability, lambda library: operator.check(library, "cuda"))


@functools.cache
def operator_of_this_machine(operator: FusedOperator) -> Kernels:
    """The compiled operator for the CPU."""
    return load_operator(operator.name, operator.check)


def call(
    library: ctypes.CDLL,
    function: str,
    sizes: Sequence[int],
    dtype: torch.dtype,
    tensors: Sequence[Tensor | None],
    *,
    scalars: Sequence[float] = (),
) -> None:
    """Calls a C function with contiguous tensors of the header's order; KernelError if it could not be done."""
    device = next(x.device for x in tensors if x is not None)
    arguments = (
        (ctypes.c_int64 * len(sizes))(*sizes),
        ctypes.c_int(DTYPE_CODES[dtype]),
        (ctypes.c_void_p * len(tensors))(*(None if x is None else x.data_ptr() for x in tensors)),
        (ctypes.c_float * len(scalars))(*scalars),
    )
    if device.type == "cuda":
        with torch.cuda.device(device):
            code = getattr(library, function)(*arguments, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
        if code != 0:
            raise KernelError(f"{function}: the device refused the kernel (CUDA error {code})")
        return
    code = getattr(library, function)(
        *arguments, ctypes.c_int64(torch.get_num_threads()), ctypes.c_void_p(thread_pool())
    )
    if code != 0:
        raise KernelError(f"{function}: no memory left for the threads' work space; use fewer threads")


def rows_of_a_piece(device: torch.device) -> int:
    """How many rows a piece has there."""
    return ROWS_OF_A_PIECE_ON_CUDA if device.type == "cuda" else ROWS_OF_A_PIECE


def num_pieces(rows: int, of_a_piece: int = ROWS_OF_A_PIECE) -> int:
    """In how many pieces so many rows are worked on."""
    return -(-rows // of_a_piece)


@overload
def contiguous(x: Tensor) -> Tensor: ...
@overload
def contiguous(x: None) -> None: ...
def contiguous(x: Tensor | None) -> Tensor | None:
    """As C takes it: autograd may hand in views of any strides, and a device reads whole 16 bytes."""
    if x is None:
        return None
    return on_16_bytes(x.contiguous()) if x.is_cuda else x.contiguous()


def normal(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Inputs for the check of a build: the same, in float32 and on the CPU, whatever torch is set to."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") for shape in shapes]


def compare(name: str, got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    """KernelError unless float32 results of a fresh build are those of the reference in float64."""
    errors = [
        torch.linalg.vector_norm(x.double() - y) / torch.linalg.vector_norm(y).clamp(min=1e-30)
        for x, y in zip(got, want, strict=True)
    ]
    worst = float(torch.stack(errors).max())
    # Not written as a comparison with >, which a result that is not a number would pass.
    if not worst < 1e-5:
        raise KernelError(
            f"{name}: the compiler made a kernel that computes wrong numbers (error {worst:.1e}); try another compiler "
            "by CXX=..., or choose kernels: torch"
        )


def try_build(
    name: str,
    library: ctypes.CDLL,
    inputs: Sequence[Tensor],
    compiled: Callable[..., Sequence[Tensor]],
    reference: Callable[..., Sequence[Tensor]],
    device: str = "cpu",
) -> None:
    """All results and gradients of one call, by a library in float32 and by the reference in float64.

    compiled(library, *inputs) and reference(*inputs) give the results; every input gets a gradient.
    """
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device, enabled=False):
        leaves = [x.to(device, copy=True).requires_grad_() for x in inputs]
        wide = [x.to(device, torch.float64).requires_grad_() for x in inputs]
        got, want = compiled(library, *leaves), reference(*wide)
        upstream = [torch.cos(torch.arange(x.numel(), dtype=torch.float64, device=device)).view(x.shape) for x in want]
        got_grads = torch.autograd.grad(list(got), leaves, [x.float() for x in upstream])
        want_grads = torch.autograd.grad(list(want), wide, upstream)
        compare(name, [x.detach() for x in (*got, *got_grads)], [x.detach() for x in (*want, *want_grads)])
