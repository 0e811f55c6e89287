"""The smallest real run that the tests share: integers that repeat, a model of a few thousand parameters."""

from __future__ import annotations

import copy
from pathlib import Path

VALUES = [[(7 * i + j) % 10 for j in range(40)] for i in range(6)]


def write_values(path: Path) -> Path:
    """VALUES as a .txt file, a document a line."""
    path.write_text("".join(" ".join(map(str, row)) + "\n" for row in VALUES))
    return path


def tiny_spec(tmp_path: Path, **sections: object) -> dict[str, object]:
    """A dict spec on VALUES. `sections` replace or extend whole sections, as train={...}."""
    spec: dict[str, object] = {
        "version": 1,
        "work_dir": str(tmp_path / "run"),
        "data": {"train": str(write_values(tmp_path / "values.txt")), "eval": {"documents": 1}},
        "tokenizer": {"type": "integer", "max_value": 9},
        "model": {"type": "x070", "n_layer": 2, "n_embd": 32, "head_size": 16, "dropout": 0.1},
        "train": {"ctx_len": 16, "batch_size": 4, "steps": 8, "precision": "fp32"},
        "optimizer": {"lr": 1e-3},
        "eval": {"every": {"steps": 4}},
        "save": {"every": {"steps": 2}, "keep": 2},
        "log": {"every": {"steps": 3}},
    }
    for name, value in sections.items():
        if value is None:
            del spec[name]
        elif isinstance(value, dict) and name in spec:
            spec[name] = {**copy.deepcopy(spec[name]), **value}  # type: ignore[dict-item]
        else:
            spec[name] = value
    return spec


def outputs(work_dir: Path) -> dict[str, bytes]:
    """Every byte of out/ that a run decides: all but the timings in the two logs."""
    import json
    import re

    found = {}
    for path in sorted((work_dir / "out").rglob("*")):
        content = path.read_bytes()
        if path.name == "metrics.jsonl":
            rows = [json.loads(line) for line in content.splitlines()]
            content = repr([{k: v for k, v in row.items() if k != "tokens_per_s"} for row in rows]).encode()
        elif path.name == "train_log.txt":
            content = re.sub(rb"tokens/s \d+|at [\d:]+|NEW RUN .*", b"", content)
        found[path.name] = content
    return found


def write_bare(folder: Path) -> Path:
    """A checkpoint outside any run folder, of 11 ids, whose likeliest token is never the end of a document."""
    import torch

    from rwkv_spec.checkpoint.format import write_weights
    from rwkv_spec.model.build import build_model, weights
    from rwkv_spec.model.shapes import fresh_shape

    model = build_model(fresh_shape("x070", n_layer=1, n_embd=32, head_size=16, vocab_size=11))
    tensors = {name: tensor.clone() for name, tensor in weights(model).items()}
    tensors["head.weight"] = torch.randn(11, 32, generator=torch.Generator().manual_seed(1))
    tensors["head.weight"][0] = 0
    tensors["emb.weight"] = torch.randn(11, 32, generator=torch.Generator().manual_seed(2))
    write_weights(folder / "bare.pth", tensors, format="pth", dtype="fp32")
    return folder / "bare.pth"
