"""On a GPU the compiled fused operators pass their gates, run on the current stream, and need no certain addresses."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor

from rwkv_spec.ops.fused import FusedOperator
from rwkv_spec.ops.relu2 import RELU2
from rwkv_spec.ops.softmax_loss import softmax_loss, softmax_loss_reference
from tests.ops.cases import error_ratio
from tests.ops.fused_cases import Case, Example, Tensors, every_example, expected, results
from tests.ops.test_fused import is_compiled, same_bits

pytestmark = pytest.mark.gpu

GATE = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}
every_dtype = pytest.mark.parametrize("dtype", list(GATE), ids=str)


def on_gpu(case: Case) -> Case:
    return case.changed(**{name: x.cuda() for name, x in case.inputs.items()})


def check(got: Tensors, want: Tensors) -> None:
    assert got.keys() == want.keys()
    for name, x in got.items():
        assert error_ratio(x.cpu(), want[name]) < GATE[x.dtype], name


@every_dtype
@every_example
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 257])
def test_every_result_of_the_cuda_operators_matches_float64(example: Example, rows: int, dtype: torch.dtype) -> None:
    for width in (32, 768):
        case = example.make(rows, width, dtype)
        assert is_compiled(on_gpu(case), "cuda")
        got = results(on_gpu(case), "cuda")
        check(got, expected(case))
        assert same_bits(results(on_gpu(case), "cuda"), got)


@every_example
def test_the_cuda_operators_run_on_the_current_stream(example: Example) -> None:
    case = on_gpu(example.make(257, 768, torch.float32))
    want = results(case, "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = case.changed(**{name: x * 1.0 for name, x in case.inputs.items()})
        got = results(late, "cuda")
    stream.synchronize()
    assert same_bits(got, want)


@every_example
def test_inputs_at_odd_addresses_change_nothing(example: Example) -> None:
    case = on_gpu(example.make(17, 32, torch.bfloat16))

    def shifted(x: Tensor) -> Tensor:
        return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)

    with torch.no_grad():
        want = case.run({name: x.clone() for name, x in case.inputs.items()}, case.dtype, "cuda")
        got = case.run({name: shifted(x) for name, x in case.inputs.items()}, case.dtype, "cuda")
    assert same_bits(got, want)


@every_dtype
@pytest.mark.parametrize("V", [1, 2, 15, 16, 17, 361, 65536])
def test_losses_and_gradients_of_logits_match_float64(V: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(V)
    logits = (4 * torch.randn(9, V, generator=generator)).to(dtype)
    targets, weights = torch.randint(V, (9,), generator=generator), torch.rand(9, generator=generator) + 0.1
    logits[4], weights[4] = float("nan"), 0.0
    wide, on_device = logits.double(), logits.cuda()
    want = softmax_loss_reference(wide, targets, weights.double(), l2wrap=0.3, want_gradient=True)
    loss = softmax_loss(on_device, targets.cuda(), weights.cuda(), l2wrap=0.3, want_gradient=True, backend="cuda")
    assert error_ratio(loss.cpu(), want) < GATE[torch.float32]
    assert error_ratio(on_device.cpu(), wide) < GATE[dtype]


def test_without_nvcc_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDACXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda command: None)
    # Another operator than that of all other tests, whose choice has been made.
    operator = FusedOperator("relu2", lambda library, device="cpu": RELU2.check(library, device))
    x = torch.ones(3, device="cuda")
    assert operator.library("auto", x.device, rows=(x,), dtype=x.dtype) is None
