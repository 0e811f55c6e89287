"""Greedy longest match by two tries, plain and compiled: the same ids, the same place where no token begins."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rwkv_spec.errors import KernelError
from rwkv_spec.tokenizer.compiled_trie import (
    CompiledTrie,
    build_arrays,
    check_library,
    make_trie,
    match_arrays,
    trie_of_this_machine,
)
from rwkv_spec.tokenizer.protocol import EncodeError, Utf8Texts
from rwkv_spec.tokenizer.trie import Match, Trie
from rwkv_spec.tokenizer.vocab import VocabTokenizer, create_vocab_file_from_tokens
from tests.ops.cases import build_changed
from tests.tokenizer.vocabularies import compiled, naive, world, write

# Few bytes, so that random texts do match; 0 and 255 are the ends of a node's children.
BYTES = st.lists(st.sampled_from([0, 97, 98, 195, 169, 255]), min_size=1, max_size=7).map(bytes)
VOCABULARIES = st.sets(BYTES, min_size=1, max_size=25).map(lambda found: {i * 3 + 1: t for i, t in enumerate(found)})
DOCUMENTS = st.lists(st.lists(st.sampled_from([0, 97, 98, 195, 169, 255]), max_size=40).map(bytes), max_size=5)


def plain_words(
    tokens: dict[int, bytes], documents: list[bytes]
) -> tuple[list[int], list[int], tuple[int, int] | None]:
    ids: list[int] = []
    counts = [0] * len(documents)
    for number, document in enumerate(documents):
        found, stuck = naive(tokens, document)
        ids += found
        counts[number] = len(found)
        if stuck is not None:
            return ids, counts, (number, stuck)
    return ids, counts, None


def words_of(match: Match) -> tuple[list[int], list[int], tuple[int, int] | None]:
    return match.ids.tolist(), match.counts.tolist(), match.stuck


@given(VOCABULARIES, DOCUMENTS)
def test_the_plain_trie_agrees_with_the_plain_definition(tokens: dict[int, bytes], documents: list[bytes]) -> None:
    assert words_of(Trie(tokens).match(documents)) == plain_words(tokens, documents)


@compiled
@given(VOCABULARIES, DOCUMENTS, st.integers(1, 9))
def test_the_compiled_trie_agrees_with_the_plain_definition(
    tokens: dict[int, bytes], documents: list[bytes], room: int
) -> None:
    want = plain_words(tokens, documents)
    assert words_of(CompiledTrie(tokens).match(documents)) == want
    # However few ids a call has room for, and however small the first guess at the number of cells was.
    library = trie_of_this_machine().library
    arrays = build_arrays(library, tokens, capacity=room)
    assert words_of(match_arrays(library, arrays, Utf8Texts.of(documents), room=room)) == want


@compiled
def test_both_tries_agree_over_a_large_vocabulary_of_any_bytes() -> None:
    generator = np.random.default_rng(1)
    pieces = {generator.integers(0, 256, size).astype(np.uint8).tobytes() for size in range(1, 40) for _ in range(200)}
    # Every single byte, so that nothing is stuck, and wide nodes below a few prefixes.
    pieces |= {prefix + bytes([byte]) for prefix in (b"", b"\x00", b"\xff\xff", b"abc") for byte in range(256)}
    tokens = {2**31 - 2 - i: token for i, token in enumerate(sorted(pieces))}
    listed = list(tokens.values())
    document = b"".join(listed[i] for i in generator.integers(0, len(listed), 20_000))
    want, got = (
        Trie(tokens).match([document, b"", document[1:]]),
        CompiledTrie(tokens).match([document, b"", document[1:]]),
    )
    assert words_of(got) == words_of(want) and want.stuck is None
    assert b"".join(tokens[i] for i in got.ids.tolist()) == document + document[1:]


@compiled
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        # Not the longest match; the end of a document overlooked; a step to any node; a byte lost between two calls; …
        ("found_end = i;\n", "found_end = i;\n                    break;\n"),
        ("i < size;) {", "i < size + 1;) {"),
        ("if (cell.parent != node) break;", "if (cell.parent == FREE) break;"),
        ("at = place[1];", "at = place[1] + (place[1] > 0);"),
        ("counts[document] += count - before;", "counts[0] += count - before;"),
        (" && fits(base, count)", ""),
        ("place[1] = at;", "place[1] = 0;"),
    ],
)
def test_a_trie_that_finds_other_ids_is_not_used(tmp_path: Path, right: str, wrong: str) -> None:
    with pytest.raises(KernelError, match="finds other ids"):
        build_changed("trie", tmp_path, right, wrong, check_library)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    trie_of_this_machine.cache_clear()
    yield
    trie_of_this_machine.cache_clear()


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_the_ids_are_the_same_and_the_reason_is_given(tmp_path: Path) -> None:
    create_vocab_file_from_tokens(["a", "ab", "b", "é"], tmp_path / "v.txt")
    tokenizer = VocabTokenizer(tmp_path / "v.txt")
    assert tokenizer.encode("abaé") == [2, 1, 4]
    assert tokenizer.how_it_matches.startswith("plain Python, many times slower: no C++ compiler on PATH")
    with pytest.raises(EncodeError) as caught:
        tokenizer.encode_many(["ab", "éx"])
    assert caught.value.offset == 1


@compiled
def test_a_compiler_that_cannot_build_it_costs_speed_and_no_ids(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    trie_of_this_machine.cache_clear()
    try:
        trie = make_trie({1: b"a", 2: b"aa"})
        assert isinstance(trie, Trie) and "no-such-compiler" in trie.remark
        assert trie.match([b"aaa"]).ids.tolist() == [2, 1]
    finally:
        trie_of_this_machine.cache_clear()


@compiled
def test_a_tokenizer_that_was_used_can_be_copied_pickled_and_shared_by_threads(tmp_path: Path) -> None:
    tokenizer = VocabTokenizer(write(tmp_path / "v.txt", "1 'a' 1\n2 'ab' 2\n3 'b' 1\n"))
    text = "abba" * 50_000
    ids = tokenizer.encode(text)
    assert re.match("compiled by (g[+][+]|clang)", tokenizer.how_it_matches)
    for again in (copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))):
        assert again.encode(text) == ids
    with ThreadPoolExecutor(4) as pool:
        assert all(found == ids for found in pool.map(tokenizer.encode, [text] * 16))


def test_long_texts_are_matched_across_chunks() -> None:
    # 128 spaces are one token: a chunk border inside a run of them must not cut it.
    text = "x" + " " * 200_003 + "y" + "The Eiffel tower " * 9000
    match = Trie(world().tokens).match([text.encode()])
    assert match.ids.tolist() == world().encode(text)
    assert world().decode(match.ids) == text
    assert match.ids[1:1500].tolist() == [65529] * 1499


@compiled
def test_more_ids_than_one_call_finds_are_put_together(tmp_path: Path) -> None:
    tokenizer = VocabTokenizer(write(tmp_path / "v.txt", "1 'a' 1\n2 'b' 1\n"))
    texts = ["a" * 700_000, "b" * 1_500_000, "", "ab"]
    ids, counts = tokenizer.encode_many(texts)
    assert counts.tolist() == [700_000, 1_500_000, 0, 2]
    assert ids.dtype == np.int64 and (np.diff(ids) != 0).sum() == 3 and ids[-2:].tolist() == [1, 2]
    with pytest.raises(EncodeError) as caught:
        tokenizer.encode("a" * 3_000_000 + "c")
    assert caught.value.offset == 3_000_000
