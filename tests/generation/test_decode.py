"""From prompts to tokens: the same alone and in a batch, stopped where asked, streamed as it goes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import rwkv_spec.generation.decode as module
from rwkv_spec.generation.decode import Generation, generate, prefill, stream
from rwkv_spec.model.build import build_model
from rwkv_spec.model.language_model import LanguageModel
from rwkv_spec.model.shapes import fresh_shape

VOCAB_SIZE = 23
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [], [5, 3], [5, 8, 9, 7, 9], [2]]


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    model = build_model(fresh_shape("x070", n_layer=2, n_embd=32, head_size=16, vocab_size=VOCAB_SIZE)).double()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


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


def test_a_batch_gives_what_its_rows_give_alone(model: LanguageModel) -> None:
    settings = {"max_new_tokens": 12, "temperature": 1.3, "top_k": 20, "top_p": 0.95}
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


@pytest.mark.parametrize("tokens", [1, 3, 4096])
def test_prefill_in_pieces_is_exact(model: LanguageModel, monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    monkeypatch.setattr(module, "_PREFILL_TOKENS", tokens)
    prompts = [prompt for prompt in PROMPTS if prompt]
    with torch.no_grad():
        logits, state = prefill(model, prompts)
        for row, prompt in enumerate(prompts):
            alone, last = model.prefill(torch.tensor([prompt]))
            torch.testing.assert_close(logits[row : row + 1], alone, rtol=1e-10, atol=1e-10)
            for name in ("att_shift", "wkv", "ffn_shift"):
                torch.testing.assert_close(
                    getattr(state, name)[:, row : row + 1], getattr(last, name), rtol=1e-10, atol=1e-10
                )


def test_an_empty_prompt_starts_from_the_end_of_a_document(model: LanguageModel) -> None:
    empty, zero = generate(model, [[], [0]], max_new_tokens=5, temperature=0.0, stop_at_end_of_document=False)
    assert empty == zero


def test_no_new_tokens_and_no_prompts_work(model: LanguageModel) -> None:
    assert generate(model, [[1], []], max_new_tokens=0) == [Generation([], [], "length")] * 2
    assert generate(model, [], max_new_tokens=5) == []
    assert list(stream(model, [[1]], max_new_tokens=0)) == []


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


def _taken(tokens: list[int], stops: list[list[int]], *, room: int = 100) -> tuple[list[list[int]], str | None]:
    """What a row lets go after each token, and why it ended."""
    row = module._Row(0, torch.Generator(), stops, room, stop_at_end_of_document=False)
    released: list[list[int]] = []
    for token in tokens:
        events = list(row.take(token, 0.0))
        released.append([event.id for event in events if event.stopped_by is None])
        if row.finished:
            return released, events[-1].stopped_by
    return released, None


def test_tokens_are_held_back_while_they_may_become_a_stop() -> None:
    assert _taken([1, 2, 3], [[1, 2, 3]]) == ([[], [], []], "stop_sequence")
    assert _taken([1, 2, 4, 5], [[1, 2, 3]]) == ([[], [], [1, 2, 4], [5]], None)
    assert _taken([1, 1, 2], [[1, 2]]) == ([[], [1], []], "stop_sequence")
    assert _taken([1, 2, 1, 2, 3], [[1, 2, 3]]) == ([[], [], [1, 2], [], []], "stop_sequence")
    assert _taken([7, 1, 2], [[1, 2], [7, 1, 2]]) == ([[], [], []], "stop_sequence")
    assert _taken([1, 2], [[1, 2, 3]], room=2) == ([[], [1, 2]], "length")


def test_stops_agree_with_a_search_over_all_short_sequences() -> None:
    stops = [[1, 0], [0, 0, 1], [2]]
    for tokens in itertools.product(range(3), repeat=6):
        ends = [
            (place + len(stop), -len(stop))
            for stop in stops
            for place in range(len(tokens))
            if list(tokens[place : place + len(stop)]) == stop
        ]
        released, reason = _taken(list(tokens), stops, room=len(tokens))
        kept = [id for part in released for id in part]
        if ends:
            end, minus_length = min(ends)
            assert (kept, reason) == (list(tokens[: end + minus_length]), "stop_sequence")
        else:
            assert (kept, reason) == (list(tokens), "length")


def test_a_stream_gives_the_same_tokens_one_by_one(model: LanguageModel) -> None:
    settings = {"max_new_tokens": 9, "temperature": 1.5, "seed": 3, "stop_sequences": [[4, 4], [7]]}
    rows: list[list[int]] = [[] for _ in PROMPTS]
    for row, id in stream(model, PROMPTS, **settings):  # type: ignore[arg-type]
        rows[row].append(id)
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    assert rows == _ids(generate(model, PROMPTS, **settings))  # type: ignore[arg-type]


def test_a_stream_does_not_run_ahead(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    original = LanguageModel.step

    def counted(self: LanguageModel, *arguments: object) -> object:
        nonlocal calls
        calls += 1
        return original(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(LanguageModel, "step", counted)
    tokens = stream(model, [[1]], max_new_tokens=50, temperature=0.0, stop_at_end_of_document=False)
    for _ in range(3):
        next(tokens)
    assert calls == 2


def test_ids_from_num_ids_on_are_never_drawn(model: LanguageModel) -> None:
    free = generate(model, PROMPTS, max_new_tokens=40, temperature=3.0, stop_at_end_of_document=False)
    few = generate(model, PROMPTS, max_new_tokens=40, temperature=3.0, stop_at_end_of_document=False, num_ids=9)
    assert max(id for result in free for id in result.ids) >= 9
    assert max(id for result in few for id in result.ids) == 8


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
        ({"num_ids": 0}, "num_ids must be"),
        ({"num_ids": VOCAB_SIZE + 1}, "num_ids must be a whole number from 1 to the model's 23"),
    ],
)
def test_bad_arguments_are_value_errors_in_words(
    model: LanguageModel, arguments: dict[str, object], message: str
) -> None:
    given: dict[str, object] = {"prompts": [[1]], "max_new_tokens": 3} | arguments
    for function in (generate, stream):
        with pytest.raises(ValueError, match=message):
            function(model, **given)  # type: ignore[operator]
