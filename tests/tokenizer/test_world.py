"""The World tokenizer: the published vocabulary and no other, found in the rwkv package or given as a file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import rwkv_spec
from rwkv_spec.errors import DataError
from rwkv_spec.tokenizer.build import Recipe, build_tokenizer, recipe_of
from rwkv_spec.tokenizer.protocol import EncodeError, undrawable_ids
from rwkv_spec.tokenizer.trie import Trie
from rwkv_spec.tokenizer.vocab import VocabTokenizer
from rwkv_spec.tokenizer.world import FILE_NAME, WorldTokenizer
from tests.tokenizer.vocabularies import compiled, world, world_file, write

GOLDEN = Path(__file__).parents[1] / "golden" / "tokenizer_golden.json"
CASES = json.loads(GOLDEN.read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: repr(next(iter(case.values())))[:30])
def test_encodings_are_the_published_ones(case: dict[str, object]) -> None:
    ids = case["ids"]
    data = bytes.fromhex(str(case["bytes_hex"])) if "bytes_hex" in case else str(case["text"]).encode()
    assert world().encode_bytes(data) == ids
    assert world().decode_bytes(ids) == data  # type: ignore[arg-type]
    assert Trie(world().tokens).match([data]).ids.tolist() == ids
    if "text" in case:
        assert world().encode(str(case["text"])) == ids
        assert world().decode(ids) == case["text"]  # type: ignore[arg-type]


def test_a_batch_is_encoded_as_its_texts_are() -> None:
    texts = [case["text"] for case in CASES if "text" in case]
    ids, sizes = world().encode_many(texts)
    assert ids.tolist() == [token for case in CASES if "text" in case for token in case["ids"]]
    assert sizes.tolist() == [len(case["ids"]) for case in CASES if "text" in case]


@compiled
def test_the_compiled_trie_is_what_encodes() -> None:
    assert world().is_compiled and world().how_it_matches.startswith("compiled by ")


def test_the_published_tokenizer_finds_the_same_ids() -> None:
    code = (
        "import json, sys; from rwkv.rwkv_tokenizer import TRIE_TOKENIZER; t = TRIE_TOKENIZER(sys.argv[1]); "
        "print(json.dumps([t.encode(text) for text in json.load(sys.stdin)]))"
    )
    texts = [
        Path(__file__).read_text(encoding="utf-8"),
        "Ünïcode, 日本語のテキスト и по-русски\t\r\n\n" * 40,
        " " * 1000,
    ]
    texts += ["".join(map(chr, range(start, start + 3000))) for start in (1, 3000, 0x4E00, 0xAC00, 0x1F300)]
    printed = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(world_file())],
        input=json.dumps(texts), capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for text, ids in zip(texts, json.loads(printed), strict=True):
        assert world().encode(text) == ids


def test_models_have_65536_rows_and_the_last_six_name_nothing() -> None:
    assert (world().vocab_size, VocabTokenizer(world_file()).vocab_size) == (65536, 65530)
    # A sampler does not draw what could not be decoded.
    for tokenizer in (world(), VocabTokenizer(world_file())):
        assert undrawable_ids(tokenizer, num_rows=65536) == [65530, 65531, 65532, 65533, 65534, 65535]
    assert world().encode("\x00") == [1] and world().decode([0, 1, 0]) == "\x00"
    for token_id in (65530, 65535, 65536, -1):
        with pytest.raises(EncodeError):
            world().decode([token_id])


def test_the_vocabulary_comes_from_the_rwkv_package_without_importing_it() -> None:
    code = (
        "import sys; from rwkv_spec.tokenizer.world import WorldTokenizer; "
        "print(WorldTokenizer().path.name, 'rwkv' in sys.modules, 'torch' in sys.modules)"
    )
    world_file()
    root = Path(__file__).parents[2]
    printed = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert printed.stdout.split() == [FILE_NAME, "False", "False"]
    assert rwkv_spec.WorldTokenizer is WorldTokenizer  # type: ignore[attr-defined]


def test_without_the_package_both_ways_out_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # An empty folder of this name is found before the package, and is a package without the file.
    (tmp_path / "rwkv").mkdir()
    (tmp_path / "rwkv" / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "rwkv", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    for make in (WorldTokenizer, lambda: build_tokenizer("world")):
        with pytest.raises(DataError, match=rf"pip install rwkv, or give a copy of {FILE_NAME} as path"):
            make()


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_both_published_copies_are_the_same_tokenizer(tmp_path: Path, end: bytes) -> None:
    lines = world_file().read_bytes().replace(b"\r\n", b"\n").split(b"\n")
    copy = WorldTokenizer(write(tmp_path / "copy.txt", end.join(lines)))
    assert copy.fingerprint == world().fingerprint == VocabTokenizer(copy.path).fingerprint
    assert copy.encode("Hello\r\n\r\n") == world().encode("Hello\r\n\r\n")
    copy.save_vocab(tmp_path / "saved.txt")
    assert (tmp_path / "saved.txt").read_bytes() == b"\n".join(lines)


def cut(text: bytes) -> bytes:
    """Up to the middle of a literal."""
    return text[: text.index(b"\n40000 ") + 10]


BROKEN: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut inside a line": (cut, r"copy\.txt:\d+:\d+: .* does not read"),
    "cut between lines": (
        lambda text: cut(text)[: cut(text).rindex(b"\n") + 1],
        r"copy\.txt: holds \d+ tokens, none with id \d+: it is cut off, or not the published World vocabulary",
    ),
    "empty": (lambda text: b"", "holds no token"),
    "an id twice": (lambda text: text.replace(b"\n301 ", b"\n300 "), r":301:1: id 300 is used already in line 300"),
    "a wrong length": (lambda text: text.replace(b"' A' 2\n", b"' A' 3\n"), r":300:\d+: the byte length is given as 3"),
    "not UTF-8": (lambda text: text.replace(b"' A' 2\n", b"'\xff' 2\n"), r":300:\d+: byte 0xff is not UTF-8"),
    "an expression": (lambda text: text.replace(b"' A' 2\n", b"exit() 2\n"), ":300:1: .* does not read"),
    "a token too many": (lambda text: text.rstrip() + b"\n65530 'one more' 8\n", "up to id 65530: it is not"),
    "another token": (lambda text: text.replace(b"' A' 2\n", b"'A A' 3\n"), "has other tokens than the published"),
    "two tokens exchanged": (
        lambda text: text.replace(b"\n300 ' A'", b"\n300 ' b'").replace(b"\n333 ' b'", b"\n333 ' A'"), "other tokens"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_not_the_published_one_is_refused_with_the_ways_out(tmp_path: Path, name: str) -> None:
    change, words = BROKEN[name]
    good = world_file().read_bytes().replace(b"\r\n", b"\n")
    assert change(good) != good
    with pytest.raises(DataError, match=words) as caught:
        WorldTokenizer(write(tmp_path / "copy.txt", change(good)))
    assert str(caught.value).startswith(str(tmp_path / "copy.txt"))


def test_a_folder_or_a_missing_file_is_said_in_words(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        WorldTokenizer(tmp_path)
    with pytest.raises(DataError, match="no such vocabulary file"):
        WorldTokenizer(tmp_path / "missing.txt")


def test_a_recipe_names_the_file_so_that_every_process_reads_the_same(tmp_path: Path) -> None:
    recipe = recipe_of(world())
    assert recipe == Recipe("world", path=str(world_file().absolute()))
    assert recipe_of(recipe.build()) == recipe
    assert repr(world()) == f"WorldTokenizer({str(world_file())!r})"
    assert recipe_of(type("Own", (WorldTokenizer,), {})(world_file())) is None
