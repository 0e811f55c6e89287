"""Greedy longest match as the World tokenizer does it, and vocabulary files read without trusting a line of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rwkv_spec.errors import DataError
from rwkv_spec.tokenizer.build import Recipe, build_tokenizer, recipe_of
from rwkv_spec.tokenizer.protocol import EncodeError
from rwkv_spec.tokenizer.vocab import GenericTokenizer, VocabTokenizer, create_vocab_file_from_tokens
from tests.tokenizer.vocabularies import world, write


def test_a_text_without_a_token_is_refused_with_its_place(tmp_path: Path) -> None:
    tokenizer = VocabTokenizer(write(tmp_path / "v.txt", "1 'é' 2\n2 'ab' 2\n"))
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_many(["ab", text])):
        with pytest.raises(EncodeError, match=r"no token of v\.txt begins at 'abc'|begins at 'c'") as caught:
            encode("ééabc")
        assert caught.value.offset == 4
    with pytest.raises(EncodeError, match="surrogate"):
        tokenizer.encode("ab\ud800")


def test_a_null_in_text_is_never_the_end_of_a_document(tmp_path: Path) -> None:
    # rwkv-trainer writes a row 0 that is NUL: it is accepted, and NUL in a text has no token then.
    tokenizer = VocabTokenizer(write(tmp_path / "v.txt", "0 b'\\x00' 1\n1 'a' 1\n"))
    assert tokenizer.encode("aa") == [1, 1]
    with pytest.raises(EncodeError):
        tokenizer.encode("a\x00")
    assert world().encode("a\x00") == [98, 1]


def test_decoding_names_ids_without_a_token(tmp_path: Path) -> None:
    tokenizer = VocabTokenizer(write(tmp_path / "v.txt", "1 'a' 1\n5 'b' 1\n"))
    assert (tokenizer.vocab_size, tokenizer.unnamed_ids) == (6, (2, 3, 4))
    assert tokenizer.decode([1, 0, 5]) == "ab"
    for ids in ([3], [6], [-1]):
        with pytest.raises(ValueError):
            tokenizer.decode(ids)


def test_crlf_bom_comments_and_blank_lines_are_accepted(tmp_path: Path) -> None:
    text = "\ufeff# a vocabulary\r\n1 '\\n' 1\r\n\r\n  \r\n"
    text += "2 \"it's # \" 7 # a comment\r\n3 b'\\xff\\x00' 2\r\n4 '\u2028' 3"
    tokenizer = VocabTokenizer(write(tmp_path / "v.txt", text))
    assert tokenizer.encode("it's # \n\u2028") == [2, 1, 4]
    assert tokenizer.encode_bytes(b"\xff\x00") == [3]


@pytest.mark.parametrize(
    ("line", "place", "words"),
    [
        ("1 'b' 1", "2:1", "id 1 is used already in line 1"),
        ("2 'a' 1", "2:1", "already in line 1"),
        ("-2 'b' 1", "2:1", "negative"),
        ("0 'b' 1", "2:1", "end of a document"),
        ("0 '\\x00\\x00' 2", "2:1", "end of a document"),
        ("2 'b' 2", "2:7", "has 1 bytes"),
        ("2 'é' 1", "2:7", "has 2 bytes"),
        ("2 'b'", "2:1", "does not read"),
        ("2 b 1", "2:1", "does not read"),
        ("2 'b' one", "2:7", "byte length"),
        ("٢ 'b' 1", "2:1", "plain decimal id"),
        ("1_0 'b' 1", "2:1", "plain decimal id"),
        ("99999999999 'b' 1", "2:1", "larger"),
        ("2 '' 0", "2:3", "empty"),
        ("2 '\\q' 2", "2:4", "escape"),
        ("2 'x\\N{DASH}' 3", "2:5", "escape"),
        ("2 b'é' 2", "2:5", "ASCII"),
        ("2 b'\\u0041' 1", "2:5", "escape"),
        ("2 '\\ud800' 3", "2:3", "surrogate"),
        ("2 '\\U00110000' 4", "2:4", "escape"),
        ("2 __import__('os') 1", "2:1", "does not read"),
        ("2 'a' 'b' 2", "2:1", "does not read"),
        ("2 f'b' 1", "2:1", "does not read"),
        ("  2 'b' 3", "2:9", "has 1 bytes"),
    ],
)
def test_a_faulty_line_is_named(tmp_path: Path, line: str, place: str, words: str) -> None:
    path = write(tmp_path / "v.txt", f"1 'a' 1\n{line}\n3 'c' 1\n")
    with pytest.raises(DataError, match=words) as caught:
        VocabTokenizer(path)
    assert str(caught.value).startswith(f"{path}:{place}: ")


def test_all_faults_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        VocabTokenizer(write(tmp_path / "v.txt", "1 'a' 1\n" + "1 'b' 1\n" * 30))
    assert len(str(caught.value).splitlines()) == 21
    assert "v.txt:3:1" in str(caught.value)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no token"),
        (b"# only\n\n", "no token"),
        (b"0 '\\x00' 1\n", "no token"),
        (b"1 'a' 1\n2 '\xff' 1\n", ":2:4: byte 0xff is not UTF-8"),
    ],
)
def test_a_file_that_is_no_vocabulary_is_refused(tmp_path: Path, data: bytes, words: str) -> None:
    with pytest.raises(DataError, match=words):
        VocabTokenizer(write(tmp_path / "v.txt", data))
    with pytest.raises(DataError, match="no such vocabulary"):
        VocabTokenizer(tmp_path / "missing.txt")
    with pytest.raises(DataError, match="cannot be read"):
        VocabTokenizer(tmp_path)


def test_an_edit_changes_the_fingerprint_and_a_copy_does_not(tmp_path: Path) -> None:
    one = VocabTokenizer(write(tmp_path / "a.txt", "1 'a' 1\n2 'b' 1\n"))
    same = VocabTokenizer(write(tmp_path / "b.txt", "# moved\n2 'b' 1\r\n1 b'a' 1\r\n"))
    other = VocabTokenizer(write(tmp_path / "c.txt", "2 'a' 1\n1 'b' 1\n"))
    assert one.fingerprint == same.fingerprint != other.fingerprint


def test_vocabulary_files_are_made_from_tokens(tmp_path: Path) -> None:
    tokens = ["hello", "world", b"\xff", " ", "'\"\\\n", "\x00"]
    create_vocab_file_from_tokens(tokens, tmp_path / "v.txt")
    tokenizer = GenericTokenizer(tmp_path / "v.txt")
    assert tokenizer.encode("hello world'\"\\\n\x00") == [1, 4, 2, 5, 6]
    assert tokenizer.vocab_size == 7
    with pytest.raises(ValueError, match="first argument"):
        create_vocab_file_from_tokens(str(tmp_path / "v.txt"), ["a"])  # type: ignore[arg-type]
    for bad in (["a", "a"], [""], [1], []):
        with pytest.raises(ValueError):
            create_vocab_file_from_tokens(bad, tmp_path / "bad.txt")  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["v.txt"]


def test_a_recipe_builds_the_same_tokenizer(tmp_path: Path) -> None:
    path = write(tmp_path / "v.txt", "1 'a' 1\n")
    recipes = [Recipe("angle"), Recipe("integer", max_value=9), Recipe("bytes"), Recipe("ids", vocab_size=9)]
    for recipe in [*recipes, Recipe("vocab", path=str(path))]:
        assert recipe_of(recipe.build()) == recipe
        assert repr(recipe.build())
    assert recipe_of(type("Own", (VocabTokenizer,), {})(path)) is None
    for bad in ({"type": "integer"}, {"type": "nothing"}, {"type": "vocab"}, {"type": "ids"}):
        with pytest.raises(ValueError):
            build_tokenizer(**bad)
