"""Generated texts on standard output: the same characters streamed and whole, harmless on a terminal."""

from __future__ import annotations

import errno
import io
import json
from collections.abc import Iterator

import pytest

from rwkv_spec.errors import UserError
from rwkv_spec.report.texts import write_json, write_pieces, write_texts


class Output(io.TextIOWrapper):
    """Keeps what was flushed. A terminal, if asked to be one."""

    def __init__(self, *, terminal: bool = False, encoding: str = "utf-8") -> None:
        self.bytes = io.BytesIO()
        super().__init__(self.bytes, encoding=encoding, newline="\n")
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def test_a_text_in_pieces_is_written_as_the_whole_is() -> None:
    whole, pieces = Output(), Output()
    write_texts(whole, ["one\r\ntwo ", "é"])
    write_pieces(pieces, iter(["one\r", "\ntw", "o ", "\né"]))
    assert whole.bytes.getvalue() == pieces.bytes.getvalue() == "one\r\ntwo \né\n".encode()


def test_each_piece_is_there_before_the_next_is_asked_for() -> None:
    output = Output()
    seen = []

    def pieces() -> object:
        yield "a"
        seen.append(output.bytes.getvalue())
        yield "b"
        seen.append(output.bytes.getvalue())

    write_pieces(output, pieces())  # type: ignore[arg-type]
    assert seen == [b"a", b"ab"]


def test_what_is_said_of_a_text_that_ends_in_an_error_begins_a_line() -> None:
    output = Output()

    def pieces() -> Iterator[str]:
        yield "a"
        raise UserError("its weights are damaged")

    with pytest.raises(UserError, match="its weights are damaged"):
        write_pieces(output, pieces())
    assert output.bytes.getvalue() == b"a\n"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EPIPE], ids=["full", "gone"])
def test_a_full_disk_is_said_in_words_and_a_reader_that_is_gone_is_told_from_it(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse() -> None:
        raise OSError(code, "refused")

    for write in (lambda to: write_texts(to, ["a"]), lambda to: write_pieces(to, ["a"]), lambda to: write_json(to, [])):
        output = Output()
        monkeypatch.setattr(output, "flush", refuse)
        with pytest.raises(BrokenPipeError if code == errno.EPIPE else UserError, match="refused"):
            write(output)
        monkeypatch.undo()


def test_a_terminal_is_not_steered_and_other_scripts_stay() -> None:
    text = "a\x1b[2J\r\x9b\x07\t\nж　é\u200d🙂"
    shown, piped = Output(terminal=True), Output()
    write_pieces(shown, [text])
    write_pieces(piped, [text])
    assert shown.bytes.getvalue().decode() == "a\\x1b[2J\\r\\x9b\\x07\t\nж　é\u200d🙂\n"
    assert piped.bytes.getvalue().decode() == f"{text}\n"


def test_what_an_encoding_lacks_is_shown_as_a_code() -> None:
    output = Output(encoding="ascii")
    write_texts(output, ["é"])
    assert output.bytes.getvalue() == b"\\xe9\n"


def test_json_holds_every_value_and_is_ascii() -> None:
    output = Output(encoding="ascii")
    values = [{"text": "é\x1b", "ids": [1, 2], "logprobs": [-0.5]}, {"text": "", "ids": [], "logprobs": []}]
    write_json(output, values)
    output.flush()
    assert json.loads(output.bytes.getvalue().decode("ascii")) == values
