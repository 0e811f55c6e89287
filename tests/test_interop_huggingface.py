"""The folder that convert writes is what rwkv7-hf and flash-linear-attention load, and theirs is what we load."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rwkv_spec
from rwkv_spec.checkpoint.format import read_weights
from tests.checkpoint.layouts import UNUSED
from tests.test_interop import PROMPT, TOLERANCE, trained_checkpoint

# A process of its own: transformers brings warnings and settings for the whole process.
OTHER_SOFTWARE = """
import json, sys
import torch
folder, prompt, result, program = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], sys.argv[4]
if program == "fla":
    # Its kernels are timed before they run, on a GPU only: the first setting is as right as the fastest.
    from triton.runtime.autotuner import Autotuner
    Autotuner._bench = lambda self, *given, config, **named: [0.0, 0.0, 0.0]
    from fla.models.rwkv7 import RWKV7ForCausalLM
else:
    from rwkv7_hf import RWKV7ForCausalLM
model, info = RWKV7ForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
model = model.eval()
with torch.no_grad():
    sequence = model(torch.tensor([prompt])).logits[0]
    steps = []
    if program == "rwkv7_hf":
        cache = None
        for token in prompt:
            output = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            steps.append(output.logits[0, -1].tolist())
troubles = [str(key) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for key in info[kind]]
with open(result, "w") as file:
    json.dump({"sequence": sequence.tolist(), "steps": steps, "troubles": troubles}, file)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_checkpoint(tmp_path_factory.mktemp("interop"), "x070")


@pytest.fixture(scope="module")
def folder(checkpoint: Path) -> Path:
    return rwkv_spec.convert(checkpoint, checkpoint.with_name("hf")).target


def require(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the package {package} is not installed")


def read_by(program: str, folder: Path, **switches: str) -> dict[str, list[object]]:
    result = folder.with_name(f"{program}.json")
    finished = subprocess.run(
        [sys.executable, "-c", OTHER_SOFTWARE, str(folder), json.dumps(PROMPT), str(result), program],
        env={**os.environ, **switches, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(result.read_text())


def test_rwkv7_hf_gives_the_same_logits_from_our_folder(checkpoint: Path, folder: Path) -> None:
    require("transformers", "rwkv7_hf")
    theirs = read_by("rwkv7_hf", folder)
    assert theirs["troubles"] == []
    ours = rwkv_spec.load(checkpoint)(torch.tensor([PROMPT]))[0]
    assert float(ours.std()) > 0.5
    for form in ("sequence", "steps"):
        torch.testing.assert_close(torch.tensor(theirs[form]), ours, rtol=0, atol=TOLERANCE)


def test_we_read_the_folder_that_rwkv7_hf_writes(checkpoint: Path, folder: Path) -> None:
    require("transformers", "rwkv7_hf")
    theirs = checkpoint.with_name("theirs")
    command = "import sys; from rwkv7_hf.converter import main; sys.exit(main(sys.argv[1:]))"
    finished = subprocess.run(
        [
            *(sys.executable, "-c", command, "--input", str(checkpoint), "--output", str(theirs)),
            *("--precision", "fp32", "--max-shard-size", "500KB"),
        ],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr
    assert (theirs / "model.safetensors.index.json").is_file(), "the point of this test is that it is in shards"
    rwkv_spec.convert(theirs, checkpoint.with_name("back.pth"))
    back, ours = read_weights(checkpoint.with_name("back.pth")), read_weights(checkpoint)
    assert back.keys() == ours.keys() - set(UNUSED)
    assert all(torch.equal(back[name], ours[name]) for name in back)
    assert rwkv_spec.inspect(theirs).layout == rwkv_spec.inspect(folder).layout


@pytest.mark.slow
def test_flash_linear_attention_gives_the_same_logits_from_our_folder(checkpoint: Path, folder: Path) -> None:
    """Its kernels are Triton programs: here Triton's interpreter runs them, on the CPU."""
    require("transformers", "fla", "triton")
    theirs = read_by("fla", folder, TRITON_INTERPRET="1")
    assert theirs["troubles"] == []
    ours = rwkv_spec.load(checkpoint)(torch.tensor([PROMPT]))[0]
    torch.testing.assert_close(torch.tensor(theirs["sequence"]), ours, rtol=0, atol=TOLERANCE)
