"""Overrides: the same strict reading, replacing instead of clashing, and every replacement on record."""

from __future__ import annotations

from pathlib import Path

import pytest

from rwkv_spec.errors import SpecError
from rwkv_spec.spec.resolved import resolved_yaml
from rwkv_spec.spec.types import Spec
from rwkv_spec.spec.validate import validate

TEXT = """\
version: 1
data: {train: a.jsonl, eval: {where: {month: 12}}}
tokenizer: {type: integer, max_value: 9}
model: {n_layer: 2, n_embd: 64, dropout: 0.5}
train: {epochs: 2, batch_size: 4}
optimizer: {lr: 1e-3, eps: 1e-9}
scheduler: {type: cosine, lr_final: 1e-4}
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "specs").mkdir()
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "specs" / "a.yaml"
    path.write_text(TEXT)
    return path


def test_values_are_read_as_in_the_file(path: Path) -> None:
    spec = validate(
        path, ["optimizer.lr=2e-4", "optimizer.betas=[0.9, 0.95]", "name=no", "data.eval.where.month=[11, 12]"]
    )
    assert (spec.optimizer.lr, spec.optimizer.betas, spec.name) == (2e-4, (0.9, 0.95), "no")
    assert spec.data.eval is not None and spec.data.eval.where == {"month": (11, 12)}
    assert spec.optimizer.eps == 1e-9


def test_a_member_of_a_group_replaces_the_other_and_says_so(path: Path) -> None:
    spec = validate(path, ["train.steps=7", "data.eval.fraction=0.5", "save.every.tokens=9"])
    assert (spec.train.epochs, spec.train.steps) == (None, 7)
    assert spec.data.eval is not None and (spec.data.eval.where, spec.data.eval.fraction) == (None, 0.5)
    assert spec.save.every.tokens == 9 and spec.save.every.epochs is None
    text = resolved_yaml(spec, {})
    assert "steps: 7  # command line, instead of train.epochs 2 (a.yaml:5)" in text
    assert "fraction: 0.5  # command line, instead of data.eval.where … (a.yaml:2)" in text


def test_a_replaced_value_is_on_record(path: Path) -> None:
    text = resolved_yaml(validate(path, ["train.batch_size=8"]), {})
    assert "batch_size: 8  # command line, instead of 4 (a.yaml:5)" in text


def test_checkpoint_replaces_model(path: Path) -> None:
    spec = validate(path, ["checkpoint.path=w.pth"])
    assert spec.model is None and spec.checkpoint is not None
    assert spec.checkpoint.path == Path.cwd() / "w.pth"


def test_a_section_replaces_the_whole_section_whatever_the_order(path: Path) -> None:
    for overrides in (
        ["optimizer={lr: 5e-4}", "optimizer.weight_decay=1"],
        ["optimizer.weight_decay=1", "optimizer={lr: 5e-4}"],
    ):
        spec = validate(path, overrides)
        assert (spec.optimizer.lr, spec.optimizer.eps, spec.optimizer.weight_decay) == (5e-4, 1e-18, 1.0)


def test_a_new_type_drops_the_keys_of_the_old(path: Path) -> None:
    spec = validate(path, ["tokenizer.type=bytes", "scheduler.type=constant"])
    assert spec.tokenizer is not None and spec.tokenizer.max_value is None
    assert spec.scheduler.lr_final is None
    spec = validate(path, ["tokenizer.vocab_size=12", "tokenizer.type=ids"])
    assert spec.tokenizer is not None and (spec.tokenizer.max_value, spec.tokenizer.vocab_size) == (None, 12)


def test_null_takes_a_key_out(path: Path) -> None:
    spec = validate(path, ["data.eval=null", "scheduler.lr_final=null", "model.dropout=null"])
    assert spec.data.eval is None and spec.scheduler.lr_final == "auto"
    assert spec.model is not None and spec.model.dropout == 0


def test_paths_start_at_the_current_folder(path: Path) -> None:
    spec = validate(path, ["data.train=[b.jsonl, ~/c.jsonl]"])
    assert spec.data.train == (Path.cwd() / "b.jsonl", Path.home() / "c.jsonl")
    assert validate(path).data.train == (path.parent / "a.jsonl",)
    assert validate(path).work_dir == Path.cwd() / "runs" / "a"
    assert validate(path, ["name=b"]).work_dir == Path.cwd() / "runs" / "b"


@pytest.mark.parametrize(
    ("override", "begins", "word"),
    [
        ("foo", "command line: 'foo'", "key.path=value"),
        ("=3", "command line: '=3'", "key.path=value"),
        ("optimizer.lr=", "command line: optimizer.lr", "nothing stands after the ="),
        ("optimizer.lr=fast", "command line: optimizer.lr", "'fast' is not a number"),
        ("optimizer.lr='1'", "command line: optimizer.lr", "remove the quotes"),
        ("train.lr=3", "command line: train.lr", "belongs under optimizer"),
        ("lr=3", "command line: lr", "belongs under optimizer"),
        ("learning_rate=3", "command line: learning_rate", "here this is optimizer.lr"),
        ("train.step=3", "command line: train.step", "did you mean train.steps?"),
        ("train.steps.x=3", "command line: train.steps.x", "no keys"),
        ("name={a", "command line: name", "quote it"),
        ("name=a #b", "command line: name", "ends early"),
        ("name=*a", "command line: name", "quote it"),
        ("train={steps: 1, steps: 2}", "command line: train.steps", "given twice"),
        ("train={}", "command line: train", "one of epochs, steps, tokens"),
        ("train=null", "specs/a.yaml:1:1: train", "is missing"),
        ("model.n_embd=65", "command line: model.n_embd", "nearest: 64"),
        ("model.n_embd=null", "specs/a.yaml:4:1: model.n_embd", "is missing"),
    ],
)
def test_a_wrong_override_is_told_as_such(override: str, begins: str, word: str, path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        validate("specs/a.yaml", [override])
    (problem,) = caught.value.problems
    assert str(problem).startswith(begins) and word in str(problem)


def test_two_overrides_that_exclude_each_other_are_an_error(path: Path) -> None:
    with pytest.raises(SpecError, match=r"command line: train\.tokens: excludes steps"):
        validate(path, ["train.steps=7", "train.tokens=9"])
    with pytest.raises(SpecError, match="twice on the command line"):
        validate(path, ["train.steps=7", "train.steps=8"])


def test_a_spec_takes_overrides_too(path: Path) -> None:
    first: Spec = validate(path)
    second = validate(first, ["train.steps=7", "tokenizer.type=bytes"])
    assert second == validate(path, ["train.steps=7", "tokenizer.type=bytes"])
    assert second.sources["train.steps"].replaces == "train.epochs 2 (a.yaml:5)"
    assert second.sources["optimizer.lr"] == first.sources["optimizer.lr"]


def test_the_run_folder_starts_at_the_current_folder_wherever_it_is_given(path: Path) -> None:
    path.write_text(TEXT + "work_dir: out\n")
    assert validate(path).work_dir == Path.cwd() / "out"
    assert validate(path, ["work_dir=~/x"]).work_dir == Path.home() / "x"
