"""What a person is told while data is prepared, beyond how much of it there is."""

from __future__ import annotations

from pathlib import Path

import pytest

import rwkv_spec
from rwkv_spec.tokenizer.compiled_trie import trie_of_this_machine
from tests.tiny import tiny_spec

SLOW = "text was encoded in plain Python, many times slower: no C++ compiler on PATH"


def gap_spec(tmp_path: Path, **sections: object) -> dict[str, object]:
    """A spec on letters, of a vocabulary file without ids 3 and 4."""
    (tmp_path / "vocab.txt").write_text("1 'a' 1\n2 'b' 1\n5 'c' 1\n")
    (tmp_path / "text.txt").write_text("abcabcabcabcabcabc\n" * 6)
    spec = tiny_spec(tmp_path, tokenizer=None, **sections)
    data = {"train": str(tmp_path / "text.txt"), "eval": {"documents": 1}}
    return spec | {"data": data, "tokenizer": {"type": "vocab", "path": str(tmp_path / "vocab.txt")}}


def test_gaps_in_a_vocabulary_are_reported_and_never_generated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = rwkv_spec.run(gap_spec(tmp_path, train={"steps": 1}))
    printed = capsys.readouterr().out
    assert "2 of the tokenizer's 6 ids name no token, the first is 3" in printed
    texts = run.generate(["a", "b", "c"], max_new_tokens=40, temperature=5.0)
    assert set("".join(texts)) == set("abc")


def test_a_vocabulary_without_gaps_is_not_spoken_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rwkv_spec.prepare(tiny_spec(tmp_path))
    assert "name no token" not in capsys.readouterr().out


def test_why_encoding_was_slow_is_said_where_text_was_encoded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    trie_of_this_machine.cache_clear()
    try:
        rwkv_spec.prepare(gap_spec(tmp_path))
        assert SLOW in capsys.readouterr().out
        rwkv_spec.prepare(gap_spec(tmp_path))
        assert "encoded" not in capsys.readouterr().out
    finally:
        trie_of_this_machine.cache_clear()
