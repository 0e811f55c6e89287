"""Numbers are taken exactly or refused: nothing wraps, nothing is truncated, and 0 stays the end of a document."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rwkv_spec.tokenizer.byte import BytesTokenizer
from rwkv_spec.tokenizer.ids import IdsTokenizer
from rwkv_spec.tokenizer.integer import AngleTokenizer, IntegerTokenizer
from rwkv_spec.tokenizer.protocol import EncodeError
from rwkv_spec.tokenizer.vocab import VocabTokenizer

BAD_WORDS = {
    "1_0": "underscores",
    "+5": "sign",
    "-1": "sign",
    "3.7": "truncated",
    "3.0": "truncated",
    "1e2": "truncated",
    "٣": "0 to 9",
    "５": "0 to 9",
    "1,2": "commas",
    "400": "outside 0..359",
    "360": "360 is 0",
    "0x10": "text",
    "nan": "text",
    "5\u00a06": "text",
    "9" * 5000: "outside",
}


def test_a_value_is_the_id_one_higher() -> None:
    tokenizer = IntegerTokenizer(999)
    assert tokenizer.vocab_size == 1001
    assert tokenizer.encode("0 999\t5\n7") == [1, 1000, 6, 8]
    assert tokenizer.encode_sequence([0, 999]).tolist() == [1, 1000]
    assert tokenizer.decode([1, 1000, 0, 6]) == "0 999 5"
    assert tokenizer.decode_sequence(np.array([1, 0, 1000], np.uint16)) == [0, 999]


def test_an_angle_is_an_integer_up_to_359() -> None:
    angle = AngleTokenizer()
    assert isinstance(angle, IntegerTokenizer)
    assert angle.vocab_size == 361
    assert angle.encode_angle_sequence([0, 359]).tolist() == [1, 360]
    assert angle.decode_angle_sequence([1, 360]) == [0, 359]
    assert angle.fingerprint == IntegerTokenizer(359).fingerprint != IntegerTokenizer(360).fingerprint


@pytest.mark.parametrize("word", BAD_WORDS, ids=lambda word: word[:8])
@pytest.mark.parametrize("before", ["", "12 7 "])
def test_what_is_no_plain_number_is_refused_with_its_place(word: str, before: str) -> None:
    with pytest.raises(EncodeError, match=BAD_WORDS[word]) as caught:
        AngleTokenizer().encode(f"{before}{word} 5")
    assert caught.value.offset == len(before)
    with pytest.raises(EncodeError):
        AngleTokenizer().encode_many(["1 2", f"{before}{word}"])


def test_zeros_in_front_do_not_count() -> None:
    assert AngleTokenizer().encode(f"007 {'0' * 5000}12") == [8, 13]
    assert AngleTokenizer().encode_many(["007", f"{'0' * 30}12 1"])[0].tolist() == [8, 13, 2]


@pytest.mark.parametrize(
    ("values", "index", "words"),
    [
        ([1, 2.0], 1, "round them"),
        (np.array([1.0]), 0, "round them"),
        ([1, True], 1, "true"),
        (np.array([True]), 0, "bool"),
        ([1, "2"], 1, "quotes"),
        ([1, [2]], 1, "flat"),
        ([1, None], 1, "null"),
        (np.array([[1]]), 0, "2 dimensions"),
        (np.array(5), 0, "0 dimensions"),
        ([0, 400], 1, "outside 0..359"),
        ([0, -1], 1, "outside 0..359"),
        ([0, 10**30], 1, "too large"),
        ([0, 10**9000], 1, "too large"),
        (np.array([0, 2**63], np.uint64), 1, "too large"),
        (np.array(["1"]), 0, "not integers"),
    ],
)
def test_values_that_are_no_integers_in_range_are_refused(values: object, index: int, words: str) -> None:
    with pytest.raises(EncodeError, match=words) as caught:
        AngleTokenizer().encode_sequence(values)  # type: ignore[arg-type]
    assert caught.value.offset == index


def test_every_integer_type_is_taken() -> None:
    for dtype in ("i1", "u1", "<i2", ">i2", "<u4", "<i8", "<u8"):
        assert AngleTokenizer().encode_sequence(np.array([5, 100], dtype)).tolist() == [6, 101]
    assert AngleTokenizer().encode_sequence([np.int16(5), 6]).tolist() == [6, 7]
    assert AngleTokenizer().encode_sequence([]).tolist() == []
    assert AngleTokenizer().encode_sequence((5,)).tolist() == [6]


@pytest.mark.parametrize("ids", [[361], [-1], [1.5], [True]])
def test_ids_out_of_range_do_not_decode(ids: list[object]) -> None:
    with pytest.raises(ValueError):
        AngleTokenizer().decode(ids)


@pytest.mark.parametrize("value", [-1, True, 3.0, "9", 2**31])
def test_a_senseless_max_value_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="max_value"):
        IntegerTokenizer(value)  # type: ignore[arg-type]


@given(st.lists(st.lists(st.integers(0, 70_000), max_size=20), min_size=1, max_size=8), st.sampled_from(" \t\n\r\v\f"))
def test_the_fast_way_agrees_with_python(rows: list[list[int]], space: str) -> None:
    tokenizer = IntegerTokenizer(70_000)
    texts = [space.join(map(str, row)) + space for row in rows]
    ids, sizes = tokenizer.encode_many(texts)
    assert ids.tolist() == [value + 1 for row in rows for value in row]
    assert sizes.tolist() == [len(row) for row in rows]
    assert [tokenizer.encode(text) for text in texts] == [[value + 1 for value in row] for row in rows]


def test_the_vocabulary_file_reads_back_to_the_same_ids(tmp_path: Path) -> None:
    angle = AngleTokenizer()
    angle.save_vocab(tmp_path / "vocab.txt")
    vocab = VocabTokenizer(tmp_path / "vocab.txt")
    assert vocab.vocab_size == angle.vocab_size
    assert vocab.encode("200 230 0 359 ") == angle.encode("200 230 0 359")
    assert vocab.decode(angle.encode("200 230")) == "200 230 "


def test_ids_stay_what_they_are(tmp_path: Path) -> None:
    tokenizer = IdsTokenizer(300)
    assert tokenizer.encode("0 299 5") == [0, 299, 5]
    assert tokenizer.encode_sequence(np.array([0, 299])).tolist() == [0, 299]
    assert tokenizer.encode_many(["1 2", "0"])[0].tolist() == [1, 2, 0]
    assert tokenizer.decode([0, 299]) == "0 299"
    for bad in ("300", "-1", "x"):
        with pytest.raises(EncodeError):
            tokenizer.encode(bad)
    with pytest.raises(EncodeError, match=r"300 is outside 0\.\.299"):
        tokenizer.encode_sequence([0, 300])
    with pytest.raises(ValueError):
        tokenizer.decode([300])
    with pytest.raises(ValueError, match="vocab_size"):
        IdsTokenizer(1)
    tokenizer.save_vocab(tmp_path / "vocab.txt")
    assert VocabTokenizer(tmp_path / "vocab.txt").encode("7 299 ") == [7, 299]


def test_bytes_are_one_lower_than_their_ids(tmp_path: Path) -> None:
    tokenizer = BytesTokenizer()
    assert tokenizer.vocab_size == 257
    assert tokenizer.encode("aé\x00") == [98, 196, 170, 1]
    assert tokenizer.encode_many(["a", "", "é"])[0].tolist() == [98, 196, 170]
    assert tokenizer.decode([98, 0, 196, 170]) == "aé"
    assert tokenizer.decode([196]) == "\ufffd"
    with pytest.raises(ValueError):
        tokenizer.decode([257])
    with pytest.raises(EncodeError, match="surrogate") as caught:
        tokenizer.encode("ab\ud800")
    assert caught.value.offset == 2
    tokenizer.save_vocab(tmp_path / "vocab.txt")
    assert VocabTokenizer(tmp_path / "vocab.txt").encode("aé\x00") == [98, 196, 170, 1]
