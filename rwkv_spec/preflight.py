"""Opens what a spec names, before anything is trained: sources, vocabulary, checkpoint header, tracker packages.

A person sees all of its problems at once, sorted by line. Torch is imported only for a checkpoint.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rwkv_spec.data.holdout import EvalRule
from rwkv_spec.data.source import Given, open_source
from rwkv_spec.errors import CheckpointError, DataError, KernelError, Problem, SpecError
from rwkv_spec.model.shapes import ModelShape, fresh_shape
from rwkv_spec.run_folder import RunFolder
from rwkv_spec.spec.types import Spec
from rwkv_spec.tokenizer.build import build_tokenizer
from rwkv_spec.tokenizer.protocol import NEEDED, Tokenizer, faults_of_tokenizer
from rwkv_spec.tokenizer.rows import mismatch

_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}


@dataclass(frozen=True)
class Inputs:
    """What the spec leads to: all of it exists and fits together as far as can be seen without reading the data.

    `checkpoint_rows` is the number of vocabulary rows in the checkpoint, where there is one; the shape may have others.
    """

    spec: Spec
    tokenizer: Tokenizer
    shape: ModelShape
    sources: tuple[Given, ...]
    eval_rule: EvalRule | None
    checkpoint_rows: int | None = None


def preflight(
    spec: Spec, *, data: Given | None = None, eval_data: Given | None = None, tokenizer: Tokenizer | None = None
) -> Inputs:
    """Open everything that the spec names; SpecError with every problem found."""
    problems: list[Problem] = []
    sources: tuple[Given, ...] = (data,) if data is not None else (spec.data.train or ())
    _check_sources(spec, "data.train", sources, problems)
    eval_rule = _eval_rule(spec, eval_data, problems)
    built = _tokenizer(spec, tokenizer, problems)
    shape, rows = _shape(spec, built, problems)
    _check_trackers(spec, problems)
    _check_compiler(spec, problems)
    if problems or built is None or shape is None:
        raise SpecError(problems)
    return Inputs(spec, built, shape, sources, eval_rule, rows)


def _check_sources(spec: Spec, key: str, sources: tuple[Given, ...], problems: list[Problem]) -> None:
    for index, source in enumerate(sources):
        name = f"{key}[{index}]" if len(sources) > 1 else key
        try:
            if isinstance(source, Path) and not source.exists() and not Path(f"{source}.idx").exists():
                problems.append(_missing(spec, name, source))
            else:
                open_source(source, name=key)
        except DataError as error:
            # Data in memory is called by its key, which the problem says already.
            problems.append(spec.problem(name, str(error).removeprefix(f"{key}: ")))


def _missing(spec: Spec, key: str, path: Path) -> Problem:
    """Where it was looked for, and what lies near: files of like name there, and the same words from where we stand."""
    hints = []
    if path.parent.is_dir():
        close = difflib.get_close_matches(path.name, [child.name for child in path.parent.iterdir()], n=2)
        hints += [f"{name} is there" for name in close]
    else:
        hints.append(f"the folder {path.parent} does not exist either")
    # A path is relative to its spec; people often mean the folder they stand in.
    for parts in range(1, len(path.parts)):
        here = Path.cwd().joinpath(*path.parts[-parts:])
        if here != path and here.is_file():
            hints.append(f"there is {here}, but paths in a spec are relative to the spec file")
            break
    advice = "; ".join(hints) if hints else "check the path; in a spec it is relative to the spec file"
    return spec.problem(key, f"no such file; looked at {path}", advice)


def _eval_rule(spec: Spec, eval_data: Given | None, problems: list[Problem]) -> EvalRule | None:
    if eval_data is not None:
        _check_sources(spec, "data.eval", (eval_data,), problems)
        return EvalRule(path=(eval_data,))
    rule = spec.data.eval
    if rule is None:
        return None
    if rule.path is not None:
        _check_sources(spec, "data.eval.path", rule.path, problems)
        trained = {path.resolve() for path in spec.data.train or ()}
        for path in rule.path:
            if path.resolve() in trained:
                what = f"{path} is trained on as well, so that its loss says nothing of held-out data"
                problems.append(spec.problem("data.eval.path", what, "name another file, or use fraction or documents"))
        return EvalRule(path=rule.path)
    try:
        return EvalRule(where=rule.where, fraction=rule.fraction, documents=rule.documents)
    except DataError as error:
        problems.append(spec.problem("data.eval", str(error)))
        return None


def _tokenizer(spec: Spec, given: Tokenizer | None, problems: list[Problem]) -> Tokenizer | None:
    if given is not None:
        wrong = faults_of_tokenizer(given)
        if wrong is not None:
            problems.append(spec.problem("tokenizer", wrong, NEEDED))
            return None
        return given
    section = spec.tokenizer
    assert section is not None
    try:
        return build_tokenizer(
            section.type, max_value=section.max_value, path=section.path, vocab_size=section.vocab_size
        )
    except (DataError, ValueError) as error:
        problems.append(spec.problem("tokenizer.path" if section.path else "tokenizer", str(error)))
        return None


def _shape(spec: Spec, tokenizer: Tokenizer | None, problems: list[Problem]) -> tuple[ModelShape | None, int | None]:
    """The model's shape, and the vocabulary rows of the checkpoint that it starts from, if it does."""
    if spec.checkpoint is None:
        return _fresh_shape(spec, tokenizer, problems), None
    shape = _checkpoint_shape(spec, spec.checkpoint.path, problems)
    if shape is None or tokenizer is None:
        return shape, None
    if spec.checkpoint.resize_vocab:
        return replace(shape, vocab_size=int(tokenizer.vocab_size)), shape.vocab_size
    wrong = mismatch(num_rows=shape.vocab_size, num_ids=tokenizer.vocab_size)
    if wrong is not None:
        fix = (
            "use the tokenizer that the checkpoint was trained with, another checkpoint, model: for fresh weights, or "
            f"checkpoint.resize_vocab: true to train with {_resized(shape.vocab_size, tokenizer.vocab_size)}"
        )
        problems.append(spec.problem("checkpoint.path", wrong, fix))
        return None, None
    return shape, shape.vocab_size


def _resized(num_rows: int, num_ids: int) -> str:
    if num_ids < num_rows:
        return f"the first {num_ids} rows alone"
    return f"these rows and {num_ids - num_rows} fresh ones"


def _fresh_shape(spec: Spec, tokenizer: Tokenizer | None, problems: list[Problem]) -> ModelShape | None:
    assert spec.model is not None
    if tokenizer is None:
        return None
    rows = tokenizer.vocab_size if spec.model.vocab_size == "auto" else spec.model.vocab_size
    if rows < tokenizer.vocab_size:
        what = f"{rows} rows are too few for the tokenizer's {tokenizer.vocab_size} ids"
        problems.append(spec.problem("model.vocab_size", what, f"use auto, or at least {tokenizer.vocab_size}"))
        return None
    model = spec.model
    try:
        return fresh_shape(
            model.type,
            n_layer=model.n_layer,
            n_embd=model.n_embd,
            head_size=model.head_size,
            vocab_size=rows,
            ranks=model.ranks or "current",
        )
    except ValueError as error:
        problems.append(spec.problem("model", str(error)))
        return None


def _checkpoint_shape(spec: Spec, path: Path, problems: list[Problem]) -> ModelShape | None:
    from rwkv_spec.checkpoint.detect import detect_model
    from rwkv_spec.checkpoint.published import open_header

    if _is_written_by_the_run(spec, path):
        what = f"{path} is a file that this run itself would write, over the weights that it starts from"
        problems.append(spec.problem("checkpoint.path", what, "move it to another folder, or use another work_dir"))
        return None
    try:
        return detect_model(open_header(path).tensors, where=path).shape
    except CheckpointError as error:
        problems.append(spec.problem("checkpoint.path", str(error)))
        return None


def _is_written_by_the_run(spec: Spec, path: Path) -> bool:
    """Whether the path, or the file that it leads to, is one of those in out/ that a run replaces and rotates away."""
    out = os.path.realpath(RunFolder(spec.work_dir).out)
    files = (Path(os.path.realpath(path.parent), path.name), Path(os.path.realpath(path)))
    return any(str(file.parent) == out and file.name.startswith("rwkv-") for file in files)


def _check_compiler(spec: Spec, problems: list[Problem]) -> None:
    if spec.kernels != "cpu":
        return

    from rwkv_spec.ops.build import find_compiler

    try:
        find_compiler()
    except KernelError as error:
        problems.append(spec.problem("kernels", f"cpu: {error}", "or use kernels: auto or torch"))


def _check_trackers(spec: Spec, problems: list[Problem]) -> None:
    find: Callable[[str], object] = importlib.util.find_spec
    for tracker in spec.log.trackers:
        if find(_PACKAGES[tracker]) is None:
            fix = f'pip install "rwkv_spec[{tracker}]", or take it out'
            problems.append(spec.problem("log.trackers", f"{tracker} is not installed", fix))
