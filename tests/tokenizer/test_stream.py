"""Text as the ids come: joined, the pieces are decode() of all ids; no piece shows half a character."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rwkv_spec.tokenizer.byte import BytesTokenizer
from rwkv_spec.tokenizer.ids import IdsTokenizer
from rwkv_spec.tokenizer.integer import AngleTokenizer, IntegerTokenizer
from rwkv_spec.tokenizer.protocol import EncodeError, Tokenizer, stream_decoder
from rwkv_spec.tokenizer.stream import BytesDecoder, PrefixDecoder
from tests.tokenizer.vocabularies import world


def pieces_of(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    decoder = stream_decoder(tokenizer)
    return [*map(decoder.feed, ids), decoder.finish()]


class Users:
    """A tokenizer with the four things that a user's own one needs, and bytes below 256 as ids."""

    vocab_size = 256
    fingerprint = "users"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


class Strict(Users):
    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8")


class Words(Users):
    """Words with a space between them and a full stop at the end: the end of each decoding is not to be believed."""

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(f"<{token_id}>" for token_id in ids) + "."


class Capitals(BytesTokenizer):
    """Derived from one of ours, with another decode()."""

    def decode(self, ids: object) -> str:
        return super().decode(ids).upper()  # type: ignore[arg-type]


class Backwards(Users):
    def decode(self, ids: Sequence[int]) -> str:
        return super().decode(list(ids)[::-1])


@cache
def numeric() -> list[Tokenizer]:
    return [AngleTokenizer(), IntegerTokenizer(7), IdsTokenizer(9)]


@given(st.lists(st.integers(0, 256)))
def test_pieces_of_bytes_are_the_whole_text(ids: list[int]) -> None:
    for tokenizer in (BytesTokenizer(), Capitals()):
        assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


@given(st.lists(st.sampled_from([0xED, 0xA0, 0xF0, 0x9F, 0x92, 0xA9, 0xC3, 0xE2, 0x41, 0xFF]), max_size=12))
def test_broken_utf8_becomes_the_same_replacements_as_in_the_whole(data: list[int]) -> None:
    ids = [byte + 1 for byte in data]
    assert "".join(pieces_of(BytesTokenizer(), ids)) == BytesTokenizer().decode(ids)
    assert "".join(pieces_of(Users(), data)) == Users().decode(data)


@given(st.lists(st.integers(0, 65529), max_size=30))
def test_pieces_of_world_tokens_are_the_whole_text(ids: list[int]) -> None:
    assert "".join(pieces_of(world(), ids)) == world().decode(ids)


@pytest.mark.parametrize(
    "tokenizer", [BytesTokenizer(), Users(), Strict(), Capitals()], ids=lambda one: type(one).__name__
)
@given(st.text())
def test_no_piece_shows_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


def test_a_character_comes_with_its_last_byte() -> None:
    text = "aé€𝔘"
    assert pieces_of(BytesTokenizer(), BytesTokenizer().encode(text)) == [
        "a", "", "é", "", "", "€", "", "", "", "𝔘", "",
    ]  # fmt: skip
    ids = world().encode("𝔘")
    assert len(ids) > 1 and pieces_of(world(), ids) == [*[""] * (len(ids) - 1), "𝔘", ""]
    # What never becomes whole is shown at the end, as decode() shows it.
    assert pieces_of(BytesTokenizer(), BytesTokenizer().encode("é")[:1]) == ["", "\ufffd"]


@given(st.lists(st.integers(0, 8)))
def test_numbers_come_with_the_separator_before_them(ids: list[int]) -> None:
    for tokenizer in numeric():
        assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_number_is_given_out_at_once_and_ends_of_documents_are_left_out() -> None:
    assert pieces_of(AngleTokenizer(), [0, 360, 0, 1, 0]) == ["", "359", "", " 0", "", ""]
    assert pieces_of(IdsTokenizer(9), [0, 3]) == ["0", " 3", ""]


def test_of_a_users_decode_only_what_stays_is_given_out() -> None:
    # The full stop moves along; a strict UTF-8 error is a wait.
    assert pieces_of(Words(), [1, 2, 3]) == ["", "<1>", " <2>", " <3>."]
    assert pieces_of(Strict(), list("aé".encode())) == ["", "", "a", "é"]
    with pytest.raises(UnicodeDecodeError):
        pieces_of(Strict(), [0xC3])
    assert pieces_of(Users(), []) == [""]
    # A replacement that is really meant comes when something stands behind it, or at the end.
    assert "".join(pieces_of(Users(), list("\ufffdx\ufffd".encode()))) == "\ufffdx\ufffd"


def test_a_decode_that_takes_text_back_is_refused_in_words() -> None:
    decoder = stream_decoder(Backwards())
    assert (decoder.feed(65), decoder.feed(65)) == ("", "A")
    with pytest.raises(ValueError, match="takes back text that it gave for fewer; give the tokenizer a stream_decoder"):
        decoder.feed(66)


def test_a_users_own_stream_decoder_is_used_and_an_inherited_one_that_no_longer_fits_is_not() -> None:
    class Own(Users):
        def stream_decoder(self) -> BytesDecoder:
            return BytesDecoder(bytes)

    assert isinstance(stream_decoder(Own()), BytesDecoder)
    assert isinstance(stream_decoder(BytesTokenizer()), BytesDecoder)
    assert isinstance(stream_decoder(Capitals()), PrefixDecoder)
    assert isinstance(stream_decoder(Users()), PrefixDecoder)


def test_ids_that_name_nothing_are_refused_as_by_decode() -> None:
    for tokenizer, token_id in ((BytesTokenizer(), 257), (AngleTokenizer(), 361), (world(), 65530)):
        with pytest.raises(EncodeError):
            tokenizer.decode([token_id])
        with pytest.raises(EncodeError):
            stream_decoder(tokenizer).feed(token_id)
