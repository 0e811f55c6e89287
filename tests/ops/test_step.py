"""The operators of the step form: gated by float64 at every head size; a wrong build is refused."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from rwkv_spec.errors import KernelError
from rwkv_spec.ops import step
from rwkv_spec.ops.build import FLAGS, HEAD_SIZES, find_compiler, machine_flags, source_folder, sources_of
from rwkv_spec.ops.step import can_step, check_library, mix_once, step_of_this_machine
from tests.ops.cases import compiled

MUTANTS = {
    "decay of zero": ("store(rows + n, decay);", "store(rows + n, V{});"),
    "no delta term": (" + load(m.b + j) * sa", ""),
    "no bonus": (" + load(m.v + n) * bonus)", ")"),
    "no gate": (") * get(c.gate + at + n));", "));"),
    "read before the update": ("y += s * get(r + j);", "y += get(from + place) * get(r + j);"),
    "v of block 0 forgotten": ("v += (first - v) *", "v += 0.0f * (first - v) *"),
    "read after the update in step6": ("load(m.y + i) + s * r_j", "load(m.y + i) + (s * decay) * r_j"),
    "every sequence's decay in step6": ("item / c.H * c.w_stride", "0 * c.w_stride"),
    "added weights forgotten": ("weight += get(c.added + at + n);", ""),
    "an epsilon of nothing": ("static_cast<float>(N) + eps)", "static_cast<float>(N) + 0.0f * eps)"),
}


@compiled
@pytest.mark.parametrize("N", HEAD_SIZES)
def test_every_result_matches_float64(N: int) -> None:
    assert max(step._errors(step_of_this_machine().library, N)) < 1e-6


@compiled
@pytest.mark.parametrize("name", MUTANTS)
def test_the_check_of_a_fresh_build_refuses_a_mutant(name: str, tmp_path: Path) -> None:
    old, new = MUTANTS[name]
    places = 0
    for path in sources_of("step", source_folder()):
        text = path.read_text(encoding="utf-8")
        places += text.count(old)
        (tmp_path / path.name).write_text(text.replace(old, new), encoding="utf-8")
    assert places == 1, "the mutant's place is gone from the sources"
    command = [*find_compiler().command, *FLAGS, *machine_flags(), "-w", "-DHEAD_SIZE=0", "-shared"]
    subprocess.run([*command, str(tmp_path / "step.cpp"), "-o", str(tmp_path / "mutant.so")], check=True)
    with pytest.raises(KernelError, match="wrong numbers"):
        check_library(ctypes.CDLL(str(tmp_path / "mutant.so")))


@compiled
def test_mixing_is_the_same_compiled_and_plain() -> None:
    generator = torch.Generator().manual_seed(0)
    x, previous = torch.randn(2, 7, 48, generator=generator).unbind()
    weights = [torch.randn(1, 1, 48, generator=generator) for _ in range(3)]
    added = torch.randn(3, 7, 48, generator=generator)
    for extra in (None, added):
        plain = mix_once(x, previous, weights, extra, compiled=False)
        for one, other in zip(mix_once(x, previous, weights, extra, compiled=True), plain, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@compiled
def test_it_is_used_only_where_it_can_be() -> None:
    x = torch.zeros(2, 32)
    with torch.no_grad():
        assert can_step(x, head_size=16, backend="auto")
        assert can_step(x, head_size=16, backend="cpu")
        assert not can_step(x, head_size=16, backend="torch")
        assert not can_step(x, head_size=16, backend="cuda")
        assert not can_step(x, head_size=24, backend="auto")
        assert not can_step(x.double(), head_size=16, backend="auto")
        assert not can_step(x.bfloat16(), head_size=16, backend="auto")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert not can_step(x, head_size=16, backend="auto")
    assert not can_step(x, head_size=16, backend="auto")
