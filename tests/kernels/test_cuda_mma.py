"""Products on tensor cores, emulated lane by lane: numbers lie as the device has them and are rounded as it does."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.kernels.cuda_cases import ORDERS, SOURCES, compile_for_cpu, emulated
from tests.ops.cases import error_ratio

pytestmark = emulated
every_order = pytest.mark.parametrize("order", ORDERS)
# 11 significant bits: half a unit of the last one is 2^-11, of which a sum of products shows less.
GATE = {False: 5e-4, True: 1e-6}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("mma")
    return compile_for_cpu(Path(__file__).parent / "emulated_mma.cu", folder / "mma.so", "-O1", f"-I{SOURCES}")


def run(
    programs: ctypes.CDLL, name: str, order: int, a: Tensor, b: Tensor, shape: tuple[int, int], *more: int
) -> Tensor:
    out = torch.full(shape, float("nan"))
    programs.cuemu_set_order(order)
    addresses = (ctypes.c_void_p(x.data_ptr()) for x in (a, b, out))
    assert getattr(programs, name)(*addresses, *more) == 0, programs.cuemu_message().decode()
    return out


def rounded(programs: ctypes.CDLL, x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    programs.round_to_tf32(ctypes.c_int64(x.numel()), ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr()))
    return out


def test_numbers_are_rounded_to_eleven_bits_ties_away_from_zero(programs: ctypes.CDLL) -> None:
    x = torch.cat((torch.randn(10_000) * 100, torch.tensor([1 + 2.0**-11, -1 - 2.0**-11, 0.0, -0.0, float("inf")])))
    mantissa, exponent = torch.frexp(x.double())
    away = torch.copysign(torch.floor(mantissa.abs() * 2048 + 0.5), mantissa) / 2048
    want = torch.where(x.isinf(), x.double(), torch.ldexp(away, exponent))
    assert torch.equal(rounded(programs, x).double(), want)


@every_order
def test_a_product_in_the_order_of_the_device(programs: ctypes.CDLL, order: int) -> None:
    # Small whole numbers: every product and sum is exact, so a number in a wrong lane shows.
    a, b = torch.randint(-9, 10, (16, 8)).float(), torch.randint(-9, 10, (8, 8)).float()
    assert torch.equal(run(programs, "run_device_order", order, a, b, (16, 8)), a @ b)


@every_order
def test_a_product_of_squares_is_that_with_the_transpose(programs: ctypes.CDLL, order: int) -> None:
    a, b = torch.randint(-9, 10, (2, 16, 16)).float()
    for three in (0, 1):
        assert torch.equal(run(programs, "run_squares", order, a, b, (16, 16), three), a @ b.T)


@pytest.mark.parametrize("three", [False, True])
def test_three_products_are_as_exact_as_float32(programs: ctypes.CDLL, three: bool) -> None:
    a, b = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(1))
    got = run(programs, "run_squares", 0, a, b, (16, 16), three)
    assert GATE[three] / 10 < error_ratio(got, a.double() @ b.double().T) < GATE[three]
    if not three:
        near = rounded(programs, a).double() @ rounded(programs, b).double().T
        assert error_ratio(got, near) < GATE[True]


@every_order
@pytest.mark.parametrize("three", [False, True])
def test_the_inverse_of_a_triangle(programs: ctypes.CDLL, order: int, three: bool) -> None:
    a = torch.randn(16, 16, generator=torch.Generator().manual_seed(2)).tril(-1) * 0.3
    got = run(programs, "run_inverses", order, a, a.T.contiguous(), (16, 16), three)
    assert error_ratio(got, torch.linalg.inv(torch.eye(16).double() - a.double())) < 2 * GATE[three]
    assert not got.triu(1).any()
