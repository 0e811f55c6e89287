"""A generation state on the disk: the same when read, of its own model only, and refused in words when it is none."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from torch import Tensor

import rwkv_spec.generation.state_file as module
from rwkv_spec.errors import CheckpointError
from rwkv_spec.generation.context import GenerationState, fresh, read
from rwkv_spec.generation.state_file import check_state_target, load_state, save_state
from rwkv_spec.model.build import build_model, weights
from rwkv_spec.model.language_model import LanguageModel
from rwkv_spec.model.shapes import fresh_shape
from tests.generation.models import small_model

VOCAB_SIZE = 23
PARTS = ("att_shift", "wkv", "ffn_shift")


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return small_model(VOCAB_SIZE)


@pytest.fixture(scope="module")
def state(model: LanguageModel) -> GenerationState:
    start = read(model, fresh(model, batch_size=2), [[0, 4, 5], [0, 7]], generated=False)
    return read(model, start, [[8], [9, 10]], generated=True)


@pytest.fixture
def path(tmp_path: Path, state: GenerationState, model: LanguageModel) -> Path:
    path = tmp_path / "state.safetensors"
    save_state(path, state, model)
    return path


def content(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safetensors.safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata())  # noqa: SIM118


def rewrite(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None) -> None:
    path.write_bytes(safetensors.torch.save(tensors, metadata=metadata))


@pytest.mark.parametrize("type", ["x052", "x060", "x070"])
def test_a_state_is_read_as_it_was_written(tmp_path: Path, type: str) -> None:
    model = small_model(VOCAB_SIZE, type=type)
    state = read(model, fresh(model, batch_size=2), [[0, 4, 5], [0, 7]], generated=False)
    save_state(tmp_path / "state", state, model)
    found = load_state(tmp_path / "state", model)
    assert (found.ids, found.generated) == (state.ids, state.generated)
    assert torch.equal(found.logits_BV, state.logits_BV)
    for name in PARTS:
        assert torch.equal(getattr(found.state, name), getattr(state.state, name))
        assert getattr(found.state, name).dtype == torch.float64
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]


def test_what_was_generated_is_still_told_from_what_was_read(path: Path, model: LanguageModel) -> None:
    found = load_state(path, model)
    assert found.ids == ((0, 4, 5, 8), (0, 7, 9, 10))
    assert found.generated == ((False, False, False, True), (False, False, True, True))


def test_one_checkpoint_has_one_fingerprint_in_every_dtype(tmp_path: Path) -> None:
    def loaded(dtype: torch.dtype) -> LanguageModel:
        # Built afresh: a cast to bf16 and back would not be what is tested.
        return build_model(fresh_shape("x070", n_layer=2, n_embd=32, head_size=16, vocab_size=9), seed=5).to(dtype)

    model = loaded(torch.float32)
    save_state(tmp_path / "state", read(model, fresh(model, batch_size=1), [[0, 4]], generated=False), model)
    for dtype in (torch.bfloat16, torch.float64):
        found = load_state(tmp_path / "state", loaded(dtype))
        assert found.logits_BV.dtype == found.state.att_shift.dtype == dtype
        assert found.state.wkv.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_tensors_that_nothing_uses_do_not_count(path: Path) -> None:
    """Block 0's v0, v1 and v2: many files of the same model lack them."""
    other = small_model(VOCAB_SIZE)
    for name in ("v0", "v1", "v2"):
        weights(other)[f"blocks.0.att.{name}"].add_(1.0)
    load_state(path, other)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: small_model(VOCAB_SIZE, type="x060"), ["'x070'", "'x060'"]),
        (lambda: small_model(VOCAB_SIZE + 1), [f"vocab_size {VOCAB_SIZE};", f"vocab_size {VOCAB_SIZE + 1};"]),
    ],
    ids=["another type", "another vocabulary"],
)
def test_the_state_of_another_model_names_both(
    path: Path, other: Callable[[], LanguageModel], words: list[str]
) -> None:
    with pytest.raises(CheckpointError, match=r"state\.safetensors: is the state of another model") as caught:
        load_state(path, other())
    assert all(word in str(caught.value) for word in words)


def test_the_state_of_other_weights_names_both(path: Path, model: LanguageModel) -> None:
    other = small_model(VOCAB_SIZE)
    weights(other)["blocks.1.ffn.x_k"].add_(1e-2)
    with pytest.raises(CheckpointError, match="is the state of other weights of the same shape") as caught:
        load_state(path, other)
    own = content(path)[1]["weights"]
    assert own in str(caught.value)


def test_what_is_there_is_never_overwritten(path: Path, state: GenerationState, model: LanguageModel) -> None:
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match="is there already and was left alone"):
        save_state(path, state, model)
    assert path.read_bytes() == before
    with pytest.raises(CheckpointError, match="is there already"):
        save_state(path.parent, state, model)
    with pytest.raises(CheckpointError, match="does not exist; make it first"):
        save_state(path.parent / "nosuch" / "state", state, model)


def test_a_link_that_leads_nowhere_is_left_alone(tmp_path: Path, state: GenerationState, model: LanguageModel) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="is there already and was left alone"):
        save_state(link, state, model)
    assert link.is_symlink()


def test_a_folder_that_is_not_ours_is_said_before_anything_is_generated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The rights of folders mean nothing to an administrator.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(CheckpointError, match="may not be written to"):
        check_state_target(tmp_path / "state")


@pytest.mark.parametrize("part", [*PARTS, "logits"])
def test_a_state_that_could_not_be_read_is_not_written(
    tmp_path: Path, state: GenerationState, model: LanguageModel, part: str
) -> None:
    broken = GenerationState(state.state.clone(), state.logits_BV.clone(), state.ids, state.generated)
    (broken.logits_BV if part == "logits" else getattr(broken.state, part)).view(-1)[-1] = float("nan")
    with pytest.raises(CheckpointError, match=r"was not written.*not finite.*damaged"):
        save_state(tmp_path / "state", broken, model)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing_behind(
    tmp_path: Path, state: GenerationState, model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"cannot write the state: .*No space left"):
        save_state(tmp_path / "state", state, model)
    assert list(tmp_path.iterdir()) == []


def _drop(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


def _put(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: change(tensors[name])})


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_drop("wkv"), "'wkv'"),
        (_drop("lengths"), "does not say how long"),
        (_drop("ids"), "does not say how long"),
        (lambda tensors: tensors.update(more=torch.zeros(1)), "'more'"),
        (_put("att_shift", lambda tensor: tensor[:1].clone()), "'att_shift'"),
        (_put("wkv", lambda tensor: tensor.half()), "'wkv'"),
        (_put("logits", lambda tensor: tensor[:, :-1].clone()), "'logits'"),
        (_put("ffn_shift", lambda tensor: tensor.to(torch.int64)), "'ffn_shift'"),
        (_put("wkv", lambda tensor: tensor * float("nan")), "wkv holds numbers that are not finite"),
        (_put("logits", lambda tensor: tensor * float("inf")), "logits holds numbers that are not finite"),
        (_put("ids", lambda tensor: tensor + VOCAB_SIZE), "holds ids that the model does not have"),
        (_put("ids", lambda tensor: tensor - 5), "holds ids that the model does not have"),
        (_put("lengths", lambda tensor: tensor + 1), "do not fit"),
        (_put("lengths", lambda tensor: torch.tensor([9, -1])), "do not fit"),
        (_put("lengths", lambda tensor: tensor[:0]), "does not say how long"),
        (_put("generated", lambda tensor: tensor + 7), "do not fit"),
    ],
)
def test_a_damaged_state_is_refused_in_words(
    path: Path, model: LanguageModel, damage: Callable[[dict[str, Tensor]], None], words: str
) -> None:
    tensors, metadata = content(path)
    damage(tensors)
    rewrite(path, tensors, metadata)
    with pytest.raises(CheckpointError, match=words) as caught:
        load_state(path, model)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (None, "not a state that was saved by generate"),
        ({"format": "pt"}, "not a state that was saved by generate"),
        ({"shape": ""}, "another model: one that it does not name"),
        ({"shape": "[" * 100_000}, "another model: one that it does not name"),
        ({"shape": json.dumps({"type": "x\x1b[2J" * 99, "n_layer": [1]})}, "another model: type 'x"),
        ({"weights": "\x1b[2J"}, "other weights"),
    ],
    ids=["none", "weights", "no shape", "deep", "control codes", "other weights"],
)
def test_metadata_that_says_something_else_is_refused_in_words(
    path: Path, model: LanguageModel, change: dict[str, str] | None, words: str
) -> None:
    tensors, metadata = content(path)
    rewrite(path, tensors, None if change is None else metadata | change)
    with pytest.raises(CheckpointError, match=words) as caught:
        load_state(path, model)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 700 + len(str(path))


@pytest.mark.parametrize("kind", ["missing", "folder", "empty", "text", "cut off", "weights", "pth"])
def test_another_file_is_called_what_it_is(path: Path, model: LanguageModel, kind: str) -> None:
    target = path.with_name("other")
    if kind == "folder":
        target.mkdir()
    elif kind == "empty":
        target.touch()
    elif kind == "text":
        target.write_text("hello")
    elif kind == "cut off":
        target.write_bytes(path.read_bytes()[:-100])
    elif kind == "weights":
        rewrite(target, dict(weights(model)), {"format": "pt"})
    elif kind == "pth":
        torch.save(weights(model), target)
    words = {
        "missing": "does not exist",
        "folder": "is a folder",
        "empty": "is empty",
        "text": "is text",
        "cut off": "cut off",
        "weights": "not a state that was saved by generate",
        "pth": "is a weights file, not a state",
    }
    with pytest.raises(CheckpointError, match=words[kind]):
        load_state(target, model)


def test_the_metadata_names_the_model(path: Path, model: LanguageModel) -> None:
    tensors, metadata = content(path)
    assert json.loads(metadata["shape"]) == asdict(model.shape)
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == {
        "att_shift": [2, 2, 32],
        "ffn_shift": [2, 2, 32],
        "wkv": [2, 2, 2, 16, 16],
        "logits": [2, VOCAB_SIZE],
        "ids": [8],
        "generated": [8],
        "lengths": [2],
    }
