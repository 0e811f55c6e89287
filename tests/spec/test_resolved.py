"""resolved.yaml is a spec that runs: read again it gives an equal Spec, and it tells where every value comes from."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from rwkv_spec.spec.load import load_file, load_value
from rwkv_spec.spec.resolved import resolved_yaml, yaml_text
from rwkv_spec.spec.schema import keys, schema
from rwkv_spec.spec.tree import plain
from rwkv_spec.spec.types import Spec
from rwkv_spec.spec.validate import validate

TAIL = "model: {n_layer: 2, n_embd: 64}\ntokenizer: {type: bytes}\n"
SPECS = [
    "data: {train: a.jsonl}\ntrain: {steps: 3}\n"
    + TAIL,
    "data: {train: [a.jsonl, b.jsonl], eval: {where: {month: 12, 'a: b': [x, true, 1.5, 'no', '12']}}}\n"
    "train: {epochs: 0.1}\n"
    + TAIL,
    "data: {train: a, eval: {path: e.txt}}\ntrain: {tokens: 7}\neval: {every: {steps: 3}}\n"
    + TAIL,
    "data: {train: a, eval: {documents: 2}, store: s}\ntrain: {tokens: 7}\n"
    "save: {every: {epochs: 0.25}}\n"
    + TAIL,
    "data: {train: a, eval: {documents: 5}}\ntrain: {tokens: 7}\n"
    "scheduler: {type: constant}\nlog: {trackers: [wandb]}\n"
    + TAIL,
    "data: {train: 'ä # ''\"\\ 😀.jsonl', field: 'null'}\n"
    "train: {steps: 1}\nname: 'on'\nwork_dir: '-x: {y}'\n"
    + TAIL,
    "data: {train: \"a\\x7f\\tb\\u2028\"}\ntrain: {steps: 1}\n"
    "optimizer: {eps: 1e-18, lr: 1.2345678901234567e-3}\n"
    + TAIL,
    "data: {train: a}\ntrain: {steps: 1}\ntokenizer: {type: vocab, path: v.txt}\n"
    "checkpoint: {path: c.pth, dropout: 0.5, resize_vocab: true}\n",
    "data: {train: a}\ntrain: {steps: 1}\ntokenizer: {type: integer, max_value: 9}\ncheckpoint: {path: c.pth}\n",
]  # fmt: skip
DERIVED: dict[str, object] = {
    "train.micro_batch_size": 4,
    "train.precision": "fp32",
    "scheduler.lr_final": 6e-5,
    "scheduler.warmup_steps": 0,
    "model.vocab_size": 257,
    "kernels": "cpu",
}


def spec_of(folder: Path, text: str) -> Spec:
    path = folder / "angles.yaml"
    path.write_text("version: 1\n" + text, encoding="utf-8")
    return validate(path)


@pytest.mark.parametrize("text", SPECS)
def test_read_again_it_is_the_same_spec(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(tmp_path, text)
    resolved = tmp_path / "elsewhere" / "resolved.yaml"
    resolved.parent.mkdir()
    resolved.write_text(resolved_yaml(spec, {}), encoding="utf-8")
    monkeypatch.chdir(resolved.parent)
    assert validate(resolved) == spec
    assert Draft202012Validator(schema()).is_valid(plain(load_file(resolved, [])))
    # Other YAML readers see the same numbers and texts.
    assert Draft202012Validator(schema()).is_valid(yaml.safe_load(resolved.read_text(encoding="utf-8")))


@pytest.mark.parametrize("text", SPECS)
def test_autos_become_what_was_derived(text: str, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, text)
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(resolved_yaml(spec, DERIVED), encoding="utf-8")
    again = validate(resolved)
    assert (again.train.micro_batch_size, again.train.precision, again.kernels) == (4, "fp32", "cpu")
    assert again.model is None or again.model.vocab_size == 257
    assert again.scheduler.lr_final == (6e-5 if spec.scheduler.type == "cosine" else None)
    assert (
        dataclasses.replace(again, train=spec.train, scheduler=spec.scheduler, model=spec.model, kernels=spec.kernels)
        == spec
    )
    assert "kernels: cpu  # derived" in resolved.read_text()


def test_every_value_tells_where_it_comes_from(tmp_path: Path) -> None:
    text = resolved_yaml(spec_of(tmp_path, SPECS[1]), DERIVED)
    assert "  train: [" in text and text.count("# given angles.yaml:2\n") == 2
    assert "seed: 42  # default" in text and "lr_final: 6.0e-05  # derived" in text
    for line in text.splitlines():
        if not line.lstrip().startswith("#") and not line.endswith(":"):
            assert re.search(r"  # (given angles\.yaml:\d+|default|derived)$", line), line


def test_every_key_is_there(tmp_path: Path) -> None:
    text = resolved_yaml(spec_of(tmp_path, SPECS[1]), {})
    absent = {
        "max_value",
        "path",
        "vocab_size",
        "fraction",
        "documents",
        "steps",
        "tokens",
        "checkpoint",
        "resize_vocab",
    }
    for key in keys():
        name = key.rpartition(".")[2]
        assert name in absent or f"{name}:" in text or f"{name}: " in text, key


def test_a_default_period_of_evaluation_is_not_written_where_nothing_is_held_out(tmp_path: Path) -> None:
    assert "# eval is not needed" in resolved_yaml(spec_of(tmp_path, SPECS[0]), {})


def test_what_was_passed_from_python_stays_out(tmp_path: Path) -> None:
    source = {"version": 1, "model": {"n_layer": 1, "n_embd": 64}, "train": {"steps": 1}}
    spec = validate(source, has_data=True, has_tokenizer=True, has_eval_data=True)
    path = tmp_path / "resolved.yaml"
    path.write_text(resolved_yaml(spec, {}))
    assert validate(path, has_data=True, has_tokenizer=True, has_eval_data=True) == spec


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    st.one_of(st.text(max_size=20), st.floats(allow_nan=False, allow_infinity=False), st.integers(-(10**30), 10**30))
)
def test_a_value_is_read_as_it_was_written(value: object) -> None:
    problems: list[object] = []
    node = load_value(yaml_text(value), Path("/"), "a", problems)  # type: ignore[arg-type]
    assert node is not None and not problems
    if isinstance(value, str):
        assert node.value == value
    else:
        assert isinstance(node.value, int | float) and isinstance(value, int | float)
        assert math.isclose(node.value, value, rel_tol=0) and float(node.value) == float(value)
