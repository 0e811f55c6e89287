"""Compiled step forms that are wrong on purpose: each must miss the gate that the true one passes."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from rwkv_spec.errors import KernelError
from rwkv_spec.model import compiled_step
from rwkv_spec.model.compiled_step import CompiledStep, step_of_this_machine
from rwkv_spec.model.shapes import TYPES
from rwkv_spec.ops.build import FLAGS, Kernels, find_compiler, machine_flags, source_folder, sources_of
from tests.model.models import compiled_or_skip, random_ids
from tests.model.test_compiled_step import GATE, pair, random_state, widened
from tests.ops.cases import error_ratio

# The generations that each one must show in, and the text that is exchanged.
MUTANTS = {
    "decay of zero": ("x070", "store(rows + n, decay);", "store(rows + n, V{});"),
    "no delta term": ("x070", " + load(m.b + j) * sa", ""),
    "no bonus": ("x070", " + load(m.v + n) * bonus)", ")"),
    "no gate": ("x070", ") * get(c.gate + at + n));", "));"),
    "read before the update": ("x070", "y += s * get(r + j);", "y += get(from + place) * get(r + j);"),
    "v of block 0 forgotten": ("x070", "v += (first - v) *", "v += 0.0f * (first - v) *"),
    "read after the update": ("x052 x060", "load(m.y + i) + s * r_j", "load(m.y + i) + (s + s * fade) * r_j"),
    "the first sequence's decay for all": ("x060", "item / c.H * c.w_stride", "0 * c.w_stride"),
    "what a token adds to its shares": ("x060", "weight += get(c.added + at + n);", ""),
    "the mean left in a norm": (
        "x052 x060 x070",
        "put(y + n, (get(y + n) - mean) * scale",
        "put(y + n, get(y + n) * scale",
    ),
    "the inputs of k and v exchanged": ("x060", "{3, 1, 2, 4}", "{3, 2, 1, 4}"),
    "shares of the other token": ("x052", "t.mix(shift, t.normed, {MIX_R", "t.mix(t.normed, shift, {MIX_R"),
    "no norm of the embedding": ("x052 x060 x070", "if (t.is_first) t.norm(t.x, t.x, t.at(LN0), t.at(LN0_BIAS));", ""),
    "the shift of another layer": ("x052 x060 x070", "states.ffn_shift + l * rows", "states.ffn_shift"),
    "no tanh": ("x060 x070", "if (activation == TANH) return std::tanh(x);", ""),
    "the last row of a block lost": ("x052 x060 x070", "(n < rows ? n : rows - 1)", "(n < rows - 1 ? n : 0)"),
}


def build_mutant(folder: Path, old: str, new: str) -> ctypes.CDLL:
    places = 0
    for path in sources_of("step", source_folder()):
        text = path.read_text(encoding="utf-8")
        places += text.count(old)
        (folder / path.name).write_text(text.replace(old, new), encoding="utf-8")
    assert places == 1, "the mutant's place is gone from the sources"
    compiler = find_compiler()
    command = [*compiler.command, *FLAGS, *machine_flags(compiler), "-w", "-DHEAD_SIZE=0", "-shared"]
    subprocess.run([*command, str(folder / "step.cpp"), "-o", str(folder / "mutant.so")], check=True)
    return ctypes.CDLL(str(folder / "mutant.so"))


def worst_error(type: str) -> float:
    """Of logits and states after two tokens of five sequences, without the model's own comparison."""
    model, plain = pair(type, n_layer=3, n_embd=96, head_size=48)
    state = random_state(model, 5)
    expected_state, step, errors = widened(state), CompiledStep(model, model.shape), []
    with torch.no_grad():
        for ids_B in random_ids(2, 5):
            new_state = state.empty_like()
            logits = step(ids_B, state.tensors, new_state.tensors)
            expected, expected_state = plain.step(ids_B, expected_state)
            state = new_state
            errors.append(error_ratio(logits, expected))
    errors += [error_ratio(got, want) for got, want in zip(state.tensors, expected_state.tensors, strict=True)]
    return float("inf") if any(error != error for error in errors) else max(errors)


@pytest.mark.parametrize("type", TYPES)
def test_the_true_one_passes(type: str) -> None:
    compiled_or_skip(type)
    assert worst_error(type) < GATE


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    types, old, new = MUTANTS[name]
    compiled_or_skip("x070")
    step_of_this_machine()
    mutant = Kernels(build_mutant(tmp_path, old, new), "a compiler", "instructions", "")
    monkeypatch.setattr(compiled_step, "step_of_this_machine", lambda: mutant)
    for type in types.split():
        assert worst_error(type) > 5 * GATE, type


# Two that no logits of a first token show, from a state of zeros: what is forgotten there, and the state after.
UNSEEN = {
    "no delta term": MUTANTS["no delta term"],
    "decay forgotten": ("x060", "s + (s * fade + get(v + i) * k_j)", "s + get(v + i) * k_j"),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_a_model_refuses_a_mutant_at_its_first_token(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    type, old, new = UNSEEN[name]
    compiled_or_skip(type)
    mutant = Kernels(build_mutant(tmp_path, old, new), "a compiler", "instructions", "")
    monkeypatch.setattr(compiled_step, "step_of_this_machine", lambda: mutant)
    model, _ = pair(type, n_layer=2, n_embd=64, head_size=32)
    with torch.no_grad(), pytest.raises(KernelError, match="computes wrong numbers"):
        model.step(torch.tensor([4]), model.initial_state(1))
