"""dropout: one mask for all forms, splits and threads; its bits look like coin tosses; so does the gradient's mask."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rwkv_spec.errors import KernelError
from rwkv_spec.ops.dropout import dropout, dropout_torch, kept
from tests.ops.cases import compiled

SEED = torch.tensor([3, -5, 2**62, -(2**63)])


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("C", [1, 15, 16, 17, 64, 100])
def test_compiled_and_plain_form_have_the_same_bits(C: int, dtype: torch.dtype) -> None:
    x = torch.randn(4, 70, C, generator=torch.Generator().manual_seed(C)).to(dtype)
    for p in (0.1, 0.5, 0.999):
        for start in (0, 12345):
            y = dropout(x, p=p, seed_B=SEED, site=7, start_T=start, backend="cpu")
            assert torch.equal(y, dropout_torch(x, p=p, seed_B=SEED, site=7, start_T=start))


@pytest.mark.parametrize("backend", [pytest.param("cpu", marks=compiled), "torch"])
def test_any_split_of_batch_and_time_gives_the_same_bits(backend: str) -> None:
    x = torch.randn(4, 9, 40)
    whole = dropout(x, p=0.3, seed_B=SEED, site=2, backend=backend)
    for rows in (slice(0, 1), slice(1, 4)):
        early = dropout(x[rows, :4], p=0.3, seed_B=SEED[rows], site=2, backend=backend)
        late = dropout(x[rows, 4:], p=0.3, seed_B=SEED[rows], site=2, start_T=4, backend=backend)
        assert torch.equal(torch.cat((early, late), dim=1), whole[rows])


@compiled
def test_thread_counts_give_the_same_bits() -> None:
    x = torch.randn(4, 300, 40)
    before = torch.get_num_threads()
    try:
        results = []
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            results.append(dropout(x, p=0.3, seed_B=SEED, site=2, backend="cpu"))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


@pytest.mark.parametrize("backend", [pytest.param("cpu", marks=compiled), "torch"])
def test_the_gradient_uses_the_mask_of_the_output(backend: str) -> None:
    x = torch.randn(4, 9, 40).requires_grad_()
    y = dropout(x, p=0.25, seed_B=SEED, site=1, backend=backend)
    dy = torch.randn(4, 9, 40)
    (dx,) = torch.autograd.grad(y, x, dy)
    mask = kept(SEED, num_times=9, num_channels=40, p=0.25, site=1)
    assert torch.equal(dx, torch.where(mask, dy * (1 / 0.75), torch.zeros(())))
    assert torch.equal(y.detach() != 0, mask)


@compiled
def test_only_seeds_are_saved() -> None:
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        dropout(torch.randn(4, 9, 40).requires_grad_(), p=0.25, seed_B=SEED, site=1, backend="cpu")
    assert [x.dtype for x in saved] == [torch.int64]


def test_no_dropout_is_the_input_itself() -> None:
    x = torch.randn(4, 3, 5)
    assert dropout(x, p=0.0, seed_B=SEED, site=0) is x


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_that_stays_is_right(p: float) -> None:
    mask = kept(torch.arange(32), num_times=128, num_channels=256, p=p, site=0)
    deviation = math.sqrt(p * (1 - p) / mask.numel())
    assert abs(float(mask.double().mean()) - (1 - p)) < 4 * deviation


def test_neighbouring_seeds_sites_times_and_channels_are_independent() -> None:
    seeds = torch.arange(8)
    masks = torch.stack([kept(seeds, num_times=64, num_channels=128, p=0.5, site=site) for site in range(4)])
    signs = masks.double() * 2 - 1
    for dimension, name in enumerate(("site", "seed", "time", "channel")):
        for step in (1, 2):
            size = signs.shape[dimension]
            agreement = signs.narrow(dimension, 0, size - step) * signs.narrow(dimension, step, size - step)
            assert abs(float(agreement.mean())) < 4 / math.sqrt(agreement.numel()), (name, step)
    # Sums over a whole row or channel spread as those of independent tosses do.
    for dimension in range(4):
        sums = signs.sum(dim=dimension)
        ratio = float(sums.square().mean()) / signs.shape[dimension]
        assert abs(ratio - 1) < 5 * math.sqrt(2 / sums.numel()), dimension


def test_a_seed_and_a_site_are_not_exchangeable() -> None:
    masks = [
        kept(torch.tensor([seed]), num_times=32, num_channels=64, p=0.5, site=site) for seed, site in ((1, 2), (2, 1))
    ]
    assert not torch.equal(*masks)


def test_wrong_arguments_are_named() -> None:
    x = torch.randn(4, 3, 5)
    for p in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match="at least 0 and below 1"):
            dropout(x, p=p, seed_B=SEED, site=0)
    with pytest.raises(KernelError, match=r"seed must be int64 \[4\]"):
        dropout(x, p=0.5, seed_B=SEED[:3], site=0)
    with pytest.raises(KernelError, match=r"seed must be int64 \[4\]"):
        dropout(x, p=0.5, seed_B=SEED.int(), site=0)
    with pytest.raises(KernelError, match=r"x must be \[B, T, C\]"):
        dropout(x[0], p=0.5, seed_B=SEED[:3], site=0)


@compiled
def test_opcheck_passes() -> None:
    x = torch.randn(4, 3, 5).requires_grad_()
    torch.library.opcheck(torch.ops.rwkv_spec.dropout.default, (x, SEED, 0.5, 1, 0))


@compiled
@pytest.mark.filterwarnings("default")
def test_torch_compile_takes_it_whole() -> None:
    x = torch.randn(4, 3, 5)

    def function(x: Tensor) -> Tensor:
        return dropout(x, p=0.5, seed_B=SEED, site=1) * 2

    assert torch.equal(torch.compile(function, fullgraph=True, backend="aot_eager")(x), function(x))
