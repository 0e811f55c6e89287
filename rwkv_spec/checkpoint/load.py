"""A model from the tensors of a checkpoint: its shape is what they tell, and all of them are used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from rwkv_spec.checkpoint.detect import detect_model
from rwkv_spec.checkpoint.format import tensor_infos
from rwkv_spec.model.build import build_model, load_state
from rwkv_spec.model.language_model import LanguageModel


def model_of(weights: Mapping[str, Tensor], *, where: Path, backend: str = "auto") -> LanguageModel:
    """The float32 model of published tensors, in evaluation mode, without gradients; errors begin with `where`."""
    model = build_model(detect_model(tensor_infos(weights), where=where).shape, seed=None, backend=backend)
    load_state(model, weights)
    return model.eval().requires_grad_(False)
