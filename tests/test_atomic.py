"""A file is written whole or stays as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rwkv_spec.atomic import discard, write_json, write_text
from rwkv_spec.checkpoint.format import write_weights
from rwkv_spec.errors import CheckpointError, DataError
from rwkv_spec.tokenizer.vocab_file import write_vocab


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_json(path, {"step": 1})
    with pytest.raises(ValueError):
        write_json(path, {"step": float("nan")})
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")
    assert path.read_text() == '{\n  "step": 1\n}\n'
    assert [child.name for child in tmp_path.iterdir()] == ["run.json"]


def test_what_went_wrong_is_not_hidden_by_the_cleaning_up(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    place = tmp_path / "file" / "a"
    discard(place)
    with pytest.raises(CheckpointError, match="cannot write the weights"):
        write_weights(place, {"a": torch.ones(2)}, format="pth", dtype=None)
    with pytest.raises(DataError, match="the vocabulary cannot be written"):
        write_vocab(place, [(1, b"a")])
    assert (tmp_path / "file").read_text() == "mine"


def test_folders_on_the_way_are_made(tmp_path: Path) -> None:
    write_text(tmp_path / "a" / "b.txt", "x\n")
    assert (tmp_path / "a" / "b.txt").read_bytes() == b"x\n"
