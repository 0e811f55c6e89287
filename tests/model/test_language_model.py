"""The forms of a model agree: steps, cuts, separate documents, batches, dtypes, dropout. For all generations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rwkv_spec.model.block import Block
from rwkv_spec.model.build import build_model
from rwkv_spec.model.language_model import State
from rwkv_spec.model.shapes import TYPES, fresh_shape
from rwkv_spec.ops.dropout import dropout
from tests.model.models import (
    VOCAB_SIZE,
    assert_same_state,
    compiled_or_skip,
    golden_model,
    random_ids,
    random_model,
    with_state,
)


@pytest.fixture(params=TYPES)
def type(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize(
    ("n_layer", "n_embd", "head_size"), [(3, 32, 16), (1, 32, 32), (2, 24, 8), (2, 16, 1), (1, 128, 128), (1, 96, 48)]
)
def test_the_step_form_equals_the_parallel_form(type: str, n_layer: int, n_embd: int, head_size: int) -> None:
    model = random_model(type, n_layer=n_layer, n_embd=n_embd, head_size=head_size)
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


def test_chunks_with_carried_state_equal_one_pass(type: str) -> None:
    model = random_model(type)
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


def test_the_parallel_form_with_starts_can_be_cut_anywhere_and_go_on_in_steps(type: str) -> None:
    model = random_model(type)
    ids = random_ids(2, 9)
    starts = torch.zeros(2, 9, dtype=torch.bool)
    starts[0, 3] = starts[1, 0] = True
    with torch.no_grad():
        whole, last = with_state(model(ids, starts_BT=starts, return_state=True))
        # From the last start on the step form, which knows no starts, can take over.
        for cut in range(4, 9):
            head, state = with_state(model(ids[:, :cut], starts_BT=starts[:, :cut], return_state=True))
            torch.testing.assert_close(head, whole[:, :cut], rtol=1e-10, atol=1e-10)
            for t in range(cut, 9):
                logits, state = model.step(ids[:, t], state)
                torch.testing.assert_close(logits, whole[:, t], rtol=1e-10, atol=1e-10)
            assert_same_state(state, last)


@pytest.mark.parametrize("head_size", [16, 48, 128])
def test_the_compiled_model_equals_the_plain_one_in_every_gradient(type: str, head_size: int) -> None:
    compiled_or_skip(type)
    ids = random_ids(2, 37)
    starts = torch.zeros(2, 37, dtype=torch.bool)
    starts[0, [0, 20]] = starts[1, 5] = True

    def results(dtype: torch.dtype, backend: str) -> list[Tensor]:
        model = random_model(type, dtype=dtype, n_layer=2, n_embd=2 * head_size, head_size=head_size, backend=backend)
        logits, state = with_state(model(ids, starts_BT=starts, return_state=True))
        # Logits alone and the last state take part, as in training through a carried state.
        loss = logits.square().mean() + state.wkv.square().mean()
        return [logits, state.wkv, *torch.autograd.grad(loss, list(model.parameters()))]

    exact = results(torch.float64, "torch")
    for ours, theirs in zip(results(torch.float32, "cpu"), exact, strict=True):
        assert (ours.double() - theirs).norm() <= 1e-4 * theirs.norm()


def test_gradients_flow_through_a_carried_state(type: str) -> None:
    model = random_model(type)
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


def test_starts_separate_documents_and_cut_the_given_state(type: str) -> None:
    model = random_model(type)
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


def test_gradients_with_starts_are_those_of_separate_documents(type: str) -> None:
    model = random_model(type)
    documents = [random_ids(1, length, seed=length) for length in (4, 1, 7)]
    starts = torch.zeros(1, 12, dtype=torch.bool)
    starts[0, [0, 4, 5]] = True
    parameters = list(model.parameters())
    together = torch.autograd.grad(model(torch.cat(documents, dim=1), starts_BT=starts).square().sum(), parameters)
    apart = torch.autograd.grad(sum((model(d).square().sum() for d in documents), torch.zeros(())), parameters)
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


def test_prefill_gives_the_last_logits_of_the_parallel_form(type: str) -> None:
    model = random_model(type)
    ids = random_ids(2, 6)
    with torch.no_grad():
        whole, last = with_state(model(ids, return_state=True))
        logits, state = model.prefill(ids)
    torch.testing.assert_close(logits, whole[:, -1], rtol=1e-12, atol=1e-12)
    assert_same_state(state, last)


def test_a_row_does_not_depend_on_the_rest_of_the_batch(type: str) -> None:
    model = random_model(type)
    ids = random_ids(4, 7)
    with torch.no_grad():
        torch.testing.assert_close(model(ids)[2:3], model(ids[2:3]), rtol=1e-10, atol=1e-10)


def test_state_rows_can_be_selected_and_replaced(type: str) -> None:
    model = random_model(type)
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


def test_the_state_is_wide_in_every_precision(type: str) -> None:
    shape = fresh_shape(type, n_layer=1, n_embd=32, head_size=16, vocab_size=5)
    assert build_model(shape).to(torch.bfloat16).initial_state(1).wkv.dtype == torch.float32
    assert build_model(shape).double().initial_state(1).wkv.dtype == torch.float64


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_autocast_in_bf16_stays_near_float32(type: str, backend: str) -> None:
    if backend == "cpu":
        compiled_or_skip(type)
    model = golden_model(type, dtype=torch.float32, backend=backend)
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


def test_a_model_wholly_in_bf16_runs_both_forms(type: str) -> None:
    model = random_model(type, dtype=torch.bfloat16)
    ids = random_ids(2, 5)
    with torch.no_grad():
        parallel, state = with_state(model(ids[:, :4], return_state=True))
        stepped, _ = model.step(ids[:, 4], state)
        whole = model(ids)
    assert parallel.dtype == torch.bfloat16
    torch.testing.assert_close(stepped.float(), whole[:, -1].float(), rtol=0.2, atol=0.2)


def test_dropout_depends_on_the_seeds_alone(type: str) -> None:
    shape = fresh_shape(type, n_layer=2, n_embd=32, head_size=16, vocab_size=VOCAB_SIZE)
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


def test_each_sum_of_each_block_has_a_dropout_site_of_its_own(type: str) -> None:
    shape = fresh_shape(type, n_layer=2, n_embd=32, head_size=16, vocab_size=VOCAB_SIZE)
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
            mixed = _mixed(block.ln1(x), block.att.shares())
            att, v_first, _ = block.att(mixed, v_first, shift_BC=None, state_BHNN=None, starts_BT=None)
            x = x + dropout(att, p=0.4, seed_B=seeds, site=2 * layer)
            ffn = block.ffn(_mixed(block.ln2(x), block.ffn.shares()))
            x = x + dropout(ffn, p=0.4, seed_B=seeds, site=2 * layer + 1)
        torch.testing.assert_close(model(ids, dropout_seed_B=seeds), model.head(model.ln_out(x)))


def _mixed(normed_BTC: Tensor, shares_MC: Tensor) -> tuple[Tensor, ...]:
    """What stands before the first token are zeros."""
    before_BTC = torch.nn.functional.pad(normed_BTC, (0, 0, 1, 0))[:, :-1]
    return tuple(normed_BTC + (before_BTC - normed_BTC) * share_C for share_C in shares_MC)


def test_no_random_state_is_used_or_moved(type: str) -> None:
    before = torch.get_rng_state()
    model = build_model(fresh_shape(type, n_layer=1, n_embd=32, head_size=16, vocab_size=5), dropout=0.5)
    model(torch.zeros(1, 3, dtype=torch.int64), dropout_seed_B=torch.tensor([1]))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("sizes", [(3,), (1, 0), (1, 2, 3)])
def test_ids_of_another_form_are_value_errors(type: str, sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="ids must be"):
        random_model(type)(torch.zeros(sizes, dtype=torch.int64))
