"""A table of broken specs: each says exactly where, under which key and why, and never with a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from rwkv_spec.errors import SpecError
from rwkv_spec.spec.validate import validate

# A sound spec, one line a section, so that a broken line stands in a known place.
GOOD = {
    1: "version: 1",
    2: "data: {train: a.jsonl, eval: {fraction: 0.1}}",
    3: "tokenizer: {type: bytes}",
    4: "model: {n_layer: 2, n_embd: 128}",
    5: "train: {epochs: 2}",
    6: "optimizer: {lr: 1e-3}",
    7: "scheduler: {type: cosine}",
    8: "eval: {continuations: 1}",
    9: "save: {keep: 2}",
    10: "log: {trackers: [wandb]}",
    11: "kernels: auto",
}

# name: (lines that replace lines of the good spec, the beginnings of all problems, a word that the text must hold)
BROKEN: dict[str, tuple[dict[int, str], list[str], str]] = {
    "unknown key, nearly right": ({5: "train: {epochs: 2, batch_sise: 4}"},
        ["5:20: train.batch_sise"], "train.batch_size?"),
    "unknown key, far off": ({9: "save: {zzzqqq: 4}"}, ["9:8: save.zzzqqq"], "every, keep, format, dtype"),
    "misspelt learning rate": ({6: "optimizer: {learnign_rate: 1e-3}"},
        ["6:13: optimizer.learnign_rate"], "optimizer.lr?"),
    "learning rate by its other name": ({6: "optimizer: {learning_rate: 1}"},
        ["6:13: optimizer.learning_rate"], "here this is"),
    "another name in another section": ({5: "train: {epochs: 2, lr_init: 1}"},
        ["5:20: train.lr_init"], "here this is optimizer.lr"),
    "another name at the top": ({11: "load_model: x.pth"}, ["11:1: load_model"], "here this is checkpoint.path"),
    "camel case": ({4: "model: {nLayer: 2, n_embd: 128}"}, ["4:9: model.nLayer"], "write it as n_layer"),
    "misplaced key": ({5: "train: {epochs: 2, n_layer: 3}"}, ["5:20: train.n_layer"], "n_layer belongs under model"),
    "key at the top": ({11: "lr: 1e-3"}, ["11:1: lr"], "lr belongs under optimizer"),
    "section inside a section": ({5: "train: {epochs: 2, optimizer: {lr: 1}}"},
        ["5:20: train.optimizer"], "at the top"),
    "period without every": ({9: "save: {epochs: 2}"}, ["9:8: save.epochs"], "write every: {epochs: ...}"),
    "eval's form without eval": ({2: "data: {train: a, fraction: 0.1}", 8: "x-a: 1"},
        ["2:18: data.fraction"], "write eval"),
    "misspelt section": ({3: "tokeniser: {type: bytes}"}, ["3:1: tokeniser"], "tokenizer?"),
    "key of another library": ({5: "train: {epochs: 2, grad_cp: 1}"},
        ["5:20: train.grad_cp"], "here this is train.grad_checkpoint"),
    "accumulation": ({5: "train: {epochs: 2, gradient_accumulation_steps: 4}"},
                     ["5:20: train.gradient_accumulation_steps"], "accumulation is derived"),
    "launch config": ({11: "devices: 4"}, ["11:1: devices"], "accelerate config"),
    "version missing": ({1: "# nothing"}, ["2:1: version"], "add version: 1"),
    "another version": ({1: "version: 2"}, ["1:1: version"], "2"),
    "version as text": ({1: "version: '1'"}, ["1:1: version"], "'1'"),
    "train missing": ({5: "x-a: 1"}, ["1:1: train"], "add train: {epochs: 1}"),
    "no length": ({5: "train: {ctx_len: 64}"}, ["5:1: train"], "one of epochs, steps, tokens is missing"),
    "two lengths": ({5: "train: {epochs: 2, steps: 5}"}, ["5:20: train.steps"], "excludes epochs"),
    "three lengths": ({5: "train: {tokens: 9, epochs: 2, steps: 5}"}, ["5:31: train.steps"], "tokens and epochs"),
    "no model": ({4: "x-a: 1"}, ["1:1"], "model: {n_layer: 3, n_embd: 128}"),
    "model and checkpoint": ({11: "checkpoint: {path: a.pth}"}, ["11:1: checkpoint"], "excludes model"),
    "data missing": ({2: "x-a: 1", 8: "x-b: 1"}, ["1:1: data.train"], "is missing"),
    "data.train missing": ({2: "data: {eval: {fraction: 0.1}}"}, ["2:1: data.train"], "is missing"),
    "data.train empty": ({2: "data: {train: [], eval: {fraction: 0.1}}"}, ["2:8: data.train"], "empty list"),
    "data.train with a number": ({2: "data: {train: [a, 3], eval: {fraction: 0.1}}"},
        ["2:19: data.train[1]"], "not text"),
    "data.train null": ({2: "data: {train: , eval: {fraction: 0.1}}"}, ["2:8: data.train"], "has no value"),
    "data.train empty text": ({2: "data: {train: '', eval: {fraction: 0.1}}"}, ["2:8: data.train"], "empty text"),
    "path with NUL": ({2: 'data: {train: "a\\0b", eval: {fraction: 0.1}}'}, ["2:8: data.train"], "character"),
    "two forms of eval": ({2: "data: {train: a, eval: {fraction: 0.1, path: b}}"},
        ["2:40: data.eval.path"], "excludes fraction"),
    "eval without a form": ({2: "data: {train: a, eval: {}}"},
        ["2:18: data.eval"], "one of where, path, fraction, documents"),
    "fraction of one": ({2: "data: {train: a, eval: {fraction: 1}}"}, ["2:25: data.eval.fraction"], "not below 1"),
    "fraction of zero": ({2: "data: {train: a, eval: {fraction: 0}}"}, ["2:25: data.eval.fraction"], "not above 0"),
    "no documents": ({2: "data: {train: a, eval: {documents: 0}}"}, ["2:25: data.eval.documents"], "less than 1"),
    "documents as a list": ({2: "data: {train: a, eval: {documents: [3, 1]}}"}, ["2:25: data.eval.documents"], ""),
    "where without field": ({2: "data: {train: a, eval: {where: {}}}"}, ["2:25: data.eval.where"], "is empty"),
    "where with null": ({2: "data: {train: a, eval: {where: {m: }}}"}, ["2:33: data.eval.where.m"], "has no value"),
    "order unknown": ({2: "data: {train: a, order: shufle, eval: {fraction: 0.1}}"},
        ["2:18: data.order"], "did you mean shuffle"),
    "nothing to evaluate": ({2: "data: {train: a}"}, ["8:8: eval.continuations"], "add data.eval"),
    "tokenizer missing": ({3: "x-a: 1"}, ["1:1: tokenizer"], "add tokenizer: {type: bytes}"),
    "tokenizer as a word": ({3: "tokenizer: angle"}, ["3:1: tokenizer"], "write {type: angle}"),
    "tokenizer without type": ({3: "tokenizer: {}"}, ["3:1: tokenizer.type"], "add type: bytes"),
    "tokenizer unknown": ({3: "tokenizer: {type: angel}"}, ["3:13: tokenizer.type"], "did you mean angle?"),
    "integer without max_value": ({3: "tokenizer: {type: integer}"},
        ["3:1: tokenizer.max_value"], "add max_value: 999"),
    "vocab without path": ({3: "tokenizer: {type: vocab}"}, ["3:1: tokenizer.path"], "is missing"),
    "max_value of world": ({3: "tokenizer: {type: world, max_value: 3}"},
        ["3:26: tokenizer.max_value"], "type: integer"),
    "a path that bytes have no use for": ({3: "tokenizer: {type: bytes, path: v.txt}"},
        ["3:26: tokenizer.path"], "type: vocab or world"),
    "key of another tokenizer": ({3: "tokenizer: {type: angle, max_value: 3}"},
        ["3:26: tokenizer.max_value"], "type: integer"),
    "ids of one": ({3: "tokenizer: {type: ids, vocab_size: 1}"}, ["3:24: tokenizer.vocab_size"], "less than 2"),
    "n_embd missing": ({4: "model: {n_layer: 2}"}, ["4:1: model.n_embd"], "is missing"),
    "n_embd not a multiple": ({4: "model: {n_layer: 2, n_embd: 700}"}, ["4:21: model.n_embd"], "nearest: 704 and 640"),
    "n_embd below head_size": ({4: "model: {n_layer: 2, n_embd: 32}"}, ["4:21: model.n_embd"], "nearest: 64"),
    "head_size": ({4: "model: {n_layer: 2, n_embd: 128, head_size: 50}"}, ["4:34: model.head_size"], "multiple of 16"),
    "head_size too large": ({4: "model: {n_layer: 2, n_embd: 256, head_size: 256}"},
        ["4:34: model.head_size"], "more than 128"),
    "no layers": ({4: "model: {n_layer: 0, n_embd: 128}"}, ["4:9: model.n_layer"], "less than 1"),
    "half a layer": ({4: "model: {n_layer: 2.5, n_embd: 128}"}, ["4:9: model.n_layer"], "not a whole number"),
    "layers as boolean": ({4: "model: {n_layer: true, n_embd: 128}"}, ["4:9: model.n_layer"], "true"),
    "generation of later": ({4: "model: {type: x080, n_layer: 2, n_embd: 128}"}, ["4:9: model.type"], "x070"),
    "ranks of another generation": ({4: "model: {type: x060, n_layer: 2, n_embd: 128, ranks: older}"},
        ["4:46: model.ranks"], "type x060 has no ranks; remove it, or use type: x070"),
    "dropout of one": ({4: "model: {n_layer: 2, n_embd: 128, dropout: 1.0}"}, ["4:34: model.dropout"], "not below 1"),
    "vocab_size as a word": ({4: "model: {n_layer: 2, n_embd: 128, vocab_size: big}"},
        ["4:34: model.vocab_size"], "auto"),
    "checkpoint without path": ({4: "checkpoint: {dropout: 0.1}"}, ["4:1: checkpoint.path"], "is missing"),
    "checkpoint as a path": ({4: "checkpoint: a.pth"}, ["4:1: checkpoint"], "{path: weights/rwkv7.pth}"),
    "quoted number": ({6: "optimizer: {lr: '1e-3'}"}, ["6:13: optimizer.lr"], "remove the quotes: 1e-3"),
    "underscore": ({5: "train: {steps: 1_000}"}, ["5:9: train.steps"], "write 1000"),
    "octal": ({5: "train: {steps: 0o17}"}, ["5:9: train.steps"], "'0o17'"),
    "leading zero": ({5: "train: {steps: 017}"}, ["5:9: train.steps"], "write 17"),
    "sexagesimal": ({5: "train: {steps: 1:30}"}, ["5:9: train.steps"], "'1:30'"),
    "hexadecimal": ({5: "train: {steps: 0x1f}"}, ["5:9: train.steps"], "'0x1f'"),
    "letters for zeros": ({5: "train: {tokens: 10M}"}, ["5:9: train.tokens"], "10e6"),
    "infinite": ({6: "optimizer: {lr: .inf}"}, ["6:13: optimizer.lr"], "finite"),
    "not a number": ({6: "optimizer: {lr: .nan}"}, ["6:13: optimizer.lr"], "finite"),
    "overflow": ({6: "optimizer: {lr: 1e999}"}, ["6:13: optimizer.lr"], "'1e999'"),
    "thousands of digits": ({5: "train: {steps: " + "9" * 5000 + "}"}, ["5:9: train.steps"], "not a whole number"),
    "negative lr": ({6: "optimizer: {lr: -1}"}, ["6:13: optimizer.lr"], "less than 0"),
    "one beta": ({6: "optimizer: {betas: [0.9]}"}, ["6:13: optimizer.betas"], "a list of 2 numbers"),
    "beta of one": ({6: "optimizer: {betas: [0.9, 1.0]}"}, ["6:26: optimizer.betas[1]"], "not below 1"),
    "betas as a number": ({6: "optimizer: {betas: 0.9}"}, ["6:13: optimizer.betas"], "a list of 2 numbers"),
    "eps of zero": ({6: "optimizer: {eps: 0}"}, ["6:13: optimizer.eps"], "not above 0"),
    "optimizer as a word": ({6: "optimizer: adamw"}, ["6:1: optimizer"], "write {type: adamw}"),
    "section empty": ({6: "optimizer:"}, ["6:1: optimizer"], "is empty"),
    "section as a list": ({6: "optimizer: [lr, 3]"}, ["6:1: optimizer"], "a list stands here"),
    "lr_final above lr": ({7: "scheduler: {lr_final: 2e-3}"}, ["7:13: scheduler.lr_final"], "above optimizer.lr 0.001"),
    "lr_final of constant": ({7: "scheduler: {type: constant, lr_final: 0}"},
        ["7:29: scheduler.lr_final"], "type: cosine"),
    "warm-up longer than the run": ({5: "train: {steps: 5}", 7: "scheduler: {warmup_steps: 5}"},
                                    ["7:13: scheduler.warmup_steps"], "not below train.steps 5"),
    "warm-up negative": ({7: "scheduler: {warmup_steps: -1}"}, ["7:13: scheduler.warmup_steps"], "less than 0"),
    "period of two units": ({9: "save: {every: {epochs: 1, steps: 5}}"}, ["9:27: save.every.steps"], "excludes epochs"),
    "period of none": ({9: "save: {every: {}}"}, ["9:8: save.every"], "one of epochs, steps, tokens is missing"),
    "period as a number": ({9: "save: {every: 100}"}, ["9:8: save.every"], "{epochs: 1}"),
    "period of zero": ({9: "save: {every: {steps: 0}}"}, ["9:16: save.every.steps"], "less than 1"),
    "keep of zero": ({9: "save: {keep: 0}"}, ["9:8: save.keep"], "less than 1"),
    "format": ({9: "save: {format: safetensor}"}, ["9:8: save.format"], "did you mean safetensors?"),
    "tracker": ({10: "log: {trackers: [wandb, mlflow]}"}, ["10:25: log.trackers[1]"], "tensorboard, wandb or trackio"),
    "tracker twice": ({10: "log: {trackers: [wandb, wandb]}"}, ["10:7: log.trackers"], "twice"),
    "tracker as a word": ({10: "log: {trackers: wandb}"}, ["10:7: log.trackers"], "a list of"),
    "no is not a kernel": ({11: "kernels: no"}, ["11:1: kernels"], "'no'"),
    "name with a slash": ({11: "name: a/b"}, ["11:1: name"], "character"),
    "name of dots": ({11: "name: .."}, ["11:1: name"], "character"),
    "name as a number": ({11: "name: 12"}, ["11:1: name"], 'in quotes: "12"'),
    "seed negative": ({11: "seed: -1"}, ["11:1: seed"], "less than 0"),
    "seed as a date": ({11: "seed: 2024-01-01"}, ["11:1: seed"], "'2024-01-01'"),
    "duplicate key": ({11: "version: 1"}, ["11:1: version"], "first on line 1"),
    "duplicate key inside": ({5: "train: {epochs: 2, ctx_len: 8, ctx_len: 9}"}, ["5:32: train.ctx_len"], "given twice"),
    "tag": ({11: "seed: !!python/name:os.system 3"}, ["11:7: seed"], "tag"),
    "batch of none": ({5: "train: {epochs: 2, batch_size: 0}"}, ["5:20: train.batch_size"], "less than 1"),
    "precision of later": ({5: "train: {epochs: 2, precision: fp16}"}, ["5:20: train.precision"], "fp32"),
    "home of nobody": ({4: "checkpoint: {path: ~nobody-at-all/a.pth}"}, ["4:14: checkpoint.path"], "home folder"),
    "all at once": ({4: "model: {n_layer: 0, n_embd: 100}", 5: "train: {epochs: 0}", 9: "save: {keep: x}"},
                    ["4:21: model.n_embd", "4:9: model.n_layer", "5:9: train.epochs", "9:8: save.keep"],
                    "not a multiple"),
}  # fmt: skip

# Words of the schema library, none of which may reach a person.
RAW = (
    "is not of type",
    "Additional properties",
    "is a required property",
    "is not valid under",
    "does not match",
    "anyOf",
)


def write(folder: Path, lines: dict[int, str]) -> Path:
    path = folder / "broken.yaml"
    path.write_text("\n".join({**GOOD, **lines}.values()) + "\n", encoding="utf-8")
    return path


def test_the_good_spec_is_good(tmp_path: Path) -> None:
    assert validate(write(tmp_path, {})).train.epochs == 2


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_spec_says_where_and_what(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, places, word = BROKEN[name]
    write(tmp_path, lines)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError) as caught:
        validate("broken.yaml")
    problems = [str(problem) for problem in caught.value.problems]
    # A place without a key is that of the whole spec.
    found = [": ".join(text.split(": ")[: place.count(": ") + 1]) for text, place in zip(problems, places, strict=True)]
    assert sorted(found) == sorted(f"broken.yaml:{place}" for place in places)
    text = str(caught.value)
    assert word in text
    assert not any(raw in text for raw in RAW)
    assert all("; " in problem for problem in problems), "a problem says what to do"
    assert all(len(problem) < 400 for problem in problems)
