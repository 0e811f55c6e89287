"""What cannot be trained on is said in words when it is opened, before anything is prepared."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

from rwkv_spec.data.binidx import IndexedWriter
from rwkv_spec.data.source import content_hash, open_source
from rwkv_spec.errors import DataError


def saved(array: np.ndarray, **options: bool) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, **options)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.jsonl", b"", "is empty"),
        ("a.csv", b"1,2", "a document a line"),
        ("a.json", b"[]", "one object a line"),
        ("a.jsonl.gz", b"\x1f\x8b", "decompress"),
        ("a.parquet", b"PAR1", "jsonl"),
        ("a", b"1 2 3", r"\(no ending\)"),
        ("a.jsonl", b"\x1f\x8b\x08 zipped", "compressed"),
        ("a.txt", "1 2".encode("utf-16"), "UTF-16"),
        ("a.npy", b"no numpy file", "no usable .npy"),
        ("a.npy", b"\x93NUMPY\x01\x00", "no usable .npy"),
        ("a.npy", saved(np.arange(1000))[:-8], "no usable .npy"),
        ("a.npy", saved(np.array([[1], "x"], dtype=object), allow_pickle=True), "no usable .npy"),
        ("a.npy", saved(np.array([1.0, 2.0])), "float64.*round"),
        ("a.npy", saved(np.array([True])), "bool"),
        ("a.npy", saved(np.array(["1", "2"])), "without quotes"),
        ("a.npy", saved(np.zeros((2, 2, 2), int)), "3 dimensions"),
        ("a.npy", saved(np.array(5)), "0 dimensions"),
        ("a.npy", saved(np.zeros(0, int)), "no values|no usable"),
        ("a.npy", saved(np.zeros((3, 0), int)), "no values|no usable"),
        ("a.bin", b"12", r"a\.idx: no such file"),
        ("a.idx", b"12", r"a\.bin: no such file"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=words) as caught:
        open_source(tmp_path / name)
    assert str(tmp_path) in str(caught.value)


def test_an_archive_under_a_wrong_name_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(3))
    (tmp_path / "a.npz").rename(tmp_path / "a.npy")
    with pytest.raises(DataError, match="several arrays"):
        open_source(tmp_path / "a.npy")


def test_a_folder_and_a_missing_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is a folder"):
        open_source(tmp_path)
    with pytest.raises(DataError, match=f"{tmp_path}/none.jsonl: no such file"):
        open_source(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match=r"none\.idx: no such file"):
        open_source(str(tmp_path / "none.bin"))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "is empty"),
        ([1, 2.0], "element 1: 2.0 is no integer"),
        ([[1], [2, None]], "row 1: element 1: null"),
        ([[1], 2], "mixes"),
        ([1, [2]], "mixes"),
        ([[1], [[2]]], "row 1: element 0: a list inside"),
        ([[1], ["a"]], "row 1: element 0: the text 'a'"),
        ([1, "a"], "holds text"),
        ([True, False], "true is no integer"),
        (np.array([0.5]), "float64"),
        (np.array([[1, 2], None], dtype=object), "object"),
        (5, "is int"),
        ({"text": 1}, "is dict"),
        (None, "is NoneType"),
    ],
)
def test_values_in_memory_are_checked(given: object, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        open_source(given, name="data.train")  # type: ignore[arg-type]
    assert str(caught.value).startswith("data.train: ")


def test_each_kind_is_known_by_its_name(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.TXT"):
        (tmp_path / name).write_text("1\n")
    np.save(tmp_path / "c.npy", np.arange(4))
    with IndexedWriter(tmp_path / "d.v2", np.dtype("<u2")) as writer:
        writer.add(np.array([1, 0]))
    kinds = {name: open_source(tmp_path / name).kind for name in ("a.jsonl", "b.TXT", "c.npy")}
    assert kinds == {"a.jsonl": "jsonl", "b.TXT": "txt", "c.npy": "npy"}
    for name in ("d.v2", "d.v2.bin", "d.v2.idx"):
        source = open_source(tmp_path / name)
        assert (source.kind, source.path) == ("binidx", tmp_path / "d.v2")


def test_the_hash_of_values_is_that_of_their_documents() -> None:
    one = content_hash(open_source(np.array([[1, 2], [3, 4]], np.uint8)))
    assert one == content_hash(open_source([[1, 2], [3, 4]])) == content_hash(open_source([np.array([1, 2]), (3, 4)]))
    assert len({one, content_hash(open_source([1, 2, 3, 4])), content_hash(open_source([[1, 2, 3], [4]]))}) == 3
