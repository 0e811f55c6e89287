"""What a spec names is opened before anything is trained, and all that is wrong with it is told at once, by line."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import yaml

import rwkv_spec
from rwkv_spec.errors import Problem, SpecError

GOLDEN = Path(__file__).parent / "golden"

# Line numbers count from here: `version` stands on line 1.
SPEC = """\
version: 1
data:
  train: values.txt
  eval: {documents: 1}
tokenizer: {type: integer, max_value: 9}
model: {type: x070, n_layer: 1, n_embd: 32, head_size: 16}
train: {ctx_len: 16, batch_size: 4, steps: 2}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "values.txt").write_text("1 2 3 4\n" * 6)
    return tmp_path


def problems(folder: Path, text: str, *, overrides: Sequence[str] = (), **given: object) -> tuple[Problem, ...]:
    """What is wrong with this spec, through the public plan(), which trains nothing."""
    path = folder / "spec.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError) as caught:
        rwkv_spec.plan(path, overrides=overrides, **given)
    for problem in caught.value.problems:
        assert problem.what and "Traceback" not in str(problem)
    return caught.value.problems


def test_the_spec_that_all_tests_here_break_is_good(folder: Path) -> None:
    (folder / "spec.yaml").write_text(SPEC)
    assert rwkv_spec.check(folder / "spec.yaml").train.steps == 2


def test_a_missing_file_is_told_with_the_place_looked_at_and_names_near_it(folder: Path) -> None:
    (problem,) = problems(folder, SPEC.replace("values.txt", "valuse.txt"))
    assert (problem.where, problem.line, problem.key) == (str(folder / "spec.yaml"), 3, "data.train")
    assert str(folder / "valuse.txt") in problem.what and "values.txt is there" in problem.fix


def test_a_file_that_lies_in_the_current_folder_is_pointed_at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """People write paths as seen from where they stand; in a spec they are relative to the spec file."""
    (folder / "specs").mkdir()
    monkeypatch.chdir(folder)
    (problem,) = problems(folder / "specs", SPEC)
    assert str(folder / "specs" / "values.txt") in problem.what
    assert f"there is {folder / 'values.txt'}" in problem.fix and "relative to the spec file" in problem.fix


def test_a_missing_folder_is_named(folder: Path) -> None:
    (problem,) = problems(folder, SPEC.replace("values.txt", "nowhere/values.txt"))
    assert f"the folder {folder / 'nowhere'} does not exist" in problem.fix


def test_each_missing_file_of_a_list_has_its_own_problem(folder: Path) -> None:
    text = SPEC.replace("  train: values.txt", "  train:\n    - no1.txt\n    - values.txt\n    - no2.txt")
    found = problems(folder, text)
    assert [problem.key for problem in found] == ["data.train[0]", "data.train[2]"]
    assert all(problem.line in (3, 4, 6) for problem in found)


def test_a_missing_evaluation_file_is_told_too(folder: Path) -> None:
    (problem,) = problems(folder, SPEC.replace("{documents: 1}", "{path: held_out.txt}"))
    assert (problem.line, problem.key) == (4, "data.eval.path") and "held_out.txt" in problem.what


def test_a_path_given_on_the_command_line_is_told_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (problem,) = problems(folder, SPEC, overrides=["data.train=other.txt"])
    assert (problem.where, problem.line) == ("command line", 0) and str(folder / "other.txt") in problem.what


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.txt", b"", "empty"),
        ("wide.txt", "1 2\n".encode("utf-16"), "UTF-8"),
        ("data.csv", b"1,2\n", "cannot read files of kind .csv"),
        ("broken.npy", b"\x93NUMPY", "broken.npy"),
        ("cut.bin", b"1234", "cut"),
    ],
)
def test_a_source_that_cannot_be_read_is_told_at_its_key(folder: Path, name: str, content: bytes, words: str) -> None:
    (folder / name).write_bytes(content)
    (problem,) = problems(folder, SPEC.replace("values.txt", name))
    assert (problem.line, problem.key) == (3, "data.train") and words in f"{problem.what}; {problem.fix}"


def test_errors_of_a_vocabulary_file_carry_its_own_lines(folder: Path) -> None:
    (folder / "vocab.txt").write_text("1 'a' 1\n2 'b' 7\n\n1 'c' 1\n-4 'd' 1\n5 __import__('os') 1\n")
    text = SPEC.replace("{type: integer, max_value: 9}", "{type: vocab, path: vocab.txt}")
    (problem,) = problems(folder, text)
    assert (problem.line, problem.key) == (5, "tokenizer.path")
    for line in (2, 4, 5, 6):
        assert f"{folder / 'vocab.txt'}:{line}" in problem.what
    assert f"{folder / 'vocab.txt'}:1" not in problem.what


def test_a_missing_vocabulary_file_is_named(folder: Path) -> None:
    text = SPEC.replace("{type: integer, max_value: 9}", "{type: vocab, path: vocab.txt}")
    (problem,) = problems(folder, text)
    assert problem.key == "tokenizer.path" and str(folder / "vocab.txt") in problem.what


def test_a_world_vocabulary_that_is_not_the_published_one_is_told_at_its_path(folder: Path) -> None:
    (folder / "vocab.txt").write_text("1 'a' 1\n")
    text = SPEC.replace("{type: integer, max_value: 9}", "{type: world, path: vocab.txt}")
    (problem,) = problems(folder, text)
    assert (problem.line, problem.key) == (5, "tokenizer.path")
    assert "none with id 2: it is cut off, or not the published World vocabulary" in problem.what
    assert "pip install rwkv" in problem.what and "type vocab" in problem.what


def test_without_the_package_that_brings_it_world_asks_for_the_package_or_a_path(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A package of this name without the file, found before the real one.
    (folder / "rwkv").mkdir()
    (folder / "rwkv" / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "rwkv", raising=False)
    monkeypatch.syspath_prepend(folder)
    (problem,) = problems(folder, SPEC.replace("{type: integer, max_value: 9}", "{type: world}"))
    assert (problem.line, problem.key) == (5, "tokenizer")
    assert "pip install rwkv, or give a copy of rwkv_vocab_v20230424.txt as path" in problem.what


def test_fewer_rows_than_ids_names_both_numbers(folder: Path) -> None:
    (problem,) = problems(folder, SPEC.replace("n_layer: 1", "n_layer: 1, vocab_size: 10"))
    assert problem.key == "model.vocab_size" and "10 rows" in problem.what and "11" in problem.what
    assert "auto" in problem.fix


def checkpoint_spec(path: str, tokenizer: str) -> str:
    lines = SPEC.splitlines(keepends=True)
    lines[4] = f"tokenizer: {tokenizer}\n"
    lines[5] = f"checkpoint: {{path: {path}}}\n"
    return "".join(lines)


@pytest.mark.parametrize("max_value", [31, 999])
def test_a_checkpoint_with_fewer_rows_than_ids_names_both_numbers(folder: Path, max_value: int) -> None:
    shutil.copy(GOLDEN / "x070_mini_L2-D128-V32.pth", folder / "mini.pth")
    (problem,) = problems(folder, checkpoint_spec("mini.pth", f"{{type: integer, max_value: {max_value}}}"))
    assert (problem.line, problem.key) == (6, "checkpoint.path")
    assert "32 vocabulary rows" in problem.what and f"{max_value + 2} ids" in problem.what and problem.fix


def test_a_checkpoint_may_have_more_rows_up_to_the_next_multiple_of_256(folder: Path) -> None:
    """32 and 256 rows for an 11-id tokenizer are padding; 256 rows for one of 257 ids are too few."""
    for name in ("x070_mini_L2-D128-V32.pth", "x070_init_L3-D128-V256.pth"):
        shutil.copy(GOLDEN / name, folder / name)
        path = folder / "spec.yaml"
        path.write_text(checkpoint_spec(name, "{type: integer, max_value: 9}"))
        assert rwkv_spec.plan(path).vocab_size in (32, 256)
    (problem,) = problems(folder, checkpoint_spec("x070_init_L3-D128-V256.pth", "{type: integer, max_value: 255}"))
    assert "256 vocabulary rows" in problem.what and "257 ids" in problem.what


def test_a_generation_that_is_not_trained_is_refused_by_its_name(folder: Path) -> None:
    names = ("att.time_decay", "att.time_first", "att.time_mix_k", "ffn.time_mix_k")
    torch.save({f"blocks.0.{name}": torch.zeros(64) for name in names}, folder / "old.pth")
    (problem,) = problems(folder, checkpoint_spec("old.pth", "{type: integer, max_value: 9}"))
    assert (problem.line, problem.key) == (6, "checkpoint.path")
    assert "RWKV-4" in str(problem) and "old.pth" in str(problem)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 cut off"], ids=["empty", "text", "zip"])
def test_a_file_that_is_no_checkpoint_is_told_at_its_key(folder: Path, content: bytes) -> None:
    (folder / "weights.pth").write_bytes(content)
    (problem,) = problems(folder, checkpoint_spec("weights.pth", "{type: integer, max_value: 9}"))
    assert (problem.line, problem.key) == (6, "checkpoint.path") and "weights.pth" in problem.what


def test_a_missing_checkpoint_is_told_at_its_key(folder: Path) -> None:
    (problem,) = problems(folder, checkpoint_spec("weights.pth", "{type: integer, max_value: 9}"))
    assert problem.key == "checkpoint.path" and str(folder / "weights.pth") in problem.what


@pytest.mark.parametrize("way", ["by its name", "through a link to it", "through a link in its place"])
def test_a_checkpoint_that_the_run_would_write_over_is_refused(folder: Path, way: str) -> None:
    out, source = folder / "runs" / "spec" / "out", folder / "mini.pth"
    out.mkdir(parents=True)
    shutil.copy(GOLDEN / "x070_mini_L2-D128-V32.pth", out / "rwkv-init.pth")
    name = str(out / "rwkv-init.pth")
    if way == "through a link to it":
        source.symlink_to(out / "rwkv-init.pth")
        name = str(source)
    elif way == "through a link in its place":
        (out / "rwkv-init.pth").rename(source)
        (out / "rwkv-init.pth").symlink_to(source)
    text = checkpoint_spec(name, "{type: integer, max_value: 30}") + f"work_dir: {folder / 'runs' / 'spec'}\n"
    (problem,) = problems(folder, text)
    assert problem.key == "checkpoint.path" and "this run itself would write" in problem.what
    # Beside the files of the run, or from another run's folder, it is only read.
    (folder / "free.pth").write_bytes((GOLDEN / "x070_mini_L2-D128-V32.pth").read_bytes())
    (out / "mine.pth").symlink_to(folder / "free.pth")
    for good in (out / "mine.pth", folder / "free.pth"):
        path = folder / "good.yaml"
        path.write_text(text.replace(name, str(good)))
        rwkv_spec.check(path)


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb", "trackio"])
def test_a_tracker_that_is_not_installed_gives_the_pip_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tracker: str
) -> None:
    # Whatever is installed here: with an empty import path nothing is found that was not imported before.
    rwkv_spec.plan({**_dict_spec(folder), "work_dir": str(folder / "first")})
    for name in [name for name in sys.modules if name.partition(".")[0] == tracker]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("sys.path", [])
    monkeypatch.setattr("sys.path_importer_cache", {})
    (problem,) = problems(folder, SPEC + f"log: {{trackers: [{tracker}]}}\n")
    assert (problem.line, problem.key) == (8, "log.trackers")
    assert f'pip install "rwkv_spec[{tracker}]"' in problem.fix


def _dict_spec(folder: Path) -> dict[str, object]:
    spec: dict[str, object] = yaml.safe_load(SPEC)
    spec["data"] = {"train": str(folder / "values.txt"), "eval": {"documents": 1}}
    return spec


class Half:
    """A tokenizer of which half is missing."""

    vocab_size = 5

    def encode(self, text: str) -> list[int]:
        return [1 for _ in text]


def test_a_custom_tokenizer_that_lacks_something_is_told_what(folder: Path) -> None:
    text = "".join(line for line in SPEC.splitlines(keepends=True) if not line.startswith("tokenizer"))
    (problem,) = problems(folder, text, tokenizer=Half())
    assert "Half lacks decode, fingerprint" in problem.what and "fingerprint (text)" in problem.fix


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vocab_size", "many"),
        ("vocab_size", 0),
        ("vocab_size", 5.5),
        ("vocab_size", True),
        ("fingerprint", 7),
        ("decode", 3),
    ],
)
def test_a_custom_tokenizer_with_wrong_attributes_is_told_what(folder: Path, name: str, value: object) -> None:
    class Wrong(Half):
        fingerprint = "1"

        def decode(self, ids: Sequence[int]) -> str:
            return ""

    setattr(Wrong, name, value)
    text = "".join(line for line in SPEC.splitlines(keepends=True) if not line.startswith("tokenizer"))
    (problem,) = problems(folder, text, tokenizer=Wrong())
    assert name in problem.what and "Wrong" in problem.what


def test_several_problems_come_at_once_sorted_by_line(folder: Path) -> None:
    text = SPEC.replace("values.txt", "no.txt").replace("{documents: 1}", "{path: held.txt}")
    text = text.replace("n_layer: 1", "n_layer: 1, vocab_size: 3")
    found = problems(folder, text)
    assert [problem.key for problem in found] == ["data.train", "data.eval.path", "model.vocab_size"]
    assert [problem.line for problem in found] == [3, 4, 6]
    lines = str(SpecError(reversed(found))).splitlines()
    assert [line.split(": ")[1] for line in lines] == [problem.key for problem in found]


def test_problems_of_the_file_alone_are_told_before_anything_is_opened(folder: Path) -> None:
    found = problems(folder, SPEC.replace("values.txt", "no.txt").replace("n_embd: 32", "n_embd: 33"))
    assert "model.n_embd" in [problem.key for problem in found]


def test_nothing_is_written_by_a_spec_that_is_refused(folder: Path) -> None:
    before = sorted(path.name for path in folder.iterdir())
    problems(folder, SPEC.replace("values.txt", "no.txt"))
    assert sorted(path.name for path in folder.iterdir()) == sorted([*before, "spec.yaml"])


@pytest.mark.parametrize("data", [[[1, 2.5]], [["a"]], 7, [], {"a": 1}, [[1, [2]]]], ids=repr)
def test_data_from_python_is_opened_like_a_file(folder: Path, data: object) -> None:
    found = problems(folder, SPEC.replace("  train: values.txt\n", ""), data=data)
    assert [problem.key for problem in found] == ["data.train"]


def test_evaluation_data_from_python_is_opened_like_a_file(folder: Path) -> None:
    (problem,) = problems(folder, SPEC.replace("  eval: {documents: 1}\n", ""), eval_data=[[1, 2.5]])
    assert problem.key == "data.eval"


def test_a_missing_file_of_a_list_is_told_on_its_own_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1 2\n")
    path = tmp_path / "s.yaml"
    path.write_text(
        "version: 1\ndata:\n  train:\n    - a.txt\n    - b.txt\ntokenizer: {type: angle}\n"
        "model: {n_layer: 1, n_embd: 64}\ntrain: {steps: 1}\n"
    )
    with pytest.raises(rwkv_spec.SpecError) as caught:
        rwkv_spec.check(path)
    (problem,) = caught.value.problems
    assert (problem.line, problem.key) == (5, "data.train[1]")


def test_a_file_that_is_trained_on_is_not_held_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1 2\n")
    path = tmp_path / "s.yaml"
    path.write_text(
        "version: 1\ndata: {train: a.txt, eval: {path: ./a.txt}}\ntokenizer: {type: angle}\n"
        "model: {n_layer: 1, n_embd: 64}\ntrain: {steps: 1}\n"
    )
    with pytest.raises(rwkv_spec.SpecError, match="is trained on as well"):
        rwkv_spec.check(path)
