"""Every faulty row is named with file, line and column, wherever in the file it is and whatever is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rwkv_spec.data.holdout import EvalRule
from rwkv_spec.data.place import element_column, field_column, text_column
from rwkv_spec.data.prepare import prepare
from rwkv_spec.data.store import Store
from rwkv_spec.errors import DataError
from rwkv_spec.tokenizer.byte import BytesTokenizer
from rwkv_spec.tokenizer.ids import IdsTokenizer
from rwkv_spec.tokenizer.integer import AngleTokenizer
from rwkv_spec.tokenizer.protocol import Tokenizer


def prepared(
    tmp_path: Path, data: str | bytes, tokenizer: Tokenizer, *, name: str = "a.jsonl", **options: object
) -> Store:
    path = tmp_path / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode("utf-8", "surrogatepass"))
    return prepare(sources=[path], tokenizer=tokenizer, store=tmp_path / "store", **options)  # type: ignore[arg-type]


def tokens(store: Store) -> list[int]:
    return store.train.read(0, store.train.num_tokens).tolist()


GOOD = '{"text": "1 2"}\n'


@pytest.mark.parametrize(
    ("line", "place", "words"),
    [
        ('{"text": "1 400"}', "2:13", "400 is outside 0..359"),
        ('{"text": "1 1_0"}', "2:13", "'1_0' is no plain decimal integer"),
        ('{"text": "1 +5"}', "2:13", "sign"),
        ('{"text": "1 3.7"}', "2:13", "truncated"),
        ('{"text": "1 \\u0663"}', "2:13", "'٣'"),
        ('{"text": "\\t\\u0020 hello"}', "2:20", "'hello'.*choose a tokenizer for text"),
        ('{"a": {"text": 1}, "text" : "1 x"}', "2:32", "'x'"),
        ('{"text": [1, 400]}', "2:14", "element 1: 400 is outside"),
        ('{"text": [1, 2.0]}', "2:14", "element 1: 2.0 is no integer"),
        ('{"text": [1, "2"]}', "2:14", "the text '2'"),
        ('{"text": [1, true]}', "2:14", "true"),
        ('{"text": [1, null]}', "2:14", "null"),
        ('{"text": [1, [2]]}', "2:14", "a list inside"),
        ('{"text": [1, {"a": 2}]}', "2:14", "an object"),
        (f'{{"text": [1, {10**50}]}}', "2:14", "too large"),
        (f'{{"text": [1, {"9" * 5000}]}}', "2:1", "thousands of digits"),
        ('{"text": [1, NaN]}', "2:1", "NaN is no JSON number"),
        ('{"text": null}', "2:10", "text is null"),
        ('{"text": 5}', "2:10", "text is 5"),
        ('{"text": {"a": 1}}', "2:10", "an object"),
        ('{"text": "1", "text": "2"}', "2:1", "stands twice"),
        ('{"txt": "1"}', "2", "no field 'text'; it has 'txt'"),
        ("{}", "2", "no field 'text'; it has none"),
        ("[1, 2]", "2:1", "a list, not an object"),
        ('"1 2"', "2:1", "single value"),
        ("5", "2:1", "single value"),
        ('{"text": "1"', "2:13", "no JSON"),
        ('{"text": "1"} x', "2:15", "no JSON"),
        ("1 2 3", "2:3", "no JSON"),
        ("[" * 100_000, "2:1", "nested too deeply"),
    ],
)
def test_a_faulty_row_is_named(tmp_path: Path, line: str, place: str, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        prepared(tmp_path, f"{GOOD}{line}\n{GOOD}", AngleTokenizer())
    assert str(caught.value).startswith(f"{tmp_path / 'a.jsonl'}:{place}: ")
    assert not (tmp_path / "store" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("line", "place", "words"),
    [
        ("1 400 2", "2:3", "outside"),
        ("hello", "2:1", "'hello'"),
        ("1,2", "2:1", "commas"),
    ],
)
def test_a_faulty_line_of_text_is_named(tmp_path: Path, line: str, place: str, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        prepared(tmp_path, f"1 2\n{line}\n3\n", AngleTokenizer(), name="a.txt")
    assert str(caught.value).startswith(f"{tmp_path / 'a.txt'}:{place}: ")


def test_integers_given_to_a_text_tokenizer_name_the_ways_out(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl:2:10: text: .*takes text; choose tokenizer angle, integer or ids"):
        prepared(tmp_path, '{"text": "words"}\n{"text": [1, 2]}\n', BytesTokenizer())
    with pytest.raises(DataError, match=r"^data\.train: the values are integers, but this tokenizer takes text"):
        prepare(sources=[[1, 2, 3]], tokenizer=BytesTokenizer(), store=tmp_path / "store")


def test_bytes_that_are_no_utf8_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl:2:12: byte 0xff is not UTF-8"):
        prepared(tmp_path, b'{"text": "\xc3\xa9"}\n{"text": "\xc3\xa9\xff"}\n', BytesTokenizer())
    with pytest.raises(DataError, match=r"a\.txt:1:2: byte 0xc3 is not UTF-8"):
        prepared(tmp_path, b"a\xc3", BytesTokenizer(), name="a.txt")


def test_half_a_surrogate_pair_is_named_and_can_be_printed(tmp_path: Path) -> None:
    emoji, half = "\\ud83e\\udd23", "\\ud800"
    for text, tokenizer, words in (
        (f"{emoji} {half}", BytesTokenizer(), "1:24: text: .*surrogate"),
        (f"1 {half}", AngleTokenizer(), "1:13: text: .*no plain"),
    ):
        with pytest.raises(DataError, match=words) as caught:
            prepared(tmp_path, f'{{"text": "{text}"}}\n', tokenizer)
        str(caught.value).encode()


def test_a_fault_deep_in_a_file_has_its_own_line(tmp_path: Path) -> None:
    lines = [GOOD] * 70_000 + ['{"month": 3}\n'] + [GOOD] * 100
    with pytest.raises(DataError, match=r"a\.jsonl:70001: the row has no field 'text'; it has 'month'"):
        prepared(tmp_path, "".join(lines), AngleTokenizer())


def test_lines_are_whole_at_the_borders_of_blocks(tmp_path: Path) -> None:
    # 13 bytes a line: no power of two ends where a line does.
    store = prepared(tmp_path, "".join(f"{i % 360:012d}\n" for i in range(200_000)), AngleTokenizer(), name="a.txt")
    assert store.train.read(0, 400_000)[::2].tolist() == [i % 360 + 1 for i in range(200_000)]


def test_twenty_faults_are_named_and_the_rest_counted(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        prepared(tmp_path, '{"text": "x"}\n' * 50, AngleTokenizer())
    lines = str(caught.value).splitlines()
    assert len(lines) == 21 and "a.jsonl:20:11" in lines[19] and "30 more" in lines[20]


def test_bom_crlf_blank_lines_and_a_missing_last_end_are_fine(tmp_path: Path) -> None:
    data = '\ufeff{"text": "1 2"}\r\n\r\n   \r\n{"text": [3]}\r\n\n{"text": ""}\n{"text": []}\n'
    data += '{"text": " "}\n{"text": "4"}'
    store = prepared(tmp_path, data, AngleTokenizer())
    assert tokens(store) == [2, 3, 0, 4, 0, 5, 0]
    assert store.num_train_documents == 3
    (record,) = store.manifest.sources
    assert (record.lines, record.blank_lines, record.first_blank_line, record.empty_documents) == (9, 3, 2, 3)
    assert store.notes() == [
        f"{tmp_path / 'a.jsonl'}: 3 blank line(s) skipped; the first is line 2",
        f"{tmp_path / 'a.jsonl'}: 3 document(s) without a token skipped",
    ]


def test_a_line_of_a_text_file_is_a_document_as_it_stands(tmp_path: Path) -> None:
    store = prepared(tmp_path, "\ufeff a \r\nb\u2028c\x0bd\n\n\ne", BytesTokenizer(), name="a.txt")
    documents = [" a ", "b\u2028c\x0bd", "e"]
    assert tokens(store) == [token for text in documents for token in [*BytesTokenizer().encode(text), 0]]


def test_a_file_of_blank_lines_is_refused(tmp_path: Path) -> None:
    for data, name in (("\n\n", "a.txt"), ('{"text": ""}\n', "a.jsonl"), ("\ufeff\n", "b.txt")):
        with pytest.raises(DataError, match="no document"):
            prepared(tmp_path, data, AngleTokenizer(), name=name)


def test_another_field_can_be_trained(tmp_path: Path) -> None:
    store = prepared(tmp_path, '{"text": "x", "angles": [1]}\n{"angles": "2"}\n', AngleTokenizer(), field="angles")
    assert tokens(store) == [2, 0, 3, 0]


def test_ids_of_rows_stay_as_they_are(tmp_path: Path) -> None:
    store = prepared(tmp_path, '{"text": [7, 0, 9]}\n{"text": "8"}\n', IdsTokenizer(10))
    assert tokens(store) == [7, 0, 9, 0, 8, 0]
    with pytest.raises(DataError, match=r"10 is outside 0\.\.9"):
        prepared(tmp_path, '{"text": [10]}\n', IdsTokenizer(10))


class Letters:
    """A user's own tokenizer."""

    vocab_size = 27
    fingerprint = "letters 1"

    def encode(self, text: str) -> list[int]:
        if "!" in text:
            raise KeyError("!")
        return [ord(letter) - 96 for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(token + 96) for token in ids)


def test_a_users_tokenizer_is_held_to_its_word(tmp_path: Path) -> None:
    assert tokens(prepared(tmp_path, "abz\n\nc\n", Letters(), name="a.txt")) == [1, 2, 26, 0, 3, 0]
    assert not (tmp_path / "store" / "vocab.txt").exists()
    with pytest.raises(DataError, match=r"a\.txt:2:1: the tokenizer returned id 27, outside its own 0\.\.26"):
        prepared(tmp_path, "a\n{\n", Letters(), name="a.txt")
    with pytest.raises(DataError, match=r"a\.txt:1:1: the tokenizer returned id -64, outside"):
        prepared(tmp_path, "a \n", Letters(), name="a.txt")
    with pytest.raises(DataError, match=r"a\.txt:1:1: the tokenizer refuses it: '!'"):
        prepared(tmp_path, "a!\n", Letters(), name="a.txt")


def test_where_chooses_rows_by_their_fields(tmp_path: Path) -> None:
    rows = [{"month": m, "station": s, "text": str(m)} for m in (1, 2, 12) for s in ("a", "b")]
    data = "".join(json.dumps(row) + "\n" for row in rows)

    def held(**where: object) -> list[int]:
        store = prepared(tmp_path, data, AngleTokenizer(), eval_rule=EvalRule(where=where))
        assert store.num_train_documents + len(store.eval_documents) == 6
        return [int(ids[0]) - 1 for ids in store.eval_documents]

    assert held(month=12) == [12, 12]
    assert held(month=[1, 12], station="b") == [1, 12]
    data = f'{{"month": 12, "station": "a", "text": ""}}\n{data}'
    assert held(month=12, station="a") == [12]
    for where, words in (
        ({"month": 11}, "no row has month: 11; month has 1, 2, 12"),
        ({"month": "12"}, "no row has month: '12'"),
        ({"month": True}, "no row has month: True"),
        ({"station": "c"}, 'station has "a", "b"'),
        ({"month": [1, 2, 12]}, "leaves none to train on"),
        ({"year": 1}, r"a\.jsonl:1: the row has no field 'year'"),
    ):
        with pytest.raises(DataError, match=words):
            held(**where)
    with pytest.raises(DataError, match=r"where chooses rows of \.jsonl"):
        prepared(tmp_path, "1\n2\n", AngleTokenizer(), name="a.txt", eval_rule=EvalRule(where={"a": 1}))


@given(st.text(max_size=12), st.booleans(), st.dictionaries(st.text(max_size=3), st.integers(), max_size=3))
def test_columns_point_at_the_character(text: str, is_ascii: bool, others: dict[str, int]) -> None:
    line = json.dumps({**others, "the text": f"{text}#"}, ensure_ascii=is_ascii)
    at = text_column(line, "the text", len(text))
    assert line[at - 1] == "#" and line[at:] == '"}'
    assert line[field_column(line, "the text") - 1] == '"'


def test_columns_point_at_the_element() -> None:
    line = '{"a" : [ 1 ,"x,]", {"b": [2]}, 77 ] }'
    assert [line[element_column(line, "a", i) - 1] for i in range(4)] == ["1", '"', "{", "7"]
    assert field_column(line, "missing") == 1


def test_arrays_name_row_and_element(tmp_path: Path) -> None:
    array = np.ones((5000, 400), np.int32)
    array[4000, 17] = 360
    np.save(tmp_path / "a.npy", array)
    np.save(tmp_path / "b.npy", array.ravel())
    np.save(tmp_path / "c.npy", np.asfortranarray(array))
    for source, place in (
        (tmp_path / "a.npy", "row 4000, element 17"),
        (tmp_path / "b.npy", f"row 0, element {4000 * 400 + 17}"),
        (tmp_path / "c.npy", "row 4000, element 17"),
        (array, "row 4000, element 17"),
        ([[1], [2, -1]], "row 1, element 1"),
    ):
        with pytest.raises(DataError, match=rf"{place}: .* is outside 0\.\.359"):
            prepare(sources=[source], tokenizer=AngleTokenizer(), store=tmp_path / "store")
