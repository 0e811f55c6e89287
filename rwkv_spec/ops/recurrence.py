"""The compiled recurrences as torch operators for eager, compile and autograd: one table says what each takes.

Promises: C gets raw addresses, 64-bit sizes and the threads or the stream to use, and fills every output. Kept for the
backward are the inputs and, in float32, the state before every 32nd token (CUDA: every 16th; wkv7: also the product of
each token's a with the state).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rwkv_spec.errors import KernelError
from rwkv_spec.ops import build, build_cuda
from rwkv_spec.ops.build import thread_pool

CHUNK_LENGTHS = {"cpu": build.CHUNK_LENGTH, "cuda": build_cuda.CHUNK_LENGTH}
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@dataclass(frozen=True)
class Recurrence:
    """What one operator takes and keeps. tokens: inputs [B, T, H, N] of one dtype; heads: [H, N] in float32.

    The C functions take the sizes, the dtype, tokens, heads, state and starts; then in the forward y, the state after,
    and what is kept; in the backward what was kept, dy and the gradient of the state after, then all gradients.
    """

    name: str
    tokens: tuple[str, ...]
    heads: tuple[str, ...]
    keeps_sa: bool

    @property
    def inputs(self) -> tuple[str, ...]:
        return (*self.tokens, *self.heads)

    @property
    def num_kept(self) -> int:
        return 2 if self.keeps_sa else 1

    def forward_outputs(self, r: Tensor, save: bool) -> tuple[Tensor, ...]:
        """y, the state after, and what is kept (without elements where nothing is to be saved)."""
        B, T, H, N = r.shape
        length = CHUNK_LENGTHS.get(r.device.type, build.CHUNK_LENGTH)
        chunks = max((T + length - 1) // length - 1, 0) if save else 0
        state = r.new_empty((B, H, N, N), dtype=torch.float32)
        kept = [r.new_empty((B, H, chunks, N, N), dtype=torch.float32)]
        if self.keeps_sa:
            kept.append(r.new_empty(r.shape if save else (0,), dtype=torch.float32))
        return torch.empty_like(r), state, *kept

    def backward_outputs(self, r: Tensor, need_dstate_in: bool) -> tuple[Tensor, ...]:
        """A gradient for every input, those of `heads` for each sequence apart [B, H, N], and one of the state."""
        B, _, H, N = r.shape
        heads = (r.new_empty((B, H, N), dtype=torch.float32) for _ in self.heads)
        state = r.new_empty((B, H, N, N) if need_dstate_in else (0,), dtype=torch.float32)
        return *(torch.empty_like(r) for _ in self.tokens), *heads, state

    def run(
        self,
        library: ctypes.CDLL,
        direction: str,
        r: Tensor,
        inputs: tuple[Tensor | None, ...],
        outputs: tuple[Tensor | None, ...],
    ) -> None:
        """Calls the C function of a direction (forward, backward) for r's head size."""
        B, T, H, N = r.shape
        function = getattr(library, f"{self.name}_{direction}_{N}")
        inputs = tuple(None if x is None else on_16_bytes(x) for x in inputs)
        arguments = [
            *(ctypes.c_int64(size) for size in (B, T, H)),
            ctypes.c_int(DTYPE_CODES[r.dtype]),
            *(ctypes.c_void_p(None if x is None else x.data_ptr()) for x in (*inputs, *outputs)),
        ]
        if r.device.type == "cuda":
            with torch.cuda.device(r.device):
                code = function(*arguments, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
            if code != 0:
                raise KernelError(f"{self.name}: the device refused the kernel (CUDA error {code})")
            return
        code = function(*arguments, ctypes.c_int64(torch.get_num_threads()), ctypes.c_void_p(thread_pool()))
        if code != 0:
            raise KernelError(f"{self.name}: no memory left for the threads' work space; use fewer threads")


def on_16_bytes(x: Tensor) -> Tensor:
    """x, or a copy where its first number does not lie on a multiple of 16 bytes, as a view of a part may not."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


RECURRENCES = {
    "wkv5": Recurrence("wkv5", ("r", "k", "v"), ("w_raw", "u"), keeps_sa=False),
    "wkv6": Recurrence("wkv6", ("r", "w_raw", "k", "v"), ("u",), keeps_sa=False),
    "wkv7": Recurrence("wkv7", ("r", "w_raw", "k", "v", "a", "b"), (), keeps_sa=True),
}


def register(recurrence: Recurrence, library: torch.library.Library, load: Callable[[Tensor], ctypes.CDLL]) -> None:
    """Makes torch.ops.rwkv_spec.NAME_forward and NAME_backward; `load` gives the library for a tensor."""
    num_inputs = len(recurrence.inputs)
    arguments = ", ".join(f"Tensor {name}" for name in recurrence.inputs) + ", Tensor? state, Tensor? starts"
    kept = "".join(f", Tensor kept_{n}" for n in range(recurrence.num_kept))
    library.define(f"{recurrence.name}_forward({arguments}, bool save) -> ({_tensors(2 + recurrence.num_kept)})")
    library.define(
        f"{recurrence.name}_backward({arguments}{kept}, Tensor? dy, Tensor? dstate_out, bool need_dstate_in)"
        f" -> ({_tensors(num_inputs + 1)})"
    )

    def forward(*arguments: Tensor | None) -> tuple[Tensor, ...]:
        *inputs, save = arguments
        assert isinstance(inputs[0], Tensor)
        outputs = recurrence.forward_outputs(inputs[0], bool(save))
        wanted = outputs if save else (*outputs[:2], *(None for _ in outputs[2:]))
        recurrence.run(load(inputs[0]), "forward", inputs[0], tuple(inputs), wanted)
        return outputs

    def backward(*arguments: Tensor | None) -> tuple[Tensor, ...]:
        *inputs, dy, dstate_out, need_dstate_in = arguments
        assert isinstance(inputs[0], Tensor)
        # What autograd hands in may be a view of any strides.
        inputs += [None if x is None else x.contiguous() for x in (dy, dstate_out)]
        outputs = recurrence.backward_outputs(inputs[0], bool(need_dstate_in))
        wanted = outputs if need_dstate_in else (*outputs[:-1], None)
        recurrence.run(load(inputs[0]), "backward", inputs[0], tuple(inputs), wanted)
        return _summed(recurrence, outputs)

    def forward_fake(r: Tensor, *others: Tensor | bool | None) -> tuple[Tensor, ...]:
        return recurrence.forward_outputs(r, bool(others[-1]))

    def backward_fake(r: Tensor, *others: Tensor | bool | None) -> tuple[Tensor, ...]:
        return _summed(recurrence, recurrence.backward_outputs(r, bool(others[-1])))

    name = f"rwkv_spec::{recurrence.name}"
    for kind in ("CPU", "CUDA"):
        library.impl(f"{recurrence.name}_forward", forward, kind)
        library.impl(f"{recurrence.name}_backward", backward, kind)
    torch.library.register_fake(f"{name}_forward", forward_fake, lib=library)
    torch.library.register_fake(f"{name}_backward", backward_fake, lib=library)
    _register_autograd(recurrence, library)


def _register_autograd(recurrence: Recurrence, library: torch.library.Library) -> None:
    num_inputs = len(recurrence.inputs)

    def save_for_backward(
        ctx: torch.autograd.function.FunctionCtx,
        inputs: tuple[Tensor | bool | None, ...],
        output: tuple[Tensor, ...],
    ) -> None:
        ctx.save_for_backward(*inputs[:-1], *output[2:])  # type: ignore[arg-type]
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)

    def differentiate(
        ctx: torch.autograd.function.BackwardCFunction, dy: Tensor | None, dstate_out: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        if dy is None and dstate_out is None:
            return (None,) * (num_inputs + 3)
        need_dstate_in = bool(ctx.needs_input_grad[num_inputs])
        operator = getattr(torch.ops.rwkv_spec, f"{recurrence.name}_backward")
        gradients = operator(*ctx.saved_tensors, dy, dstate_out, need_dstate_in)
        return (*gradients[:-1], gradients[-1] if need_dstate_in else None, None, None)

    torch.library.register_autograd(
        f"rwkv_spec::{recurrence.name}_forward", differentiate, setup_context=save_for_backward, lib=library
    )


def _summed(recurrence: Recurrence, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The gradients with those of `heads` summed over the batch, always in the same order."""
    first, last = len(recurrence.tokens), len(recurrence.inputs)
    return *gradients[:first], *(x.sum(dim=0) for x in gradients[first:last]), *gradients[last:]


def _tensors(count: int) -> str:
    return ", ".join(["Tensor"] * count)
