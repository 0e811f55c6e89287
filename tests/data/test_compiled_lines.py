"""With a compiler and without one, rows give the same documents, the same counts and the same faults, word for word."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rwkv_spec.data import compiled_lines, rows
from rwkv_spec.data.compiled_lines import check_library, plain_reader, read_lines
from rwkv_spec.data.holdout import EvalRule
from rwkv_spec.data.part import Job, Part, encode_range
from rwkv_spec.data.rows import RowReader
from rwkv_spec.errors import DataError, KernelError
from rwkv_spec.tokenizer import compiled_ids
from rwkv_spec.tokenizer.byte import BytesTokenizer
from rwkv_spec.tokenizer.ids import IdsTokenizer
from rwkv_spec.tokenizer.integer import AngleTokenizer, IntegerTokenizer
from rwkv_spec.tokenizer.protocol import Tokenizer
from rwkv_spec.tokenizer.vocab import VocabTokenizer
from tests.data.stores import make, snapshot
from tests.ops.cases import build_changed
from tests.tokenizer.vocabularies import compiled

# Lines of one file, all plain but for their kind of text; `m` is asked for in some tests.
NUMBERS = [
    '{"text": "1 2", "m": 1}',
    '{"m":"a","text":"007 \\t3\\u00203\\n359"}',
    '  { "n": {"text": 5, "deep": [[], {}, [{"x": [1.5e-3, -0, 0.0]}]]} , "m" : [1, "x"], "text" : " 4 " } \r',
    '{"text": [1, 2,3 , 359], "m": true}',
    '{"text":[], "m": 1}',
    '{"text": "", "m": null}',
    '{"m": 1.0, "text": "9\\f8\\r7"}',
    '{"m": {"a": 1}, "a": "\\"\\\\\\/\\b", "text": "5"}',
]
WORDS = [
    '{"text": "1 2", "m": 1}',
    '{"text": "é 你好 😀 \\ud83d\\ude00 \\u00e9\\t\\n\\r\\f\\b\\/\\"\\\\", "m": "é"}',
    '{"m": "a long text", "text": "' + "many plain words " * 30 + '\\n"}',
    '{"text": "\\u0000\\u007f\x7f", "m": [{"b": {}}]}',
    '{"m": -1e5, "text": "\\uffff\\u0800\\u07ff"}',
]
BLANK = ["", " ", "\t\r", "\x0b\x0c"]
# Faults, and what is right but rare.
UNUSUAL = [
    '{"text": "1 400", "m": 1}',
    '{"text": "1 -5", "m": 1}',
    '{"text": "3.7", "m": 1}',
    '{"text": "1_0", "m": 1}',
    '{"text": "1,2", "m": 1}',
    '{"text": "\\u0663", "m": 1}',
    '{"text": "00000000000000000000000012", "m": 1}',
    '{"text": "99999999999999999999", "m": 1}',
    '{"text": [1, 2.0], "m": 1}',
    '{"text": [1, -0], "m": 1}',
    '{"text": [1, null], "m": 1}',
    '{"text": [1, [2]], "m": 1}',
    '{"text": [1, 99999999999999999999], "m": 1}',
    '{"text": [01], "m": 1}',
    '{"text": null, "m": 1}',
    '{"text": {"text": "1"}, "m": 1}',
    '{"text": 1, "m": 1}',
    '{"m": 1}',
    '{"text": "1"}',
    "{}",
    '{"text": "1", "text": "2", "m": 1}',
    '{"text": "1", "m": 1, "m": 1}',
    '{"text": "1", "m": {"a": 1, "a": 2}}',
    '{"text": "1", "m": {"a": 1, "\\u0061": 2}}',
    '{"te\\u0078t": "1", "m": 1}',
    '{"text": "1", "\\u0074ext": "2", "m": 1}',
    '{"text": "\\ud800", "m": 1}',
    '{"text": "\\ude00\\ud83d", "m": 1}',
    '{"text": "1", "n": "\\ud800", "m": 1}',
    '{"text": "\\x41", "m": 1}',
    '{"text": "\\u12", "m": 1}',
    '{"text": "a\tb", "m": 1}',
    '{"text": "1", "m": NaN}',
    '{"text": "1", "m": -Infinity}',
    '{"text": "1", "m": 01}',
    '{"text": "1", "m": 1.}',
    '{"text": "1", "m": .5}',
    '{"text": "1", "m": +1}',
    '{"text": "1", "m": 1e}',
    '{"text": "1", "m": tru}',
    '{"text": "1", "m": 1,}',
    '{"text": "1", "m": [1,]}',
    '{"text": "1" "m": 1}',
    '{"text" "1", "m": 1}',
    '{"text": "1", "m": 1} x',
    '{"text": "1", "m": 1}}',
    '{"text": "1", "m": 1',
    '{"text": "1, "m": 1}',
    '{text: "1", "m": 1}',
    "{'text': '1', 'm': 1}",
    '[{"text": "1", "m": 1}]',
    '"1"',
    "1 2 3",
    "\ufeff{}",
    '{"text": "1", "m": 1}\x00',
    '{"text": "1", "m": ' + "9" * 4200 + "}",
    '{"text": "1", "m": ' + "9" * 4400 + "}",
    '{"text": "1", "m": ' + "[" * 70 + "]" * 70 + "}",
    '{"text": "1", "m": {' + ", ".join(f'"{i}": 0' for i in range(300)) + "}}",
]
BYTES = [
    b"\xff",
    b"\xc0\x80",
    b"\xed\xa0\x80",
    b"\xf4\x90\x80\x80",
    b"\xe2\x82",
    b"\xc3\xa9",
    b"\xf0\x8f\xbf\xbf",
    b"\x80",
]
LINES = st.one_of(
    st.sampled_from([*NUMBERS, *WORDS, *BLANK]).map(str.encode),
    st.sampled_from([*NUMBERS, *WORDS, *BLANK, *UNUSUAL]).map(str.encode),
    st.sampled_from(BYTES).map(lambda piece: b'{"m": 1, "text": "1' + piece + b'"}'),
    st.text(alphabet=' \t\r\x0b1207,-.x"\\é', max_size=8).map(str.encode),
)


@contextmanager
def reading(*, plainly: bool, block_bytes: int = 100) -> Iterator[None]:
    """Small blocks, read by compiled code where they are plain, or never."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "BLOCK_BYTES", block_bytes)
        patch.setattr(compiled_lines, "SMALL_BYTES", 0 if plainly else 1 << 60)
        yield


def parts(data: bytes, kind: str, tokenizer: Tokenizer, where: dict[str, object] | None) -> list[list[object]]:
    """All that a range gives, read by either way."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / f"a.{kind}"
        source.write_bytes(data)
        for plainly in (True, False):
            with reading(plainly=plainly):
                job = Job(str(source), kind, 0, len(data), "text", where, f"{folder}/part{plainly}", len(data))
                part = encode_range(job, tokenizer, lambda count: None)
                files = [Path(f"{part.out}.{name}").read_bytes() for name in ("ids", "sizes", "marks")]
                found.append([replace(part, out=""), *files])
    return found


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> VocabTokenizer:
    path = tmp_path_factory.mktemp("vocab") / "v.txt"
    singles = [f"{i + 1} {bytes([i])!r} 1\n" for i in range(256) if i != 0xF0]
    path.write_text("".join([*singles, "300 'plain' 5\n", "301 '1 2' 3\n"]))
    return VocabTokenizer(path)


@compiled
@pytest.mark.parametrize("kind", ["jsonl", "txt"])
@given(
    lines=st.lists(LINES, max_size=12),
    end=st.sampled_from([b"\n", b"", b"\r\n"]),
    bom=st.sampled_from([b"", b"", b"\xef\xbb\xbf"]),
    which=st.integers(0, 4),
    where=st.sampled_from([None, {"m": 1}, {"m": [1, "a", None]}, {"m": 1, "text": "5"}, {"none": 2}]),
)
def test_any_lines_give_the_same_documents_and_faults(
    words: VocabTokenizer,
    kind: str,
    lines: list[bytes],
    end: bytes,
    bom: bytes,
    which: int,
    where: dict[str, object] | None,
) -> None:
    tokenizer = (AngleTokenizer(), IntegerTokenizer(100_000), IdsTokenizer(360), BytesTokenizer(), words)[which]
    rule = where if kind == "jsonl" else None
    compiled_way, plain_way = parts(bom + b"\n".join(lines) + end, kind, tokenizer, rule)
    assert compiled_way == plain_way


@compiled
@pytest.mark.parametrize("line", UNUSUAL)
def test_each_unusual_line_gives_the_same_documents_and_faults(words: VocabTokenizer, line: str) -> None:
    data = "\n".join([NUMBERS[0], line, NUMBERS[0]]).encode()
    for tokenizer in (AngleTokenizer(), BytesTokenizer(), words):
        compiled_way, plain_way = parts(data, "jsonl", tokenizer, {"m": 1})
        assert compiled_way == plain_way


@compiled
@pytest.mark.parametrize("seed", range(200))
def test_a_damaged_line_gives_the_same_documents_and_faults(seed: int) -> None:
    draw = random.Random(seed)
    lines = [bytearray(draw.choice([*NUMBERS, *WORDS]).encode()) for _ in range(4)]
    for _ in range(draw.randrange(1, 4)):
        line = draw.choice(lines)
        at = draw.randrange(len(line))
        line[at : at + draw.randrange(3)] = draw.choice(
            [b"", b'"', b"\\", b"{", b"}", b"[", b",", b":", b"0", b"\xff", b" "]
        )
    compiled_way, plain_way = parts(b"\n".join(lines), "jsonl", BytesTokenizer(), None)
    assert compiled_way == plain_way


@compiled
@pytest.mark.parametrize(
    ("kind", "lines", "tokenizer"),
    [
        ("jsonl", [*NUMBERS, *BLANK], AngleTokenizer()),
        ("jsonl", [*NUMBERS[:3], *WORDS, *BLANK], BytesTokenizer()),
        ("txt", [*NUMBERS, *WORDS, *BLANK], BytesTokenizer()),
        ("txt", ["1 2 3", "4\r", " 5 ", *BLANK], AngleTokenizer()),
    ],
)
def test_plain_lines_are_read_by_compiled_code(
    tmp_path: Path, kind: str, lines: list[str], tokenizer: Tokenizer
) -> None:
    with reading(plainly=True):
        where: dict[str, object] | None = {"m": 1} if kind == "jsonl" else None
        reader = plain_reader(RowReader(tmp_path, kind, "text", where), tokenizer, num_bytes=1)
        assert reader is not None
        for order in (lines, lines[::-1]):
            assert reader.documents("\n".join(order).encode()) is not None


@compiled
def test_values_of_rows_that_differ_in_every_row_are_not_all_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_lines, "_MAX_REMEMBERED", 3)
    lines = [json.dumps({"m": i % 7, "text": str(i % 360)}) for i in range(100)]
    compiled_way, plain_way = parts("\n".join(lines).encode(), "jsonl", AngleTokenizer(), {"m": [2, 5]})
    assert compiled_way == plain_way
    part = compiled_way[0]
    assert isinstance(part, Part) and part.num_held_out == 28 and part.values_seen == {"m": list("0123456")}


@compiled
@pytest.mark.parametrize("processes", [1, 2])
def test_a_store_is_the_same_with_a_compiler_and_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: VocabTokenizer, processes: int
) -> None:
    monkeypatch.setattr("rwkv_spec.data.build_store.job_bytes", lambda total, processes: 3000)
    draw = random.Random(0)
    for name, kinds, tokenizer in (("n", NUMBERS, AngleTokenizer()), ("w", WORDS[1:], words)):
        if name == "w":
            kinds = [line for line in kinds if "\U0001f600" not in line]
        source = tmp_path / f"{name}.jsonl"
        source.write_text("\n".join(draw.choice([*kinds, *BLANK]) for _ in range(2000)), encoding="utf-8")
        stores = []
        for plainly in (True, False):
            with reading(plainly=plainly, block_bytes=1000):
                options = {"tokenizer": tokenizer, "processes": processes, "store": tmp_path / f"{name}{plainly}"}
                stores.append(
                    make(tmp_path, source, eval_rule=EvalRule(where={"m": -1e5 if name == "w" else 1}), **options)
                )
        assert snapshot(stores[0].dir) == snapshot(stores[1].dir)


@compiled
def test_errors_of_a_store_are_the_same_with_a_compiler_and_without(tmp_path: Path) -> None:
    source, messages = tmp_path / "a.jsonl", []
    source.write_text("\n".join([*NUMBERS, *UNUSUAL[:25], *NUMBERS]), encoding="utf-8")
    for plainly in (True, False):
        with reading(plainly=plainly), pytest.raises(DataError) as caught:
            make(tmp_path, source)
        messages.append(str(caught.value))
    assert messages[0] == messages[1] and f"{source}:9:13: text: 400 is outside" in messages[0]


@compiled
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("if (names[i] == found) return false;", ""),
        (
            "(control | (",
            "((",
        ),
        ("lead == 0xe0 ? 0xa0 : 0x80", "0x80"),
        ("lead == 0xed ? 0x9f : 0xbf", "0xbf"),
        ("lead == 0xf0 ? 0x90 : 0x80", "0x80"),
        ("lead == 0xf4 ? 0x8f : 0xbf", "0xbf"),
        ("lead >= 0xc2 &&", "lead >= 0xc0 &&"),
        ("number * 16 +", "number * 10 +"),
        (
            "0x10000 + (",
            "(",
        ),
        ("*at == '0' ? (at++, true) : digits()", "digits()"),
        ("return plain && reader.at == end && missing == 0;", "return plain && missing == 0;"),
        ("return plain && reader.at == end && missing == 0;", "return plain && reader.at == end;"),
        ("found->arena = stop;", ""),
        ("if (blank++ == 0) first_blank", "if (blank++ >= 0) first_blank"),
        ("end[-1] == '\\r' ? end - 1 : end", "end"),
        ("*at == 11 || *at == 12", "false"),
        ("found->count * (found->num_names - 1) + i - 1", "found->count"),
        ("found->value_sizes[entry] = reader.at - value;", "found->value_sizes[entry] = 1;"),
        ("num_names = first;", ""),
    ],
)
def test_a_build_that_reads_other_documents_is_not_used(tmp_path: Path, right: str, wrong: str) -> None:
    with pytest.raises(KernelError, match="reads other documents"):
        build_changed("lines", tmp_path, right, wrong, check_library)


@compiled
def test_lines_at_the_very_end_of_a_block_are_whole() -> None:
    kernels = compiled_lines._lines_here()
    assert kernels is not None
    for size in range(40):
        block = ('{"text": "' + "x" * size + '"}').encode()
        found = read_lines(kernels.library, block, "jsonl", ("text",))
        assert found is not None and found.texts.sizes.tolist() == [size] and found.num_lines == 1


def test_without_a_compiler_rows_are_read_by_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    caches = (compiled_lines._lines_here, compiled_ids._ids_of_this_machine)
    for cached in caches:
        cached.cache_clear()
    try:
        with reading(plainly=True):
            assert plain_reader(RowReader(tmp_path, "txt", "text", None), AngleTokenizer(), num_bytes=9 << 20) is None
            source = tmp_path / "a.txt"
            source.write_text("1 2\n3\n" * 50_000)
            store = make(tmp_path, source, processes=2)
        assert store.manifest.train_tokens == 250_000
        assert np.array_equal(store.train.read(0, 5), [2, 3, 0, 4, 0])
    finally:
        for cached in caches:
            cached.cache_clear()
