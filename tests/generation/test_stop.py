"""Where a sequence ends: stops of ids and of text, held back while they may come, and never let go in part."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rwkv_spec.errors import UserError
from rwkv_spec.generation.stop import IdRow, NumberRow, TextRow, first_stop, num_begun, rest_ids
from rwkv_spec.tokenizer.integer import IntegerTokenizer
from rwkv_spec.tokenizer.protocol import stream_decoder
from rwkv_spec.tokenizer.stream import BytesDecoder, PrefixDecoder, StreamDecoder

# A character may be in several tokens, and in one with others.
PIECES = {1: b"a", 2: b"b", 3: b"ab", 4: b"ba", 5: b"\xc3", 6: b"\xa9", 7: b"a\xc3", 8: b"\xa9b", 9: b"\n", 10: b"b\na"}


class Pieces:
    """Greedy over PIECES, which are bytes."""

    vocab_size, fingerprint = 11, "pieces"

    def encode(self, text: str) -> list[int]:
        ids, rest = [], text.encode()
        while rest:
            fitting = [token for token, piece in PIECES.items() if rest.startswith(piece)]
            if not fitting:
                raise ValueError(f"no token begins {rest!r}")
            ids.append(max(fitting, key=lambda token: len(PIECES[token])))
            rest = rest[len(PIECES[ids[-1]]) :]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.decode_bytes(ids).decode(errors="replace")

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(PIECES[token] for token in ids)

    def stream_decoder(self) -> StreamDecoder:
        return BytesDecoder(self.decode_bytes)


def ids_taken(tokens: list[int], stops: list[list[int]], *, room: int = 100) -> tuple[list[list[int]], str | None]:
    """What a row lets go after each token, and why it ended."""
    row = IdRow(stops=stops, max_new_tokens=room, stop_at_end_of_document=False)
    released: list[list[int]] = []
    for token in tokens:
        before = len(row.ids)
        row.take(token, -float(token))
        released.append(row.ids[before:])
        if row.stopped_by is not None:
            break
    assert row.logprobs == [-float(token) for token in row.ids]
    return released, row.stopped_by


def text_row(tokens: Sequence[int], stops: Sequence[str], *, room: int = 100) -> tuple[TextRow, list[str]]:
    """The row after these tokens, and its pieces."""
    row = TextRow(Pieces(), stream_decoder(Pieces()), stops=stops, max_new_tokens=room)
    pieces = []
    for token in tokens:
        pieces.append(row.take(token, -float(token)))
        if row.stopped_by is not None:
            break
    return row, pieces


def test_tokens_are_held_back_while_they_may_become_a_stop() -> None:
    assert ids_taken([1, 2, 3], [[1, 2, 3]]) == ([[], [], []], "stop_sequence")
    assert ids_taken([1, 2, 4, 5], [[1, 2, 3]]) == ([[], [], [1, 2, 4], [5]], None)
    assert ids_taken([1, 1, 2], [[1, 2]]) == ([[], [1], []], "stop_sequence")
    assert ids_taken([1, 2, 1, 2, 3], [[1, 2, 3]]) == ([[], [], [1, 2], [], []], "stop_sequence")
    assert ids_taken([7, 1, 2], [[1, 2], [7, 1, 2]]) == ([[], [], []], "stop_sequence")
    assert ids_taken([1, 2], [[1, 2, 3]], room=2) == ([[], [1, 2]], "length")


def test_stops_of_ids_agree_with_a_search_over_all_short_sequences() -> None:
    stops = [[1, 0], [0, 0, 1], [2]]
    for tokens in itertools.product(range(3), repeat=6):
        ends = [
            (place + len(stop), -len(stop))
            for stop in stops
            for place in range(len(tokens))
            if list(tokens[place : place + len(stop)]) == stop
        ]
        released, reason = ids_taken(list(tokens), stops, room=len(tokens))
        kept = [token for part in released for token in part]
        if ends:
            end, minus_length = min(ends)
            assert (kept, reason) == (list(tokens[: end + minus_length]), "stop_sequence")
        else:
            assert (kept, reason) == (list(tokens), "length")


def test_the_end_of_a_document_lets_go_what_was_held_back() -> None:
    row = IdRow(stops=[[1, 2, 3]], max_new_tokens=9)
    for token in (1, 2, 0):
        row.take(token, 0.0)
    assert (row.ids, row.stopped_by) == ([1, 2], "end_of_document")
    text, pieces = text_row([1, 9, 0], ["a\nb"])
    assert (text.text, text.stopped_by, pieces) == ("a\n", "end_of_document", ["", "", "a\n"])


def test_numbers_are_matched_as_numbers_and_written_as_text() -> None:
    tokenizer = IntegerTokenizer(30)
    row = NumberRow(stream_decoder(tokenizer), stops=[tokenizer.encode("1 2")], max_new_tokens=9)
    pieces = [row.take(token, 0.0) for token in tokenizer.encode("11 2 1 5 1")]
    assert pieces == ["11", " 2", "", " 1 5", ""]
    assert row.take(tokenizer.encode("2")[0], 0.0) == ""
    assert (row.text, row.stopped_by) == ("11 2 1 5", "stop_sequence")
    assert tokenizer.decode(row.ids) == row.text


def test_a_stop_is_found_however_its_tokens_cut_it() -> None:
    # "ab" is token 3, or 1 2, or lies across 4 and 2, or inside 10's neighbours: a list of ids would miss most of them.
    for tokens, text in (
        ([2, 3], "b"),
        ([2, 1, 2], "b"),
        ([4, 2], "b"),
        ([9, 10, 2], "\nb\n"),
        ([9, 10, 4], "\nb\n"),
    ):
        row, pieces = text_row(tokens, ["ab"])
        assert (row.text, row.stopped_by, "".join(pieces)) == (text, "stop_sequence", text), tokens


def test_tokens_that_a_stop_cuts_are_left_out_and_their_first_part_is_told() -> None:
    row, _ = text_row([2, 4, 2], ["ab"])
    assert (row.text, row.ids, row.logprobs, row.rest) == ("bb", [2], [-2.0], "b")
    assert rest_ids(row, Pieces()) == [2]
    # The last byte before the stop is half of the stop's first character.
    row, _ = text_row([2, 7, 8], ["é"])
    assert (row.text, row.ids, row.rest) == ("ba", [2], "a")
    row, _ = text_row([2, 3], ["ab"])
    assert (row.ids, row.rest, rest_ids(row, Pieces())) == ([2], "", [])


def test_a_part_of_a_token_that_has_no_tokens_of_its_own_is_told() -> None:
    class Wordy(Pieces):
        def encode(self, text: str) -> list[int]:
            raise ValueError("no token for it")

    row, _ = text_row([4, 2], ["ab"])
    with pytest.raises(UserError, match="cut a token in two, and its first part 'b' cannot be encoded"):
        rest_ids(row, Wordy())


def test_of_several_stops_the_first_to_be_complete_ends_the_text() -> None:
    assert first_stop("xabcab", ["cab", "bc"], start=0) == 2
    assert first_stop("xabc", ["bc", "abc"], start=0) == 1
    assert first_stop("xabcd", ["abcd", "c"], start=0) == 3
    assert first_stop("xabc", ["d"], start=0) is None
    assert first_stop("abab", ["ab"], start=1) == 2


def test_what_may_begin_a_stop_is_counted_short_of_the_whole() -> None:
    assert [num_begun(text, "aab") for text in ("", "a", "aa", "aaa", "ab", "aab", "xa")] == [0, 1, 2, 2, 0, 0, 1]
    assert num_begun([5, 1, 2], [1, 2, 3]) == 2


def test_the_greatest_length_lets_go_what_was_held_back() -> None:
    row, pieces = text_row([1, 9], ["a\nb"], room=2)
    assert (row.text, row.stopped_by, pieces) == ("a\n", "length", ["", "a\n"])
    # Half a character at the very end is shown as such, and only there.
    row, pieces = text_row([1, 5], [], room=2)
    assert (row.text, pieces) == ("a\ufffd", ["a", "\ufffd"])
    assert TextRow(Pieces(), stream_decoder(Pieces()), stops=[], max_new_tokens=0).stopped_by == "length"


@given(
    tokens=st.lists(st.integers(1, 10), min_size=1, max_size=14),
    stops=st.lists(st.text(alphabet="ab\né", min_size=1, max_size=4), max_size=3),
    lags=st.booleans(),
)
def test_text_ends_where_a_search_in_the_whole_text_finds_the_first_stop(
    tokens: list[int], stops: list[str], lags: bool
) -> None:
    """With a decoder of bytes and with one that knows decode() alone, which lags behind."""
    whole = Pieces().decode(tokens)
    tokenizer = Pieces()
    decoder = PrefixDecoder(tokenizer.decode) if lags else stream_decoder(tokenizer)
    row = TextRow(tokenizer, decoder, stops=stops, max_new_tokens=len(tokens))
    given_out = ""
    for token in tokens:
        given_out += row.take(token, -float(token))
        assert whole.startswith(given_out)
        if row.stopped_by is not None:
            break
    ends = [(whole.find(stop) + len(stop), whole.find(stop)) for stop in stops if stop in whole]
    expected = whole[: min(ends)[1]] if ends else whole
    assert row.text == given_out == expected
    assert row.stopped_by == ("stop_sequence" if ends else "length")
    assert row.ids == tokens[: len(row.ids)] and row.logprobs == [-float(token) for token in row.ids]
    assert tokenizer.decode(row.ids) + row.rest == row.text
    longer = tokenizer.decode(tokens[: len(row.ids) + 1])
    assert len(row.ids) == len(tokens) or not row.text.startswith(longer)
