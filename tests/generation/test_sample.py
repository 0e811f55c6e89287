"""Choosing a token: greedy, temperature, top_k and top_p, each row by its own seed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rwkv_spec.generation.sample import Sampling, sample, sequence_generators


def _logits(rows: int = 3, vocab_size: int = 17) -> Tensor:
    return 2 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(1))


def _counts(logits_V: Tensor, sampling: Sampling, *, draws: int = 4000) -> Tensor:
    (generator,) = sequence_generators(5, count=1)
    rows = logits_V.expand(draws, -1)
    tokens, _ = sample(rows, sampling=sampling, generators=[generator] * draws)
    return torch.bincount(torch.tensor(tokens), minlength=logits_V.shape[0]) / draws


def test_greedy_takes_the_first_largest() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 5.0]])
    tokens, _ = sample(logits, sampling=Sampling(temperature=0.0), generators=sequence_generators(0, count=2))
    assert tokens == [1, 0]


def test_logprobs_are_the_models_own() -> None:
    logits = _logits()
    for sampling in (Sampling(temperature=0.0), Sampling(temperature=3.0), Sampling(top_k=2), Sampling(top_p=0.3)):
        tokens, logprobs = sample(logits, sampling=sampling, generators=sequence_generators(0, count=3))
        own = logits.double().log_softmax(dim=-1)
        assert logprobs == pytest.approx([float(own[row, token]) for row, token in enumerate(tokens)])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_tempered_probabilities(temperature: float) -> None:
    logits = _logits(1)[0]
    found = _counts(logits, Sampling(temperature=temperature))
    assert float((found - (logits / temperature).softmax(dim=-1)).abs().max()) < 0.03


def test_top_k_keeps_the_k_largest_in_their_proportion() -> None:
    logits = torch.log(torch.tensor([0.1, 0.4, 0.2, 0.3]))
    found = _counts(logits, Sampling(top_k=2))
    assert found.tolist() == pytest.approx([0.0, 4 / 7, 0.0, 3 / 7], abs=0.03)
    assert float(_counts(logits, Sampling(top_k=1))[1]) == 1.0
    assert _counts(logits, Sampling(top_k=100)).tolist() == pytest.approx([0.1, 0.4, 0.2, 0.3], abs=0.03)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.log(torch.tensor([0.1, 0.4, 0.2, 0.3]))
    assert _counts(logits, Sampling(top_p=0.65)).tolist() == pytest.approx([0.0, 4 / 7, 0.0, 3 / 7], abs=0.03)
    assert float(_counts(logits, Sampling(top_p=0.35))[1]) == 1.0
    assert float(_counts(logits, Sampling(top_p=1e-9))[1]) == 1.0


def test_a_row_draws_the_same_in_any_batch() -> None:
    logits = _logits(4)
    for sampling in (Sampling(), Sampling(temperature=0.7, top_k=5), Sampling(top_p=0.8)):
        together, _ = sample(logits, sampling=sampling, generators=sequence_generators(10, count=4))
        alone = [
            sample(logits[row : row + 1], sampling=sampling, generators=sequence_generators(10 + row, count=1))[0][0]
            for row in range(4)
        ]
        assert together == alone


def test_rows_of_equal_logits_draw_differently() -> None:
    tokens, _ = sample(torch.zeros(20, 50), sampling=Sampling(), generators=sequence_generators(0, count=20))
    assert len(set(tokens)) > 10


def test_a_tiny_temperature_is_nearly_greedy_and_does_not_overflow() -> None:
    logits = _logits() * 1e4
    tokens, logprobs = sample(logits, sampling=Sampling(temperature=1e-300), generators=sequence_generators(0, count=3))
    assert tokens == logits.argmax(dim=-1).tolist()
    assert all(math.isfinite(logprob) for logprob in logprobs)


def test_logits_that_are_not_finite_are_value_errors() -> None:
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not finite"):
            sample(torch.tensor([[0.0, bad]]), sampling=Sampling(), generators=sequence_generators(0, count=1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -1.0}, "temperature must be"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"temperature": float("inf")}, "temperature must be"),
        ({"top_k": -1}, "top_k must be"),
        ({"top_k": 1.5}, "top_k must be"),
        ({"top_p": 0.0}, "top_p must be"),
        ({"top_p": 1.1}, "top_p must be"),
        ({"top_p": float("nan")}, "top_p must be"),
    ],
)
def test_impossible_settings_are_value_errors(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [-1, 1.5, True, 1 << 63])
def test_impossible_seeds_are_value_errors(seed: int) -> None:
    with pytest.raises(ValueError, match="seed must be"):
        sequence_generators(seed, count=2)


def test_as_many_generators_as_rows_are_needed() -> None:
    with pytest.raises(ValueError, match="generators"):
        sample(torch.zeros(2, 3), sampling=Sampling(), generators=sequence_generators(0, count=1))
