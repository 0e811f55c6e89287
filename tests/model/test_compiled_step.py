"""The compiled step form: the numbers of the plain one for any number of sequences and threads, and nothing stale."""

from __future__ import annotations

import copy
import io
import pickle
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from rwkv_spec.errors import KernelError
from rwkv_spec.model import compiled_step
from rwkv_spec.model.build import build_model
from rwkv_spec.model.compiled_step import CompiledStep, takes_step
from rwkv_spec.model.language_model import LanguageModel, State
from rwkv_spec.model.shapes import TYPES, ModelShape, fresh_shape
from rwkv_spec.ops.build import Kernels
from tests.model.models import VOCAB_SIZE, assert_same_state, compiled_or_skip, random_ids, random_model
from tests.ops.cases import error_ratio

# Of the root of the mean square: the layers between make more of a rounding than one product does.
GATE = 2e-5
every_type = pytest.mark.parametrize("type", TYPES)


@pytest.fixture(autouse=True)
def _needs_a_compiler() -> None:
    compiled_or_skip("x070")


def pair(type: str, **sizes: int) -> tuple[LanguageModel, LanguageModel]:
    """A model whose step form is compiled, and one in plain torch and float64 with the same weights."""
    compiled = random_model(type, dtype=torch.float32, backend="cpu", **sizes)
    plain = random_model(type, dtype=torch.float32, backend="torch", **sizes)
    plain.load_state_dict(compiled.state_dict())
    return compiled.requires_grad_(False), plain.double().requires_grad_(False)


def random_state(model: LanguageModel, batch_size: int) -> State:
    generator = torch.Generator().manual_seed(3)
    return State(*(torch.randn(x.shape, generator=generator) for x in model.initial_state(batch_size).tensors))


def widened(state: State) -> State:
    return State(*(x.double() for x in state.tensors))


@every_type
@pytest.mark.parametrize("batch_size", [1, 2, 3, 33])
@pytest.mark.parametrize(
    ("n_layer", "n_embd", "head_size"), [(1, 16, 16), (3, 96, 48), (2, 128, 64), (2, 128, 128), (2, 160, 80)]
)
def test_it_gives_the_numbers_of_the_plain_form(
    type: str, batch_size: int, n_layer: int, n_embd: int, head_size: int
) -> None:
    model, plain = pair(type, n_layer=n_layer, n_embd=n_embd, head_size=head_size)
    state = random_state(model, batch_size)
    expected_state = widened(state)
    with torch.no_grad():
        for ids_B in random_ids(3, batch_size):
            logits, state = model.step(ids_B, state)
            expected, expected_state = plain.step(ids_B, expected_state)
            assert error_ratio(logits, expected) < GATE
    for got, want in zip(state.tensors, expected_state.tensors, strict=True):
        assert error_ratio(got, want) < GATE
    assert model._compiled_step is not None and plain._compiled_step is None


@pytest.mark.parametrize(("decay", "iclr", "value", "gate"), [(1, 1, 1, 1), (5, 67, 3, 130), (40, 20, 100, 48)])
def test_ranks_of_any_size_are_taken(decay: int, iclr: int, value: int, gate: int) -> None:
    shape = ModelShape("x070", 2, 64, 32, VOCAB_SIZE, decay, iclr, value, gate, dim_ffn=256)
    models = [build_model(shape, backend=backend, seed=4).requires_grad_(False) for backend in ("cpu", "torch")]
    for model in models:
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    state, ids = random_state(models[0], 1), torch.tensor([3])
    with torch.no_grad():
        (logits, after), (expected, expected_after) = (model.step(ids, state) for model in models)
    for got, want in zip((logits, *after.tensors), (expected, *expected_after.tensors), strict=True):
        assert error_ratio(got, want.double()) < GATE


@every_type
@pytest.mark.parametrize("batch_size", [1, 5])
def test_the_given_state_is_left_alone_unless_it_is_to_take_the_new_one(type: str, batch_size: int) -> None:
    model, _ = pair(type, n_layer=2, n_embd=64, head_size=32)
    state, ids = random_state(model, batch_size), random_ids(1, batch_size)[0]
    before = state.clone()
    with torch.no_grad():
        logits, after = model.step(ids, state)
        assert_same_state(state, before, tolerance=0.0)
        again, same = model.step(ids, state, out=state)
    assert same is state
    assert torch.equal(logits, again)
    assert_same_state(state, after, tolerance=0.0)


@every_type
@pytest.mark.parametrize("batch_size", [1, 5])
def test_threads_change_no_bit(type: str, batch_size: int) -> None:
    # Wide enough that a second thread is worth its waking.
    model, _ = pair(type, n_layer=1, n_embd=512, head_size=64)
    state, threads, results = random_state(model, batch_size), torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            with torch.no_grad():
                results.append(model.step(torch.arange(batch_size), state))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0][0], results[1][0])
    assert_same_state(results[0][1], results[1][1], tolerance=0.0)


def step_once(model: LanguageModel) -> Tensor:
    with torch.no_grad():
        return model.step(torch.tensor([4]), random_state(model, 1))[0]


@every_type
def test_weights_that_are_changed_or_exchanged_are_followed(type: str) -> None:
    model, _ = pair(type, n_layer=2, n_embd=64, head_size=32)
    seen = [step_once(model)]
    first = model._compiled_step
    with torch.no_grad():
        model.blocks[0].att.key.weight *= 1.5
    seen.append(step_once(model))
    assert model._compiled_step is first
    model.blocks[1].ffn.value.weight.data = model.blocks[1].ffn.value.weight.data * 1.5
    seen.append(step_once(model))
    model.blocks[1].att.ln_x.bias = nn.Parameter(torch.ones(64))
    seen.append(step_once(model))
    model.head = nn.Linear(64, VOCAB_SIZE, bias=False).requires_grad_(False)
    seen.append(step_once(model))
    for one, other in pairwise(seen):
        assert not torch.allclose(one, other, rtol=1e-3)
    with torch.no_grad():
        plain = model.__class__(model.shape, dropout=0.0, backend="torch")
        plain.load_state_dict(model.state_dict())
        torch.testing.assert_close(step_once(plain), seen[-1], rtol=1e-4, atol=1e-4)


@every_type
def test_a_model_can_be_copied_pickled_and_saved_after_a_step(type: str) -> None:
    model, _ = pair(type, n_layer=2, n_embd=64, head_size=32)
    expected = step_once(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)):
        assert other._compiled_step is None
        assert torch.equal(step_once(other), expected)


@every_type
def test_gradients_other_dtypes_and_strides_take_the_plain_form(type: str) -> None:
    model, _ = pair(type, n_layer=2, n_embd=64, head_size=32)
    expected, state, ids = step_once(model), random_state(model, 1), torch.tensor([4])
    strided = State(*(torch.stack([x, x], dim=-1)[..., 0] for x in state.tensors))
    with torch.no_grad():
        torch.testing.assert_close(model.step(ids, strided)[0], expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(copy.deepcopy(model).double().step(ids, widened(state))[0].float(), expected,
                                   rtol=1e-4, atol=1e-4)  # fmt: skip
    trained = copy.deepcopy(model).requires_grad_(True)
    logits, _ = trained.step(ids, state)
    logits.sum().backward()
    torch.testing.assert_close(logits.detach(), expected, rtol=1e-4, atol=1e-4)
    assert trained.blocks[0].att.key.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("index", [-1, VOCAB_SIZE, 1 << 40])
def test_an_id_outside_the_vocabulary_is_refused(index: int) -> None:
    model, _ = pair("x070", n_layer=1, n_embd=32, head_size=16)
    with torch.no_grad(), pytest.raises(IndexError):
        model.step(torch.tensor([index]), model.initial_state(1))
    step_once(model)
    with torch.no_grad(), pytest.raises(IndexError, match=f"id {index} is outside the vocabulary of {VOCAB_SIZE} ids"):
        model.step(torch.tensor([index]), model.initial_state(1))


@every_type
def test_a_weight_that_is_not_a_number_is_not_hidden(type: str) -> None:
    model, _ = pair(type, n_layer=2, n_embd=64, head_size=32)
    with torch.no_grad():
        model.blocks[1].ffn.key.weight[3, 5] = float("nan")
    assert torch.isnan(step_once(model)).all()
    # Nothing could be compared with, so that the next token will be.
    assert model._compiled_step is None


@every_type
def test_ids_that_are_not_one_for_each_sequence_are_refused(type: str) -> None:
    for model in pair(type, n_layer=1, n_embd=32, head_size=16):
        state = model.initial_state(2)
        for ids in (torch.tensor([1]), torch.tensor([1, 2, 3]), torch.tensor([[1], [2]]), torch.tensor(1)):
            with torch.no_grad(), pytest.raises(ValueError, match="one for each of the state's 2 sequences"):
                model.step(ids, state)
        with torch.no_grad(), pytest.raises(ValueError, match="the state's 0 sequences"):
            model.step(torch.tensor([], dtype=torch.int64), model.initial_state(0))


@pytest.mark.parametrize("type", ["x052", "x060"])
def test_slow_decays_lose_no_digits_over_many_tokens(type: str) -> None:
    model, plain = pair(type, n_layer=1, n_embd=16, head_size=16)
    # Rounded to a float32, each of these decays would be wrong by up to 3e-8 at every token, always to the same side.
    for one in (model, plain):
        with torch.no_grad():
            one.blocks[0].att.time_decay.copy_(torch.linspace(-9, -7, 16).view(one.blocks[0].att.time_decay.shape))
            if type == "x060":
                one.blocks[0].att.time_decay_w2.zero_()
    state, expected = random_state(model, 1), widened(random_state(model, 1))
    with torch.no_grad():
        for ids in random_ids(2000, 1):
            _, state = model.step(ids, state, out=state)
            _, expected = plain.step(ids, expected, out=expected)
    assert error_ratio(state.wkv, expected.wkv) < 2e-6


def test_a_call_that_computes_wrong_numbers_is_refused_at_its_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        @staticmethod
        def step(*arguments: object) -> int:
            return 0

    model, _ = pair("x070", n_layer=1, n_embd=32, head_size=16)
    wrong = Kernels(Wrong(), "a compiler", "instructions", "")  # type: ignore[arg-type]
    monkeypatch.setattr(compiled_step, "step_of_this_machine", lambda: wrong)
    with pytest.raises(KernelError, match=r"computes wrong numbers .* choose kernels: torch"):
        step_once(model)


def test_the_order_of_weights_covers_every_parameter() -> None:
    for type in TYPES:
        shape = fresh_shape(type, n_layer=2, n_embd=32, head_size=16, vocab_size=VOCAB_SIZE)
        model = build_model(shape)
        taken = {f"{owner_id}/{name}" for owner_id, name in _taken(CompiledStep(model, shape))}
        expected = {
            f"{id(module._parameters if name in module._parameters else module._buffers)}/{name}"
            for module in model.modules()
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        }
        assert taken == expected


def _taken(step: CompiledStep) -> list[tuple[int, str]]:
    return [(id(owner), name) for owner, name, _, _ in step._tensors]


def test_it_is_used_only_where_it_can_be() -> None:
    weight = torch.zeros(2, 32)
    with torch.no_grad():
        assert takes_step(weight, head_size=16, backend="auto")
        assert takes_step(weight, head_size=16, backend="cpu")
        assert not takes_step(weight, head_size=16, backend="torch")
        assert not takes_step(weight, head_size=16, backend="cuda")
        assert not takes_step(weight, head_size=24, backend="auto")
        assert not takes_step(weight.double(), head_size=16, backend="auto")
        assert not takes_step(weight.bfloat16(), head_size=16, backend="auto")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert not takes_step(weight, head_size=16, backend="auto")
    assert not takes_step(weight, head_size=16, backend="auto")
