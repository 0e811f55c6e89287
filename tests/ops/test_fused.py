"""What is promised of every fused operator: who runs it, what it saves, and that nothing leaks, is lost or varies."""

from __future__ import annotations

import contextlib
import ctypes

import pytest
import torch
from torch import Tensor

from rwkv_spec.errors import KernelError
from rwkv_spec.ops.fused import ROWS_OF_A_PIECE, call, compare, num_pieces, operator_of_this_machine
from rwkv_spec.ops.norm_mix import NORM_MIX
from rwkv_spec.ops.relu2 import RELU2
from tests.ops.cases import compiled
from tests.ops.fused_cases import (
    EXAMPLES,
    OPERATORS,
    Case,
    Example,
    Tensors,
    assert_case,
    assert_right,
    every_dtype,
    every_example,
    every_operator,
    expected,
    gated_norm_case,
    norm_mix_case,
    outputs_of,
    poisoned_memory,
    results,
    sigmoid_gate_case,
    token_mix_case,
    wkv7_prepare_case,
)


def is_compiled(case: Case, backend: str) -> bool:
    """Whether compiled code gave the outputs: its part of a graph is one node with a name of its own."""
    _, outputs = outputs_of(case, backend)
    nodes = [x.grad_fn for x in outputs.values() if x.grad_fn is not None]
    return any(type(node).__name__.startswith("_") for node in nodes)


def with_a_nan(x: Tensor) -> Tensor:
    x = x.clone()
    x.view(-1)[20 * x.numel() // 50] = float("nan")
    return x


def same_bits(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(x, other[name]) for name, x in one.items())


# ---- who runs ----


@compiled
@every_dtype
@every_example
def test_compiled_code_runs_what_it_can(example: Example, dtype: torch.dtype) -> None:
    case = example.make(3, 32, dtype)
    assert is_compiled(case, "auto")
    assert is_compiled(case, "cpu")


@every_example
def test_kernels_torch_runs_the_reference(example: Example) -> None:
    assert not is_compiled(example.make(3, 32, torch.float32), "torch")


@every_example
def test_float64_is_run_by_the_reference(example: Example) -> None:
    case = example.make(3, 32, torch.float32)
    assert not is_compiled(case.double(), "auto")
    got = results(case.double(), "auto")
    assert all(x.dtype == torch.float64 for x in got.values())
    assert_right({name: x.float() for name, x in results(case, "torch").items()}, got)


@every_example
def test_float16_is_run_by_the_reference(example: Example) -> None:
    case = example.make(3, 32, torch.float16)
    assert not is_compiled(case, "auto")
    assert all(x.isfinite().all() for x in results(case, "auto").values())


@every_example
def test_parameters_in_another_dtype_than_float32_are_run_by_the_reference(example: Example) -> None:
    case = example.make(3, 32, torch.bfloat16)
    for name, x in case.inputs.items():
        # Where torch itself refuses to take two dtypes at once, that too is no compiled code.
        with contextlib.suppress(RuntimeError):
            assert x.dtype != torch.float32 or not is_compiled(case.changed(**{name: x.double()}), "cpu"), name


@compiled
@every_example
def test_rows_in_two_dtypes_are_run_by_the_reference(example: Example) -> None:
    case = example.make(3, 32, torch.bfloat16)
    rows = [name for name, x in case.inputs.items() if x.dtype == torch.bfloat16]
    for name in rows if len(case.inputs) > 1 else ():
        assert not is_compiled(case.changed(**{name: case.inputs[name].float()}), "cpu"), name


@compiled
@every_dtype
@pytest.mark.parametrize("width", [8, 24, 40])
def test_a_width_that_no_vector_fills_is_run_by_the_reference(width: int, dtype: torch.dtype) -> None:
    for case in (
        norm_mix_case(3, width, dtype),
        gated_norm_case(3, 2, width, dtype, bonus=True),
        wkv7_prepare_case(3, 2, width, dtype, residual=True),
        token_mix_case(3, width, dtype),
        sigmoid_gate_case(3, width, dtype),
    ):
        assert not is_compiled(case, "cpu")
        assert same_bits(results(case, "cpu"), results(case, "torch"))


@compiled
@every_example
@pytest.mark.filterwarnings("default")
def test_torch_compile_takes_the_reference_whole(example: Example) -> None:
    case = example.make(3, 32, torch.float32)

    def function(x: Tensors) -> Tensors:
        return case.run(x, case.dtype, "cpu")

    # Every example is the same function to it, of which it makes but few forms.
    torch.compiler.reset()
    traced = torch.compile(function, fullgraph=True, backend="aot_eager")(case.inputs)
    assert same_bits(traced, case.run(case.inputs, case.dtype, "torch"))


@every_example
def test_a_backend_that_does_not_exist_is_named(example: Example) -> None:
    with pytest.raises(KernelError, match="there is no backend 'gpu'"):
        outputs_of(example.make(3, 32, torch.float32), "gpu")


@pytest.mark.parametrize("backend", ["auto", "cpu", "cuda"])
def test_what_compiled_code_cannot_do_is_run_by_the_reference_whatever_was_asked_for(backend: str) -> None:
    for dtype, device in ((torch.float16, "cpu"), (torch.float64, "cpu"), (torch.float32, "meta")):
        x = torch.ones(1, dtype=dtype, device=device)
        assert RELU2.library(backend, x.device, rows=(x,), dtype=dtype) is None
    x = torch.ones(1)
    assert RELU2.library("cuda", x.device, rows=(x,), dtype=torch.float32) is None


# ---- a fresh build ----


@compiled
@every_operator
def test_the_check_of_a_fresh_build_takes_a_right_one_whatever_torch_is_set_to(operator: str) -> None:
    library = operator_of_this_machine(OPERATORS[operator]).library
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with (
            poisoned_memory(),
            torch.inference_mode(),
            torch.autocast("cpu", dtype=torch.bfloat16),
            torch.device("meta"),
        ):
            OPERATORS[operator].check(library)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("wrong", [1.001, float("nan"), float("inf")])
def test_wrong_numbers_are_a_kernel_error(wrong: float) -> None:
    right = torch.ones(5)
    compare("some_operator", [right, right], [right.double(), right.double()])
    with pytest.raises(KernelError, match=r"some_operator: the compiler made a kernel that computes wrong numbers"):
        compare("some_operator", [right, right * wrong], [right.double(), right.double()])


@compiled
def test_a_code_that_is_not_0_is_a_kernel_error() -> None:
    library = operator_of_this_machine(NORM_MIX).library
    x = torch.ones(1, 16)
    # For three mixed outputs nothing is compiled.
    sizes = (1, 1, 16, 3, ROWS_OF_A_PIECE)
    with pytest.raises(KernelError, match="norm_mix_forward"):
        call(library, "norm_mix_forward", sizes, torch.float32, [x] * 14)


def test_pieces_are_counted_up() -> None:
    assert [num_pieces(rows) for rows in (0, 1, ROWS_OF_A_PIECE, ROWS_OF_A_PIECE + 1)] == [0, 1, 1, 2]


# ---- what a call gives ----


def test_the_memory_of_these_tests_is_poisoned() -> None:
    with poisoned_memory():
        x = torch.ones(3)
        made = (torch.empty(3), torch.empty_like(x), x.new_empty(3), x.new_empty(3, dtype=torch.bfloat16))
    assert all(y.isnan().all() for y in made)


@compiled
@every_dtype
@every_example
def test_each_output_alone_gives_its_gradients(example: Example, dtype: torch.dtype) -> None:
    case = example.make(ROWS_OF_A_PIECE + 1, 32, dtype)
    for name in expected(case):
        if name in outputs_of(case, "cpu")[1]:
            assert_case(case, f"{name} alone:", only=[name])


@compiled
@every_dtype
@every_example
def test_an_input_that_needs_no_gradient_changes_no_other(example: Example, dtype: torch.dtype) -> None:
    case = example.make(5, 32, dtype)
    whole = results(case, "cpu")
    for fixed in case.inputs:
        leaves, outputs = outputs_of(case, "cpu")
        leaves = {name: x.detach().requires_grad_(name != fixed) for name, x in leaves.items()}
        outputs = {name: x for name, x in case.run(leaves, dtype, "cpu").items() if x.requires_grad}
        flows = [case.upstream(name, x) for name, x in outputs.items()]
        learning = {name: x for name, x in leaves.items() if name != fixed}
        if not learning:
            return
        gradients = torch.autograd.grad(list(outputs.values()), list(learning.values()), flows, materialize_grads=True)
        for name, x in zip(learning, gradients, strict=True):
            assert torch.equal(x, whole[f"d{name}"]), (fixed, name)


@compiled
@every_dtype
@every_example
def test_views_with_strides_give_the_same_bits(example: Example, dtype: torch.dtype) -> None:
    case = example.make(7, 32, dtype)

    def with_strides(x: Tensor) -> Tensor:
        return torch.stack((x, x + 1), dim=-1)[..., 0]

    def transposed(x: Tensor) -> Tensor:
        return x.transpose(0, -1).contiguous().transpose(0, -1)

    contiguous = {name: case.upstream(name, x) for name, x in outputs_of(case, "cpu")[1].items()}
    want = results(case, "cpu", upstream=contiguous)
    for change in (with_strides, transposed):

        def run(x: Tensors, dtype: torch.dtype, backend: str, change: object = change) -> Tensors:
            assert callable(change)
            return case.run({name: change(y) for name, y in x.items()}, dtype, backend)

        upstream = {name: change(x) for name, x in contiguous.items()}
        assert same_bits(results(Case(dtype, case.inputs, run), "cpu", upstream=upstream), want)


@compiled
@every_dtype
@every_example
def test_an_upstream_gradient_of_one_number_gives_the_same_bits(example: Example, dtype: torch.dtype) -> None:
    case = example.make(7, 32, dtype)
    outputs = outputs_of(case, "cpu")[1]
    expanded = {name: torch.ones((), dtype=x.dtype).expand(x.shape) for name, x in outputs.items()}
    whole = {name: x.contiguous() for name, x in expanded.items()}
    assert same_bits(results(case, "cpu", upstream=expanded), results(case, "cpu", upstream=whole))


@compiled
@every_dtype
@every_example
def test_what_flows_in_and_what_goes_in_is_left_as_it_was(example: Example, dtype: torch.dtype) -> None:
    case = example.make(ROWS_OF_A_PIECE + 1, 32, dtype)
    upstream = {name: case.upstream(name, x) for name, x in outputs_of(case, "cpu")[1].items()}
    before = {name: x.clone() for name, x in (upstream | case.inputs).items()}
    results(case, "cpu", upstream=upstream)
    assert same_bits(upstream | case.inputs, before)


@compiled
@every_dtype
@every_example
def test_no_bit_depends_on_the_number_of_threads(example: Example, dtype: torch.dtype) -> None:
    # Enough pieces that torch, too, shares out the sums over them.
    case = example.make(40 * ROWS_OF_A_PIECE + 1, 224, dtype)
    before = torch.get_num_threads()
    runs = []
    try:
        for num_threads in (1, 3, 2):
            torch.set_num_threads(num_threads)
            runs.append(results(case, "cpu"))
    finally:
        torch.set_num_threads(before)
    assert same_bits(runs[0], runs[1])
    assert same_bits(runs[0], runs[2])


@compiled
@every_dtype
@every_example
def test_what_is_not_a_number_is_so_where_the_reference_says(example: Example, dtype: torch.dtype) -> None:
    case = example.make(ROWS_OF_A_PIECE + 6, 32, dtype)
    clean = results(case, "cpu")
    flows = {name: case.upstream(name, x) for name, x in outputs_of(case, "cpu")[1].items()}
    for name in (*case.inputs, *flows):
        inputs = {other: with_a_nan(x) if other == name else x for other, x in case.inputs.items()}
        upstream = {other: with_a_nan(x) if other == name else x for other, x in flows.items()}
        poisoned = Case(dtype, inputs, case.run)
        got, want = results(poisoned, "cpu", upstream=upstream), results(poisoned, "torch", upstream=upstream)
        for result, x in got.items():
            assert torch.equal(x.isnan(), want[result].isnan()), (name, result)
            # All else has the bits that it has without: nothing leaks.
            if x.shape in {y.shape for y in flows.values()}:
                assert torch.equal(x[~x.isnan()], clean[result][~x.isnan()]), (name, result)


@compiled
@every_dtype
@every_example
def test_autocast_and_inference_mode_change_nothing(example: Example, dtype: torch.dtype) -> None:
    case = example.make(5, 32, dtype)
    want = results(case, "cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same_bits(results(case, "cpu"), want)
    with torch.inference_mode():
        outputs = case.run({name: x.clone() for name, x in case.inputs.items()}, dtype, "cpu")
    assert same_bits({name: x.clone() for name, x in outputs.items()}, {name: want[name] for name in outputs})


# ---- what is saved ----

# Beside inputs: by the shape of a tensor of rows [R, 32].
SAVED_ANEW = {
    "norm_mix": [(1, 5, 32), (1, 5, 2)],
    "norm_mix of x alone": [(1, 5, 2)],
    "relu2": [(160,)],
}
NEVER_SAVED = {"norm_mix": {"x", "added"}, "wkv7_prepare": {"w_low"}, "wkv7_prepare of block 0": {"w_low", "v"}}


@compiled
@every_dtype
@every_example
def test_only_what_is_promised_is_saved(example: Example, dtype: torch.dtype) -> None:
    name = next(name for name, other in EXAMPLES.items() if other is example)
    case = example.make(5, 32, dtype)
    leaves = {name: x.clone().requires_grad_() for name, x in case.inputs.items()}
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        outputs = case.run(leaves, dtype, "cpu")
    inputs = {x.data_ptr(): name for name, x in leaves.items()}
    anew = [x for x in saved if x.data_ptr() not in inputs and x.dtype != torch.bool]
    assert [tuple(x.shape) for x in anew] == SAVED_ANEW.get(name, [])
    # What is as large as the rows is an output besides: it takes no memory of its own.
    large = {x.data_ptr() for x in anew if x.shape[-1] > 2}
    assert large <= {x.data_ptr() for x in outputs.values()}
    assert not {inputs.get(x.data_ptr()) for x in saved} & NEVER_SAVED.get(name, set())


@compiled
@compiled
@every_example
def test_a_gradient_of_a_gradient_is_an_error_and_no_zero(example: Example) -> None:
    leaves, outputs = outputs_of(example.make(5, 32, torch.float32), "cpu")
    graded = [x for x in leaves.values() if x.requires_grad]
    total = torch.stack([x.square().sum() for x in outputs.values()]).sum()
    gradients = torch.autograd.grad(total, graded, create_graph=True, allow_unused=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        torch.stack([x.sum() for x in gradients if x is not None]).sum().backward()


def test_every_operator_has_a_library_of_its_own() -> None:
    libraries = [operator_of_this_machine(operator).library for operator in OPERATORS.values()]
    assert all(isinstance(library, ctypes.CDLL) for library in libraries)
    assert len({library._name for library in libraries}) == len(OPERATORS)
