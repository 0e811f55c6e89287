"""A small model whose every weight counts, so that its tokens vary and a wrong state shows in them."""

from __future__ import annotations

import torch

from rwkv_spec.model.build import build_model
from rwkv_spec.model.language_model import LanguageModel
from rwkv_spec.model.shapes import fresh_shape


def small_model(vocab_size: int, *, type: str = "x070", seed: int = 4) -> LanguageModel:
    """In float64: the two forms of the model then differ by far less than any two logits."""
    shape = fresh_shape(type, n_layer=2, n_embd=32, head_size=16, vocab_size=vocab_size)
    model = build_model(shape).double().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model
