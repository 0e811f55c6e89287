"""Models of all generations for the tests: with random weights, and the golden ones with their published numbers."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rwkv_spec.model.build import build_model, load_state
from rwkv_spec.model.language_model import LanguageModel, State
from rwkv_spec.model.shapes import OPERATORS, fresh_shape
from rwkv_spec.objective.cross_entropy import cross_entropy
from rwkv_spec.ops.build import NoCompiler
from rwkv_spec.ops.wkv import resolve_backend

GOLDEN = Path(__file__).parents[1] / "golden"
VOCAB_SIZE = 11


def random_model(
    type: str,
    *,
    dtype: torch.dtype = torch.float64,
    n_layer: int = 3,
    n_embd: int = 32,
    head_size: int = 16,
    dropout: float = 0.0,
    backend: str = "auto",
) -> LanguageModel:
    """No weight is left at its start of zero, so that nothing is tested on a silent path."""
    shape = fresh_shape(type, n_layer=n_layer, n_embd=n_embd, head_size=head_size, vocab_size=VOCAB_SIZE)
    model = build_model(shape, dropout=dropout, backend=backend, seed=1).to(dtype)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator).to(dtype)
    return model


def random_ids(batch_size: int, length: int, *, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB_SIZE, (batch_size, length), generator=torch.Generator().manual_seed(seed))


def with_state(result: Tensor | tuple[Tensor, State] | tuple[Tensor, Tensor]) -> tuple[Tensor, State]:
    assert isinstance(result, tuple)
    logits, state = result
    assert isinstance(state, State)
    return logits, state


def loss_of(
    model: LanguageModel, ids: Tensor, targets: Tensor, weights: Tensor, *, l2wrap: float = 0.0, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """The weighted sum of cross-entropy and its weight, by head and loss in pieces as in training."""

    def loss(hidden: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        return cross_entropy(hidden, head, targets, weights, l2wrap=l2wrap, backend=backend)

    weighted_sum, weight = model(ids, loss=loss)
    return weighted_sum, weight


def assert_same_state(one: State, other: State, *, tolerance: float = 1e-10) -> None:
    for name in ("att_shift", "wkv", "ffn_shift"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=tolerance, atol=tolerance)


@cache
def golden_numbers(type: str) -> dict[str, Any]:
    numbers: dict[str, Any] = json.loads((GOLDEN / f"{type}_mini.json").read_text(encoding="utf-8"))
    return numbers


def golden_model(type: str, *, dtype: torch.dtype, backend: str) -> LanguageModel:
    """The model that the golden numbers are from."""
    shape = fresh_shape(type, n_layer=2, n_embd=128, head_size=64, vocab_size=32)
    model = build_model(shape, backend=backend, seed=None).to(dtype)
    load_state(model, torch.load(GOLDEN / f"{type}_mini_L2-D128-V32.pth", weights_only=True))
    return model


def compiled_or_skip(type: str) -> None:
    try:
        resolve_backend("cpu", device="cpu", dtype=torch.float32, operator=OPERATORS[type], head_size=64)
    except NoCompiler as error:
        pytest.skip(f"no compiler here: {error}")
