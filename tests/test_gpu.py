"""On a GPU the compiled recurrences pass their gates, and the same spec gives the same training."""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path

import pytest
import torch

import rwkv_spec
from rwkv_spec.ops.build_cuda import load_cuda_operator
from rwkv_spec.ops.dropout import dropout
from rwkv_spec.ops.wkv import REFERENCES, check_library, wkv5, wkv6, wkv7
from tests.ops.cases import RECURRENCES, error_ratio, expected, make_case, through_library
from tests.tiny import tiny_spec

pytestmark = pytest.mark.gpu

OPERATORS = {"wkv5": wkv5, "wkv6": wkv6, "wkv7": wkv7}
GATE = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}


@pytest.mark.parametrize("dtype", list(GATE), ids=str)
@pytest.mark.parametrize("N", [64, 128])
@pytest.mark.parametrize("T", [1, 15, 16, 17, 257])
@pytest.mark.parametrize("operator", OPERATORS)
def test_every_result_of_the_cuda_kernels_matches_float64(operator: str, T: int, N: int, dtype: torch.dtype) -> None:
    case = make_case(T, N, dtype, operator=operator)
    names = ("y", "state", *(f"d{name}" for name in RECURRENCES[operator].inputs), "dstate")
    results = []
    for function, double in ((OPERATORS[operator], False), (REFERENCES[operator], True)):
        leaves = [(x.double() if double else x.clone()).cuda().requires_grad_() for x in case.inputs]
        starts = None if case.starts is None else case.starts.cuda()
        extra = {} if double else {"backend": "cuda"}
        y, state = function(*leaves, starts_BT=starts, **extra)
        flows = [case.dy.cuda().to(y.dtype), case.dstate_out.cuda().to(state.dtype)]
        gradients = torch.autograd.grad([y, state], leaves, flows)
        results.append([x.detach() for x in (y, state, *gradients)])
    for name, got, want in zip(names, *results, strict=True):
        assert error_ratio(got, want) < GATE[dtype], name


@pytest.mark.parametrize("dtype", list(GATE), ids=str)
@pytest.mark.parametrize("N", [16, 32, 48, 64])
@pytest.mark.parametrize("T", [1, 15, 16, 17, 257])
def test_every_result_of_wkv7_on_tensor_cores_matches_float64(T: int, N: int, dtype: torch.dtype) -> None:
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        pytest.skip(f"products of tf32 numbers come with sm_80; this device is sm_{capability[0]}{capability[1]}")

    def check(library: ctypes.CDLL) -> None:
        check_library(RECURRENCES["wkv7"], library, (N,), device="cuda")

    library = load_cuda_operator("wkv7_tensor", N, capability, check).library
    case = make_case(T, N, dtype)
    assert case.starts is not None
    case = dataclasses.replace(
        case,
        inputs=tuple(x.cuda() for x in case.inputs),
        starts=case.starts.cuda(),
        dy=case.dy.cuda(),
        dstate_out=case.dstate_out.cuda(),
    )
    first = through_library(library, case)
    for name, got, want in zip(case.results, first, expected(case), strict=True):
        assert error_ratio(got, want) < GATE[dtype], name
    assert all(torch.equal(x, y) for x, y in zip(through_library(library, case), first, strict=True))


def test_the_cuda_kernels_run_on_the_current_stream() -> None:
    case = make_case(257, 64, torch.float32)
    inputs = [x.cuda() for x in case.inputs]
    expected = wkv7(*inputs, backend="cuda")[0]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = [x * 1.0 for x in inputs]
        y = wkv7(*late, backend="cuda")[0]
    stream.synchronize()
    assert torch.equal(y, expected)


def test_a_run_on_a_gpu_gives_the_losses_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gpu", "cpu"):
        (tmp_path / name).mkdir()
    on_gpu = rwkv_spec.run(tiny_spec(tmp_path / "gpu"))
    assert on_gpu.plan.backend == "cuda" and next(on_gpu.model.parameters()).is_cuda
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    on_cpu = rwkv_spec.run(tiny_spec(tmp_path / "cpu"))
    for left, right in zip(on_gpu.metrics, on_cpu.metrics, strict=True):
        assert left.loss == pytest.approx(right.loss, rel=1e-4), left.step


def test_dropout_drops_the_same_elements_on_gpu_and_cpu() -> None:
    x, seeds = torch.ones(3, 50, 64), torch.tensor([1, 2, 3])
    on_gpu = dropout(x.cuda(), p=0.3, seed_B=seeds.cuda(), site=4)
    assert torch.equal(on_gpu.cpu(), dropout(x, p=0.3, seed_B=seeds, site=4))
