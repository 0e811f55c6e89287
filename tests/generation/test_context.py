"""Where sequences stand: reading in pieces is exact, whatever the lengths."""

from __future__ import annotations

import pytest
import torch

import rwkv_spec.generation.context as module
from rwkv_spec.generation.context import GenerationState, fresh, prefill, read
from tests.generation.models import small_model

VOCAB_SIZE = 23
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3], [5, 8, 9, 7, 9], [2]]
PARTS = ("att_shift", "wkv", "ffn_shift")


def assert_same(one: GenerationState, other: GenerationState) -> None:
    assert (one.ids, one.generated) == (other.ids, other.generated)
    torch.testing.assert_close(one.logits_BV, other.logits_BV, rtol=1e-10, atol=1e-10)
    for name in PARTS:
        torch.testing.assert_close(getattr(one.state, name), getattr(other.state, name), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("tokens", [1, 3, 4096])
@pytest.mark.parametrize("type", ["x052", "x060", "x070"])
def test_prefill_in_pieces_is_exact(monkeypatch: pytest.MonkeyPatch, type: str, tokens: int) -> None:
    monkeypatch.setattr(module, "_PREFILL_TOKENS", tokens)
    model = small_model(VOCAB_SIZE, type=type)
    with torch.no_grad():
        logits, state = prefill(model, PROMPTS)
        for row, prompt in enumerate(PROMPTS):
            alone, last = model.prefill(torch.tensor([prompt]))
            torch.testing.assert_close(logits[row : row + 1], alone, rtol=1e-10, atol=1e-10)
            for name in PARTS:
                torch.testing.assert_close(
                    getattr(state, name)[:, row : row + 1], getattr(last, name), rtol=1e-10, atol=1e-10
                )


def test_reading_in_two_parts_is_reading_at_once_and_an_empty_part_changes_nothing() -> None:
    model = small_model(VOCAB_SIZE)
    start = fresh(model, batch_size=4)
    cuts = [5, 2, 1, 1]
    whole = read(model, start, PROMPTS, generated=False)
    first = read(model, start, [prompt[:cut] for prompt, cut in zip(PROMPTS, cuts, strict=True)], generated=False)
    second = read(model, first, [prompt[cut:] for prompt, cut in zip(PROMPTS, cuts, strict=True)], generated=False)
    assert_same(whole, second)
    assert_same(read(model, whole, [[]] * 4, generated=True), whole)


def test_what_was_generated_is_told_from_what_was_read() -> None:
    model = small_model(VOCAB_SIZE)
    state = read(model, fresh(model, batch_size=2), [[1, 2], [3]], generated=False)
    state = read(model, state, [[4], [5, 6]], generated=True)
    assert state.ids == ((1, 2, 4), (3, 5, 6))
    assert state.generated == ((False, False, True), (False, True, True))


def test_one_sequence_is_repeated_as_it_is() -> None:
    model = small_model(VOCAB_SIZE)
    one = read(model, fresh(model, batch_size=1), [[1, 2]], generated=False)
    assert_same(one.repeated(3), read(model, fresh(model, batch_size=3), [[1, 2]] * 3, generated=False))
