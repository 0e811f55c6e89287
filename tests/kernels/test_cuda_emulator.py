"""The emulator of CUDA: right programs give the right numbers in every order of threads, and faults are found."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.kernels.cuda_cases import FORWARD, REVERSE, SHUFFLED, compile_for_cpu, emulated

pytestmark = emulated
ORDERS = (FORWARD, REVERSE, SHUFFLED, SHUFFLED + 1, SHUFFLED + 2)
LAUNCH_FAILURE = 719
every_order = pytest.mark.parametrize("order", ORDERS)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("emulated")
    return compile_for_cpu(Path(__file__).parent / "emulated.cu", folder / "emulated.so", "-O1")


def run(programs: ctypes.CDLL, name: str, order: int, in_: Tensor, size: int, *more: int) -> tuple[int, Tensor]:
    out = torch.full((size,), float("nan"))
    programs.cuemu_set_order(order)
    addresses = (ctypes.c_void_p(in_.data_ptr()), ctypes.c_void_p(out.data_ptr()))
    return int(getattr(programs, name)(*addresses, *more)), out


@every_order
def test_shuffles_move_what_they_should(programs: ctypes.CDLL, order: int) -> None:
    x = torch.randn(64)
    code, out = run(programs, "run_shuffles", order, x, 256)
    lane = torch.arange(64)
    assert code == 0
    assert torch.equal(out[:64], x[lane ^ 5])
    assert torch.equal(out[64:128], x[torch.where(lane % 8 + 3 < 8, lane + 3, lane)])
    assert torch.equal(out[128:192], x[lane // 4 * 4 + 2])
    sums = x.clone()
    for turn in range(8):
        sums = torch.where(turn <= lane % 32 // 4, sums + sums[lane ^ (1 + turn % 3)], sums)
    assert torch.equal(out[192:], sums)


@pytest.mark.parametrize("name", ["run_reverses", "run_rotates"])
def test_a_missing_barrier_shows_and_a_barrier_mends_it(programs: ctypes.CDLL, name: str) -> None:
    x = torch.randn(192)
    want = x.view(2, 96).flip(1).flatten() if name == "run_reverses" else x[:96].roll(-64)
    size = len(want)
    assert all(torch.equal(run(programs, name, order, x, size, 1)[1], want) for order in ORDERS)
    # Every order but the one that happens to suit the program.
    wrong = [order for order in ORDERS if not torch.equal(run(programs, name, order, x, size, 0)[1], want)]
    assert len(wrong) >= 3


@every_order
def test_a_barrier_that_not_all_reach_ends_the_launch(programs: ctypes.CDLL, order: int) -> None:
    programs.cuemu_set_order(order)
    assert programs.run_diverges() == LAUNCH_FAILURE
    assert b"deadlock: 40 threads are at a barrier, 24 have ended" in programs.cuemu_message()


@every_order
def test_a_mask_must_name_lanes_that_are_there_and_the_own(programs: ctypes.CDLL, order: int) -> None:
    code, _ = run(programs, "run_leaves_its_warp", order, torch.zeros(32), 32)
    assert code == LAUNCH_FAILURE
    assert b"ended" in programs.cuemu_message()
    code, _ = run(programs, "run_names_too_few", order, torch.zeros(32), 32)
    assert code == LAUNCH_FAILURE
    assert b"not in the mask" in programs.cuemu_message()


def test_shared_memory_begins_as_no_number_and_is_fenced(programs: ctypes.CDLL) -> None:
    out = torch.zeros(32)
    assert programs.run_shows_shared(ctypes.c_void_p(out.data_ptr())) == 0
    assert out.isnan().all()
    assert programs.run_writes_shared(15) == 0
    for place in (-1, 16):
        assert programs.run_writes_shared(place) == LAUNCH_FAILURE
        assert b"outside of shared memory" in programs.cuemu_message()


def test_no_more_is_given_than_the_smallest_device_gives(programs: ctypes.CDLL) -> None:
    for size, asks, code in ((48, 0, 0), (49, 0, 1), (49, 1, 0), (99, 1, 0), (100, 1, 1)):
        assert programs.run_with_shared(ctypes.c_int64(size * 1024), asks) == code
    assert [programs.run_threads(count) for count in (0, 1, 1024, 1025)] == [9, 0, 0, 9]


def test_numbers_of_16_bits_are_rounded_as_torch_does(programs: ctypes.CDLL) -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (100_000,), dtype=torch.int64).to(torch.int32)
    special = torch.tensor([0.0, -0.0, 1.0, 65504.0, 65519.9, 65520.0, 6e-8, 3e-8, float("inf"), float("nan")])
    ties = torch.arange(4096, dtype=torch.int32) * 2**12 + 0x3F800000
    x = torch.cat((bits.view(torch.float32), special, ties.view(torch.float32), torch.randn(10_000)))
    bfloat16, float16 = (torch.empty(len(x), dtype=torch.int16) for _ in range(2))
    back = torch.empty(len(x), 2)
    addresses = (ctypes.c_void_p(each.data_ptr()) for each in (x, bfloat16, float16, back))
    programs.convert(ctypes.c_int64(len(x)), *addresses)
    for dtype, got, n in ((torch.bfloat16, bfloat16, 0), (torch.float16, float16, 1)):
        torch.testing.assert_close(got.view(dtype), x.to(dtype), rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(back[:, n], x.to(dtype).float(), rtol=0, atol=0, equal_nan=True)
