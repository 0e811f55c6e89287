"""Make a language model: freshly initialised as published, or to be filled with given weights.

A parameter's start depends on the seed and on its name alone, so that neither the order of building nor the world
changes it, and torch's own random state is left as it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from rwkv_spec.errors import CheckpointError
from rwkv_spec.model import rwkv5, rwkv6, rwkv7
from rwkv_spec.model.initial import orthogonal, shared_start
from rwkv_spec.model.language_model import LanguageModel
from rwkv_spec.model.shapes import UNTRAINED, ModelShape, parameter_shapes

_NUM_SHOWN = 6
_OWN_STARTS = {"x052": rwkv5.initial_start, "x060": rwkv6.initial_start, "x070": rwkv7.initial_start}


def build_model(
    shape: ModelShape,
    *,
    dropout: float = 0.0,
    backend: str = "auto",
    grad_checkpoint: bool = False,
    seed: int | None = 0,
) -> LanguageModel:
    """A float32 model on the CPU. `seed` None leaves all weights at zero, for a load_state that follows."""
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout must be at least 0 and below 1, got {dropout!r}")
    # On the meta device the layers' own random start costs nothing and moves no random state.
    with torch.device("meta"):
        model = LanguageModel(shape, dropout=dropout, backend=backend, grad_checkpoint=grad_checkpoint)
    model.to_empty(device="cpu")
    tensors = model.state_dict()
    with torch.no_grad():
        for name, parameter in parameter_shapes(shape).items():
            if seed is None:
                tensors[name].zero_()
            else:
                tensors[name].copy_(initial_value(name, parameter.shape, shape=shape, seed=seed))
    return model


def initial_value(name: str, sizes: tuple[int, ...], *, shape: ModelShape, seed: int) -> Tensor:
    """The published start of one tensor by its full name."""
    generator = torch.Generator().manual_seed(_seed_of(name, seed=seed))
    if name.startswith("blocks."):
        _, layer, rest = name.split(".", 2)
        shared = shared_start(rest, sizes, shape=shape, layer=int(layer), generator=generator)
        if shared is not None:
            return shared
        return _OWN_STARTS[shape.type](rest, sizes, shape=shape, layer=int(layer), generator=generator)
    if name == "emb.weight":
        return torch.empty(sizes).uniform_(-1e-4, 1e-4, generator=generator)
    if name == "head.weight":
        gain = 0.5 * max(1.0, shape.vocab_size / shape.n_embd) ** 0.5
        return orthogonal(sizes, gain=gain, generator=generator)
    return torch.ones(sizes) if name.endswith("weight") else torch.zeros(sizes)


def weights(model: LanguageModel) -> dict[str, Tensor]:
    """Published name -> the model's own tensor, not a copy; buffers, as block 0's v0, v1, v2 of x070, included."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensors[name].detach() for name in parameter_shapes(model.shape)}


def load_state(model: LanguageModel, tensors: Mapping[str, Tensor]) -> None:
    """Copy given weights in, in the model's dtype. Strict: a CheckpointError lists all names and shapes that misfit.

    Only block 0's v0, v1, v2 of x070, which nothing uses, may be absent; they keep the values they have. Nothing is
    changed unless everything fits.
    """
    expected = parameter_shapes(model.shape)
    optional = {name for name, parameter in expected.items() if parameter.group == UNTRAINED}
    missing = sorted(expected.keys() - tensors.keys() - optional)
    unknown = sorted(tensors.keys() - expected.keys())
    problems = [f"{name} is missing" for name in missing] + [f"{name} is not known" for name in unknown]
    for name, tensor in tensors.items():
        if name not in expected:
            continue
        if tuple(tensor.shape) != expected[name].shape:
            problems.append(f"{name} has shape {list(tensor.shape)}, not {list(expected[name].shape)}")
        elif not tensor.is_floating_point():
            problems.append(f"{name} holds {tensor.dtype}, not floating-point numbers")
    if problems:
        shown = "; ".join(problems[:_NUM_SHOWN])
        more = f"; and {len(problems) - _NUM_SHOWN} more" if len(problems) > _NUM_SHOWN else ""
        raise CheckpointError(f"the weights do not fit this {model.shape.type} model: {shown}{more}")
    own = weights(model)
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)


def _seed_of(name: str, *, seed: int) -> int:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
