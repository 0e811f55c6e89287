"""eval_loss is what anyone would compute by hand: every token of every document, one document at a time, in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rwkv_spec.evaluate import Evaluation, evaluate
from rwkv_spec.model.build import build_model
from rwkv_spec.model.language_model import LanguageModel
from rwkv_spec.model.shapes import fresh_shape

NUM_IDS = 13
LENGTHS = (7, 1, 0, 23, 16, 1, 40, 0, 17)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    """Random in every weight: freshly initialised matrices are partly zero and would hide a forgotten state."""
    built = build_model(
        fresh_shape("x070", n_layer=2, n_embd=32, head_size=16, vocab_size=NUM_IDS),
        dropout=0.5,
        backend="torch",
        seed=3,
    ).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return built.eval()


@pytest.fixture(scope="module")
def documents() -> list[np.ndarray]:
    generator = np.random.default_rng(1)
    return [generator.integers(1, NUM_IDS, length).astype(np.uint16) for length in LENGTHS]


@pytest.fixture(scope="module")
def naive(model: LanguageModel, documents: list[np.ndarray]) -> float:
    """Token by token from the step form: its state is the model's whole memory."""
    loss_sum = 0.0
    with torch.no_grad():
        for document in documents:
            state = model.initial_state(1)
            previous = 0
            for token in document.tolist():
                logits_BV, state = model.step(torch.tensor([previous]), state)
                loss_sum -= float(torch.log_softmax(logits_BV[0], dim=0)[token])
                previous = token
    return loss_sum


@pytest.mark.parametrize("chunk_len", [1, 3, 16, 39, 40, 1000])
@pytest.mark.parametrize("batch_size", [1, 2, 4, 100])
def test_it_is_the_naive_sum_whatever_the_chunks_and_batches(
    model: LanguageModel, documents: list[np.ndarray], naive: float, chunk_len: int, batch_size: int
) -> None:
    found = evaluate(model, documents, chunk_len=chunk_len, batch_size=batch_size)
    assert found.num_tokens == sum(LENGTHS)
    assert found.loss_sum == pytest.approx(naive, rel=1e-10)


def test_the_naive_sum_tells_states_that_are_lost(
    model: LanguageModel, documents: list[np.ndarray], naive: float
) -> None:
    """A state that starts anew at each chunk gives another number, so the test above can fail."""
    torn = [piece for document in documents for piece in np.array_split(document, 3)]
    assert evaluate(model, torn, chunk_len=16, batch_size=4).loss_sum != pytest.approx(naive, rel=1e-4)


def test_the_order_of_documents_plays_no_part(model: LanguageModel, documents: list[np.ndarray], naive: float) -> None:
    assert evaluate(model, documents[::-1], chunk_len=5, batch_size=3).loss_sum == pytest.approx(naive, rel=1e-10)


def test_shares_of_processes_add_up(model: LanguageModel, documents: list[np.ndarray], naive: float) -> None:
    shares = [evaluate(model, documents[rank::4], chunk_len=8, batch_size=2) for rank in range(4)]
    assert sum(share.loss_sum for share in shares) == pytest.approx(naive, rel=1e-10)
    assert sum(share.num_tokens for share in shares) == sum(LENGTHS)


@pytest.mark.parametrize("documents", [[], [np.zeros(0, np.int64)]])
def test_nothing_to_score_gives_nothing(model: LanguageModel, documents: list[np.ndarray]) -> None:
    assert evaluate(model, documents, chunk_len=8, batch_size=2) == Evaluation(0.0, 0)


def test_dropout_is_off_and_the_mode_is_given_back(
    model: LanguageModel, documents: list[np.ndarray], naive: float
) -> None:
    model.train()
    assert evaluate(model, documents, chunk_len=8, batch_size=4).loss_sum == pytest.approx(naive, rel=1e-10)
    assert model.training
    model.eval()
    evaluate(model, documents, chunk_len=8, batch_size=4)
    assert not model.training and all(parameter.grad is None for parameter in model.parameters())


def test_float32_stays_close(model: LanguageModel, documents: list[np.ndarray], naive: float) -> None:
    small = build_model(model.shape, seed=None, backend="auto")
    small.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
    found = evaluate(small, documents, chunk_len=16, batch_size=4)
    assert math.isclose(found.loss_sum, naive, rel_tol=1e-5)
