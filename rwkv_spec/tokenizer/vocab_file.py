"""Reads and writes RWKV vocabulary files, `<id> <str or bytes literal> <byte length>` a line; nothing is evaluated.

Every fault is named with file, line and column, up to twenty at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from rwkv_spec.atomic import discard, temporary_sibling
from rwkv_spec.errors import DataError
from rwkv_spec.tokenizer.protocol import shorten

_LITERAL = r"""b?(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_LINE = re.compile(rf"(?P<id>\S+)[ \t]+(?P<literal>{_LITERAL})[ \t]+(?P<length>\S+)[ \t]*(?:#.*)?")
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)", re.DOTALL)
_SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
_MAX_ID = 2**31 - 2
_MAX_PROBLEMS = 20


class _LineError(Exception):
    def __init__(self, column: int, message: str) -> None:
        self.column, self.message = column, message
        super().__init__(message)


def read_vocab(path: Path) -> dict[int, bytes]:
    """id -> token for every row but that of id 0. Raises one DataError that names all faults found."""
    tokens: dict[int, bytes] = {}
    lines_of_ids: dict[int, int] = {}
    lines_of_tokens: dict[bytes, int] = {}
    problems: list[str] = []
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            token_id, token = _parse_line(line)
            if token_id in lines_of_ids:
                raise _LineError(
                    1, f"id {token_id} is used already in line {lines_of_ids[token_id]}; each id names one token"
                )
            if token_id != 0 and token in lines_of_tokens:
                raise _LineError(
                    1, f"the token {token!r} stands already in line {lines_of_tokens[token]}; keep one of them"
                )
        except _LineError as error:
            problems.append(f"{path}:{number}:{error.column}: {error.message}")
            if len(problems) == _MAX_PROBLEMS:
                problems.append(f"{path}: reading stopped after {_MAX_PROBLEMS} faults")
                break
            continue
        lines_of_ids[token_id] = number
        if token_id != 0:
            lines_of_tokens[token] = number
            tokens[token_id] = token
    if problems:
        raise DataError("\n".join(problems))
    if not tokens:
        raise DataError(f"{path}: holds no token; a vocabulary line looks like: 1 'the' 3")
    return tokens


def _lines(path: Path) -> list[str]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path}: no such vocabulary file") from None
    except OSError as error:
        raise DataError(f"{path}: the vocabulary cannot be read: {error.strerror or error}") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        raise DataError(
            f"{path}:{line}:{column}: byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8"
        ) from None
    # Only line feeds end a line: str.splitlines would also cut at characters that a literal may hold.
    return [line.removesuffix("\r") for line in text.split("\n")]


def _parse_line(line: str) -> tuple[int, bytes]:
    indent = len(line) - len(line.lstrip())
    match = _LINE.fullmatch(line, indent)
    if match is None:
        raise _LineError(
            indent + 1, f"{shorten(repr(line.strip()))} does not read: <id> <str or bytes literal> <byte length>"
        )
    column = match.start("id") + 1
    token_id = _plain_int(match["id"], column, "id")
    literal_column = match.start("literal") + 1
    token = _unescape(match["literal"], literal_column)
    length = _plain_int(match["length"], match.start("length") + 1, "byte length")
    if length != len(token):
        where = match.start("length") + 1
        raise _LineError(where, f"the byte length is given as {length}, but {match['literal']} has {len(token)} bytes")
    if token_id == 0 and token != b"\x00":
        raise _LineError(
            column, r"id 0 is reserved for the end of a document; only '\x00' may stand there; count ids from 1"
        )
    if not token:
        raise _LineError(literal_column, "the token is empty; remove the line")
    return token_id, token


def _plain_int(word: str, column: int, what: str) -> int:
    if not (word.isascii() and word.isdigit()):
        hint = f"; negative {what}s do not exist" if word.startswith("-") else ""
        raise _LineError(column, f"{shorten(repr(word))} is no plain decimal {what}{hint}")
    if len(word) > 10 or int(word) > _MAX_ID:
        raise _LineError(column, f"{what} {shorten(word)} is larger than {_MAX_ID}")
    return int(word)


def _unescape(literal: str, column: int) -> bytes:
    is_bytes = literal[0] == "b"
    body, body_column = (literal[2:-1], column + 2) if is_bytes else (literal[1:-1], column + 1)
    if is_bytes and not body.isascii():
        at = next(i for i, character in enumerate(body) if not character.isascii())
        raise _LineError(body_column + at, r"a bytes literal holds ASCII only; write other bytes as \xHH")
    text = body
    if "\\" in body:
        text = _ESCAPE.sub(lambda match: _escaped(match, is_bytes, body_column), body)
    if is_bytes:
        return text.encode("latin-1")
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise _LineError(column, "half of a surrogate pair is no character; write the bytes as b'…'") from None


def _escaped(match: re.Match[str], is_bytes: bool, body_column: int) -> str:
    code = match[1]
    if code in _SIMPLE:
        return _SIMPLE[code]
    if code[0] in "xuU" and len(code) > 1 and not (is_bytes and code[0] != "x"):
        value = int(code[1:], 16)
        if value <= 0x10FFFF:
            return chr(value)
    elif code[0] in "01234567" and int(code, 8) <= 255:
        return chr(int(code, 8))
    raise _LineError(
        body_column + match.start(), f"the escape {match[0]} is not known in a {'bytes' if is_bytes else 'str'} literal"
    )


def write_vocab(path: str | Path, tokens: Iterable[tuple[int, bytes]]) -> None:
    """Write (id, token) rows, beside the place and then renamed. A token that is UTF-8 becomes a str literal."""
    path = Path(path)
    temporary = temporary_sibling(path)
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            for token_id, token in tokens:
                file.write(f"{token_id} {_literal(token)} {len(token)}\n")
        temporary.replace(path)
    except OSError as error:
        raise DataError(f"{path}: the vocabulary cannot be written: {error.strerror or error}") from error
    finally:
        discard(temporary)


def _literal(token: bytes) -> str:
    try:
        return repr(token.decode("utf-8"))
    except UnicodeDecodeError:
        return repr(token)
