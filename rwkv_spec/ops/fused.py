"""What the fused operators share: who runs one, how its C function is called, and how a fresh build is tried.

A fused operator does in one pass over memory what plain torch does in many. Each has a reference in plain torch, which
also runs it where there is no compiled form: other devices and dtypes, torch.compile, widths that no vector fills.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rwkv_spec.errors import KernelError
from rwkv_spec.ops.backend import COMPILED_DTYPES, choose_backend
from rwkv_spec.ops.build import Kernels, load_operator, thread_pool
from rwkv_spec.ops.recurrence import DTYPE_CODES

# Rows are worked on in pieces of this many, whose sums over rows are added up afterwards: fixed, so that neither the
# number of threads nor their order changes a bit.
ROWS_OF_A_PIECE = 64
# Channels come in whole vectors of the widest kind.
CHANNELS_OF_A_VECTOR = 16


@dataclass(frozen=True)
class FusedOperator:
    """One operator of kernels/cpu. `check` raises KernelError where a fresh build computes wrong numbers."""

    name: str
    check: Callable[[ctypes.CDLL], None]

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
        return _chosen(self, backend, device.type, dtype)


@functools.cache
def _chosen(operator: FusedOperator, backend: str, device: str, dtype: torch.dtype) -> ctypes.CDLL | None:
    # Where a backend that was asked for cannot be had, the recurrence says so; the plain form is right everywhere.
    if device != "cpu" or backend == "cuda" or dtype not in COMPILED_DTYPES["cpu"]:
        return None
    chosen = choose_backend(backend, device=device, dtype=dtype, load=lambda: operator_of_this_machine(operator))
    return None if chosen.name == "torch" else operator_of_this_machine(operator).library


@functools.cache
def operator_of_this_machine(operator: FusedOperator) -> Kernels:
    """The compiled operator; a build is tried against the reference before it is kept."""
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
    code = getattr(library, function)(
        (ctypes.c_int64 * len(sizes))(*sizes),
        ctypes.c_int(DTYPE_CODES[dtype]),
        (ctypes.c_void_p * len(tensors))(*(None if x is None else x.data_ptr() for x in tensors)),
        (ctypes.c_float * len(scalars))(*scalars),
        ctypes.c_int64(torch.get_num_threads()),
        ctypes.c_void_p(thread_pool()),
    )
    if code != 0:
        raise KernelError(f"{function}: no memory left for the threads' work space; use fewer threads")


def num_pieces(rows: int) -> int:
    """In how many pieces so many rows are worked on."""
    return -(-rows // ROWS_OF_A_PIECE)


def contiguous(x: Tensor | None) -> Tensor | None:
    """As C takes it: autograd may hand in views of any strides."""
    return None if x is None else x.contiguous()


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
) -> None:
    """All results and gradients of one call, by a library in float32 and by the reference in float64.

    compiled(library, *inputs) and reference(*inputs) give the results; every input gets a gradient.
    """
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        leaves = [x.clone().requires_grad_() for x in inputs]
        wide = [x.double().requires_grad_() for x in inputs]
        got, want = compiled(library, *leaves), reference(*wide)
        upstream = [torch.cos(torch.arange(x.numel(), dtype=torch.float64, device="cpu")).view(x.shape) for x in want]
        got_grads = torch.autograd.grad(list(got), leaves, [x.float() for x in upstream])
        want_grads = torch.autograd.grad(list(want), wide, upstream)
        compare(name, [x.detach() for x in (*got, *got_grads)], [x.detach() for x in (*want, *want_grads)])
