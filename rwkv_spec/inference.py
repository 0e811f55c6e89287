"""A checkpoint as something to use: loaded as a model, its tokenizer found beside it."""

from __future__ import annotations

from pathlib import Path

import torch
import yaml

from rwkv_spec.checkpoint.folder import is_weights_folder
from rwkv_spec.checkpoint.load import model_of
from rwkv_spec.checkpoint.published import open_weights
from rwkv_spec.checkpoint.state import WEIGHTS, list_states
from rwkv_spec.errors import CheckpointError, UserError
from rwkv_spec.model.language_model import LanguageModel
from rwkv_spec.paths import is_folder
from rwkv_spec.run_folder import RunFolder
from rwkv_spec.tokenizer.build import build_tokenizer
from rwkv_spec.tokenizer.protocol import NEEDED, Tokenizer, faults_of_tokenizer
from rwkv_spec.tokenizer.rows import mismatch

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
    if not is_folder(source) or is_weights_folder(source):
        return source
    folder = RunFolder(source)
    for stem in _PREFERRED:
        for file_format in _FORMATS:
            path = folder.weights(stem, file_format)
            if path.is_file():
                return path
    numbered = [path for file_format in _FORMATS for path in folder.numbered_weights(file_format)]
    # A run that was stopped early has saved nothing but its state.
    kept = numbered or [state / WEIGHTS for state in list_states(folder.states)]
    if not kept:
        raise CheckpointError(
            f"{source}: there are no weights in {folder.out}; name a run folder that has trained, or a weights file"
        )
    return kept[-1]


def tokenizer_for(source: Path, given: Tokenizer | None, *, num_rows: int) -> Tokenizer:
    """The given tokenizer, else that of the run that `source` belongs to.

    UserError where it does not belong to weights of so many vocabulary rows: the text would be of another language.
    """
    tokenizer = find_tokenizer(source) if given is None else given
    faults = faults_of_tokenizer(tokenizer)
    if faults is not None:
        raise ValueError(f"tokenizer: {faults}; {NEEDED}")
    wrong = mismatch(num_rows=num_rows, num_ids=tokenizer.vocab_size)
    if wrong is not None and not _was_asked_for(source, given, num_rows=num_rows):
        raise UserError(
            f"{source}: {wrong}, so that the two do not belong together; use the tokenizer that the checkpoint was "
            "trained with"
        )
    return tokenizer


def find_tokenizer(source: Path) -> Tokenizer:
    """The tokenizer of the run that `source` (its folder, or a checkpoint in its out/ or state/) belongs to."""
    folder = RunFolder(_work_dir(source))
    if not folder.resolved_spec.is_file():
        raise UserError(
            f"{source}: no {folder.resolved_spec} says which tokenizer it was trained with; pass tokenizer= "
            "(--tokenizer on the command line), or name a run folder"
        )
    section = _tokenizer_section(folder.resolved_spec)
    copy = folder.data / "vocab.txt"
    # A file that is gone, or the World vocabulary of a package that may not be installed here.
    is_elsewhere = section.get("type") in ("vocab", "world") and not Path(str(section.get("path"))).is_file()
    if is_elsewhere and copy.is_file():
        section = {**section, "path": copy}
    try:
        return build_tokenizer(**section)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{folder.resolved_spec}: its tokenizer section cannot be used: {error}; pass tokenizer="
        ) from error


def _work_dir(source: Path) -> Path:
    if is_folder(source) and not is_weights_folder(source):
        return source
    folder = source.absolute().parent
    # state/step-…/weights.safetensors lies one deeper than out/….
    return folder.parent.parent if folder.parent.name == "state" else folder.parent


def _was_asked_for(source: Path, given: Tokenizer | None, *, num_rows: int) -> bool:
    """Whether the run's model.vocab_size says so many rows, and the tokenizer is the run's as far as can be seen."""
    resolved = RunFolder(_work_dir(source)).resolved_spec
    if not resolved.is_file():
        return False
    tree = _resolved_tree(resolved)
    model = tree.get("model")
    is_own = given is None or tree.get("tokenizer") is None
    return is_own and isinstance(model, dict) and model.get("vocab_size") == num_rows


def _tokenizer_section(resolved: Path) -> dict[str, object]:
    section = _resolved_tree(resolved).get("tokenizer")
    if section is None:
        raise UserError(f"{resolved}: the run's tokenizer came from Python; pass it as tokenizer=")
    if not isinstance(section, dict) or not all(isinstance(key, str) for key in section):
        raise UserError(f"{resolved}: its tokenizer section cannot be used: {section!r}; pass tokenizer=")
    return section


def _resolved_tree(resolved: Path) -> dict[str, object]:
    try:
        tree = yaml.safe_load(resolved.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{resolved}: cannot be read: {error}; pass tokenizer=") from error
    if not isinstance(tree, dict):
        raise UserError(f"{resolved}: holds no spec; pass tokenizer=")
    return tree
