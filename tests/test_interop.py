"""What a run leaves is what other RWKV software reads: the `rwkv` package from PyPI gives the same numbers from it."""

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
from tests.tiny import tiny_spec

PROMPT = [0, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2, 3, 10, 10, 1, 5]
NUM_GREEDY = 20
NUM_LAYERS, WIDTH, NUM_IDS = 2, 128, 11
# 1e-4 is the promise. Both sides are within 3e-6 of float64 here, and another epsilon in a norm makes 4e-5.
TOLERANCE = 2e-5

# The package decides by environment variables, before it is imported: so it gets a process of its own.
OTHER_SOFTWARE = """
import json, sys
import torch
from rwkv.model import RWKV

stem, prompt, num_greedy = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
model = RWKV(model=stem, strategy="cpu fp32")
sequence, state = model.forward(list(prompt), None, full_output=True)
steps, step_state = [], None
for token in prompt:
    logits, step_state = model.forward([token], step_state)
    steps.append(logits.float().tolist())
greedy, logits = [], sequence[-1]
for _ in range(num_greedy):
    greedy.append(int(torch.argmax(logits)))
    logits, state = model.forward([greedy[-1]], state)
with open(sys.argv[4], "w") as file:
    json.dump({"sequence": sequence.float().tolist(), "steps": steps, "greedy": greedy}, file)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained at a high rate, so that every matrix that starts at zero counts in the logits."""
    tmp_path = tmp_path_factory.mktemp("interop")
    spec = tiny_spec(
        tmp_path,
        model={"n_layer": NUM_LAYERS, "n_embd": WIDTH, "head_size": 64},
        train={"steps": 12, "batch_size": 8},
        optimizer={"lr": 1e-2},
        eval={"every": {"steps": 12}},
        save={"every": {"steps": 12}},
    )
    return rwkv_spec.run(spec).checkpoint


@pytest.fixture(scope="module")
def theirs(checkpoint: Path) -> dict[str, object]:
    if importlib.util.find_spec("rwkv") is None:
        pytest.skip("the PyPI package rwkv is not installed: pip install rwkv")
    switches = {"RWKV_V7_ON": "1", "RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0"}
    result = checkpoint.with_name("theirs.json")
    finished = subprocess.run(
        [
            *(sys.executable, "-c", OTHER_SOFTWARE, str(checkpoint.with_suffix(""))),
            *(json.dumps(PROMPT), str(NUM_GREEDY), str(result)),
        ],
        env={**os.environ, **switches},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(result.read_text())


def test_its_sequence_form_gives_the_same_logits(checkpoint: Path, theirs: dict[str, object]) -> None:
    ours = rwkv_spec.load(checkpoint)(torch.tensor([PROMPT]))[0]
    assert float(ours.std()) > 0.5, "logits near zero would agree whatever the model computes"
    torch.testing.assert_close(torch.tensor(theirs["sequence"]), ours, rtol=0, atol=TOLERANCE)


def test_its_step_form_gives_the_same_logits(checkpoint: Path, theirs: dict[str, object]) -> None:
    model = rwkv_spec.load(checkpoint)
    state = model.initial_state(1)
    ours = []
    for token in PROMPT:
        logits_BV, state = model.step(torch.tensor([token]), state)
        ours.append(logits_BV[0])
    torch.testing.assert_close(torch.tensor(theirs["steps"]), torch.stack(ours), rtol=0, atol=TOLERANCE)


def test_its_greedy_continuation_is_the_same(checkpoint: Path, theirs: dict[str, object]) -> None:
    model = rwkv_spec.load(checkpoint)
    logits, state = model(torch.tensor([PROMPT]), return_state=True)
    logits_BV = logits[:, -1]
    greedy = []
    for _ in range(NUM_GREEDY):
        greedy.append(int(logits_BV[0].argmax()))
        logits_BV, state = model.step(torch.tensor([greedy[-1]]), state)
    assert theirs["greedy"] == greedy


def test_the_public_generate_is_that_greedy_continuation_too(checkpoint: Path, theirs: dict[str, object]) -> None:
    values = " ".join(str(token - 1) for token in PROMPT[1:])
    (text,) = rwkv_spec.generate(checkpoint, [values], max_new_tokens=NUM_GREEDY, temperature=0)
    greedy = list(theirs["greedy"])
    # Our continuation ends with its document, which is token 0.
    until_end = greedy[: greedy.index(0)] if 0 in greedy else greedy
    assert [int(value) + 1 for value in text.split()] == until_end


def test_the_file_has_the_published_names_and_shapes(checkpoint: Path) -> None:
    """Written out from the published tables: names and shapes of an RWKV-7 file as the reference trainer leaves it."""
    ranks = {"w": 32, "a": 32, "v": 32, "g": 64}
    expected: dict[str, tuple[int, ...]] = {
        "emb.weight": (NUM_IDS, WIDTH),
        "head.weight": (NUM_IDS, WIDTH),
        "ln_out.weight": (WIDTH,),
        "ln_out.bias": (WIDTH,),
        "blocks.0.ln0.weight": (WIDTH,),
        "blocks.0.ln0.bias": (WIDTH,),
    }
    for layer in range(NUM_LAYERS):
        block: dict[str, tuple[int, ...]] = {
            f"{norm}.{part}": (WIDTH,) for norm in ("ln1", "ln2") for part in ("weight", "bias")
        }
        for name in ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g", "w0", "a0", "v0", "k_k", "k_a"):
            block[f"att.{name}"] = (1, 1, WIDTH)
        for letter, rank in ranks.items():
            block[f"att.{letter}1"] = (WIDTH, rank)
            block[f"att.{letter}2"] = (rank, WIDTH)
        block["att.r_k"] = (WIDTH // 64, 64)
        for name in ("receptance", "key", "value", "output"):
            block[f"att.{name}.weight"] = (WIDTH, WIDTH)
        block["att.ln_x.weight"] = block["att.ln_x.bias"] = (WIDTH,)
        block["ffn.x_k"] = (1, 1, WIDTH)
        block["ffn.key.weight"] = (4 * WIDTH, WIDTH)
        block["ffn.value.weight"] = (WIDTH, 4 * WIDTH)
        expected |= {f"blocks.{layer}.{name}": sizes for name, sizes in block.items()}
    for path in (checkpoint, checkpoint.with_name("rwkv-init.pth"), checkpoint.with_name("rwkv-best.pth")):
        tensors = torch.load(path, map_location="cpu", weights_only=True)
        assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
        assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
