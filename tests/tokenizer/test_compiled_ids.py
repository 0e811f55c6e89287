"""Compiled ids of texts that lie anywhere in memory: those of the plain forms, or None where these know better."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rwkv_spec.data.encode import end_documents
from rwkv_spec.errors import KernelError
from rwkv_spec.tokenizer import compiled_ids
from rwkv_spec.tokenizer.byte import BytesTokenizer
from rwkv_spec.tokenizer.compiled_ids import can_read_ids, check_library, end_with_zero, ids_of_integers
from rwkv_spec.tokenizer.ids import IdsTokenizer
from rwkv_spec.tokenizer.integer import AngleTokenizer, IntegerTokenizer
from rwkv_spec.tokenizer.protocol import EncodeError, Utf8Texts, Utf8Tokenizer
from rwkv_spec.tokenizer.vocab import VocabTokenizer
from tests.ops.cases import build_changed
from tests.tokenizer.vocabularies import compiled, write

TEXTS = st.one_of(
    st.lists(st.integers(0, 400), max_size=20).map(lambda values: " ".join(map(str, values))),
    st.text(alphabet="0123456789 \t\n\r\v\f", max_size=30),
    st.text(alphabet="0123456789 -+.,_eé\x00\x1c", max_size=8),
)


def listed(found: tuple[np.ndarray, np.ndarray] | None) -> tuple[list[int], list[int]] | None:
    return None if found is None else (found[0].tolist(), found[1].tolist())


@compiled
@given(st.lists(TEXTS, max_size=5), st.sampled_from([0, 9, 359, 10**9, 2**31 - 3]))
def test_integers_have_the_ids_of_the_plain_form(texts: list[str], max_value: int) -> None:
    tokenizer = IntegerTokenizer(max_value)
    got = listed(tokenizer.encode_utf8(Utf8Texts.of([text.encode() for text in texts])))
    try:
        want = listed(tokenizer.encode_many(texts))
    except EncodeError:
        want = None
    # Zeros in front may make a number longer than the compiled form reads.
    too_long = any(len(word) > 18 for text in texts for word in text.split())
    assert got == want or (too_long and got is None)


@compiled
@given(st.lists(st.lists(st.integers(0, 400), max_size=9), max_size=5))
def test_lists_have_the_ids_of_sequences(rows: list[list[int]]) -> None:
    tokenizer = IdsTokenizer(401)
    pieces = [" , ".join(map(str, row)).encode() for row in rows]
    got = listed(tokenizer.encode_utf8(Utf8Texts.of(pieces, [True] * len(rows))))
    assert got == ([value for row in rows for value in row], list(map(len, rows)))
    assert BytesTokenizer().encode_utf8(Utf8Texts.of([b"1", b"2"], [False, True])) is None


@compiled
@given(st.lists(st.text(max_size=20), max_size=5))
def test_bytes_have_the_ids_of_the_plain_form(texts: list[str]) -> None:
    got = BytesTokenizer().encode_utf8(Utf8Texts.of([text.encode() for text in texts]))
    assert listed(got) == listed(BytesTokenizer().encode_many(texts))


@compiled
def test_a_vocabulary_has_the_ids_of_the_plain_form(tmp_path: Path) -> None:
    tokenizer = VocabTokenizer(write(tmp_path / "v.txt", "1 'a' 1\n2 'ab' 2\n3 'b' 1\n"))
    assert listed(tokenizer.encode_utf8(Utf8Texts.of([b"abb", b"", b"aab"]))) == listed(
        tokenizer.encode_many(["abb", "", "aab"])
    )
    assert tokenizer.encode_utf8(Utf8Texts.of([b"ab", b"ac"])) is None
    assert tokenizer.encode_utf8(Utf8Texts.of([b"ab"], [True])) is None


@compiled
def test_documents_end_as_in_the_plain_form(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    for top, dtype in ((65_536, np.dtype("<u2")), (2**31, np.dtype("<i4"))):
        sizes = rng.integers(0, 9, 300)
        ids = rng.integers(0, top, int(sizes.sum()))
        want = end_documents(ids, sizes, dtype)
        got = end_with_zero(ids, sizes, dtype)
        assert got is not None and got.dtype == want.dtype == dtype and got.tolist() == want.tolist()
        # As views with gaps, too.
        apart = end_with_zero(np.repeat(ids, 2)[::2], np.repeat(sizes, 3)[::3], dtype)
        assert apart is not None and apart.tolist() == want.tolist()
        monkeypatch.setattr("rwkv_spec.data.encode.MANY_IDS", 0)
        assert end_documents(ids, sizes, dtype).tolist() == want.tolist()
        monkeypatch.undo()


@compiled
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("value * 10 + digit", "value * 10 + digit % 9"),
        (" || value > high", ""),
        ("at - first > MOST_DIGITS || ", ""),
        ("!(LIST && *at == ',')", "*at != ','"),
        ("static_cast<int64_t>(value) + shift", "static_cast<int64_t>(value)"),
        ("byte <= 13", "byte <= 12"),
        ("counts[text] = count;", "counts[0] = count;"),
        ("texts[text][i] + 1", "texts[text][i]"),
        ("*out++ = 0;", "*out++ = 1;"),
        ("static_cast<int32_t*>(out)", "static_cast<uint16_t*>(out)"),
    ],
)
def test_a_build_with_other_ids_is_not_used(tmp_path: Path, right: str, wrong: str) -> None:
    with pytest.raises(KernelError, match="gives other ids"):
        build_changed("ids", tmp_path, right, wrong, check_library)


@compiled
def test_a_tokenizer_that_was_used_can_be_copied_and_pickled(tmp_path: Path) -> None:
    texts = Utf8Texts.of([b"1 2", b"3"])
    for tokenizer in (AngleTokenizer(), IdsTokenizer(10), BytesTokenizer()):
        assert isinstance(tokenizer, Utf8Tokenizer) and tokenizer.is_compiled
        want = listed(tokenizer.encode_utf8(texts))
        for again in (copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))):
            assert want is not None and listed(again.encode_utf8(texts)) == want


def test_without_a_compiler_there_is_no_compiled_form(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    compiled_ids._ids_of_this_machine.cache_clear()
    try:
        assert not can_read_ids() and not AngleTokenizer().is_compiled and not BytesTokenizer().is_compiled
        assert ids_of_integers(Utf8Texts.of([b"1"]), high=9, shift=0) is None
        assert BytesTokenizer().encode_utf8(Utf8Texts.of([b"1"])) is None
        assert end_with_zero(np.ones(3, np.int64), np.array([3]), np.dtype("<u2")) is None
        assert end_documents(np.ones(70_000, np.int64), np.array([70_000]), np.dtype("<u2"))[-2:].tolist() == [1, 0]
    finally:
        compiled_ids._ids_of_this_machine.cache_clear()
