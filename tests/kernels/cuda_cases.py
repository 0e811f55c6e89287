"""The CUDA kernels under the emulator: building them with g++, inputs that a model can emit, results, references."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rwkv_spec.ops.build_cuda import CHUNK_LENGTH
from rwkv_spec.ops.recurrence import DTYPE_CODES, RECURRENCES
from rwkv_spec.ops.reference import wkv5_reference, wkv6_reference, wkv7_reference

SOURCES = Path(__file__).parents[2] / "kernels" / "cuda"
EMULATOR = Path(__file__).parent
REFERENCES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "wkv5": wkv5_reference,
    "wkv6": wkv6_reference,
    "wkv7": wkv7_reference,
}
# The rounding of outputs alone costs about 1.7e-3 in bfloat16 and 2.1e-4 in float16 (2^-9 and 2^-12, times 0.86);
# inputs are rounded before the reference reads them.
GATE = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
FORWARD, REVERSE, SHUFFLED = 0, 1, 2
ORDERS = (FORWARD, REVERSE, SHUFFLED)
GUARD = 64

emulated = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++, and there is none on PATH")


def compile_for_cpu(source: Path, target: Path, *flags: str, optimize: str = "-O2") -> ctypes.CDLL:
    """A .cu file as a library that runs on the CPU, one fiber a CUDA thread."""
    warnings = ("-Wall", "-Wextra", "-Wno-unknown-pragmas")
    command = [
        "g++",
        "-std=c++17",
        optimize,
        "-U_FORTIFY_SOURCE",
        *warnings,
        "-shared",
        "-fPIC",
        f"-I{EMULATOR}",
        *flags,
    ]
    done = subprocess.run(
        [*command, "-x", "c++", str(source), "-o", str(target)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    library = ctypes.CDLL(str(target))
    library.cuemu_message.restype = ctypes.c_char_p
    return library


def included_by(source: Path) -> set[Path]:
    """The file and all that it includes, at however many removes, of this folder."""
    found, new = set(), [source]
    while new:
        path = new.pop()
        found.add(path)
        names = re.findall(r'#include "(\w+\.cuh)"', path.read_text(encoding="utf-8"))
        new += [path.parent / name for name in names if path.parent / name not in found]
    return found


def build_kernel(name: str, head_size: int, folder: Path, changes: Mapping[str, str] | None = None) -> ctypes.CDLL:
    """NAME.cu for one head size, with texts of the sources exchanged; each must stand there exactly once."""
    counts = dict.fromkeys(changes or {}, 0)
    for path in included_by(SOURCES / f"{name}.cu"):
        text = path.read_text(encoding="utf-8")
        for old, new in (changes or {}).items():
            counts[old] += text.count(old)
            text = text.replace(old, new)
        (folder / path.name).write_text(text, encoding="utf-8")
    assert set(counts.values()) <= {1}, f"a mutant's place is gone from the sources, or there twice: {counts}"
    sizes = (f"-DHEAD_SIZE={head_size}", f"-DCHUNK_LENGTH={CHUNK_LENGTH}")
    # A mutant runs once on a few tokens: there the time goes into compiling. What it no longer uses is no matter.
    how = ("-O0", "-w") if changes else ("-O1",)
    return compile_for_cpu(folder / f"{name}.cu", folder / f"{name}_{head_size}.so", *how, *sizes)


# ---- inputs ----


@dataclass(frozen=True)
class Case:
    """Inputs in the operator's order, the state last; and what flows into the outputs. None is a null address."""

    name: str
    inputs: tuple[Tensor, ...]
    state: Tensor | None
    starts: Tensor | None
    dy: Tensor | None
    dstate_out: Tensor | None

    @property
    def r(self) -> Tensor:
        return self.inputs[0]


def make_case(name: str, T: int, N: int, dtype: torch.dtype = torch.float32, *, B: int = 2, H: int = 2) -> Case:
    """Raw decays over the whole range of a model, from a state that is not zero, some tokens starting anew."""
    generator = torch.Generator().manual_seed(T * 200 + N)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def decays(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator) * 20 - 12

    kappa = torch.nn.functional.normalize(normal(B, T, H, N), dim=-1)
    by_name = {
        **{key: normal(B, T, H, N) for key in "rkv"},
        "w_raw": decays(H, N) if name == "wkv5" else decays(B, T, H, N),
        "a": -kappa,
        "b": kappa * torch.sigmoid(normal(B, T, H, N)),
        "u": normal(H, N),
    }
    recurrence = RECURRENCES[name]
    tokens = [by_name[key].to(dtype) for key in recurrence.tokens]
    flags = torch.rand((B, T), generator=generator) < 0.1
    # A first token that starts anew, one in a chunk and one on a chunk's border are always among them.
    flags[0, 0] = True
    flags[-1, T // 2] = True
    if T > CHUNK_LENGTH:
        flags[0, CHUNK_LENGTH] = True
    return Case(
        name,
        (*tokens, *(by_name[key] for key in recurrence.heads)),
        normal(B, H, N, N),
        flags,
        normal(B, T, H, N).to(dtype),
        normal(B, H, N, N),
    )


def result_names(name: str) -> tuple[str, ...]:
    return ("y", "state", *(f"d{key}" for key in RECURRENCES[name].inputs), "dstate")


def expected(case: Case) -> tuple[Tensor, ...]:
    """All results by the recurrence in float64. Gradients of [H, N] inputs are those of each sequence, [B, H, N]."""
    recurrence, r = RECURRENCES[case.name], case.r
    B, _, H, N = r.shape
    heads = len(recurrence.heads)
    state = torch.zeros(B, H, N, N) if case.state is None else case.state
    # Sequence by sequence, so that autograd keeps their gradients apart.
    by_sequence = []
    for n in range(B):
        pieces = [x[n : n + 1] for x in case.inputs[: len(recurrence.tokens)]]
        leaves = [x.double().clone().requires_grad_() for x in (*pieces, *case.inputs[len(pieces) :], state[n : n + 1])]
        starts = None if case.starts is None else case.starts[n : n + 1]
        outputs = REFERENCES[case.name](*leaves, starts_BT=starts)
        flow = [
            torch.zeros_like(output) if given is None else given[n : n + 1].double()
            for output, given in zip(outputs, (case.dy, case.dstate_out), strict=True)
        ]
        gradients = torch.autograd.grad(outputs, leaves, flow, allow_unused=True)
        filled = [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, leaves, strict=True)]
        if heads:
            filled[-1 - heads : -1] = [g.unsqueeze(0) for g in filled[-1 - heads : -1]]
        by_sequence.append([x.detach() for x in (*outputs, *filled)])
    return tuple(torch.cat(parts) for parts in zip(*by_sequence, strict=True))


# ---- results of the C interface ----


class Fenced:
    """Tensors between bands that nobody may write: what is read from a band is not a number."""

    def __init__(self) -> None:
        self.bands: list[tuple[Tensor, Tensor]] = []

    def of(self, x: Tensor | None, *, poison: bool = False) -> Tensor | None:
        if x is None:
            return None
        whole = torch.empty(x.numel() + 2 * GUARD, dtype=x.dtype)
        whole.view(torch.uint8).fill_(0xFF)
        inner = whole[GUARD : GUARD + x.numel()].view(x.shape)
        if not poison:
            inner.copy_(x)
        for band in (whole[:GUARD], whole[GUARD + x.numel() :]):
            self.bands.append((band.view(torch.uint8), band.view(torch.uint8).clone()))
        return inner

    def whole(self) -> bool:
        return all(torch.equal(band, before) for band, before in self.bands)


def call(library: ctypes.CDLL, name: str, r: Tensor, arguments: Sequence[Tensor | None]) -> int:
    """One C function: sizes, dtype, addresses, and no stream. Gives its code."""
    B, T, H, N = r.shape
    function = getattr(library, f"{name}_{N}")
    addresses = [ctypes.c_void_p(None if x is None else x.data_ptr()) for x in arguments]
    sizes = [ctypes.c_int64(size) for size in (B, T, H)]
    return int(function(*sizes, ctypes.c_int(DTYPE_CODES[r.dtype]), *addresses, ctypes.c_void_p(None)))


def results(library: ctypes.CDLL, case: Case, *, order: int = FORWARD, need_dstate: bool = True) -> tuple[Tensor, ...]:
    """Outputs and all gradients; every place of every output is not a number before, and no band may change."""
    library.cuemu_set_order(order)
    recurrence, r, fence = RECURRENCES[case.name], case.r, Fenced()
    B, T, H, N = r.shape
    kept = [torch.empty(B, H, max((T + CHUNK_LENGTH - 1) // CHUNK_LENGTH - 1, 0), N, N)]
    if recurrence.keeps_sa:
        kept.append(torch.empty(B, T, H, N))
    inputs = [fence.of(x) for x in (*case.inputs, case.state, case.starts)]
    y, state = fence.of(torch.empty_like(r), poison=True), fence.of(torch.empty(B, H, N, N), poison=True)
    saved = [fence.of(x, poison=True) for x in kept]
    code = call(library, f"{case.name}_forward", r, (*inputs, y, state, *saved))
    assert code == 0, library.cuemu_message().decode()
    shapes = [*(x.shape for x in case.inputs[: len(recurrence.tokens)]), *((B, H, N) for _ in recurrence.heads)]
    dtypes = [*(r.dtype for _ in recurrence.tokens), *(torch.float32 for _ in recurrence.heads)]
    gradients = [
        fence.of(torch.empty(shape, dtype=dtype), poison=True) for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    dstate = fence.of(torch.empty(B, H, N, N), poison=True) if need_dstate else None
    flow = [fence.of(case.dy), fence.of(case.dstate_out)]
    code = call(library, f"{case.name}_backward", r, (*inputs, *saved, *flow, *gradients, dstate))
    assert code == 0, library.cuemu_message().decode()
    assert fence.whole(), "written outside of a tensor"
    return tuple(x for x in (y, state, *gradients, dstate) if x is not None)
