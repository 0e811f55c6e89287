"""Which weights and which tokenizer a run folder or a file stands for, and words where there are none."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml

import rwkv_spec
from rwkv_spec.errors import CheckpointError, UserError
from rwkv_spec.inference import find_tokenizer, find_weights, load_model
from tests.tiny import tiny_spec
from tests.tokenizer.vocabularies import world


@pytest.fixture(scope="module")
def work_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp_path = tmp_path_factory.mktemp("inference")
    return rwkv_spec.run(tiny_spec(tmp_path, train={"steps": 2})).dir


def touch(folder: Path, *names: str) -> Path:
    (folder / "out").mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / "out" / name).touch()
    return folder


def test_weights_are_preferred_final_then_best_then_the_newest_number(tmp_path: Path) -> None:
    names = ["rwkv-init.pth", "rwkv-step30.pth", "rwkv-step200.pth", "rwkv-best.pth", "rwkv-final.pth"]
    touch(tmp_path, *names)
    for expected in ("rwkv-final.pth", "rwkv-best.pth", "rwkv-step200.pth", "rwkv-step30.pth"):
        assert find_weights(tmp_path).name == expected
        (tmp_path / "out" / expected).unlink()
    # Untrained weights are nobody's result.
    with pytest.raises(CheckpointError, match=r"no weights in .*out; name a run folder that has trained"):
        find_weights(tmp_path)


def test_the_number_decides_and_not_the_time_of_the_file(tmp_path: Path) -> None:
    touch(tmp_path, "rwkv-9.pth", "rwkv-10.pth")
    os.utime(tmp_path / "out" / "rwkv-10.pth", (1, 1))
    assert find_weights(tmp_path).name == "rwkv-10.pth"


def test_both_formats_are_found(tmp_path: Path) -> None:
    touch(tmp_path, "rwkv-3.safetensors")
    assert find_weights(tmp_path).name == "rwkv-3.safetensors"
    touch(tmp_path, "rwkv-final.safetensors")
    assert find_weights(tmp_path).name == "rwkv-final.safetensors"


def test_a_run_that_was_stopped_early_generates_from_its_newest_state(work_dir: Path, tmp_path: Path) -> None:
    stopped = tmp_path / "stopped"
    shutil.copytree(work_dir, stopped)
    shutil.rmtree(stopped / "out")
    (newest,) = (stopped / "state").iterdir()
    assert find_weights(stopped) == newest / "weights.safetensors"
    settings = {"max_new_tokens": 8, "seed": 3}
    for source in (stopped, newest / "weights.safetensors"):
        assert rwkv_spec.generate(source, "1 2", **settings) == rwkv_spec.generate(work_dir, "1 2", **settings)  # type: ignore[arg-type]


def test_a_file_stands_for_itself(tmp_path: Path) -> None:
    assert find_weights(tmp_path / "weights.pth") == tmp_path / "weights.pth"


def test_the_tokenizer_is_found_from_the_folder_and_from_a_file_in_it(
    work_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(work_dir / "out")
    for source in (work_dir, work_dir / "out" / "rwkv-final.pth", Path("rwkv-best.pth")):
        tokenizer = find_tokenizer(source)
        assert tokenizer.encode("1 9") == [2, 10] and tokenizer.vocab_size == 11


@pytest.mark.parametrize("source", ["", "weights.pth"])
def test_without_a_run_folder_it_asks_for_the_tokenizer(tmp_path: Path, source: str) -> None:
    with pytest.raises(UserError, match="pass tokenizer="):
        find_tokenizer(tmp_path / source)


def test_a_tokenizer_from_python_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "resolved.yaml").write_text("version: 1\n")
    with pytest.raises(UserError, match="came from Python"):
        find_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "tokenizer: 5", "tokenizer: {type: nosuch}", "tokenizer: {kind: bytes}", "\x00"]
)
def test_a_damaged_resolved_spec_is_said_in_words(tmp_path: Path, text: str) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "resolved.yaml").write_text(text)
    with pytest.raises(UserError, match=r"resolved\.yaml"):
        find_tokenizer(tmp_path)


def test_a_vocabulary_that_is_nowhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    section = {"tokenizer": {"type": "vocab", "path": str(tmp_path / "gone.txt")}}
    (tmp_path / "configs" / "resolved.yaml").write_text(yaml.safe_dump(section))
    with pytest.raises(UserError, match=r"gone\.txt"):
        find_tokenizer(tmp_path)


def test_a_run_folder_generates_though_the_vocabulary_moved_away(tmp_path: Path) -> None:
    """data/vocab.txt is the run's own copy: a run folder that was sent to somebody is whole."""
    (tmp_path / "vocab.txt").write_text("".join(f"{i} '{letter}' 1\n" for i, letter in enumerate("abc", 1)))
    (tmp_path / "text.txt").write_text("abcabcabc\n" * 4)
    spec = tiny_spec(tmp_path, tokenizer=None, data=None, eval=None, train={"steps": 1})
    spec |= {"tokenizer": {"type": "vocab", "path": str(tmp_path / "vocab.txt")}}
    spec |= {"data": {"train": str(tmp_path / "text.txt")}}
    run = rwkv_spec.run(spec)
    before = rwkv_spec.generate(run.dir, ["ab"], max_new_tokens=4, temperature=0)
    assert set(before[0]) <= set("abc")
    (tmp_path / "vocab.txt").unlink()
    run.dir.rename(tmp_path / "sent")
    assert rwkv_spec.generate(tmp_path / "sent", ["ab"], max_new_tokens=4, temperature=0) == before


def test_a_run_with_the_world_vocabulary_needs_no_rwkv_package_to_generate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs").mkdir(), (tmp_path / "data").mkdir()
    (tmp_path / "configs" / "resolved.yaml").write_text("tokenizer: {type: world}\n")
    copy = tmp_path / "data" / "vocab.txt"
    world().save_vocab(copy)
    # A package of this name without the file, found before the real one.
    (tmp_path / "rwkv").mkdir()
    (tmp_path / "rwkv" / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "rwkv", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    tokenizer = find_tokenizer(tmp_path)
    assert (tokenizer.fingerprint, tokenizer.vocab_size) == (world().fingerprint, 65536)
    copy.unlink()
    with pytest.raises(UserError, match="pip install rwkv"):
        find_tokenizer(tmp_path)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
def test_a_loaded_model_is_ready_to_use(work_dir: Path, dtype: str) -> None:
    model = load_model(work_dir / "out" / "rwkv-final.pth", device="cpu", dtype=dtype)
    assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())
    assert torch.isfinite(model(torch.tensor([[0, 1, 2]]))).all()


def test_an_unknown_dtype_is_a_value_error_that_names_the_known(work_dir: Path) -> None:
    with pytest.raises(ValueError, match="fp32, bf16, fp64"):
        rwkv_spec.load(work_dir / "out" / "rwkv-final.pth", dtype="float32")


def test_a_folder_a_missing_file_and_another_file_are_told_apart(work_dir: Path) -> None:
    with pytest.raises(CheckpointError, match="folder"):
        rwkv_spec.load(work_dir / "out")
    with pytest.raises(CheckpointError, match=r"nosuch\.pth"):
        rwkv_spec.load(work_dir / "out" / "nosuch.pth")
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl"):
        rwkv_spec.load(work_dir / "out" / "metrics.jsonl")


@pytest.mark.parametrize(
    ("prompt", "words"),
    [("1 2 x", "x"), ("1 2 10", "10"), ("3.7", "3.7"), ([1, 2, 10], "10"), ([1.5], "1.5"), ([True], "true")],
    ids=repr,
)
def test_a_prompt_that_cannot_be_encoded_is_quoted(work_dir: Path, prompt: object, words: str) -> None:
    with pytest.raises(UserError, match="prompt ") as caught:
        rwkv_spec.generate(work_dir, [prompt], max_new_tokens=1)
    assert words in str(caught.value)


def test_values_for_a_tokenizer_of_text_are_refused(work_dir: Path) -> None:
    class Text:
        vocab_size, fingerprint = 11, "text"

        def encode(self, text: str) -> list[int]:
            return [1 for _ in text]

        def decode(self, ids: list[int]) -> str:
            return "a" * len(ids)

    with pytest.raises(UserError, match="Text takes text"):
        rwkv_spec.generate(work_dir, [[1, 2]], tokenizer=Text(), max_new_tokens=1)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_new_tokens": -1},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
    ],
    ids=str,
)
def test_settings_out_of_range_are_value_errors_that_name_them(work_dir: Path, settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        rwkv_spec.generate(work_dir, ["1"], **settings)


def test_no_prompt_gives_no_text_and_an_empty_prompt_starts_a_document(work_dir: Path) -> None:
    assert rwkv_spec.generate(work_dir, []) == []
    assert len(rwkv_spec.generate(work_dir, [""], max_new_tokens=2)) == 1


def test_one_prompt_not_in_a_list_is_one_prompt(work_dir: Path) -> None:
    alone = rwkv_spec.generate(work_dir, "1 2", max_new_tokens=2, temperature=0)
    assert alone == rwkv_spec.generate(work_dir, ["1 2"], max_new_tokens=2, temperature=0)


def test_a_tokenizer_of_another_model_is_said_in_words(work_dir: Path) -> None:
    """Its decoder meets ids that it has no text for."""

    class Gaps:
        vocab_size, fingerprint = 11, "gaps"

        def encode(self, text: str) -> list[int]:
            return [1 for _ in text]

        def decode(self, ids: list[int]) -> str:
            if any(index > 1 for index in ids):
                raise ValueError("no such id")
            return "a" * len(ids)

    with pytest.raises(UserError, match="do the two belong together"):
        rwkv_spec.generate(work_dir, ["a"] * 20, tokenizer=Gaps(), max_new_tokens=40, seed=1)
