"""Choosing a token: greedy, temperature, top_k, top_p and penalties, each row by its own number."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from rwkv_spec.generation.penalty import History
from rwkv_spec.generation.sample import NonFiniteLogits, Sampling, check_seed, sample, uniform


def _logits(rows: int = 3, vocab_size: int = 17) -> Tensor:
    return 2 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(1))


def _counts(logits_V: Tensor, sampling: Sampling, *, draws: int = 4000) -> Tensor:
    rows = logits_V.expand(draws, -1)
    tokens, _ = sample(rows, sampling=sampling, numbers=[uniform(5, place) for place in range(draws)])
    return torch.bincount(torch.tensor(tokens), minlength=logits_V.shape[0]) / draws


def test_greedy_takes_the_first_largest() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 5.0]])
    tokens, _ = sample(logits, sampling=Sampling(temperature=0.0), numbers=[0.0] * 2)
    assert tokens == [1, 0]


def test_logprobs_are_the_models_own() -> None:
    logits = _logits()
    for sampling in (Sampling(temperature=0.0), Sampling(temperature=3.0), Sampling(top_k=2), Sampling(top_p=0.3)):
        tokens, logprobs = sample(logits, sampling=sampling, numbers=[0.5] * 3)
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
    numbers = [uniform(10 + row, 7) for row in range(4)]
    histories = [_history(PENALTIES, prompt=[row], text=[row + 1, row + 1, 5]) for row in range(4)]
    for sampling in (Sampling(), Sampling(temperature=0.7, top_k=5), Sampling(top_p=0.8)):
        together, logprobs = sample(logits, sampling=sampling, numbers=numbers, histories=histories)
        for row in range(4):
            alone, own = sample(
                logits[row : row + 1], sampling=sampling, numbers=numbers[row : row + 1], histories=[histories[row]]
            )
            assert (alone, own) == ([together[row]], [logprobs[row]])


def test_rows_of_equal_logits_draw_differently() -> None:
    tokens, _ = sample(torch.zeros(20, 50), sampling=Sampling(), numbers=[uniform(row, 0) for row in range(20)])
    assert len(set(tokens)) > 10


def test_the_numbers_are_uniform_and_neither_seeds_nor_places_are_alike() -> None:
    for numbers in (
        [uniform(3, place) for place in range(20000)],
        [uniform(seed, 3) for seed in range(20000)],
    ):
        assert all(0.0 <= number < 1.0 for number in numbers) and len(set(numbers)) == 20000
        counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
        # Five standard deviations of a share of 1/20.
        assert np.abs(counts - 1000).max() < 5 * math.sqrt(20000 * 0.05 * 0.95)
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


def test_the_numbers_of_a_seed_stay_what_they_are() -> None:
    """A saved seed means a text: these are what the first version drew."""
    assert [uniform(0, 1), uniform(7, 123)] == [0.26850248758465334, 0.04000685892195632]


@pytest.mark.parametrize("cut", [{}, {"top_k": 30}, {"top_p": 0.999}], ids=str)
def test_neither_the_smallest_nor_the_largest_number_draws_what_is_left_out(cut: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn((2000, 40), generator=generator)
    # Where all the rest weighs little, the total comes close to 1, where floating-point numbers change their spacing.
    logits[1000:, 5] += 20 * torch.rand(1000, generator=generator)
    for number in (0.0, 1 - 2.0**-53):
        tokens, _ = sample(
            logits,
            sampling=Sampling(**cut),  # type: ignore[arg-type]
            numbers=[number] * 2000,
            num_ids=38,
            gaps=[0, 1, 20, 37],
        )
        assert not set(tokens) & {0, 1, 20, 37, 38, 39}


def test_a_tiny_temperature_is_nearly_greedy_and_does_not_overflow() -> None:
    logits = _logits() * 1e4
    tokens, logprobs = sample(logits, sampling=Sampling(temperature=1e-300), numbers=[0.5] * 3)
    assert tokens == logits.argmax(dim=-1).tolist()
    assert all(math.isfinite(logprob) for logprob in logprobs)


def test_logits_that_are_not_finite_are_value_errors() -> None:
    for bad in (float("nan"), float("inf")):
        with pytest.raises(NonFiniteLogits, match="not finite"):
            sample(torch.tensor([[0.0, bad]]), sampling=Sampling(), numbers=[0.0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -1.0}, "temperature must be"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"temperature": float("inf")}, "temperature must be"),
        ({"temperature": "1"}, "temperature must be a number, got '1'"),
        ({"top_p": None}, "top_p must be a number, got None"),
        ({"top_k": -1}, "top_k must be"),
        ({"top_k": 1.5}, "top_k must be"),
        ({"top_p": 0.0}, "top_p must be"),
        ({"top_p": 1.1}, "top_p must be"),
        ({"top_p": float("nan")}, "top_p must be"),
        ({"presence_penalty": float("nan")}, "presence_penalty must be from -1000 to 1000"),
        ({"presence_penalty": 1001.0}, "presence_penalty must be"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty must be"),
        ({"frequency_penalty": -1001.0}, "frequency_penalty must be"),
        ({"penalty_decay": 1.01}, "penalty_decay must be from 0 to 1"),
        ({"penalty_decay": -0.1}, "penalty_decay must be"),
        ({"penalty_decay": float("nan")}, "penalty_decay must be"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be from 0.001 to 1000"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty must be"),
    ],
)
def test_impossible_settings_are_value_errors(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [-1, 1.5, True, 1 << 63])
def test_impossible_seeds_are_value_errors(seed: int) -> None:
    with pytest.raises(ValueError, match="seed must be"):
        check_seed(seed, count=2)


def test_as_many_numbers_as_rows_are_needed() -> None:
    with pytest.raises(ValueError, match="numbers"):
        sample(torch.zeros(2, 3), sampling=Sampling(), numbers=[0.0])


PENALTIES = Sampling(
    temperature=0.0, presence_penalty=0.7, frequency_penalty=0.4, penalty_decay=0.9, repetition_penalty=1.3
)


def _history(sampling: Sampling, *, prompt: list[int], text: list[int]) -> History | None:
    return sampling.history([*prompt, *text], [False] * len(prompt) + [True] * len(text))


def _penalised(logits_V: list[float], sampling: Sampling, prompt: list[int], text: list[int]) -> list[float]:
    """The penalties as chat programs write them, one token at a time, in plain Python."""
    found = list(logits_V)
    for token in set(prompt + text) - {0}:
        if token < len(found):
            repetition = sampling.repetition_penalty
            found[token] = found[token] / repetition if found[token] > 0 else found[token] * repetition
    occurrence: dict[int, float] = {}
    for token in text:
        for known in occurrence:
            occurrence[known] *= sampling.penalty_decay
        occurrence[token] = occurrence.get(token, 0.0) + 1
    for token, count in occurrence.items():
        if 0 < token < len(found):
            found[token] -= sampling.presence_penalty + count * sampling.frequency_penalty
    return found


@pytest.mark.parametrize(
    "sampling",
    [
        PENALTIES,
        Sampling(presence_penalty=1.5),
        Sampling(presence_penalty=-1.5),
        Sampling(frequency_penalty=0.5),
        Sampling(frequency_penalty=0.5, penalty_decay=0.0),
        Sampling(frequency_penalty=0.5, penalty_decay=0.96),
        Sampling(repetition_penalty=1.2),
        Sampling(repetition_penalty=0.8),
    ],
    ids=str,
)
def test_penalties_are_what_chat_programs_compute(sampling: Sampling) -> None:
    draw = random.Random(3)
    for length in (0, 1, 5, 300):
        logits = [draw.gauss(0, 3) for _ in range(150)]
        # Ids up to 199: a padded vocabulary's prompt may hold more than can be drawn. 0 is the end of a document.
        prompt, text = ([draw.randrange(200) for _ in range(length)] for _ in range(2))
        history = sampling.history([*prompt, *text], [False] * length + [True] * length)
        assert history is not None
        own = np.array(logits)
        history.penalise(own)
        assert own.tolist() == pytest.approx(_penalised(logits, sampling, prompt, text), rel=1e-12)
        if length == 300:
            assert own.tolist() != pytest.approx(logits)


def test_a_penalty_changes_the_choice_but_not_the_log_probability() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.9, -3.0]])
    sampling = Sampling(temperature=0.0, presence_penalty=0.5)
    history = sampling.history([1], [True])
    (token,), (logprob,) = sample(logits, sampling=sampling, numbers=[0.0], histories=[history])
    assert token == 2
    assert logprob == pytest.approx(float(logits.double().log_softmax(dim=-1)[0, 2]), rel=1e-6)
    assert logits.tolist() == [[0.0, 2.0, pytest.approx(1.9), -3.0]]


def test_a_prompt_alone_moves_the_repetition_penalty_only() -> None:
    for sampling, expected in (
        (Sampling(presence_penalty=1.0, frequency_penalty=1.0), [2.0, 2.0, -2.0]),
        (Sampling(repetition_penalty=2.0), [2.0, 1.0, -4.0]),
    ):
        logits = np.array([2.0, 2.0, -2.0])
        history = sampling.history([0, 1, 1, 2], [False] * 4)
        assert history is not None
        history.penalise(logits)
        assert logits.tolist() == expected


def test_without_penalties_nothing_is_counted() -> None:
    assert Sampling(temperature=0.3, top_p=0.5, penalty_decay=0.5).history([1], [True]) is None
