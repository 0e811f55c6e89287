"""A checkpoint as something to use: loaded as a model, its tokenizer found beside it."""

from __future__ import annotations

from pathlib import Path

import torch
import yaml

from rwkv_spec.checkpoint.folder import is_weights_folder
from rwkv_spec.checkpoint.load import model_of
from rwkv_spec.checkpoint.published import open_weights
from rwkv_spec.errors import CheckpointError, UserError
from rwkv_spec.model.language_model import LanguageModel
from rwkv_spec.run_folder import RunFolder
from rwkv_spec.tokenizer.build import build_tokenizer
from rwkv_spec.tokenizer.protocol import Tokenizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
# A run's weights by how good they are to use, before its numbered saves.
_PREFERRED = ("rwkv-final", "rwkv-best")
_FORMATS = ("pth", "safetensors")


def load_model(path: Path, *, device: str, dtype: str, backend: str = "auto") -> LanguageModel:
    """The model of a checkpoint, in evaluation mode, without gradients. CheckpointError where there is none."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; it is one of {', '.join(DTYPES)}")
    model = model_of(open_weights(path), where=path, backend=backend)
    return model.to(device=device, dtype=DTYPES[dtype])


def find_weights(source: Path) -> Path:
    """The checkpoint that `source` is, a file or a Hugging Face folder, or the one to use of the run folder it is."""
    if not source.is_dir() or is_weights_folder(source):
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
    """The tokenizer of the run that `source` (its folder, or a checkpoint in its out/) belongs to."""
    is_run = source.is_dir() and not is_weights_folder(source)
    work_dir = source if is_run else source.absolute().parent.parent
    resolved = RunFolder(work_dir).resolved_spec
    if not resolved.is_file():
        raise UserError(
            f"{source}: no {resolved} says which tokenizer it was trained with; pass tokenizer= "
            "(--tokenizer on the command line), or name a run folder"
        )
    section = _tokenizer_section(resolved)
    copy = RunFolder(work_dir).data / "vocab.txt"
    # A file that is gone, or the World vocabulary of a package that may not be installed here.
    is_elsewhere = section.get("type") in ("vocab", "world") and not Path(str(section.get("path"))).is_file()
    if is_elsewhere and copy.is_file():
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
