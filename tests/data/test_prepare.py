"""A token store holds what its sources hold, is reused while they stay the same, and is never half made."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rwkv_spec.data import build_store
from rwkv_spec.data import prepare as prepare_module
from rwkv_spec.data.binidx import IndexedReader
from rwkv_spec.data.holdout import Choice, EvalRule, choose
from rwkv_spec.data.prepare import find_store
from rwkv_spec.data.source import Given
from rwkv_spec.data.store import open_store
from rwkv_spec.errors import DataError
from rwkv_spec.tokenizer.byte import BytesTokenizer
from rwkv_spec.tokenizer.ids import IdsTokenizer
from rwkv_spec.tokenizer.integer import IntegerTokenizer
from rwkv_spec.tokenizer.vocab import VocabTokenizer
from tests.data.stores import ANGLES, ROOT, Custom, held_out, make, snapshot, tokens, write, write_pair

# What a store holds


def test_every_kind_of_source_becomes_documents(tmp_path: Path) -> None:
    np.save(tmp_path / "flat.npy", np.array([1, 2, 3], np.uint16))
    np.save(tmp_path / "rows.npy", np.array([[4, 5], [6, 7]], ">i4"))
    np.save(tmp_path / "fortran.npy", np.asfortranarray([[8, 9], [10, 11]]))
    sources: list[Given] = [
        tmp_path / "flat.npy",
        str(tmp_path / "rows.npy"),
        tmp_path / "fortran.npy",
        write(tmp_path / "a.jsonl", '{"text": "12 13"}\n{"text": [14]}\n'),
        write_pair(tmp_path / "pair", [[15, 0], [16, 17]]),
        write(tmp_path / "a.txt", "18 19\n\n20\n"),
        np.array([[21], [22]]),
        [23, 24],
        [[25], [], [26, 27]],
    ]
    documents = [[1, 2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14]]
    expected = [token for values in documents for token in [*(v + 1 for v in values), 0]] + [15, 0, 16, 17]
    documents = [[18, 19], [20], [21], [22], [23, 24], [25], [26, 27]]
    expected += [token for values in documents for token in [*(v + 1 for v in values), 0]]
    store = make(tmp_path, *sources)
    assert tokens(store) == expected
    assert store.num_train_documents == 16 and len(store.eval_documents) == 0
    assert tokens(open_store(store.dir)) == expected


def test_tiny_data_works(tmp_path: Path) -> None:
    assert tokens(make(tmp_path, [7])) == [8, 0]
    with pytest.raises(DataError, match="at least 2"):
        make(tmp_path, write_pair(tmp_path / "x", [[5]]))


@pytest.mark.parametrize(("max_value", "dtype"), [(65_533, np.uint16), (65_534, np.uint16), (65_535, np.int32)])
def test_large_vocabularies_take_32_bits_and_never_wrap(tmp_path: Path, max_value: int, dtype: type) -> None:
    store = make(tmp_path, [max_value, 0, max_value], tokenizer=IntegerTokenizer(max_value))
    assert tokens(store) == [max_value + 1, 1, max_value + 1, 0]
    assert IndexedReader(store.dir / "train").dtype == dtype


def test_a_pair_is_read_in_place_and_its_documents_held_out(tmp_path: Path) -> None:
    documents = [[i + 1] * (i % 4 + 1) + [0] for i in range(40)]
    prefix = write_pair(tmp_path / "pair", documents)
    store = make(tmp_path, prefix, write(tmp_path / "a.txt", "5\n6\n"), eval_rule=EvalRule(documents=9), seed=4)
    assert not (store.dir / "train.bin").exists() or (store.dir / "train.bin").stat().st_size < 20
    everything = [*documents, [6, 0], [7, 0]]
    held = held_out(store)
    assert len(held) == 9
    left = [document for document in everything if document[:-1] not in held]
    assert tokens(store) == [token for document in left for token in document]
    assert [document[:-1] for document in everything if document[:-1] in held] == held


@pytest.mark.parametrize("token", [361, 400])
def test_ids_beyond_the_vocabulary_name_document_and_offset(tmp_path: Path, token: int) -> None:
    prefix = write_pair(tmp_path / "pair", [[1, 0], [], [2, token, 0]])
    with pytest.raises(DataError, match=rf"pair\.bin: document 2, offset 1: id {token} is outside 0\.\.360"):
        make(tmp_path, prefix)


def test_the_golden_pair_is_what_it_was(tmp_path: Path) -> None:
    golden = ROOT / "tests" / "golden" / "demo_bytes_unshuffled"
    store = make(tmp_path, golden, tokenizer=IdsTokenizer(256))
    assert (store.train.num_tokens, store.num_train_documents) == (296_553, 182)
    assert sorted(path.name for path in store.dir.iterdir()) == ["manifest.json", "vocab.txt"]


# What is held out


def test_other_sources_are_held_out_whole(tmp_path: Path) -> None:
    rule = EvalRule(path=(write(tmp_path / "e.txt", "7\n8 9\n"), write_pair(tmp_path / "p", [[3, 0]]), [5]))
    store = make(tmp_path, write(tmp_path / "t.txt", "1\n2\n"), eval_rule=rule)
    assert tokens(store) == [2, 0, 3, 0] and held_out(store) == [[8], [9, 10], [3], [6]]
    assert held_out(make(tmp_path, [1, 2], eval_rule=EvalRule(path=tmp_path / "e.txt"))) == [[8], [9, 10]]


@given(st.integers(2, 400), st.floats(0.001, 0.7), st.integers(0, 99))
def test_a_fraction_is_an_exact_number_chosen_by_the_seed(total: int, fraction: float, seed: int) -> None:
    count = max(1, round(fraction * total))
    if count == total:
        with pytest.raises(DataError, match="leaves none"):
            choose(EvalRule(fraction=fraction), total, seed)
        return
    choice = choose(EvalRule(fraction=fraction), total, seed)
    assert choice.count == count and choice.mask(0, total).sum() == count
    first = total // 3
    assert np.array_equal(choice.documents(first, total - first), np.flatnonzero(choice.mask(first, total)))


def test_the_choice_differs_by_seed_and_rules_are_checked() -> None:
    masks = [tuple(np.flatnonzero(Choice(10, 1000, seed).mask(0, 1000))) for seed in range(5)]
    assert len(set(masks)) == 5
    for bad in ({"fraction": 0.0}, {"fraction": 1.0}, {"documents": 0}, {"where": {}}):
        with pytest.raises(DataError):
            EvalRule(**bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="exactly one"):
        EvalRule(fraction=0.1, documents=3)
    for rule in (EvalRule(documents=3), EvalRule(fraction=0.5)):
        with pytest.raises(DataError, match="leaves none to train on"):
            choose(rule, 1, 0)


@pytest.mark.parametrize("rule", [EvalRule(documents=5), EvalRule(fraction=0.25)])
def test_held_out_documents_are_not_trained(tmp_path: Path, rule: EvalRule) -> None:
    store = make(tmp_path, np.arange(20).reshape(20, 1), eval_rule=rule, seed=3)
    held = [ids[0] for ids in held_out(store)]
    assert len(held) == 5 and sorted(held + [t for t in tokens(store) if t]) == list(range(1, 21))
    assert held_out(store)[-1] == store.eval_documents[-1].tolist()
    assert [ids.tolist() for ids in store.eval_documents[1:3]] == held_out(store)[1:3]
    with pytest.raises(IndexError):
        store.eval_documents[5]


# When it is reused


def test_an_unchanged_source_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "a.txt", "1 2\n3\n")
    first = make(tmp_path, source, eval_rule=EvalRule(documents=1))
    before = snapshot(first.dir)

    def no_reading(*arguments: object) -> str:
        raise AssertionError("the source was read")

    monkeypatch.setattr(prepare_module, "file_hash", no_reading)
    second = make(tmp_path, source, eval_rule=EvalRule(documents=1))
    assert second.reused and not first.reused
    assert second.hash == first.hash and snapshot(first.dir) == before
    assert find_store(sources=[source], tokenizer=ANGLES, store=first.dir, eval_rule=EvalRule(documents=1)) is not None
    assert find_store(sources=[source], tokenizer=ANGLES, store=first.dir) is None


def test_a_touched_or_moved_source_is_hashed_and_kept(tmp_path: Path) -> None:
    source = write(tmp_path / "a.txt", "1 2\n3\n")
    first = make(tmp_path, source)
    os.utime(source, ns=(1, 1))
    assert make(tmp_path, source).reused
    assert json.loads((first.dir / "manifest.json").read_text())["sources"][0]["files"][0]["mtime_ns"] == 1
    moved = source.rename(tmp_path / "b.txt")
    again = make(tmp_path, moved)
    assert again.reused and again.manifest.sources[0].name == str(moved)
    pair = write_pair(tmp_path / "p", [[1, 0]])
    make(tmp_path, pair)
    for suffix in (".bin", ".idx"):
        Path(f"{pair}{suffix}").rename(tmp_path / f"q{suffix}")
    assert tokens(make(tmp_path, tmp_path / "q")) == [1, 0]


def test_an_edit_in_place_is_noticed(tmp_path: Path) -> None:
    source = write(tmp_path / "a.txt", "1 2\n3\n")
    first = make(tmp_path, source)
    write(source, "1 2\n4\n")
    second = make(tmp_path, source)
    assert tokens(second) == [2, 3, 0, 5, 0] and second.hash != first.hash and not second.reused


def test_verify_notices_what_size_and_time_do_not(tmp_path: Path) -> None:
    source = write(tmp_path / "a.txt", "1 2\n3\n")
    times = (source.stat().st_atime_ns, source.stat().st_mtime_ns)
    store = make(tmp_path, source)
    write(source, "1 2\n4\n")
    os.utime(source, ns=times)
    assert make(tmp_path, source).reused
    assert tokens(make(tmp_path, source, verify=True)) == [2, 3, 0, 5, 0]
    assert make(tmp_path, source, verify=True).reused
    data = bytearray((store.dir / "train.bin").read_bytes())
    data[0] ^= 1
    (store.dir / "train.bin").write_bytes(data)
    assert make(tmp_path, source).reused
    assert tokens(make(tmp_path, source, verify=True)) == [2, 3, 0, 5, 0]


def test_whatever_decides_the_ids_makes_another_store(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", '{"text": "1 2", "b": "5"}\n{"text": "3", "b": "6"}\n')
    vocab = write(tmp_path / "v.txt", "1 '1' 1\n2 '2' 1\n3 '3' 1\n4 ' ' 1\n")
    variants: list[dict[str, object]] = [
        {},
        {"field": "b"},
        {"eval_rule": EvalRule(documents=1)},
        {"eval_rule": EvalRule(documents=1), "seed": 1},
        {"eval_rule": EvalRule(where={"b": "5"})},
        {"tokenizer": IntegerTokenizer(5000)},
        {"tokenizer": BytesTokenizer()},
        {"tokenizer": VocabTokenizer(vocab)},
    ]
    for options in variants:
        assert not make(tmp_path, source, **options).reused
        assert make(tmp_path, source, **options).reused
    # The seed decides nothing where nothing is chosen.
    make(tmp_path, source)
    assert make(tmp_path, source, seed=9).reused
    make(tmp_path, source, tokenizer=VocabTokenizer(vocab))
    write(vocab, "2 '1' 1\n1 '2' 1\n3 '3' 1\n4 ' ' 1\n")
    assert tokens(make(tmp_path, source, tokenizer=VocabTokenizer(vocab))) == [2, 4, 1, 0, 3, 0]


def test_arrays_are_known_by_their_content(tmp_path: Path) -> None:
    assert not make(tmp_path, np.array([1, 2])).reused
    assert make(tmp_path, [1, 2]).reused
    assert not make(tmp_path, [1, 3]).reused


def test_a_damaged_store_is_made_again(tmp_path: Path) -> None:
    source = write(tmp_path / "a.txt", "1 2\n3\n")
    expected = tokens(make(tmp_path, source))
    for damage in ("train.bin", "train.idx", "manifest.json"):
        path = tmp_path / "store" / damage
        path.write_bytes(path.read_bytes()[:-3])
        assert tokens(make(tmp_path, source)) == expected
        path.unlink()
        if damage == "manifest.json":
            with pytest.raises(DataError, match="no part of one"):
                make(tmp_path, source)
        else:
            with pytest.raises(DataError):
                open_store(tmp_path / "store")
            assert tokens(make(tmp_path, source)) == expected
    with pytest.raises(DataError, match="no finished token store"):
        open_store(tmp_path)


def test_nothing_of_an_earlier_store_is_left(tmp_path: Path) -> None:
    make(tmp_path, [[1], [2]], eval_rule=EvalRule(documents=1))
    make(tmp_path, write(tmp_path / "a.txt", "a\nb\n"), tokenizer=Custom())
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["manifest.json", "train.bin", "train.idx"]


def test_a_shared_place_keeps_stores_apart(tmp_path: Path) -> None:
    one = make(tmp_path, write(tmp_path / "a.txt", "1\n"), keyed=True)
    two = make(tmp_path, write(tmp_path / "b.txt", "2\n"), keyed=True)
    three = make(tmp_path, tmp_path / "a.txt", keyed=True, tokenizer=IntegerTokenizer(9))
    assert len({one.dir, two.dir, three.dir}) == 3 and {s.dir.parent for s in (one, two, three)} == {tmp_path / "store"}
    assert make(tmp_path, tmp_path / "a.txt", keyed=True).dir == one.dir
    assert tokens(open_store(one.dir)) == [2, 0] and tokens(open_store(two.dir)) == [3, 0]


# What it never does


def test_a_failed_preparation_leaves_the_earlier_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make(tmp_path, write(tmp_path / "a.txt", "1 2\n3\n"))
    before = snapshot(store.dir)
    with pytest.raises(DataError):
        make(tmp_path, write(tmp_path / "b.txt", "1 2\nx\n"))
    monkeypatch.setattr(build_store.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 1))
    with pytest.raises(DataError, match="GB free"):
        make(tmp_path, tmp_path / "a.txt", tokenizer=IntegerTokenizer(9))
    monkeypatch.undo()

    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device", "part-000000.ids")

    monkeypatch.setattr(build_store, "join_part", full)
    with pytest.raises(DataError, match=r"No space left on device.*earlier store is left as it was"):
        make(tmp_path, tmp_path / "a.txt", tokenizer=IntegerTokenizer(9))
    assert snapshot(store.dir) == before
    assert make(tmp_path, tmp_path / "a.txt").reused


def test_a_kill_while_files_are_replaced_leaves_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, [1, 2], eval_rule=EvalRule(path=([3],)))
    replace = Path.replace

    def killed(source: Path, target: Path) -> None:
        if target.name == "eval.bin":
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(Path, "replace", killed)
    # The same sizes in other content: only the manifest can tell.
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, [5, 6], eval_rule=EvalRule(path=([7],)))
    monkeypatch.undo()
    with pytest.raises(DataError, match="no finished token store"):
        open_store(tmp_path / "store")
    assert not make(tmp_path, [1, 2], eval_rule=EvalRule(path=([3],))).reused


def test_a_store_that_cannot_be_made_is_said_in_words(tmp_path: Path) -> None:
    write(tmp_path / "file", "")
    with pytest.raises(DataError, match="token store cannot be made"):
        make(tmp_path, [1], store=tmp_path / "file" / "store")


def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "a.txt", "1\n" * 10)
    with pytest.raises(DataError, match="changed while it was being read"):
        make(tmp_path, source, progress=lambda done, total: write(source, "2\n" * 10))
    assert not (tmp_path / "store" / "manifest.json").exists()


def test_sources_and_foreign_files_are_never_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    write_pair(folder / "train", [[1, 0], [2, 0]])
    before = snapshot(folder)
    store = make(tmp_path, folder / "train")
    assert tokens(store) == [1, 0, 2, 0] and make(tmp_path, folder / "train").reused
    assert {name: data for name, data in snapshot(folder).items() if name in before} == before
    # Another preparation there would have to replace its own source.
    with pytest.raises(DataError, match=r"train\.bin: is a source and lies where the token store goes"):
        make(tmp_path, folder / "train.bin", [5])
    write(folder / "vocab.txt", "1 'mine' 4\n")
    (folder / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"vocab\.txt: lies where the token store goes and is no part of one"):
        make(tmp_path, folder / "train")
    (folder / "vocab.txt").unlink()
    with pytest.raises(DataError, match=r"train\.bin: lies where"):
        make(tmp_path, [5])
    assert {name: data for name, data in snapshot(folder).items() if name in before} == before


def test_a_vocabulary_that_lies_in_the_store_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    vocab = write(tmp_path / "store" / "vocab.txt", "# mine\n1 'a' 1\n")
    store = make(tmp_path, write(tmp_path / "a.txt", "aa\n"), tokenizer=VocabTokenizer(vocab))
    assert tokens(store) == [1, 1, 0] and vocab.read_text() == "# mine\n1 'a' 1\n"


def test_all_missing_sources_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        make(tmp_path, tmp_path / "a.txt", tmp_path / "b.txt", eval_rule=EvalRule(path=tmp_path / "c.txt"))
    assert [name in str(caught.value) for name in ("a.txt", "b.txt", "c.txt")] == [True] * 3
    with pytest.raises(DataError, match="names no source"):
        make(tmp_path)
