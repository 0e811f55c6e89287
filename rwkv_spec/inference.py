"""A checkpoint as something to use: loaded as a model, its tokenizer found beside it, prompts continued as text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import yaml

from rwkv_spec.checkpoint.detect import detect
from rwkv_spec.checkpoint.format import read_weights, tensor_infos
from rwkv_spec.errors import CheckpointError, UserError
from rwkv_spec.generation.decode import generate
from rwkv_spec.model.build import build_model, load_state
from rwkv_spec.model.language_model import LanguageModel
from rwkv_spec.run_folder import RunFolder
from rwkv_spec.tokenizer.build import build_tokenizer
from rwkv_spec.tokenizer.protocol import NumericTokenizer, Tokenizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
# A run's weights by how good they are to use, before its numbered saves.
_PREFERRED = ("rwkv-final", "rwkv-best")
_FORMATS = ("pth", "safetensors")


def load_model(path: Path, *, device: str, dtype: str, backend: str = "auto") -> LanguageModel:
    """The model of a weights file, in evaluation mode, without gradients. CheckpointError where there is none."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; it is one of {', '.join(DTYPES)}")
    weights = read_weights(path)
    shape = detect(tensor_infos(weights), where=path).shape
    model = build_model(shape, seed=None, backend=backend)
    load_state(model, weights)
    return model.to(device=device, dtype=DTYPES[dtype]).eval().requires_grad_(False)


def find_weights(source: Path) -> Path:
    """The weights file that `source` is, or the one to use of the run folder that it is."""
    if not source.is_dir():
        return source
    folder = RunFolder(source)
    for stem in _PREFERRED:
        for file_format in _FORMATS:
            path = folder.weights(stem, file_format)
            if path.is_file():
                return path
    numbered = [path for file_format in _FORMATS for path in folder.numbered_weights(file_format)]
    if not numbered:
        raise CheckpointError(f"{source}: there are no weights in {folder.out}; train first, or name a weights file")
    return numbered[-1]


def find_tokenizer(source: Path) -> Tokenizer:
    """The tokenizer of the run that `source` (its folder, or a file in its out/) belongs to."""
    work_dir = source if source.is_dir() else source.absolute().parent.parent
    resolved = RunFolder(work_dir).resolved_spec
    if not resolved.is_file():
        raise UserError(
            f"{source}: no {resolved} says which tokenizer it was trained with; pass tokenizer=, or name a run folder"
        )
    section = _tokenizer_section(resolved)
    copy = RunFolder(work_dir).data / "vocab.txt"
    if section.get("type") == "vocab" and not Path(str(section.get("path"))).is_file() and copy.is_file():
        section = {**section, "path": copy}
    try:
        return build_tokenizer(**section)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise UserError(f"{resolved}: its tokenizer section cannot be used: {error}; pass tokenizer=") from error


def _tokenizer_section(resolved: Path) -> dict[str, object]:
    try:
        tree = yaml.safe_load(resolved.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{resolved}: cannot be read: {error}; pass tokenizer=") from error
    if not isinstance(tree, dict):
        raise UserError(f"{resolved}: holds no spec; pass tokenizer=")
    section = tree.get("tokenizer")
    if section is None:
        raise UserError(f"{resolved}: the run's tokenizer came from Python; pass it as tokenizer=")
    if not isinstance(section, dict) or not all(isinstance(key, str) for key in section):
        raise UserError(f"{resolved}: its tokenizer section cannot be used: {section!r}; pass tokenizer=")
    return section


def generate_texts(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str | Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    stop_sequences: Sequence[str] = (),
    seed: int = 0,
) -> list[str]:
    """The continuation of each prompt as text, without the prompt. A prompt is text, or values of a numeric tokenizer.

    Each prompt is the start of a document: it follows token 0, as in training. Raises UserError or ValueError in words.
    """
    samples = generate(
        model,
        [[0, *_encode(tokenizer, prompt)] for prompt in prompts],
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        stop_sequences=[_encode(tokenizer, stop) for stop in stop_sequences],
        seed=seed,
        num_ids=min(tokenizer.vocab_size, model.shape.vocab_size),
    )
    try:
        return [tokenizer.decode(sample.ids) for sample in samples]
    except ValueError as error:
        raise UserError(
            f"the model produced what its tokenizer cannot decode: {error}; do the two belong together?"
        ) from error


def _encode(tokenizer: Tokenizer, prompt: str | Sequence[int]) -> list[int]:
    try:
        if isinstance(prompt, str):
            return list(tokenizer.encode(prompt))
        if isinstance(tokenizer, NumericTokenizer):
            return [int(index) for index in tokenizer.encode_sequence(list(prompt))]
    except ValueError as error:
        raise UserError(f"prompt {prompt!r}: {error}") from error
    raise UserError(f"prompt {prompt!r}: {type(tokenizer).__name__} takes text, not a list of values")
