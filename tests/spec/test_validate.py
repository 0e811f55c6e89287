"""validate(): files, dicts and Specs, defaults that never fail, what comes from Python, one SpecError for all."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from rwkv_spec.errors import SpecError
from rwkv_spec.spec.types import Spec
from rwkv_spec.spec.validate import validate

MINI: dict[str, object] = {
    "version": 1,
    "data": {"train": "a.npy"},
    "tokenizer": {"type": "angle"},
    "model": {"n_layer": 1, "n_embd": 64},
    "train": {"steps": 1},
}


def changed(**sections: object) -> dict[str, object]:
    """The small spec with some sections replaced, or taken out by None."""
    return {name: value for name, value in {**MINI, **sections}.items() if value is not None}


def text_of(source: dict[str, object], *, data: bool = False, tokenizer: bool = False, eval_data: bool = False) -> str:
    with pytest.raises(SpecError) as caught:
        validate(source, has_data=data, has_tokenizer=tokenizer, has_eval_data=eval_data)
    return str(caught.value)


def test_the_defaults_of_the_house_plan() -> None:
    spec = validate(MINI)
    assert (spec.name, spec.seed, spec.kernels, spec.data.field, spec.data.order) == (
        "rwkv",
        42,
        "auto",
        "text",
        "shuffle",
    )
    assert spec.work_dir == Path.cwd() / "runs" / "rwkv" and spec.data.store == spec.work_dir / "data"
    assert (spec.train.ctx_len, spec.train.batch_size, spec.train.micro_batch_size) == (512, 16, "auto")
    assert (spec.train.grad_clip, spec.train.l2wrap, spec.train.precision) == (1.0, 1e-4, "auto")
    assert spec.optimizer == dataclasses.replace(
        spec.optimizer, lr=6e-4, betas=(0.9, 0.99), eps=1e-18, weight_decay=0.001
    )
    assert (spec.scheduler.type, spec.scheduler.lr_final, spec.scheduler.warmup_steps) == ("cosine", "auto", "auto")
    assert (spec.eval.every.epochs, spec.eval.continuations, spec.log.every.steps, spec.log.trackers) == (
        1.0,
        2,
        10,
        (),
    )
    assert (spec.save.every.epochs, spec.save.keep, spec.save.format, spec.save.dtype) == (1.0, 3, "pth", "fp32")
    assert spec.model is not None
    assert (spec.model.type, spec.model.head_size, spec.model.vocab_size, spec.model.ranks) == (
        "x070",
        64,
        "auto",
        "current",
    )


@pytest.mark.parametrize("steps", [1, 2, 9, 1000])
@pytest.mark.parametrize("lr", [0, 1e-9, 1])
def test_defaults_never_cause_an_error(steps: int, lr: float) -> None:
    spec = validate(changed(train={"steps": steps}, optimizer={"lr": lr}))
    assert spec.optimizer.lr == lr


def test_a_dict_may_hold_paths_tuples_and_numbers_of_numpy() -> None:
    source = changed(
        data={"train": (Path("a.npy"), "b.npy")},
        train={"steps": np.int64(3)},
        optimizer={"lr": np.float32(0.5), "betas": (0.5, 0.9)},
    )
    spec = validate(source)
    assert spec.data.train == (Path.cwd() / "a.npy", Path.cwd() / "b.npy")
    assert (spec.train.steps, spec.optimizer.lr, spec.optimizer.betas) == (3, 0.5, (0.5, 0.9))
    assert type(spec.train.steps) is int and type(spec.optimizer.lr) is float
    assert spec.sources["train.steps"].kind == "python" and spec.sources["train.ctx_len"].kind == "default"


def test_wrong_things_in_a_dict_are_told() -> None:
    assert (
        text_of(changed(train={"steps": "3"})) == "python: train.steps: '3' is not a whole number; remove the quotes: 3"
    )
    assert "a ndarray cannot stand in a spec; pass arrays as run(spec, data=...)" in text_of(
        changed(data={"train": np.zeros(3)})
    )
    assert "the key 3 is not text" in text_of(changed(train={3: 1, "steps": 1}))
    assert "a set cannot stand in a spec" in text_of(changed(seed={1}))
    assert "finite" in text_of(changed(optimizer={"lr": float("inf")}))
    assert "'1e5000' is not a whole number" in text_of(changed(train={"steps": 10**5000}))
    loop: dict[str, object] = {}
    loop["train"] = loop
    assert "nested too deeply" in text_of(changed(train=loop))


def test_what_comes_from_python_may_be_absent_and_may_not_be_given_twice() -> None:
    spec = validate(changed(data=None, tokenizer=None), has_data=True, has_tokenizer=True)
    assert spec.data.train is None and spec.tokenizer is None
    assert "data.train: is given, and data= is passed" in text_of(MINI, data=True)
    assert "tokenizer: is given, and tokenizer= is passed" in text_of(MINI, tokenizer=True)
    source = changed(data={"train": "a", "eval": {"fraction": 0.5}})
    assert "data.eval: is given, and eval_data= is passed" in text_of(source, eval_data=True)
    assert "data.train: is missing" in text_of(changed(data=None))
    where = changed(data={"eval": {"where": {"month": 1}}})
    assert "passed from Python has none" in text_of(where, data=True)


def test_settings_of_an_evaluation_that_is_not_there() -> None:
    text = text_of(changed(eval={"every": {"steps": 2}}))
    assert (
        text == "python: eval.every: there is no data.eval to evaluate; "
        "add data.eval, such as {fraction: 0.05}, or remove it"
    )
    assert validate(changed(eval={"every": {"steps": 2}}), has_eval_data=True).eval.every.steps == 2
    assert validate(changed(eval={"continuations": 0})).eval.continuations == 0


def test_no_misleading_consequences() -> None:
    text = text_of(
        changed(train={"step": 3}, model={"n_layers": 2, "n_embd": 64}, tokenizer=None, tokeniser={"type": "angle"})
    )
    assert len(text.splitlines()) == 3, text
    text = text_of(changed(model={"n_layer": 0, "n_embd": "wide", "head_size": 50}))
    assert len(text.splitlines()) == 3, text
    text = text_of(changed(data={"trian": "a", "evl": {"fraction": 0.1}}, eval={"continuations": 3}))
    assert len(text.splitlines()) == 2, text


def test_problems_are_sorted_by_place(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("version: 2\ntrain: {steps: 0, ctx_len: 0}\nkernels: x\nfoo: 1\n")
    with pytest.raises(SpecError) as caught:
        validate(path)
    places = [(problem.line, problem.column) for problem in caught.value.problems]
    assert places == sorted(places) and len(places) >= 6


def test_a_spec_validates_to_itself() -> None:
    source = changed(
        data={"train": "a", "eval": {"documents": 2}, "store": "s"},
        scheduler={"type": "constant", "warmup_steps": 0},
    )
    spec = validate(source)
    again = validate(spec)
    assert again == spec and again.sources == spec.sources
    assert validate(dataclasses.replace(spec, seed=7)).seed == 7
    broken = dataclasses.replace(spec, train=dataclasses.replace(spec.train, batch_size=0))
    with pytest.raises(SpecError, match=r"train\.batch_size: 0 is less than 1"):
        validate(broken)


def test_a_checkpoint_stands_instead_of_a_model_and_keeps_dropout() -> None:
    spec = validate(changed(model=None, checkpoint={"path": "w.pth", "dropout": 0.25}))
    assert spec.model is None and spec.dropout == 0.25
    assert validate(spec) == spec


def test_a_problem_is_placed_where_the_key_was_given_or_its_parent(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        "version: 1\ndata:\n  train: [a, b]\ntokenizer: {type: bytes}\n"
        "model: {n_layer: 1, n_embd: 64}\ntrain:\n  steps: 3\n"
    )
    spec: Spec = validate(path, ["seed=3"])
    assert str(spec.problem("train.steps", "no", "do")) == f"{path}:7:3: train.steps: no; do"
    assert str(spec.problem("train.ctx_len", "no")) == f"{path}:6:1: train.ctx_len: no"
    assert str(spec.problem("data.train[1]", "no")) == f"{path}:3:14: data.train[1]: no"
    assert str(spec.problem("optimizer.lr", "no")) == f"{path}:1:1: optimizer.lr: no"
    assert str(spec.problem("seed", "no")) == "command line: seed: no"


def test_the_settings_of_the_published_trace_are_a_spec() -> None:
    spec = validate(
        {
            "version": 1,
            "data": {"train": "demo_bytes_unshuffled.bin", "order": "rwkv-lm"},
            "tokenizer": {"type": "ids", "vocab_size": 256},
            "checkpoint": {"path": "x070_init_L3-D128-V256.pth"},
            "train": {"ctx_len": 64, "batch_size": 4, "tokens": 30720, "precision": "fp64", "l2wrap": 0},
            "optimizer": {"lr": 6e-4, "weight_decay": 0.1},
            "scheduler": {"lr_final": 6e-5, "warmup_steps": 10},
        }
    )
    assert spec.train.tokens == 30720


def test_world_takes_a_path_or_none(tmp_path: Path) -> None:
    spec = validate(changed(tokenizer={"type": "world"}))
    assert spec.tokenizer is not None and spec.tokenizer.path is None
    path = tmp_path / "spec.yaml"
    path.write_text(
        "version: 1\ndata: {train: a}\ntokenizer: {type: world, path: v.txt}\nmodel: {n_layer: 1, n_embd: 64}\n"
        "train: {steps: 1}\n"
    )
    spec = validate(path)
    assert spec.tokenizer is not None and spec.tokenizer.path == tmp_path / "v.txt"
    # A new type drops the keys that only the old one has.
    spec = validate(changed(tokenizer={"type": "integer", "max_value": 9}), ["tokenizer.type=world"])
    assert spec.tokenizer is not None and (spec.tokenizer.type, spec.tokenizer.max_value) == ("world", None)
