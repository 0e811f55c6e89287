"""wkv7 as a torch operator: bits, pieces, empty inputs, checkpointing, autocast, compile; what it refuses."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rwkv_spec.errors import KernelError
from rwkv_spec.ops import wkv
from rwkv_spec.ops.build import thread_pool
from rwkv_spec.ops.reference import wkv7_reference
from rwkv_spec.ops.wkv import resolve_backend, wkv7
from tests.ops.cases import (
    compiled,
    error_ratio,
    make_case,
    through_library,
)


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return wkv.operator_of_this_machine("wkv7").library


# ---- bits, shapes and modes ----


@compiled
def test_thread_counts_give_the_same_bits(library: ctypes.CDLL) -> None:
    case = make_case(40, 64, torch.float32, B=3, H=5)
    before = torch.get_num_threads()
    try:
        results = []
        for num_threads in (1, 2, 7):
            torch.set_num_threads(num_threads)
            results.append(through_library(library, case))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))


@compiled
def test_pieces_of_a_sequence_give_the_same_bits_as_the_whole() -> None:
    case = make_case(40, 32, torch.float32)
    *inputs, state = case.inputs
    whole, last = wkv7(*inputs, state, starts_BT=case.starts, backend="cpu")
    pieces = []
    assert case.starts is not None
    for first, stop in ((0, 16), (16, 17), (17, 40)):
        part = [x[:, first:stop] for x in inputs]
        y, state = wkv7(*part, state, starts_BT=case.starts[:, first:stop], backend="cpu")
        pieces.append(y)
    assert torch.equal(torch.cat(pieces, dim=1), whole)
    assert torch.equal(state, last)


@pytest.mark.parametrize("backend", [pytest.param("cpu", marks=compiled), "torch"])
def test_no_tokens_and_no_rows_are_allowed(backend: str) -> None:
    empty = [torch.zeros(2, 0, 1, 16) for _ in range(6)]
    state = torch.randn(2, 1, 16, 16)
    y, last = wkv7(*empty, state, backend=backend)
    assert y.shape == (2, 0, 1, 16)
    assert torch.equal(last, state)
    y, last = wkv7(*(torch.zeros(0, 3, 1, 16) for _ in range(6)), backend=backend)
    assert (y.shape, last.shape) == ((0, 3, 1, 16), (0, 1, 16, 16))


@compiled
def test_a_start_clears_even_a_state_that_is_not_a_number() -> None:
    *inputs, state = make_case(20, 16, torch.float32).inputs
    starts = torch.zeros(2, 20, dtype=torch.bool)
    starts[:, 7] = True
    y, last = wkv7(*inputs, torch.full_like(state, float("nan")), starts_BT=starts, backend="cpu")
    assert torch.isnan(y[:, :7]).all()
    assert torch.isfinite(y[:, 7:]).all()
    assert torch.isfinite(last).all()


@compiled
@pytest.mark.parametrize("which", ["y", "state"])
def test_a_loss_on_one_output_alone_is_differentiated(which: str) -> None:
    case = make_case(20, 16, torch.float32)
    results = []
    for function in (lambda *x: wkv7(*x, backend="cpu"), wkv7_reference):
        leaves = [x.double() if function is wkv7_reference else x.clone() for x in case.inputs]
        leaves = [x.requires_grad_() for x in leaves]
        y, state = function(*leaves)
        loss = (y if which == "y" else state).square().sum()
        results.append(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))
    got, want = results
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, torch.zeros_like(x)) if not y.any() else error_ratio(x, y) < 5e-6


@compiled
def test_nothing_is_saved_without_gradients() -> None:
    inputs = make_case(33, 16, torch.float32).inputs
    _, _, *kept = torch.ops.rwkv_spec.wkv7_forward(*inputs, None, False)
    assert [x.numel() for x in kept] == [0, 0]
    leaves = [x.clone().requires_grad_() for x in inputs]
    with torch.no_grad():
        y, state = wkv7(*leaves, backend="cpu")
    assert y.grad_fn is None
    assert state.grad_fn is None


@compiled
def test_checkpointing_gives_the_same_gradients() -> None:
    case = make_case(20, 16, torch.float32)
    leaves = [x.clone().requires_grad_() for x in case.inputs]

    def block(*xs: Tensor) -> Tensor:
        y, _ = wkv7(*xs, starts_BT=case.starts, backend="cpu")
        return y

    plain = torch.autograd.grad(block(*leaves).square().sum(), leaves)
    again = torch.autograd.grad(checkpoint(block, *leaves, use_reentrant=False).square().sum(), leaves)
    assert all(torch.equal(x, y) for x, y in zip(plain, again, strict=True))


@compiled
def test_autocast_casts_the_inputs() -> None:
    case = make_case(20, 16, torch.float32)
    *inputs, state = case.inputs
    with torch.autocast("cpu", torch.bfloat16):
        y, last = wkv7(*inputs, state, backend="cpu")
    assert (y.dtype, last.dtype) == (torch.bfloat16, torch.float32)
    want, _ = wkv7(*(x.bfloat16() for x in inputs), state, backend="cpu")
    assert torch.equal(y, want)


@compiled
def test_opcheck_passes() -> None:
    case = make_case(17, 16, torch.float32)
    leaves = [x.clone().requires_grad_() for x in case.inputs]
    torch.library.opcheck(torch.ops.rwkv_spec.wkv7_forward.default, (*leaves, case.starts, True))
    _, _, *kept = torch.ops.rwkv_spec.wkv7_forward(*case.inputs, case.starts, True)
    torch.library.opcheck(
        torch.ops.rwkv_spec.wkv7_backward.default,
        (*case.inputs, case.starts, *kept, case.dy, case.dstate_out, True),
        test_utils=("test_schema", "test_faketensor"),
    )


@compiled
@pytest.mark.filterwarnings("default")
def test_torch_compile_takes_it_whole() -> None:
    case = make_case(17, 16, torch.float32)

    def function(*xs: Tensor) -> tuple[Tensor, Tensor]:
        y, state = wkv7(*xs, starts_BT=case.starts)
        return y * 2, state

    fast = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = []
    for f in (function, fast):
        leaves = [x.clone().requires_grad_() for x in case.inputs]
        outputs = f(*leaves)
        results.append((*outputs, *torch.autograd.grad(outputs, leaves, [case.dy, case.dstate_out])))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


# ---- what is refused, and what runs where ----


def test_wrong_tensors_are_named() -> None:
    *inputs, state = make_case(4, 16, torch.float32).inputs
    bad: list[tuple[str, list[Tensor], Tensor | None, Tensor | None]] = [
        ("w_raw must have r's shape", [inputs[0], inputs[1][:, :3], *inputs[2:]], None, None),
        ("k must be float32 as r is, got bfloat16", [*inputs[:2], inputs[2].bfloat16(), *inputs[3:]], None, None),
        (r"r must be \[B, T, H, N\]", [x[0] for x in inputs], None, None),
        ("r must hold floating-point numbers", [x.long() for x in inputs], None, None),
        ("state must be float32", inputs, state.bfloat16(), None),
        ("state must be float32", inputs, state[:1], None),
        ("starts must be bool", inputs, None, torch.zeros(2, 4)),
        ("starts must be bool", inputs, None, torch.zeros(2, 5, dtype=torch.bool)),
    ]
    for message, xs, s, starts in bad:
        with pytest.raises(KernelError, match=message):
            wkv7(*xs, s, starts_BT=starts)


def test_a_backend_that_is_not_there_is_named() -> None:
    with pytest.raises(KernelError, match="choose auto, cpu, cuda or torch"):
        resolve_backend("opencl", device="cpu", dtype=torch.float32, operator="wkv7", head_size=64)
    with pytest.raises(KernelError, match="kernels: cuda cannot be used: the device is cpu"):
        resolve_backend("cuda", device="cpu", dtype=torch.float32, operator="wkv7", head_size=64)
    with pytest.raises(KernelError, match="take float32 and bfloat16, not float64"):
        resolve_backend("cpu", device="cpu", dtype=torch.float64, operator="wkv7", head_size=64)
    with pytest.raises(KernelError, match="for the CPU and for CUDA, not for meta"):
        resolve_backend("cpu", device="meta", dtype=torch.float32, operator="wkv7", head_size=64)
    assert resolve_backend("auto", device="cpu", dtype=torch.float64, operator="wkv7", head_size=64).name == "torch"
    assert resolve_backend("torch", device="cpu", dtype=torch.float32, operator="wkv7", head_size=64).name == "torch"


@compiled
def test_the_reason_is_a_sentence_for_a_person() -> None:
    backend = resolve_backend("auto", device="cpu", dtype=torch.bfloat16, operator="wkv7", head_size=64)
    assert backend.name == "cpu"
    assert backend.reason.startswith("compiled CPU kernel, ")


@compiled
def test_a_head_size_that_is_not_compiled_falls_back_or_is_refused() -> None:
    inputs = make_case(3, 24, torch.float32).inputs
    with pytest.raises(KernelError, match=r"head size 24 is not compiled \(there are 16, 32"):
        wkv7(*inputs, backend="cpu")
    assert torch.equal(wkv7(*inputs)[0], wkv7(*inputs, backend="torch")[0])


def test_tensors_that_are_not_contiguous_are_taken() -> None:
    *inputs, state = make_case(5, 16, torch.float32).inputs
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    assert not strided[0].is_contiguous()
    assert torch.equal(wkv7(*strided, state)[0], wkv7(*inputs, state)[0])


@compiled
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_process_has_one_openmp_runtime() -> None:
    script = (
        "import torch\n"
        "from pathlib import Path\n"
        "from rwkv_spec.ops.wkv import wkv7\n"
        "torch.set_num_threads(3)\n"
        "torch.randn(1000, 1000) @ torch.randn(1000, 1000)\n"
        "xs = [torch.zeros(4, 20, 4, 16) for _ in range(6)]\n"
        "before = len(list(Path('/proc/self/task').iterdir()))\n"
        "wkv7(*xs, backend='cpu')\n"
        "after = len(list(Path('/proc/self/task').iterdir()))\n"
        "lines = Path('/proc/self/maps').read_text().splitlines()\n"
        "names = {x.split()[-1] for x in lines if 'libgomp' in x or 'libomp' in x or 'libiomp' in x}\n"
        "assert len(names) == 1, names\n"
        "assert before == after, (before, after)\n"
    )
    assert thread_pool() is not None
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2])
