"""Logits, loss and every gradient of the three generations are the published ones, with and without the kernels."""

from __future__ import annotations

import pytest
import torch

from rwkv_spec.model.block import Block
from rwkv_spec.model.rwkv6 import TimeMix6
from rwkv_spec.model.shapes import TYPES
from tests.model.models import compiled_or_skip, golden_model, golden_numbers, loss_of

# In this file the first token's bonus in head 1 is a sum of 64 terms that cancel to a thousandth of their size, and the
# group norm enlarges what is left. Rounding r and k to float32 alone moves this gradient by up to 1e-5 of its norm, and
# the published formula in plain float32 misses it by 3e-5. The test below holds the reason.
ILL_CONDITIONED = {("x060", "blocks.0.att.time_faaaa"): 1e-4}


@pytest.mark.parametrize(
    ("dtype", "backend", "tolerance"),
    [(torch.float64, "torch", 1e-10), (torch.float32, "torch", 1e-5), (torch.float32, "cpu", 1e-5)],
)
@pytest.mark.parametrize(("l2wrap", "key"), [(0.0, "grad_ce"), (1e-4, "grad_ce_plus_l2wrap")])
@pytest.mark.parametrize("type", TYPES)
def test_logits_loss_and_every_gradient_are_the_golden_ones(
    type: str, dtype: torch.dtype, backend: str, tolerance: float, l2wrap: float, key: str
) -> None:
    if backend == "cpu":
        compiled_or_skip(type)
    golden = golden_numbers(type)
    model = golden_model(type, dtype=dtype, backend=backend)
    logits = model(torch.tensor(golden["idx"]))
    golden_logits = torch.tensor(golden["logits"], dtype=torch.float64)
    assert (logits.double() - golden_logits).abs().max() <= tolerance * golden_logits.abs().max()
    weighted_sum, weight = loss_of(
        model,
        torch.tensor(golden["idx"]),
        torch.tensor(golden["targets"]),
        torch.ones(2, 32),
        l2wrap=l2wrap,
        backend=backend,
    )
    loss = weighted_sum / weight
    assert float(loss.detach()) == pytest.approx(golden["loss_ce"], rel=tolerance)
    loss.backward()
    parameters = dict(model.named_parameters())
    untrained = {f"blocks.0.att.v{i}" for i in range(3)} if type == "x070" else set()
    assert set(parameters) == set(golden[key]) - untrained
    for name, parameter in parameters.items():
        theirs = golden[key][name]
        assert parameter.grad is not None
        grad = parameter.grad.double()
        bound = tolerance if dtype == torch.float64 else ILL_CONDITIONED.get((type, name), tolerance)
        # Single entries are small differences of large terms, so that their scale is that of the whole; an error of
        # the whole can add up to sqrt(n) times as much in a sum of n entries (Cauchy-Schwarz).
        scale = pytest.approx(0.0, abs=bound * theirs["norm"])
        assert float(grad.norm()) - theirs["norm"] == scale, name
        spread = pytest.approx(0.0, abs=bound * theirs["norm"] * grad.numel() ** 0.5)
        assert float(grad.sum()) - theirs["sum"] == spread, name
        for our_entry, their_entry in zip(grad.flatten()[:4].tolist(), theirs["first4"], strict=True):
            assert our_entry - their_entry == scale, name


@pytest.mark.parametrize("type", TYPES)
def test_the_step_form_gives_the_golden_logits(type: str) -> None:
    golden = golden_numbers(type)
    model = golden_model(type, dtype=torch.float64, backend="torch")
    ids = torch.tensor(golden["idx"])
    state, steps = model.initial_state(len(ids)), []
    with torch.no_grad():
        for t in range(ids.shape[1]):
            logits, state = model.step(ids[:, t], state)
            steps.append(logits)
    golden_logits = torch.tensor(golden["logits"], dtype=torch.float64)
    assert (torch.stack(steps, dim=1) - golden_logits).abs().max() <= 1e-10 * golden_logits.abs().max()


def test_the_loosened_gradient_hangs_on_terms_that_cancel() -> None:
    model = golden_model("x060", dtype=torch.float64, backend="torch")
    block = model.blocks[0]
    assert isinstance(block, Block) and block.ln0 is not None and isinstance(block.att, TimeMix6)
    with torch.no_grad():
        first_BC = block.ln1(block.ln0(model.emb(torch.tensor(golden_numbers("x060")["idx"])[:, 0])))
        r_BC, _, k_BC, _, _ = block.att._project(block.att._mixed_once(first_BC, torch.zeros_like(first_BC)))
        terms_BHN = (r_BC * k_BC).view(-1, 2, 64) * block.att.time_faaaa
    assert float(terms_BHN[0, 1].abs().sum()) > 1000 * float(terms_BHN[0, 1].sum().abs())
