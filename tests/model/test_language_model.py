"""The model's numbers: golden logits and gradients, and the two forms and their states in agreement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rwkv_spec.model.build import build_model, load_state
from rwkv_spec.model.language_model import LanguageModel, State
from rwkv_spec.model.rwkv7 import Block
from rwkv_spec.model.shapes import ModelShape, fresh_shape
from rwkv_spec.objective.cross_entropy import cross_entropy
from rwkv_spec.ops.build import NoCompiler
from rwkv_spec.ops.dropout import dropout
from rwkv_spec.ops.wkv import resolve_backend

GOLDEN = Path(__file__).parents[1] / "golden"
VOCAB_SIZE = 11


def random_model(
    *, dtype: torch.dtype = torch.float64, n_layer: int = 3, n_embd: int = 32, head_size: int = 16
) -> LanguageModel:
    """No weight is left at its start of zero, so that nothing is tested on a silent path."""
    shape = fresh_shape("x070", n_layer=n_layer, n_embd=n_embd, head_size=head_size, vocab_size=VOCAB_SIZE)
    model = build_model(shape, seed=1).to(dtype)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator).to(dtype)
    return model


def random_ids(batch_size: int, length: int, *, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB_SIZE, (batch_size, length), generator=torch.Generator().manual_seed(seed))


def with_state(result: Tensor | tuple[Tensor, State]) -> tuple[Tensor, State]:
    assert isinstance(result, tuple)
    return result


def assert_same_state(one: State, other: State, *, tolerance: float = 1e-10) -> None:
    for name in ("att_shift", "wkv", "ffn_shift"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def mini() -> dict[str, Any]:
    golden: dict[str, Any] = json.loads((GOLDEN / "x070_mini.json").read_text(encoding="utf-8"))
    return golden


def mini_model(dtype: torch.dtype, backend: str) -> LanguageModel:
    weights = torch.load(GOLDEN / "x070_mini_L2-D128-V32.pth", weights_only=True)
    ranks = [weights[f"blocks.1.att.{letter}1"].shape[1] for letter in "wavg"]
    model = build_model(ModelShape("x070", 2, 128, 64, 32, *ranks, 512), backend=backend, seed=None).to(dtype)
    load_state(model, weights)
    return model


def compiled_or_skip() -> None:
    try:
        resolve_backend("cpu", device="cpu", dtype=torch.float32, operator="wkv7")
    except NoCompiler as error:
        pytest.skip(f"no compiler here: {error}")


@pytest.mark.parametrize(
    ("dtype", "backend", "tolerance"),
    [(torch.float64, "torch", 1e-10), (torch.float32, "torch", 1e-5), (torch.float32, "cpu", 1e-5)],
)
@pytest.mark.parametrize(("l2wrap", "key"), [(0.0, "grad_ce"), (1e-4, "grad_ce_plus_l2wrap")])
def test_logits_loss_and_every_gradient_are_the_golden_ones(
    mini: dict[str, Any], dtype: torch.dtype, backend: str, tolerance: float, l2wrap: float, key: str
) -> None:
    if backend == "cpu":
        compiled_or_skip()
    model = mini_model(dtype, backend)
    logits = model(torch.tensor(mini["idx"]))
    golden_logits = torch.tensor(mini["logits"], dtype=torch.float64)
    assert (logits.double() - golden_logits).abs().max() <= tolerance * golden_logits.abs().max()
    weighted_sum, weight = cross_entropy(logits, torch.tensor(mini["targets"]), torch.ones(2, 32), l2wrap=l2wrap)
    loss = weighted_sum / weight
    assert float(loss.detach()) == pytest.approx(mini["loss_ce"], rel=tolerance)
    loss.backward()
    parameters = dict(model.named_parameters())
    untrained = {f"blocks.0.att.v{i}" for i in range(3)}
    assert set(parameters) == set(mini[key]) - untrained
    for name, parameter in parameters.items():
        golden = mini[key][name]
        assert parameter.grad is not None
        grad = parameter.grad.double()
        # Single entries are small differences of large terms, so that their scale is that of the whole; an error of
        # the whole can add up to sqrt(n) times as much in a sum of n entries (Cauchy-Schwarz).
        scale = pytest.approx(0.0, abs=tolerance * golden["norm"])
        assert float(grad.norm()) - golden["norm"] == scale, name
        spread = pytest.approx(0.0, abs=tolerance * golden["norm"] * grad.numel() ** 0.5)
        assert float(grad.sum()) - golden["sum"] == spread, name
        for ours, theirs in zip(grad.flatten()[:4].tolist(), golden["first4"], strict=True):
            assert ours - theirs == scale, name


@pytest.mark.parametrize(("n_layer", "n_embd", "head_size"), [(3, 32, 16), (1, 32, 32), (2, 24, 8), (2, 16, 1)])
def test_the_step_form_equals_the_parallel_form(n_layer: int, n_embd: int, head_size: int) -> None:
    model = random_model(n_layer=n_layer, n_embd=n_embd, head_size=head_size)
    ids = random_ids(3, 9)
    with torch.no_grad():
        parallel, last = with_state(model(ids, return_state=True))
        state = model.initial_state(3)
        steps = []
        for t in range(ids.shape[1]):
            logits, state = model.step(ids[:, t], state)
            steps.append(logits)
    torch.testing.assert_close(torch.stack(steps, dim=1), parallel, rtol=1e-10, atol=1e-10)
    assert_same_state(state, last)


def test_chunks_with_carried_state_equal_one_pass() -> None:
    model = random_model()
    ids = random_ids(2, 23)
    with torch.no_grad():
        whole, last = with_state(model(ids, return_state=True))
        state, parts = None, []
        for part in ids.split([1, 16, 2, 4], dim=1):
            logits, state = with_state(model(part, state, return_state=True))
            parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-10, atol=1e-10)
    assert state is not None
    assert_same_state(state, last)


def test_gradients_flow_through_a_carried_state() -> None:
    model = random_model()
    ids = random_ids(2, 12)

    def grads(logits: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(
            (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum(), list(model.parameters())
        )

    whole = grads(model(ids))
    first, state = with_state(model(ids[:, :5], return_state=True))
    carried = grads(torch.cat([first, model(ids[:, 5:], state)], dim=1))
    for one, other in zip(whole, carried, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


def test_starts_separate_documents_and_cut_the_given_state() -> None:
    model = random_model()
    documents = [random_ids(1, length, seed=length) for length in (4, 1, 7)]
    packed = torch.cat(documents, dim=1)
    starts = torch.zeros(1, 12, dtype=torch.bool)
    starts[0, [0, 4, 5]] = True
    foreign = State(*(torch.randn_like(t) for t in vars(model.initial_state(1)).values()))
    with torch.no_grad():
        together, last = with_state(model(packed, foreign, starts_BT=starts, return_state=True))
        apart = [with_state(model(document, return_state=True)) for document in documents]
    torch.testing.assert_close(together, torch.cat([logits for logits, _ in apart], dim=1), rtol=1e-10, atol=1e-10)
    assert_same_state(last, apart[-1][1])


def test_gradients_with_starts_are_those_of_separate_documents() -> None:
    model = random_model()
    documents = [random_ids(1, length, seed=length) for length in (4, 1, 7)]
    starts = torch.zeros(1, 12, dtype=torch.bool)
    starts[0, [0, 4, 5]] = True
    parameters = list(model.parameters())
    together = torch.autograd.grad(model(torch.cat(documents, dim=1), starts_BT=starts).square().sum(), parameters)
    apart = torch.autograd.grad(sum((model(d).square().sum() for d in documents), torch.zeros(())), parameters)
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


def test_prefill_gives_the_last_logits_of_the_parallel_form() -> None:
    model = random_model()
    ids = random_ids(2, 6)
    with torch.no_grad():
        whole, last = with_state(model(ids, return_state=True))
        logits, state = model.prefill(ids)
    torch.testing.assert_close(logits, whole[:, -1], rtol=1e-12, atol=1e-12)
    assert_same_state(state, last)


def test_a_row_does_not_depend_on_the_rest_of_the_batch() -> None:
    model = random_model()
    ids = random_ids(4, 7)
    with torch.no_grad():
        torch.testing.assert_close(model(ids)[2:3], model(ids[2:3]), rtol=1e-10, atol=1e-10)


def test_state_rows_can_be_selected_and_replaced() -> None:
    model = random_model()
    with torch.no_grad():
        _, state = with_state(model(random_ids(3, 5), return_state=True))
    picked = state.select(torch.tensor([2, 0]))
    assert picked.batch_size == 2
    assert torch.equal(picked.wkv[:, 0], state.wkv[:, 2])
    back = model.initial_state(3).replaced(torch.tensor([2, 0]), picked)
    assert torch.equal(back.att_shift[:, [0, 2]], state.att_shift[:, [0, 2]])
    assert bool((back.wkv[:, 1] == 0).all())
    copy = state.clone()
    copy.wkv.zero_()
    assert bool((state.wkv != 0).any())


def test_the_state_is_wide_in_every_precision() -> None:
    shape = fresh_shape("x070", n_layer=1, n_embd=32, head_size=16, vocab_size=5)
    assert build_model(shape).to(torch.bfloat16).initial_state(1).wkv.dtype == torch.float32
    assert build_model(shape).double().initial_state(1).wkv.dtype == torch.float64


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_autocast_in_bf16_stays_near_float32(backend: str) -> None:
    if backend == "cpu":
        compiled_or_skip()
    model = mini_model(torch.float32, backend)
    ids = random_ids(2, 20)
    exact = model(ids)
    with torch.autocast("cpu", torch.bfloat16):
        rough, state = with_state(model(ids, return_state=True))
    rough = rough.float()
    error = (rough - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 1e-6 < float(error.detach()) < 0.05
    assert state.wkv.dtype == torch.float32
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        state = model.initial_state(2)
        for t in range(20):
            stepped, state = model.step(ids[:, t], state)
    assert state.wkv.dtype == torch.float32
    exact = exact.detach()
    assert float((stepped - exact[:, -1]).square().mean().sqrt() / exact.square().mean().sqrt()) < 0.05
    rough.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.dtype == torch.float32 for parameter in model.parameters())


def test_a_model_wholly_in_bf16_runs_both_forms() -> None:
    model = random_model(dtype=torch.bfloat16)
    ids = random_ids(2, 5)
    with torch.no_grad():
        parallel, state = with_state(model(ids[:, :4], return_state=True))
        stepped, _ = model.step(ids[:, 4], state)
        whole = model(ids)
    assert parallel.dtype == torch.bfloat16
    torch.testing.assert_close(stepped.float(), whole[:, -1].float(), rtol=0.2, atol=0.2)


def test_dropout_depends_on_the_seeds_alone() -> None:
    shape = fresh_shape("x070", n_layer=2, n_embd=32, head_size=16, vocab_size=VOCAB_SIZE)
    model = build_model(shape, dropout=0.4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1
    ids = random_ids(3, 8)
    seeds = torch.tensor([7, 8, 9])
    with torch.no_grad():
        plain = model(ids)
        dropped = model(ids, dropout_seed_B=seeds)
        torch.manual_seed(123)
        assert torch.equal(dropped, model(ids, dropout_seed_B=seeds))
        torch.testing.assert_close(dropped[1:2], model(ids[1:2], dropout_seed_B=seeds[1:2]))
        assert not torch.allclose(dropped, model(ids, dropout_seed_B=seeds + 1))
        assert not torch.allclose(dropped, plain)
        assert torch.equal(plain, model(ids))


def test_each_sum_of_each_block_has_a_dropout_site_of_its_own() -> None:
    shape = fresh_shape("x070", n_layer=2, n_embd=32, head_size=16, vocab_size=VOCAB_SIZE)
    model = build_model(shape, dropout=0.4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1
    ids, seeds = random_ids(2, 6), torch.tensor([7, 8])
    with torch.no_grad():
        x, v_first = model.emb(ids), None
        for layer, block in enumerate(model.blocks):
            assert isinstance(block, Block)
            x = x if block.ln0 is None else block.ln0(x)
            att, v_first, _ = block.att(block.ln1(x), v_first, shift_BC=None, state_BHNN=None, starts_BT=None)
            x = x + dropout(att, p=0.4, seed_B=seeds, site=2 * layer)
            ffn = block.ffn(block.ln2(x), shift_BC=None, starts_BT=None)
            x = x + dropout(ffn, p=0.4, seed_B=seeds, site=2 * layer + 1)
        torch.testing.assert_close(model(ids, dropout_seed_B=seeds), model.head(model.ln_out(x)))


def test_no_random_state_is_used_or_moved() -> None:
    before = torch.get_rng_state()
    model = build_model(fresh_shape("x070", n_layer=1, n_embd=32, head_size=16, vocab_size=5), dropout=0.5)
    model(torch.zeros(1, 3, dtype=torch.int64), dropout_seed_B=torch.tensor([1]))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("sizes", [(3,), (1, 0), (1, 2, 3)])
def test_ids_of_another_form_are_value_errors(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="ids must be"):
        random_model()(torch.zeros(sizes, dtype=torch.int64))
