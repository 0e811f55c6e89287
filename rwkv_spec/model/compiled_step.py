"""The step form of a whole model as one compiled call: a token of each sequence, without Python between the layers.

Promises: the numbers of the plain step form in float32, for any number of sequences and threads; a weight or a layer
that was exchanged is noticed at the next token.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from rwkv_spec.errors import KernelError
from rwkv_spec.model.shapes import ModelShape, parameter_shapes
from rwkv_spec.ops.backend import choose_backend
from rwkv_spec.ops.build import HEAD_SIZES, Kernels, load_operator, thread_pool

_GENERATIONS: Final = {"x052": 5, "x060": 6, "x070": 7}
# The order of a layer's weights in kernels/cpu/step.cpp, by their published names.
_SHARED: Final = (
    *("ln0.weight", "ln0.bias", "ln1.weight", "ln1.bias", "ln2.weight", "ln2.bias"),
    *("att.receptance.weight", "att.key.weight", "att.value.weight", "att.output.weight"),
    *("att.ln_x.weight", "att.ln_x.bias", "ffn.key.weight", "ffn.value.weight"),
)
_GATED: Final = ("att.gate.weight", "att.time_faaaa", "att.time_decay", "ffn.receptance.weight")
_ORDER: Final = {
    "x052": (
        *_SHARED,
        *_GATED,
        *("att.time_mix_r", "att.time_mix_k", "att.time_mix_v", "att.time_mix_g"),
        *("ffn.time_mix_k", "ffn.time_mix_r"),
    ),
    "x060": (
        *_SHARED,
        *_GATED,
        *("att.time_maa_x", "att.time_maa_w", "att.time_maa_k", "att.time_maa_v", "att.time_maa_r", "att.time_maa_g"),
        *("att.time_maa_w1", "att.time_maa_w2", "att.time_decay_w1", "att.time_decay_w2"),
        *("ffn.time_maa_k", "ffn.time_maa_r"),
    ),
    "x070": (
        *_SHARED,
        *("att.x_r", "att.x_w", "att.x_k", "att.x_v", "att.x_a", "att.x_g"),
        *("att.w0", "att.w1", "att.w2", "att.a0", "att.a1", "att.a2", "att.v0", "att.v1", "att.v2"),
        *("att.g1", "att.g2", "att.k_k", "att.k_a", "att.r_k", "ffn.x_k"),
    ),
}
_ENDS: Final = ("emb.weight", "ln_out.weight", "ln_out.bias", "head.weight")


def takes_step(model_weight: Tensor, *, head_size: int, backend: str) -> bool:
    """Whether the compiled step form can stand for the plain one here and now. `backend`: auto, cpu, cuda or torch."""
    return (
        model_weight.device.type == "cpu"
        and model_weight.dtype == torch.float32
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
    """The compiled call. A model compares its first token with its plain step form, so that a build needs no check."""
    return load_operator("step", lambda library: None)


class CompiledStep:
    """A model's weights as the compiled call takes them. Holds no copy: a weight that is trained on is followed."""

    def __init__(self, model: nn.Module, shape: ModelShape) -> None:
        self._children: list[tuple[Mapping[str, nn.Module | None], str, nn.Module]] = []
        for module in model.modules():
            self._children += [(module._modules, name, child) for name, child in module.named_children()]
        self._tensors: list[tuple[Mapping[str, Tensor | None], str, Tensor, int]] = []
        expected = parameter_shapes(shape)
        names = [f"blocks.{layer}.{name}" for layer in range(shape.n_layer) for name in _ORDER[shape.type]]
        # Only the first block has a norm before it.
        addresses = [self._address_of(model, name) if name in expected else None for name in names]
        self._weights = (ctypes.c_void_p * len(names))(*addresses)
        self._ends = (ctypes.c_void_p * len(_ENDS))(*(self._address_of(model, name) for name in _ENDS))
        ranks = (shape.rank_decay, shape.rank_iclr, shape.rank_value, shape.rank_gate, shape.rank_mix)
        sizes = (shape.n_layer, shape.n_embd, shape.num_heads, shape.head_size, shape.dim_ffn, shape.vocab_size, *ranks)
        self._sizes = (ctypes.c_int64 * len(sizes))(*sizes)
        self._generation = ctypes.c_int64(_GENERATIONS[shape.type])
        self._num_ids = shape.vocab_size

    def is_current(self) -> bool:
        """Whether every layer and every weight is still the one that it was."""
        return all(owner.get(name) is child for owner, name, child in self._children) and all(
            owner.get(name) is tensor and tensor.data_ptr() == address for owner, name, tensor, address in self._tensors
        )

    def __call__(self, ids_B: Tensor, state: Sequence[Tensor], new_state: Sequence[Tensor]) -> Tensor:
        """Logits [B, V]; fills new_state, which may be state: att_shift, wkv and ffn_shift, contiguous float32."""
        ids = [int(index) for index in ids_B.tolist()]
        for index in ids:
            if not 0 <= index < self._num_ids:
                raise IndexError(f"id {index} is outside the vocabulary of {self._num_ids} ids")
        logits_BV = torch.empty((len(ids), self._num_ids), dtype=torch.float32, device="cpu")
        code = step_of_this_machine().library.step(
            self._generation,
            self._sizes,
            ctypes.c_int64(len(ids)),
            (ctypes.c_int64 * len(ids))(*ids),
            self._weights,
            self._ends,
            (ctypes.c_void_p * 3)(*(tensor.data_ptr() for tensor in state)),
            (ctypes.c_void_p * 3)(*(tensor.data_ptr() for tensor in new_state)),
            ctypes.c_void_p(logits_BV.data_ptr()),
            ctypes.c_int64(torch.get_num_threads()),
            ctypes.c_void_p(thread_pool()),
        )
        if code != 0:
            raise KernelError("step: no memory left for the work space; free some, or take fewer sequences at once")
        return logits_BV

    def _address_of(self, model: nn.Module, name: str) -> int:
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        owner: Mapping[str, Tensor | None] = module._parameters if leaf in module._parameters else module._buffers
        tensor = owner[leaf]
        assert tensor is not None and tensor.dtype == torch.float32 and tensor.is_contiguous(), name
        self._tensors.append((owner, leaf, tensor, tensor.data_ptr()))
        return tensor.data_ptr()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # Addresses mean nothing elsewhere: a copy of a model begins without them.
        return type(None), ()
