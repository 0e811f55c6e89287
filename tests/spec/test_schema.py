"""schema.json is the only home of keys and defaults: sound, equal to types.py, and usable by an editor alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from rwkv_spec.spec import types
from rwkv_spec.spec.load import load_file
from rwkv_spec.spec.schema import Schema, keys, other_names, properties, schema
from rwkv_spec.spec.tree import plain

SECTIONS = {
    "": types.Spec, "data": types.Data, "data.eval": types.DataEval, "tokenizer": types.Tokenizer, "model": types.Model,
    "checkpoint": types.Checkpoint, "train": types.Train, "optimizer": types.Optimizer, "scheduler": types.Scheduler,
    "eval": types.Eval, "save": types.Save, "log": types.Log, "eval.every": types.Every, "save.every": types.Every,
    "log.every": types.Every,
}  # fmt: skip


def standalone(sub: Schema) -> dict[str, object]:
    """A part of the schema that can be used alone."""
    return {**sub, "$defs": schema()["$defs"]}


def test_the_schema_is_a_sound_schema() -> None:
    Draft202012Validator.check_schema(schema())


def test_the_fields_of_the_types_are_the_keys_of_the_schema() -> None:
    sections = {"": schema(), **{key: sub for key, sub in keys().items() if "properties" in sub}}
    assert sections.keys() == SECTIONS.keys()
    for key, sub in sections.items():
        names = [field.name for field in dataclasses.fields(SECTIONS[key]) if field.name != "sources"]
        assert names == list(properties(sub)), key


def test_every_default_and_example_suits_its_own_schema() -> None:
    num_checked = 0
    for key, sub in keys().items():
        for value in [*([sub["default"]] if "default" in sub else []), *sub.get("examples", [])]:
            assert Draft202012Validator(standalone(sub)).is_valid(value), (key, value)
            num_checked += 1
    assert num_checked > 40


def test_every_key_is_described_and_has_a_default_or_an_example() -> None:
    for key, sub in keys().items():
        assert sub["description"].endswith("."), key
        assert "properties" in sub or "default" in sub or "examples" in sub, key


def test_other_names_are_unambiguous_and_no_keys_of_ours() -> None:
    names = [name for sub in keys().values() for name in sub.get("x-also-known-as", ())]
    assert len(names) == len(set(names)) == len(other_names())
    assert not set(names) & set(schema()["x-elsewhere"])
    assert not set(names) & {key.rpartition(".")[2] for key in keys()}
    for name, key in {
        "lr_init": "optimizer.lr", "micro_bsz": "train.micro_batch_size", "adam_eps": "optimizer.eps",
        "num_epochs": "train.epochs", "epoch_save": "save.every", "load_model": "checkpoint.path",
        "model_type": "model.type", "learning_rate": "optimizer.lr", "sequence_len": "train.ctx_len",
        "base_model": "checkpoint.path",
    }.items():  # fmt: skip
        assert other_names()[name] == key


GOOD = """\
version: 1
x-base: {anything: [1]}
data: {train: [a.jsonl, b.jsonl], eval: {where: {month: [11, 12], kind: x}}, order: rwkv-lm}
tokenizer: {type: ids, vocab_size: 300}
checkpoint: {path: a.pth, dropout: 0.1}
train: {tokens: 30720, ctx_len: 64, micro_batch_size: 2, precision: fp64}
scheduler: {lr_final: 0, warmup_steps: 0}
save: {every: {tokens: 100}}
"""

BAD = [
    ("version: 1", "version: 2"), ("order: rwkv-lm", "order: random"), ("type: ids, vocab_size: 300", "type: ids"),
    ("type: ids, vocab_size: 300", "type: angle, vocab_size: 300"), ("tokens: 30720", "tokens: 30720, steps: 3"),
    ("tokens: 30720, ", ""), ("checkpoint: {path: a.pth, dropout: 0.1}", "seed: 1"), ("dropout: 0.1", "dropout: 1"),
    ("checkpoint:", "model: {n_layer: 1, n_embd: 64}\ncheckpoint:"), ("warmup_steps: 0", "warmup: 0"),
    ("{tokens: 100}", "{tokens: 100, steps: 3}"), ("where: {month: [11, 12], kind: x}", "where: {}"),
    ("lr_final: 0,", "type: constant, lr_final: 0,"), ("x-base", "base"),
    ("micro_batch_size: 2", "micro_batch_size: all"),
]  # fmt: skip


def test_an_editor_with_the_schema_alone_accepts_a_good_spec(tmp_path: Path) -> None:
    assert list(Draft202012Validator(schema()).iter_errors(tree(tmp_path, GOOD))) == []


@pytest.mark.parametrize(("old", "new"), BAD)
def test_an_editor_with_the_schema_alone_refuses_a_bad_spec(old: str, new: str, tmp_path: Path) -> None:
    assert old in GOOD
    assert not Draft202012Validator(schema()).is_valid(tree(tmp_path, GOOD.replace(old, new)))


def tree(folder: Path, text: str) -> object:
    path = folder / "a.yaml"
    path.write_text(text)
    return plain(load_file(path, []))
