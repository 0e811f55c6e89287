"""What a run leaves is what the `rwkv` package from PyPI reads: it gives the same numbers, in all three generations."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import rwkv_spec
from rwkv_spec.checkpoint.format import read_weights
from rwkv_spec.model.shapes import TYPES, UNTRAINED, parameter_groups
from tests.checkpoint.layouts import golden_file
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


@dataclass(frozen=True)
class Case:
    """A checkpoint, and what the other program makes of it; `trained` ones have a run folder with a tokenizer."""

    checkpoint: Path
    theirs: dict[str, list[object]]
    trained: bool


def trained_checkpoint(tmp_path: Path, generation: str) -> Path:
    """Trained at a high rate, so that every matrix that starts at zero counts in the logits."""
    spec = tiny_spec(
        tmp_path,
        model={"type": generation, "n_layer": NUM_LAYERS, "n_embd": WIDTH, "head_size": 64},
        train={"steps": 12, "batch_size": 8},
        optimizer={"lr": 1e-2},
        eval={"every": {"steps": 12}},
        save={"every": {"steps": 12}},
    )
    return rwkv_spec.run(spec).checkpoint


def read_by_the_package(checkpoint: Path, generation: str) -> dict[str, list[object]]:
    switches = {"RWKV_V7_ON": "1" if generation == "x070" else "0", "RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0"}
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


@pytest.fixture(
    scope="module", params=[f"{kind} {generation}" for generation in TYPES for kind in ("our", "another's")]
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A run's own weights, and a file of the published trainer's making with every number in it drawn at random."""
    if importlib.util.find_spec("rwkv") is None:
        pytest.skip("the PyPI package rwkv is not installed: pip install rwkv")
    kind, generation = request.param.split()
    folder = tmp_path_factory.mktemp("interop")
    if kind == "our":
        checkpoint = trained_checkpoint(folder, generation)
    else:
        checkpoint = folder / "golden.pth"
        # On bf16 files it rounds its own folding of the first norm.
        rwkv_spec.convert(golden_file(generation), checkpoint, dtype="fp32")
    return Case(checkpoint, read_by_the_package(checkpoint, generation), trained=kind == "our")


def test_every_matrix_counts(case: Case) -> None:
    """Weights that are zero would agree whatever is done with them."""
    groups = parameter_groups(rwkv_spec.load(case.checkpoint).shape)
    for name, tensor in read_weights(case.checkpoint).items():
        if groups[name] != UNTRAINED:
            assert tensor.abs().max() > 0, name


def test_its_sequence_form_gives_the_same_logits(case: Case) -> None:
    ours = rwkv_spec.load(case.checkpoint)(torch.tensor([PROMPT]))[0]
    assert float(ours.std()) > 0.5, "logits near zero would agree whatever the model computes"
    torch.testing.assert_close(torch.tensor(case.theirs["sequence"]), ours, rtol=0, atol=TOLERANCE)


def test_its_step_form_gives_the_same_logits(case: Case) -> None:
    model = rwkv_spec.load(case.checkpoint)
    state = model.initial_state(1)
    ours = []
    for token in PROMPT:
        logits_BV, state = model.step(torch.tensor([token]), state)
        ours.append(logits_BV[0])
    torch.testing.assert_close(torch.tensor(case.theirs["steps"]), torch.stack(ours), rtol=0, atol=TOLERANCE)


def test_its_greedy_continuation_is_the_same(case: Case) -> None:
    model = rwkv_spec.load(case.checkpoint)
    logits, state = model(torch.tensor([PROMPT]), return_state=True)
    logits_BV = logits[:, -1]
    greedy = []
    for _ in range(NUM_GREEDY):
        greedy.append(int(logits_BV[0].argmax()))
        logits_BV, state = model.step(torch.tensor([greedy[-1]]), state)
    assert case.theirs["greedy"] == greedy


def test_the_public_generate_is_that_greedy_continuation_too(case: Case) -> None:
    tokenizer = None if case.trained else rwkv_spec.IntegerTokenizer(30)
    values = " ".join(str(token - 1) for token in PROMPT[1:])
    (text,) = rwkv_spec.generate(
        case.checkpoint, [values], tokenizer=tokenizer, max_new_tokens=NUM_GREEDY, temperature=0
    )
    greedy = list(case.theirs["greedy"])
    # Our continuation ends with its document, which is token 0.
    until_end = greedy[: greedy.index(0)] if 0 in greedy else greedy
    assert [int(value) + 1 for value in text.split()] == until_end


@pytest.mark.parametrize("generation", TYPES)
def test_the_file_has_the_published_names_and_shapes(tmp_path: Path, generation: str) -> None:
    """Written out from the published tables: names and shapes of a file as the reference trainer leaves it."""
    checkpoint = trained_checkpoint(tmp_path, generation)
    expected: dict[str, tuple[int, ...]] = {
        "emb.weight": (NUM_IDS, WIDTH),
        "head.weight": (NUM_IDS, WIDTH),
        "ln_out.weight": (WIDTH,),
        "ln_out.bias": (WIDTH,),
        "blocks.0.ln0.weight": (WIDTH,),
        "blocks.0.ln0.bias": (WIDTH,),
    }
    for layer in range(NUM_LAYERS):
        expected |= {f"blocks.{layer}.{name}": sizes for name, sizes in published_block(generation).items()}
    for path in (checkpoint, checkpoint.with_name("rwkv-init.pth"), checkpoint.with_name("rwkv-best.pth")):
        tensors = torch.load(path, map_location="cpu", weights_only=True)
        assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
        assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


def published_block(generation: str) -> dict[str, tuple[int, ...]]:
    heads, vector, ffn = (WIDTH // 64, 64), (1, 1, WIDTH), 4 * WIDTH if generation == "x070" else 448
    block: dict[str, tuple[int, ...]] = {
        f"{norm}.{part}": (WIDTH,) for norm in ("ln1", "ln2", "att.ln_x") for part in ("weight", "bias")
    }
    block |= {f"att.{name}.weight": (WIDTH, WIDTH) for name in ("receptance", "key", "value", "output")}
    block |= {"ffn.key.weight": (ffn, WIDTH), "ffn.value.weight": (WIDTH, ffn)}
    if generation == "x070":
        for name in ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g", "w0", "a0", "v0", "k_k", "k_a"):
            block[f"att.{name}"] = vector
        for letter, rank in {"w": 32, "a": 32, "v": 32, "g": 64}.items():
            block |= {f"att.{letter}1": (WIDTH, rank), f"att.{letter}2": (rank, WIDTH)}
        return block | {"att.r_k": heads, "ffn.x_k": vector}
    block |= {"att.gate.weight": (WIDTH, WIDTH), "ffn.receptance.weight": (WIDTH, WIDTH), "att.time_faaaa": heads}
    if generation == "x052":
        block |= {f"att.time_mix_{letter}": vector for letter in "kvrg"}
        return block | {"att.time_decay": heads, "ffn.time_mix_k": vector, "ffn.time_mix_r": vector}
    block |= {f"att.time_maa_{letter}": vector for letter in "xwkvrg"}
    block |= {"att.time_maa_w1": (WIDTH, 160), "att.time_maa_w2": (5, 32, WIDTH), "att.time_decay": vector}
    block |= {"att.time_decay_w1": (WIDTH, 64), "att.time_decay_w2": (64, WIDTH)}
    return block | {"ffn.time_maa_k": vector, "ffn.time_maa_r": vector}
