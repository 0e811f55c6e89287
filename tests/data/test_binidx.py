"""Token stores are Megatron's byte for byte, a damaged pair is never read, a failed writer leaves the old pair."""

from __future__ import annotations

import gc
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rwkv_spec.data.binidx import IndexedReader, IndexedWriter, dtype_for
from rwkv_spec.errors import DataError

GOLDEN = Path(__file__).parents[1] / "golden" / "demo_bytes_unshuffled"


def write(prefix: Path, documents: list[list[int]], dtype: str = "<u2") -> IndexedReader:
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        for document in documents:
            writer.add(np.array(document, np.int64))
    return IndexedReader(prefix)


def both(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def test_a_published_pair_is_read_and_written_byte_for_byte(tmp_path: Path) -> None:
    reader = IndexedReader(GOLDEN)
    assert (reader.num_documents, reader.num_tokens, reader.dtype) == (182, 296_553, np.uint16)
    assert all(reader.document(i)[-1] == 0 for i in range(182))
    write(tmp_path / "one", [reader.document(i).tolist() for i in range(182)])
    assert both(tmp_path / "one") == both(GOLDEN)
    with IndexedWriter(tmp_path / "many", reader.dtype) as writer:
        writer.add_many(reader.tokens, reader.sizes)
    assert both(tmp_path / "many") == both(GOLDEN)


@given(st.lists(st.lists(st.integers(0, 65_535), max_size=5), max_size=6), st.sampled_from(["<u2", "<i4"]))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], dtype: str
) -> None:
    reader = write(tmp_path_factory.mktemp("pair") / "x", documents, dtype)
    assert [reader.document(i).tolist() for i in range(reader.num_documents)] == documents
    assert reader.tokens.tolist() == [token for document in documents for token in document]


def test_ids_beyond_16_bits_take_32(tmp_path: Path) -> None:
    assert dtype_for(65_536) == np.uint16 and dtype_for(65_537) == np.int32
    assert write(tmp_path / "x", [[65_536, 2**31 - 1]], "<i4").document(0).tolist() == [65_536, 2**31 - 1]


@pytest.mark.parametrize(("dtype", "token"), [("<u2", 65_536), ("<u2", -1), ("<i4", 2**31), ("<i4", -1)])
def test_an_id_that_does_not_fit_is_refused_not_wrapped(tmp_path: Path, dtype: str, token: int) -> None:
    with pytest.raises(DataError, match="outside"):
        write(tmp_path / "x", [[1], [token]], dtype)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_writer_leaves_the_earlier_pair(tmp_path: Path) -> None:
    write(tmp_path / "x", [[1, 2]])
    before = both(tmp_path / "x")
    with pytest.raises(RuntimeError), IndexedWriter(tmp_path / "x", np.dtype("<u2")) as writer:
        writer.add(np.array([3, 4]))
        raise RuntimeError
    with pytest.raises(ValueError, match="add up"), IndexedWriter(tmp_path / "x", np.dtype("<u2")) as writer:
        writer.write_ids(np.array([3, 4]))
    assert both(tmp_path / "x") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx"]


def test_a_kill_between_the_two_renames_leaves_no_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "x", [[1, 2]])

    def killed(source: Path, target: Path) -> None:
        if target.suffix == ".idx":
            raise KeyboardInterrupt
        source.rename(target)

    monkeypatch.setattr("rwkv_spec.data.binidx.os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "x", [[3, 4]])
    with pytest.raises(DataError, match="no such file"):
        IndexedReader(tmp_path / "x")


def test_views_outlive_the_reader(tmp_path: Path) -> None:
    with write(tmp_path / "x", [[1, 2, 3], [4, 5]]) as reader:
        document, tokens = reader.document(1), reader.tokens
    assert reader.tokens.size == 0
    del reader
    gc.collect()
    assert document.tolist() == [4, 5] and tokens.sum() == 15
    with pytest.raises(ValueError):
        document[0] = 9


def test_documents_are_found_by_offset(tmp_path: Path) -> None:
    reader = write(tmp_path / "x", [[1, 2], [], [3], [4, 5]])
    assert [reader.document_at(i) for i in range(5)] == [0, 0, 2, 3, 3]
    assert [reader.document_start(i) for i in range(4)] == [0, 2, 2, 3]
    with pytest.raises(IndexError):
        reader.document(4)


def header(code: int = 8, items: int = 1, bounds: int = 2, version: int = 1) -> bytes:
    return struct.pack("<9sQBQQ", b"MMIDIDX\0\0", version, code, items, bounds)


def index(sizes: list[int], pointers: list[int], bounds: list[int], **fields: int) -> bytes:
    head = header(items=len(sizes), bounds=len(bounds), **fields)
    return head + struct.pack(f"<{len(sizes)}i{len(pointers)}q{len(bounds)}q", *sizes, *pointers, *bounds)


@pytest.mark.parametrize(
    ("idx", "size", "words"),
    [
        (b"", 4, "no token index"),
        (b"PK\x03\x04 something else altogether", 4, "no token index"),
        (header()[:20], 4, "truncated inside its header"),
        (index([2], [0], [0, 1], version=2), 4, "version 2"),
        (index([2], [0], [0, 1], code=6), 4, "floating-point"),
        (index([2], [0], [0, 1], code=7), 4, "floating-point"),
        (index([2], [0], [0, 1], code=99), 4, "dtype code 99"),
        (header(items=2**60), 4, "damaged"),
        (header(items=2**64 - 1, bounds=2**64 - 1), 4, "damaged"),
        (index([2], [0], [0, 1]) + b"x", 4, "truncated, extended"),
        (index([2], [0], [0, 1])[:-1], 4, "truncated, extended"),
        (index([2], [0], [0, 1]), 3, "has 3 bytes"),
        (index([2], [0], [0, 1]), 6, "has 6 bytes"),
        (index([2], [0], [0, 1]), 0, "has 0 bytes"),
        (index([-2], [0], [0, 1]), 4, "negative size"),
        (index([1, 1], [0, 4], [0, 1, 2]), 4, "points to byte 4"),
        (index([2], [2], [0, 1]), 4, "points to byte 2"),
        (index([2], [0], [0, 5]), 4, "bounds"),
        (index([2], [0], [1, 0]), 4, "bounds"),
    ],
)
def test_a_pair_that_contradicts_itself_is_refused(tmp_path: Path, idx: bytes, size: int, words: str) -> None:
    (tmp_path / "x.idx").write_bytes(idx)
    (tmp_path / "x.bin").write_bytes(bytes(size))
    with pytest.raises(DataError, match=words):
        IndexedReader(tmp_path / "x")


def test_a_missing_half_is_named(tmp_path: Path) -> None:
    write(tmp_path / "x", [[1]])
    (tmp_path / "x.idx").rename(tmp_path / "y.idx")
    with pytest.raises(DataError, match=r"x\.idx: no such file"):
        IndexedReader(tmp_path / "x")
    with pytest.raises(DataError, match=r"y\.bin: no such file"):
        IndexedReader(tmp_path / "y")


@pytest.mark.parametrize(("code", "dtype"), [(1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")])
def test_every_integer_type_is_read(tmp_path: Path, code: int, dtype: str) -> None:
    data = np.array([7, 100], dtype)
    (tmp_path / "x.bin").write_bytes(data.tobytes())
    (tmp_path / "x.idx").write_bytes(index([2], [0], [0, 1], code=code))
    assert IndexedReader(tmp_path / "x").document(0).tolist() == [7, 100]


def test_an_empty_pair_is_no_error(tmp_path: Path) -> None:
    reader = write(tmp_path / "x", [])
    assert (reader.num_documents, reader.num_tokens) == (0, 0)
