"""A file is written whole or stays as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from rwkv_spec.atomic import write_json, write_text


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_json(path, {"step": 1})
    with pytest.raises(ValueError):
        write_json(path, {"step": float("nan")})
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")
    assert path.read_text() == '{\n  "step": 1\n}\n'
    assert [child.name for child in tmp_path.iterdir()] == ["run.json"]


def test_folders_on_the_way_are_made(tmp_path: Path) -> None:
    write_text(tmp_path / "a" / "b.txt", "x\n")
    assert (tmp_path / "a" / "b.txt").read_bytes() == b"x\n"
