"""From prompts to tokens: the same alone and in a batch, and stopped where asked."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from rwkv_spec.generation.decode import Generation, generate
from rwkv_spec.generation.sample import Sampling, uniform
from rwkv_spec.model.language_model import LanguageModel
from tests.generation.models import small_model

VOCAB_SIZE = 23
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [], [5, 3], [5, 8, 9, 7, 9], [2]]
PENALTIES = {"presence_penalty": 0.8, "frequency_penalty": 0.5, "penalty_decay": 0.95, "repetition_penalty": 1.2}


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return small_model(VOCAB_SIZE)


def _ids(results: list[Generation]) -> list[list[int]]:
    return [result.ids for result in results]


def _plain_greedy(model: LanguageModel, prompt: list[int], count: int) -> list[int]:
    ids = prompt or [0]
    for _ in range(count):
        with torch.no_grad():
            logits = model(torch.tensor([ids]))
        assert isinstance(logits, torch.Tensor)
        ids = [*ids, int(logits[0, -1].argmax())]
    return ids[-count:]


def test_greedy_tokens_are_those_of_the_parallel_form(model: LanguageModel) -> None:
    results = generate(model, PROMPTS, max_new_tokens=10, temperature=0.0, stop_at_end_of_document=False)
    assert _ids(results) == [_plain_greedy(model, prompt, 10) for prompt in PROMPTS]
    assert {result.stopped_by for result in results} == {"length"}


def test_logprobs_are_those_of_the_parallel_form(model: LanguageModel) -> None:
    (result,) = generate(model, [[4, 2]], max_new_tokens=6, temperature=2.0, stop_at_end_of_document=False)
    with torch.no_grad():
        logits = model(torch.tensor([[4, 2, *result.ids]]))
    assert isinstance(logits, torch.Tensor)
    own = logits[0, 1:-1].log_softmax(dim=-1)
    assert result.logprobs == pytest.approx([float(own[place, id]) for place, id in enumerate(result.ids)], rel=1e-9)


@pytest.mark.parametrize("penalties", [{}, PENALTIES], ids=["plain", "penalised"])
def test_a_batch_gives_what_its_rows_give_alone(model: LanguageModel, penalties: dict[str, float]) -> None:
    settings = {"max_new_tokens": 12, "temperature": 1.3, "top_k": 20, "top_p": 0.95, **penalties}
    together = generate(model, PROMPTS, seed=100, **settings)  # type: ignore[arg-type]
    for row, prompt in enumerate(PROMPTS):
        (alone,) = generate(model, [prompt], seed=100 + row, **settings)  # type: ignore[arg-type]
        assert alone.ids == together[row].ids
        assert alone.stopped_by == together[row].stopped_by
        assert alone.logprobs == pytest.approx(together[row].logprobs, rel=1e-9)
    assert len({tuple(ids) for ids in _ids(together)}) > 1


def test_seeds_decide_the_draw(model: LanguageModel) -> None:
    once, again, other = (_ids(generate(model, PROMPTS, max_new_tokens=12, seed=seed)) for seed in (1, 1, 50))
    assert once == again
    assert once != other


def test_the_draw_of_a_token_depends_on_its_place_and_not_on_where_the_prompt_ends(model: LanguageModel) -> None:
    settings = {"temperature": 1.5, "seed": 9, "stop_at_end_of_document": False}
    (whole,) = generate(model, [[4, 2, 6]], max_new_tokens=12, **settings)  # type: ignore[arg-type]
    (later,) = generate(model, [[4, 2, 6, *whole.ids[:5]]], max_new_tokens=7, **settings)  # type: ignore[arg-type]
    assert later.ids == whole.ids[5:]


def test_penalties_count_what_this_row_has_generated_so_far(model: LanguageModel) -> None:
    """Step by step against the plain definition, each token from the parallel form's logits."""
    settings = Sampling(temperature=1.2, **PENALTIES)
    found = generate(
        model, PROMPTS, max_new_tokens=30, temperature=1.2, seed=5, stop_at_end_of_document=False, **PENALTIES
    )
    plain = generate(model, PROMPTS, max_new_tokens=30, temperature=1.2, seed=5, stop_at_end_of_document=False)
    assert _ids(found) != _ids(plain)
    for row, prompt in enumerate(PROMPTS):
        start, text = prompt or [0], found[row].ids
        with torch.no_grad():
            logits = model(torch.tensor([start + text]))
        assert isinstance(logits, torch.Tensor)
        for place in range(len(text)):
            history = settings.history(start + text[:place], [False] * len(start) + [True] * place)
            assert history is not None
            own = logits[0, len(start) + place - 1].numpy().copy()
            history.penalise(own)
            chances = np.exp((own - own.max()) / 1.2)
            drawn = uniform(5 + row, len(start) + place) * chances.sum()
            assert text[place] == np.searchsorted(chances.cumsum(), drawn, side="right")


def test_a_strong_penalty_keeps_tokens_from_coming_again(model: LanguageModel) -> None:
    settings = {"max_new_tokens": 20, "temperature": 0.0, "stop_at_end_of_document": False}
    (free,) = generate(model, [[1]], **settings)  # type: ignore[arg-type]
    (apart,) = generate(model, [[1]], presence_penalty=1000.0, **settings)  # type: ignore[arg-type]
    assert len(set(free.ids)) < 20
    # Token 0, the end of a document, is never penalised.
    others = [token for token in apart.ids if token]
    assert len(set(others)) == len(others) > 0


@pytest.mark.parametrize("type", ["x052", "x060", "x070"])
def test_the_prompts_are_read_by_the_parallel_form_and_each_later_token_by_a_step(
    monkeypatch: pytest.MonkeyPatch, type: str
) -> None:
    model = small_model(VOCAB_SIZE, type=type)
    calls: list[tuple[str, int]] = []
    prefill, step = LanguageModel.prefill, LanguageModel.step

    def counted_prefill(self: LanguageModel, ids_BT: torch.Tensor, *rest: object) -> object:
        calls.append(("prefill", ids_BT.shape[1]))
        return prefill(self, ids_BT, *rest)  # type: ignore[arg-type]

    def counted_step(self: LanguageModel, ids_B: torch.Tensor, *rest: object, **named: object) -> object:
        calls.append(("step", len(ids_B)))
        return step(self, ids_B, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(LanguageModel, "prefill", counted_prefill)
    monkeypatch.setattr(LanguageModel, "step", counted_step)
    prompt = random.Random(1).choices(range(VOCAB_SIZE), k=1000)
    generate(model, [prompt, prompt[:300]], max_new_tokens=4, stop_at_end_of_document=False)
    # The last token is drawn, and nothing follows that would need it read.
    assert calls == [("prefill", 300), ("prefill", 700), ("step", 2), ("step", 2), ("step", 2)]


def test_an_empty_prompt_starts_from_the_end_of_a_document(model: LanguageModel) -> None:
    empty, zero = generate(model, [[], [0]], max_new_tokens=5, temperature=0.0, stop_at_end_of_document=False)
    assert empty == zero


def test_no_new_tokens_and_no_prompts_work(model: LanguageModel) -> None:
    assert generate(model, [[1], []], max_new_tokens=0) == [Generation([], [], "length")] * 2
    assert generate(model, [], max_new_tokens=5) == []


def test_a_stop_sequence_ends_its_row_and_is_left_out(model: LanguageModel) -> None:
    free = generate(model, PROMPTS, max_new_tokens=12, temperature=0.0, stop_at_end_of_document=False)
    ids = free[0].ids
    stop = ids[3:6]
    stopped = generate(
        model, PROMPTS, max_new_tokens=12, temperature=0.0, stop_sequences=[stop], stop_at_end_of_document=False
    )
    first = next(place for place in range(len(ids)) if ids[place : place + 3] == stop)
    assert stopped[0].ids == ids[:first]
    assert stopped[0].stopped_by == "stop_sequence"
    assert len(stopped[0].logprobs) == first
    for row in range(1, len(PROMPTS)):
        whole = free[row].ids
        found = [place for place in range(len(whole)) if whole[place : place + 3] == stop]
        assert stopped[row].ids == (whole[: found[0]] if found else whole)


def test_the_end_of_a_document_stops_only_if_asked(model: LanguageModel) -> None:
    settings = {"max_new_tokens": 60, "temperature": 3.0, "seed": 2}
    free = generate(model, PROMPTS, stop_at_end_of_document=False, **settings)  # type: ignore[arg-type]
    stopped = generate(model, PROMPTS, **settings)  # type: ignore[arg-type]
    assert any(0 in result.ids for result in free)
    for one, other in zip(free, stopped, strict=True):
        if 0 in one.ids:
            assert other.ids == one.ids[: one.ids.index(0)]
            assert other.stopped_by == "end_of_document"
        else:
            assert other == one


@pytest.mark.parametrize("cut", [{}, {"top_k": 15}, {"top_p": 0.99}, PENALTIES], ids=str)
def test_ids_that_are_left_out_are_never_drawn(model: LanguageModel, cut: dict[str, float]) -> None:
    settings = {"max_new_tokens": 60, "temperature": 3.0, "stop_at_end_of_document": False, **cut}
    left_out = [3, 4, 11, *range(15, VOCAB_SIZE)]
    free = generate(model, PROMPTS, **settings)  # type: ignore[arg-type]
    few = generate(model, PROMPTS, left_out=left_out, **settings)  # type: ignore[arg-type]
    assert {id for result in free for id in result.ids} & set(left_out)
    assert {id for result in few for id in result.ids} == set(range(VOCAB_SIZE)) - set(left_out)


def test_log_probabilities_count_what_is_left_out(model: LanguageModel) -> None:
    settings = {"max_new_tokens": 4, "temperature": 2.0, "stop_at_end_of_document": False}
    (found,) = generate(model, [[4, 2]], left_out=[5, 21, 22], **settings)  # type: ignore[arg-type]
    with torch.no_grad():
        logits = model(torch.tensor([[4, 2, *found.ids]]))
    assert isinstance(logits, torch.Tensor)
    own = logits[0, 1:-1].log_softmax(dim=-1)
    assert found.logprobs == pytest.approx([float(own[place, id]) for place, id in enumerate(found.ids)], rel=1e-9)


def test_the_likeliest_token_that_is_not_left_out_is_taken(model: LanguageModel) -> None:
    settings = {"max_new_tokens": 1, "temperature": 0.0, "stop_at_end_of_document": False}
    (first,) = generate(model, [[4, 2]], **settings)  # type: ignore[arg-type]
    (second,) = generate(model, [[4, 2]], left_out=first.ids, **settings)  # type: ignore[arg-type]
    with torch.no_grad():
        logits = model(torch.tensor([[4, 2]]))
    assert isinstance(logits, torch.Tensor)
    assert [*first.ids, *second.ids] == logits[0, -1].topk(2).indices.tolist()


def test_arrays_and_tuples_are_prompts_too(model: LanguageModel) -> None:
    lists, arrays = ([[1, 2], [3]], [np.array([1, 2]), (3,)])
    assert generate(model, lists, max_new_tokens=3) == generate(model, arrays, max_new_tokens=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": [[1], [VOCAB_SIZE]]}, "prompt 1 holds id 23 at place 0, but the model's ids end at 22"),
        ({"prompts": [[1, -1]]}, "prompt 0 holds id -1 at place 1"),
        ({"prompts": [[1.5]]}, "prompt 0 must hold whole numbers, got 1.5 at place 0"),
        ({"prompts": [[True]]}, "prompt 0 must hold whole numbers"),
        ({"prompts": ["text"]}, "prompt 0 must be a list of token ids, got text; encode it"),
        ({"prompts": [5]}, "prompt 0 must be a list of token ids, got 5"),
        ({"max_new_tokens": -1}, "max_new_tokens must be"),
        ({"max_new_tokens": 2.0}, "max_new_tokens must be"),
        ({"stop_sequences": [[]]}, "a stop sequence is empty"),
        ({"stop_sequences": [[99]]}, "stop sequence 0 holds id 99"),
        ({"temperature": -0.5}, "temperature must be"),
        ({"top_p": 2.0}, "top_p must be"),
        ({"top_k": -3}, "top_k must be"),
        ({"seed": -3}, "seed must be"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be"),
        ({"left_out": range(VOCAB_SIZE)}, "every id of the model is left out"),
    ],
)
def test_bad_arguments_are_value_errors_in_words(
    model: LanguageModel, arguments: dict[str, object], message: str
) -> None:
    given: dict[str, object] = {"prompts": [[1]], "max_new_tokens": 3} | arguments
    with pytest.raises(ValueError, match=message):
        generate(model, **given)  # type: ignore[arg-type]
