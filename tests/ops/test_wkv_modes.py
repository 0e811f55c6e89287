"""The recurrences as torch operators: bits, pieces, empty inputs, checkpointing, autocast, compile; what it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rwkv_spec.errors import KernelError
from rwkv_spec.ops.build import thread_pool
from rwkv_spec.ops.recurrence import RECURRENCES, on_16_bytes
from rwkv_spec.ops.wkv import REFERENCES, operator_of_this_machine, resolve_backend
from tests.ops.cases import (
    OPERATORS,
    compiled,
    error_ratio,
    every_operator,
    make_case,
    through_library,
)


def zeros(operator: str, B: int, T: int, H: int, N: int) -> list[Tensor]:
    """An operator's inputs without the state."""
    recurrence = RECURRENCES[operator]
    return [*(torch.zeros(B, T, H, N) for _ in recurrence.tokens), *(torch.zeros(H, N) for _ in recurrence.heads)]


def part_of(operator: str, inputs: list[Tensor], first: int, stop: int) -> list[Tensor]:
    """Some of the tokens; what belongs to the heads stays whole."""
    number = len(RECURRENCES[operator].tokens)
    return [*(x[:, first:stop] for x in inputs[:number]), *inputs[number:]]


# ---- bits, shapes and modes ----


@compiled
@every_operator
def test_thread_counts_give_the_same_bits(operator: str) -> None:
    case = make_case(40, 64, torch.float32, operator=operator, B=3, H=5)
    library = operator_of_this_machine(operator).library
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
@every_operator
def test_pieces_of_a_sequence_give_the_same_bits_as_the_whole(operator: str) -> None:
    case = make_case(40, 32, torch.float32, operator=operator)
    function = OPERATORS[operator]
    *inputs, state = case.inputs
    whole, last = function(*inputs, state, starts_BT=case.starts, backend="cpu")
    pieces = []
    assert case.starts is not None
    for first, stop in ((0, 16), (16, 17), (17, 40)):
        part = part_of(operator, inputs, first, stop)
        y, state = function(*part, state, starts_BT=case.starts[:, first:stop], backend="cpu")
        pieces.append(y)
    assert torch.equal(torch.cat(pieces, dim=1), whole)
    assert torch.equal(state, last)


@pytest.mark.parametrize("backend", [pytest.param("cpu", marks=compiled), "torch"])
@every_operator
def test_no_tokens_and_no_rows_are_allowed(operator: str, backend: str) -> None:
    function = OPERATORS[operator]
    empty = [x.requires_grad_() for x in zeros(operator, 2, 0, 1, 16)]
    state = torch.randn(2, 1, 16, 16, requires_grad=True)
    y, last = function(*empty, state, backend=backend)
    assert y.shape == (2, 0, 1, 16)
    assert torch.equal(last, state)
    *gradients, dstate = torch.autograd.grad(
        last, [*empty, state], state.detach(), allow_unused=True, materialize_grads=True
    )
    assert torch.equal(dstate, state)
    assert all(x.shape == like.shape and not x.any() for x, like in zip(gradients, empty, strict=True))
    y, last = function(*zeros(operator, 0, 3, 1, 16), backend=backend)
    assert (y.shape, last.shape) == ((0, 3, 1, 16), (0, 1, 16, 16))


@compiled
@every_operator
def test_a_start_clears_even_a_state_that_is_not_a_number(operator: str) -> None:
    *inputs, state = make_case(20, 16, torch.float32, operator=operator).inputs
    starts = torch.zeros(2, 20, dtype=torch.bool)
    starts[:, 7] = True
    y, last = OPERATORS[operator](*inputs, torch.full_like(state, float("nan")), starts_BT=starts, backend="cpu")
    assert torch.isnan(y[:, :7]).all()
    assert torch.isfinite(y[:, 7:]).all()
    assert torch.isfinite(last).all()


@compiled
@pytest.mark.parametrize("which", ["y", "state"])
@every_operator
def test_a_loss_on_one_output_alone_is_differentiated(operator: str, which: str) -> None:
    case = make_case(20, 16, torch.float32, operator=operator)
    results = []
    for double in (False, True):
        leaves = [(x.double() if double else x.clone()).requires_grad_() for x in case.inputs]
        y, state = REFERENCES[operator](*leaves) if double else OPERATORS[operator](*leaves, backend="cpu")
        loss = (y if which == "y" else state).square().sum()
        results.append(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))
    for got, want in zip(*results, strict=True):
        # A state of wkv6 is gone after some tokens: what is left of its gradient is below what a float32 can hold.
        assert got.abs().max() < 1e-30 if want.abs().max() < 1e-30 else error_ratio(got, want) < 5e-6


@compiled
@every_operator
def test_nothing_is_saved_without_gradients(operator: str) -> None:
    inputs = make_case(33, 16, torch.float32, operator=operator).inputs
    _, _, *kept = getattr(torch.ops.rwkv_spec, f"{operator}_forward")(*inputs, None, False)
    assert [x.numel() for x in kept] == [0] * RECURRENCES[operator].num_kept
    leaves = [x.clone().requires_grad_() for x in inputs]
    with torch.no_grad():
        y, state = OPERATORS[operator](*leaves, backend="cpu")
    assert y.grad_fn is None
    assert state.grad_fn is None


@compiled
@every_operator
def test_a_gradient_for_one_input_alone_is_enough(operator: str) -> None:
    case = make_case(20, 16, torch.float32, operator=operator)
    leaves = [x.clone().requires_grad_() for x in case.inputs]
    together = torch.autograd.grad(OPERATORS[operator](*leaves, backend="cpu")[0], leaves, case.dy)
    for place, gradient in enumerate(together):
        inputs = [x.clone().requires_grad_(n == place) for n, x in enumerate(case.inputs)]
        y, _ = OPERATORS[operator](*inputs, backend="cpu")
        assert torch.equal(torch.autograd.grad(y, inputs[place], case.dy)[0], gradient)


@compiled
@every_operator
def test_checkpointing_gives_the_same_gradients(operator: str) -> None:
    case = make_case(20, 16, torch.float32, operator=operator)
    leaves = [x.clone().requires_grad_() for x in case.inputs]

    def block(*xs: Tensor) -> Tensor:
        y, _ = OPERATORS[operator](*xs, starts_BT=case.starts, backend="cpu")
        return y

    plain = torch.autograd.grad(block(*leaves).square().sum(), leaves)
    again = torch.autograd.grad(checkpoint(block, *leaves, use_reentrant=False).square().sum(), leaves)
    assert all(torch.equal(x, y) for x, y in zip(plain, again, strict=True))


@compiled
@every_operator
def test_autocast_casts_the_inputs_of_the_tokens(operator: str) -> None:
    case = make_case(20, 16, torch.float32, operator=operator)
    number = len(RECURRENCES[operator].tokens)
    with torch.autocast("cpu", torch.bfloat16):
        y, last = OPERATORS[operator](*case.inputs, backend="cpu")
    assert (y.dtype, last.dtype) == (torch.bfloat16, torch.float32)
    cast = [x.bfloat16() if n < number else x for n, x in enumerate(case.inputs)]
    want, _ = OPERATORS[operator](*cast, backend="cpu")
    assert torch.equal(y, want)


@compiled
@every_operator
def test_opcheck_passes(operator: str) -> None:
    case = make_case(17, 16, torch.float32, operator=operator)
    leaves = [x.clone().requires_grad_() for x in case.inputs]
    forward = getattr(torch.ops.rwkv_spec, f"{operator}_forward").default
    torch.library.opcheck(forward, (*leaves, case.starts, True))
    _, _, *kept = forward(*case.inputs, case.starts, True)
    torch.library.opcheck(
        getattr(torch.ops.rwkv_spec, f"{operator}_backward").default,
        (*case.inputs, case.starts, *kept, case.dy, case.dstate_out, True),
        test_utils=("test_schema", "test_faketensor"),
    )


@compiled
@pytest.mark.filterwarnings("default")
@every_operator
def test_torch_compile_takes_it_whole(operator: str) -> None:
    case = make_case(17, 16, torch.float32, operator=operator)

    def function(*xs: Tensor) -> tuple[Tensor, Tensor]:
        y, state = OPERATORS[operator](*xs, starts_BT=case.starts)
        return y * 2, state

    fast = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = []
    for f in (function, fast):
        leaves = [x.clone().requires_grad_() for x in case.inputs]
        outputs = f(*leaves)
        results.append((*outputs, *torch.autograd.grad(outputs, leaves, [case.dy, case.dstate_out])))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


# ---- what is refused, and what runs where ----


@every_operator
def test_wrong_tensors_are_named(operator: str) -> None:
    *inputs, state = make_case(4, 16, torch.float32, operator=operator).inputs
    k = RECURRENCES[operator].tokens.index("k")

    def with_k(x: Tensor) -> list[Tensor]:
        return [*inputs[:k], x, *inputs[k + 1 :]]

    bad: list[tuple[str, list[Tensor], Tensor | None, Tensor | None]] = [
        ("k must have r's shape", with_k(inputs[k][:, :3]), None, None),
        ("k must be float32 as r is, got bfloat16", with_k(inputs[k].bfloat16()), None, None),
        (r"r must be \[B, T, H, N\]", [x[0] for x in inputs], None, None),
        ("r must hold floating-point numbers", [x.long() for x in inputs], None, None),
        ("state must be float32", inputs, state.bfloat16(), None),
        ("state must be float32", inputs, state[:1], None),
        ("starts must be bool", inputs, None, torch.zeros(2, 4)),
        ("starts must be bool", inputs, None, torch.zeros(2, 5, dtype=torch.bool)),
    ]
    for message, xs, s, starts in bad:
        with pytest.raises(KernelError, match=f"^{operator}: {message}"):
            OPERATORS[operator](*xs, s, starts_BT=starts)


@pytest.mark.parametrize("operator", ["wkv5", "wkv6"])
def test_a_wrong_u_is_named(operator: str) -> None:
    *inputs, u, _ = make_case(4, 16, torch.bfloat16, operator=operator).inputs
    for wrong, got in ((u.bfloat16(), r"bfloat16 \[2, 16\]"), (u[:1], r"float32 \[1, 16\]"), (u.double(), "float64")):
        with pytest.raises(KernelError, match=rf"{operator}: u must be float32 \[2, 16\] on cpu, got {got}"):
            OPERATORS[operator](*inputs, wrong)
    # In float64 everything is.
    with pytest.raises(KernelError, match="u must be float64"):
        OPERATORS[operator](*(x.double() for x in inputs), u)


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
@every_operator
def test_a_head_size_that_is_not_compiled_falls_back_or_is_refused(operator: str) -> None:
    inputs = make_case(3, 24, torch.float32, operator=operator).inputs
    with pytest.raises(KernelError, match=rf"{operator}: head size 24 is not compiled \(there are 16, 32"):
        OPERATORS[operator](*inputs, backend="cpu")
    assert torch.equal(OPERATORS[operator](*inputs)[0], OPERATORS[operator](*inputs, backend="torch")[0])


@compiled
@every_operator
def test_tensors_that_are_not_contiguous_are_taken(operator: str) -> None:
    case = make_case(5, 16, torch.float32, operator=operator)
    results = []
    for strided in (False, True):
        leaves = [x.clone().requires_grad_() for x in case.inputs]
        flows = [case.dy, case.dstate_out]
        if strided:
            # The same numbers, the first dimension lying innermost.
            leaves, flows = (
                [x.detach().movedim(0, -1).contiguous().movedim(-1, 0) for x in xs] for xs in (leaves, flows)
            )
            assert not any(x.is_contiguous() for x in (*leaves, *flows))
            leaves = [x.requires_grad_() for x in leaves]
        outputs = OPERATORS[operator](*leaves, backend="cpu")
        results.append((*outputs, *torch.autograd.grad(outputs, leaves, flows)))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


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


@compiled
@every_operator
def test_views_that_begin_at_odd_addresses_are_taken(operator: str) -> None:
    case = make_case(5, 16, torch.float32, operator=operator)
    odd = [torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in case.inputs]
    assert any(x.data_ptr() % 16 for x in odd)
    assert all(on_16_bytes(x).data_ptr() % 16 == 0 and torch.equal(on_16_bytes(x), x) for x in odd)
    assert all(on_16_bytes(x) is x for x in case.inputs)
    for one, other in zip(OPERATORS[operator](*odd), OPERATORS[operator](*case.inputs), strict=True):
        assert torch.equal(one, other)
