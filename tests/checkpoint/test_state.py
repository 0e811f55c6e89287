"""A state is whole or absent, found by its step, verified when read, and never silently replaced by an older one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rwkv_spec.checkpoint.state import (
    list_states,
    read_state,
    remove_leftovers,
    rotate_states,
    write_state,
)
from rwkv_spec.errors import CheckpointError

WEIGHTS = {"emb.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4)}
MOMENTS = {"emb.weight.exp_avg": torch.ones(3, 4, dtype=torch.float64)}


def save(states: Path, step: int) -> Path:
    return write_state(states, step, weights=WEIGHTS, optimizer=MOMENTS, record={"loss_sum": 0.1 + 0.2, "step": step})


def test_what_was_saved_comes_back_bit_for_bit(tmp_path: Path) -> None:
    state = read_state(save(tmp_path, 7))
    assert state.step == 7
    assert torch.equal(state.weights["emb.weight"], WEIGHTS["emb.weight"])
    assert torch.equal(state.optimizer["emb.weight.exp_avg"], MOMENTS["emb.weight.exp_avg"])
    assert state.record == {"loss_sum": 0.1 + 0.2, "step": 7}


def test_states_are_ordered_by_step_and_not_by_name(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000, 5):
        save(tmp_path, step)
    assert [path.name for path in list_states(tmp_path)] == ["step-00000005", "step-99999999", "step-100000000"]


def test_a_half_written_or_half_deleted_state_is_no_state(tmp_path: Path) -> None:
    save(tmp_path, 1)
    half = save(tmp_path, 2)
    (half / "manifest.json").unlink()
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".step-00000003.99-abc.tmp")
    assert [path.name for path in list_states(tmp_path)] == ["step-00000001"]
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_file_is_named_and_the_state_before_is_offered(tmp_path: Path, name: str, damage: str) -> None:
    save(tmp_path, 1)
    folder = save(tmp_path, 2)
    file = folder / name
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(content if damage == "flip" else content[:-5])
    with pytest.raises(CheckpointError) as caught:
        read_state(folder)
    assert name in str(caught.value) and "step-00000001" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 99}', '{"format": 1, "step": 3, "record": {}}'])
def test_a_damaged_manifest_is_named(tmp_path: Path, text: str) -> None:
    folder = save(tmp_path, 2)
    (folder / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        read_state(folder)


def test_rotation_keeps_the_newest_and_at_least_one(tmp_path: Path) -> None:
    for step in (1, 2, 10, 3):
        save(tmp_path, step)
    rotate_states(tmp_path, keep=2)
    assert [path.name for path in list_states(tmp_path)] == ["step-00000003", "step-00000010"]
    rotate_states(tmp_path, keep=0)
    assert [path.name for path in list_states(tmp_path)] == ["step-00000010"]


WRITE_ON_A_FULL_DISK = """
import resource, signal, sys
from pathlib import Path
import torch
from rwkv_spec.checkpoint.state import write_state
from rwkv_spec.errors import CheckpointError

# A limit on file size stands in for a full disk: writing past it fails in the same place.
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    write_state(Path(sys.argv[1]), 2, weights={"a": torch.zeros(100_000)}, optimizer={}, record={})
except CheckpointError as error:
    print(error)
"""


def test_a_full_disk_leaves_the_earlier_state_and_says_what_to_do(tmp_path: Path) -> None:
    pytest.importorskip("resource")
    save(tmp_path, 1)
    command = [sys.executable, "-c", WRITE_ON_A_FULL_DISK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "earlier states are untouched" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert read_state(tmp_path / "step-00000001").step == 1
