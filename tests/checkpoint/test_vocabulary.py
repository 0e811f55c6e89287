"""Resizing a vocabulary keeps the rows that exist, bit for bit; new ones are as fresh weights of that size are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rwkv_spec.checkpoint.detect import detect
from rwkv_spec.checkpoint.format import tensor_infos
from rwkv_spec.checkpoint.vocabulary import starting_weights, with_vocabulary
from rwkv_spec.errors import CheckpointError
from rwkv_spec.model.build import build_model, weights
from tests.checkpoint.layouts import golden_file, golden_weights


@pytest.mark.parametrize("generation", ["x052", "x060", "x070"])
@pytest.mark.parametrize("rows", [7, 32, 50])
def test_rows_that_exist_are_kept_and_new_ones_are_fresh(generation: str, rows: int) -> None:
    path = golden_file(generation)
    old = golden_weights(generation)
    shape = replace(detect(tensor_infos(old), where=path).shape, vocab_size=rows)
    new = starting_weights(path, shape=shape, seed=3)
    fresh = weights(build_model(shape, seed=3))
    kept = min(rows, 32)
    for name in ("emb.weight", "head.weight"):
        assert new[name].shape == (rows, 128)
        assert torch.equal(new[name][:kept], old[name][:kept].to(new[name].dtype))
        assert torch.equal(new[name][kept:], fresh[name][kept:].to(new[name].dtype))
    for name in old.keys() - {"emb.weight", "head.weight"}:
        assert torch.equal(new[name], old[name]), name
    if rows == 32:
        assert new["emb.weight"].dtype == torch.bfloat16
    assert detect(tensor_infos(new), where=path).shape == shape


def test_the_seed_decides_the_new_rows() -> None:
    old = golden_weights("x070")
    shape = replace(detect(tensor_infos(old), where=Path("a")).shape, vocab_size=40)
    one, same, other = (with_vocabulary(old, shape=shape, seed=seed)["head.weight"] for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert torch.equal(one[:32], other[:32]) and not torch.equal(one[32:], other[32:])


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    torch.save({"emb.weight": torch.zeros(3, 4)}, tmp_path / "a.pth")
    shape = detect(tensor_infos(golden_weights("x070")), where=Path("a")).shape
    with pytest.raises(CheckpointError, match="no RWKV file"):
        starting_weights(tmp_path / "a.pth", shape=shape, seed=0)
