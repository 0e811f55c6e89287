"""The step form's own operators, compiled, without gradients: one token of a block for any number of sequences.

Promises: the numbers of the parallel form, for any number of sequences. A model uses them where `can_step` says so, and
its own plain torch elsewhere (gradients, other dtypes and devices, no compiler).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from rwkv_spec.errors import KernelError
from rwkv_spec.ops.backend import choose_backend
from rwkv_spec.ops.build import HEAD_SIZES, Kernels, load_operator, thread_pool
from rwkv_spec.ops.reference import wkv6_reference, wkv7_reference

# Fewer numbers than this are read before a second thread has begun.
_NUMBERS_A_THREAD: Final = 1 << 16


def can_step(x_BC: Tensor, *, head_size: int, backend: str) -> bool:
    """Whether the compiled step form takes rows like these. `backend` is auto, cpu, cuda or torch."""
    return (
        x_BC.device.type == "cpu"
        and x_BC.dtype == torch.float32
        and head_size in HEAD_SIZES
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and _is_compiled(backend)
    )


@functools.cache
def _is_compiled(backend: str) -> bool:
    if backend == "cuda":
        return False
    return choose_backend(backend, device="cpu", dtype=torch.float32, load=step_of_this_machine).name == "cpu"


@functools.cache
def step_of_this_machine() -> Kernels:
    """The compiled operators; a build is tried against float64 before it is kept."""
    return load_operator("step", check_library)


def mix_once(
    x_BC: Tensor,
    previous_BC: Tensor,
    weights: Sequence[Tensor],
    added_MBC: Tensor | None = None,
    *,
    compiled: bool,
) -> tuple[Tensor, ...]:
    """x + (previous - x) * weight for every weight of C numbers; `added` [M, B, C] is added to the weights before."""
    if not compiled:
        delta_BC = previous_BC - x_BC
        rows = [weight.view(-1) for weight in weights]
        if added_MBC is not None:
            rows = [row + added for row, added in zip(rows, added_MBC, strict=True)]
        return tuple(torch.addcmul(x_BC, delta_BC, row) for row in rows)
    return _mix(step_of_this_machine().library, x_BC, previous_BC, weights, added_MBC).unbind(0)


def step7(
    products: Sequence[Tensor | None],
    weights: Sequence[Tensor],
    *,
    eps: float,
    state_BHNN: Tensor,
    new_state_BHNN: Tensor,
) -> tuple[Tensor, Tensor]:
    """RWKV-7's time-mix of one token up to its output matrix: (its input [B, C], v [B, C]); fills new_state.

    products, [B, C]: r, w1 w2, k, v, a1 a2, the gate, and after block 0 v1 v2 and the v of block 0 (else None).
    weights: w0, a0, v0, k_k, k_a, r_k and ln_x's weight and bias, of C numbers each.
    """
    return _step7(step_of_this_machine().library, products, weights, eps, state_BHNN, new_state_BHNN)


def step6(
    products: Sequence[Tensor],
    weights: Sequence[Tensor],
    *,
    eps: float,
    state_BHNN: Tensor,
    new_state_BHNN: Tensor,
) -> Tensor:
    """RWKV-6's and 5.2's time-mix of one token up to its output matrix: its input [B, C]; fills new_state.

    products, [B, C]: r, w_raw (or of C numbers alone, for every sequence), k, v, the gate before its SiLU.
    weights: u and ln_x's weight and bias, of C numbers each.
    """
    return _step6(step_of_this_machine().library, products, weights, eps, state_BHNN, new_state_BHNN)


# ---- the calls ----


def _address(x: Tensor | None) -> int | None:
    if x is None:
        return None
    assert x.dtype == torch.float32 and x.is_contiguous(), "the caller hands in float32 rows"
    return x.data_ptr()


def _addresses(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*[_address(x) for x in tensors])


def _threads(numbers: int) -> tuple[ctypes.c_int64, ctypes.c_void_p]:
    threads = min(torch.get_num_threads(), max(1, numbers // _NUMBERS_A_THREAD))
    return ctypes.c_int64(threads), ctypes.c_void_p(thread_pool())


def _raise_for(code: int) -> None:
    if code != 0:
        raise KernelError("step: no memory left for the threads' work space; use fewer threads")


def _mix(
    library: ctypes.CDLL, x_BC: Tensor, previous_BC: Tensor, weights: Sequence[Tensor], added_MBC: Tensor | None
) -> Tensor:
    B, C = x_BC.shape
    x_BC, previous_BC = x_BC.contiguous(), previous_BC.contiguous()
    out_MBC = x_BC.new_empty((len(weights), B, C))
    x, previous, added, out = _addresses((x_BC, previous_BC, added_MBC, out_MBC))
    sizes = (ctypes.c_int64(B), ctypes.c_int64(C), ctypes.c_int64(len(weights)))
    _raise_for(
        library.mix(
            *sizes,
            ctypes.c_void_p(x),
            ctypes.c_void_p(previous),
            _addresses(weights),
            ctypes.c_void_p(added),
            ctypes.c_void_p(out),
            *_threads(B * C),
        )
    )
    return out_MBC


def _step7(
    library: ctypes.CDLL,
    products: Sequence[Tensor | None],
    weights: Sequence[Tensor],
    eps: float,
    state_BHNN: Tensor,
    new_state_BHNN: Tensor,
) -> tuple[Tensor, Tensor]:
    r_BC, v_BC = products[0], products[3]
    assert r_BC is not None and v_BC is not None
    out_BC, new_v_BC = torch.empty_like(r_BC), torch.empty_like(v_BC)
    _recur(
        library.step7,
        products,
        weights,
        eps,
        (state_BHNN.contiguous(), new_state_BHNN, new_v_BC, out_BC),
        w_stride=None,
    )
    return out_BC, new_v_BC


def _step6(
    library: ctypes.CDLL,
    products: Sequence[Tensor],
    weights: Sequence[Tensor],
    eps: float,
    state_BHNN: Tensor,
    new_state_BHNN: Tensor,
) -> Tensor:
    out_BC = torch.empty_like(products[0])
    w_raw = products[1]
    w_stride = 0 if w_raw.numel() == products[0].shape[1] and len(products[0]) > 1 else products[0].shape[1]
    _recur(library.step6, products, weights, eps, (state_BHNN.contiguous(), new_state_BHNN, out_BC), w_stride=w_stride)
    return out_BC


def _recur(
    function: object,
    products: Sequence[Tensor | None],
    weights: Sequence[Tensor],
    eps: float,
    rest: Sequence[Tensor],
    *,
    w_stride: int | None,
) -> None:
    B, H, N, _ = rest[0].shape
    strides = () if w_stride is None else (ctypes.c_int64(w_stride),)
    assert callable(function)
    _raise_for(
        function(
            ctypes.c_int64(B),
            ctypes.c_int64(H),
            ctypes.c_int64(N),
            *strides,
            ctypes.c_float(eps),
            _addresses(products),
            _addresses(weights),
            *(ctypes.c_void_p(address) for address in _addresses(rest)),
            *_threads(B * H * N * N),
        )
    )


# ---- the gate of a fresh build ----


def check_library(library: ctypes.CDLL) -> None:
    """Raises KernelError unless short calls of every head size agree with float64."""
    with torch.inference_mode(False), torch.no_grad():
        worst = max(error for head_size in HEAD_SIZES for error in _errors(library, head_size))
    # Not written as a comparison with >, which a result that is not a number would pass.
    if not worst < 1e-5:
        raise KernelError(
            f"step: the compiler made operators that compute wrong numbers (error {worst:.1e}); try another compiler "
            "by CXX=..., or choose kernels: torch"
        )


def _errors(library: ctypes.CDLL, N: int) -> list[float]:
    generator = torch.Generator(device="cpu").manual_seed(N)
    B, H, eps = 3, 2, 64e-5

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    def error(got: Tensor, want: Tensor) -> float:
        return float(torch.linalg.vector_norm(got.double() - want) / torch.linalg.vector_norm(want))

    def heads(x: Tensor) -> Tensor:
        return x.double().view(-1, 1, H, N)

    def normed(y_B1HN: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.group_norm(y_B1HN.reshape(B, H * N), H, weight.double(), bias.double(), eps)

    products, weights = [normal(B, H * N) for _ in range(8)], [normal(H * N) for _ in range(8)]
    state, after = normal(B, H, N, N), normal(B, H, N, N)
    out, v_out = _step7(library, products, weights, eps, state, after)
    r, w_low, k, v, a_low, gate, share, first = (x.double() for x in products)
    w0, a0, v0, k_k, k_a, r_k, ln_weight, ln_bias = (x.double() for x in weights)
    rate, v = torch.sigmoid(a0 + a_low), torch.lerp(v, first, torch.sigmoid(v0 + share))
    kappa = F.normalize(heads(k * k_k), dim=-1)
    k = k * (1 + (rate - 1) * k_a)
    y, state7 = wkv7_reference(
        heads(r), heads(w0 + w_low), heads(k), heads(v), -kappa, kappa * heads(rate), state.double()
    )
    bonus = (heads(r * k * r_k).sum(dim=-1, keepdim=True) * heads(v)).view(B, H * N)
    errors = [error(after, state7), error(v_out, v), error(out, (normed(y, ln_weight, ln_bias) + bonus) * gate)]

    for w_raw in (products[1], weights[3]):
        five = (products[0], w_raw, products[2], products[3], products[5])
        out = _step6(library, five, weights[5:], eps, state, after)
        y, state6 = wkv6_reference(
            heads(r), heads(w_raw).expand(B, 1, H, N), heads(five[2]), heads(five[3]), r_k.view(H, N), state.double()
        )
        errors += [error(after, state6), error(out, normed(y, ln_weight, ln_bias) * F.silu(gate))]
    x, before = products[:2]
    mixed = _mix(library, x, before, weights, torch.stack(products))
    want = torch.stack([x + (before - x) * (one + added) for one, added in zip(weights, products, strict=True)])
    return [*errors, error(mixed, want.double())]
