"""Prompts continued as text: streamed and whole alike, stopped by text, and gone on with from a saved state."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from rwkv_spec.errors import CheckpointError, UserError
from rwkv_spec.generation.sample import Sampling
from rwkv_spec.generation.state_file import load_state
from rwkv_spec.generation.text import Completion, TextStream
from rwkv_spec.model.language_model import LanguageModel
from rwkv_spec.tokenizer.integer import IntegerTokenizer
from rwkv_spec.tokenizer.protocol import Tokenizer
from rwkv_spec.tokenizer.vocab import VocabTokenizer
from tests.generation.models import small_model

TOKENS = [b"a", b"b", b"ab", b"ba", b"\xc3", b"\xa9", b"a\xc3", b"\xa9b", b"\n", b"b\na", b"aa", b"\n\n"]
PROMPTS = ["ab", "", "b\nab\n", "é"]
WARM = Sampling(temperature=1.5)
GREEDY = Sampling(temperature=0.0)
PENALISED = Sampling(
    temperature=1.3, presence_penalty=0.6, frequency_penalty=0.4, penalty_decay=0.9, repetition_penalty=1.2
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> VocabTokenizer:
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    path.write_text("".join(f"{index} {token!r} {len(token)}\n" for index, token in enumerate(TOKENS, 1)))
    return VocabTokenizer(path)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return small_model(len(TOKENS) + 1)


def completions(model: LanguageModel, tokenizer: Tokenizer, prompts: object, **settings: object) -> list[Completion]:
    given = {"max_new_tokens": 30, "sampling": WARM, "seed": 3} | settings
    return TextStream(model, tokenizer, prompts, **given).completions()  # type: ignore[arg-type]


def texts(model: LanguageModel, tokenizer: Tokenizer, prompts: object, **settings: object) -> list[str]:
    return [completion.text for completion in completions(model, tokenizer, prompts, **settings)]


def test_a_stop_cuts_the_free_text_where_it_first_stands(model: LanguageModel, tokenizer: VocabTokenizer) -> None:
    settings = {"max_new_tokens": 12, "seed": 4}
    free = completions(model, tokenizer, PROMPTS, **settings)
    seen = set()
    for stops in (["ab"], ["a\n"], ["é"], ["ba", "b\n"], ["aab", "\nb"], ["never"]):
        for row, found in enumerate(completions(model, tokenizer, PROMPTS, stop_sequences=stops, **settings)):
            whole = free[row].text
            ends = [(whole.find(stop) + len(stop), whole.find(stop)) for stop in stops if stop in whole]
            assert found.text == (whole[: min(ends)[1]] if ends else whole)
            assert found.stopped_by == ("stop_sequence" if ends else free[row].stopped_by)
            assert found.ids == free[row].ids[: len(found.ids)]
            # The batch is another one once a row has left it: the same numbers up to rounding.
            assert found.logprobs == pytest.approx(free[row].logprobs[: len(found.ids)], rel=1e-9)
            seen.add(found.stopped_by)
    assert seen == {"length", "end_of_document", "stop_sequence"}


@pytest.mark.parametrize("sampling", [WARM, PENALISED], ids=["plain", "penalised"])
@pytest.mark.parametrize("stops", [[], ["ab", "\nb"], ["é"]], ids=str)
def test_the_pieces_of_a_stream_are_the_text(
    model: LanguageModel, tokenizer: VocabTokenizer, stops: list[str], sampling: Sampling
) -> None:
    settings = {"max_new_tokens": 30, "sampling": sampling, "stop_sequences": stops, "seed": 1}
    stream = TextStream(model, tokenizer, PROMPTS, **settings)  # type: ignore[arg-type]
    joined, num_pieces = ["" for _ in PROMPTS], 0
    for row, piece in stream:
        assert piece and torch.is_grad_enabled()
        joined[row] += piece
        num_pieces += 1
    assert joined == [completion.text for completion in stream.completions()]
    assert joined == texts(model, tokenizer, PROMPTS, **settings)
    assert num_pieces > len(PROMPTS) or stops


def test_a_row_alone_gives_the_text_it_gives_in_a_batch(model: LanguageModel, tokenizer: VocabTokenizer) -> None:
    together = completions(model, tokenizer, PROMPTS, sampling=PENALISED, seed=20, stop_sequences=["ab"])
    for row, prompt in enumerate(PROMPTS):
        (alone,) = completions(model, tokenizer, [prompt], sampling=PENALISED, seed=20 + row, stop_sequences="ab")
        assert (alone.text, alone.ids, alone.stopped_by) == (
            together[row].text,
            together[row].ids,
            together[row].stopped_by,
        )


def test_a_stream_does_not_run_ahead(
    model: LanguageModel, tokenizer: VocabTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    original = LanguageModel.step

    def counted(self: LanguageModel, *arguments: object, **named: object) -> object:
        nonlocal calls
        calls += 1
        return original(self, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(LanguageModel, "step", counted)
    stream = iter(TextStream(model, tokenizer, ["a"], max_new_tokens=50, sampling=WARM, seed=1))
    given = [next(stream)[1] for _ in range(3)]
    (whole,) = texts(model, tokenizer, ["a"], max_new_tokens=calls + 1, seed=1)
    assert "".join(given) == whole


def test_a_prompt_begins_a_document(model: LanguageModel) -> None:
    numbers = IntegerTokenizer(11)
    (found,) = completions(model, numbers, [[3, 4]], sampling=GREEDY, max_new_tokens=1)
    with torch.no_grad():
        logits = model(torch.tensor([[0, 4, 5]]))
    assert isinstance(logits, torch.Tensor)
    assert found.ids == [int(logits[0, -1].argmax())]


def test_numbers_stop_at_values_and_never_inside_a_number(model: LanguageModel) -> None:
    numbers = IntegerTokenizer(11)
    # A text in which 11 and some value follow each other before 1 and that value do.
    for seed in range(1000):
        (free,) = completions(model, numbers, ["1"], max_new_tokens=200, seed=seed)
        values = [int(word) for word in free.text.split()]
        if 11 not in values[:-1]:
            continue
        after = values[values.index(11) + 1]
        pairs = list(pairwise(values))
        if (1, after) in pairs and pairs.index((1, after)) > values.index(11):
            break
    # "1 7" also stands in "11 7" as text.
    stop = [1, after]
    end = next(place for place in range(len(values)) if values[place : place + 2] == stop)
    for given in (f"1 {after}", stop):
        (found,) = completions(model, numbers, ["1"], max_new_tokens=200, seed=seed, stop_sequences=[given])
        assert [int(word) for word in found.text.split()] == values[:end]
        assert numbers.decode(found.ids) == found.text
    assert end > values.index(11)


@pytest.mark.parametrize("sampling", [GREEDY, WARM, PENALISED], ids=["greedy", "drawn", "penalised"])
@pytest.mark.parametrize("type", ["x052", "x060", "x070"])
def test_going_on_from_a_saved_state_gives_what_the_whole_gives(
    tmp_path: Path, tokenizer: VocabTokenizer, type: str, sampling: Sampling
) -> None:
    model = small_model(len(TOKENS) + 1, type=type)
    settings = {"sampling": sampling, "seed": 7}
    # Prompts in two parts.
    path = tmp_path / "read.safetensors"
    assert texts(model, tokenizer, ["a", "b\n"], max_new_tokens=0, save_state=path, **settings) == ["", ""]
    later = completions(model, tokenizer, ["\nb", "é"], state=path, **settings)
    whole = completions(model, tokenizer, ["a\nb", "b\né"], **settings)
    assert [found.ids for found in later] == [found.ids for found in whole]
    # A text in two parts.
    path = tmp_path / "written.safetensors"
    whole = completions(model, tokenizer, ["ab"], max_new_tokens=24, **settings)
    first = completions(model, tokenizer, ["ab"], max_new_tokens=9, save_state=path, **settings)
    second = completions(model, tokenizer, None, max_new_tokens=15, state=path, **settings)
    assert first[0].ids + second[0].ids == whole[0].ids
    assert first[0].logprobs + second[0].logprobs == pytest.approx(whole[0].logprobs, rel=1e-9)


def test_a_state_stands_at_the_end_of_the_text_though_the_stop_was_read(
    model: LanguageModel, tokenizer: VocabTokenizer, tmp_path: Path
) -> None:
    """Also where the stop begins inside a token: what the state has read is the prompt and the text, no more."""
    num_cut = 0
    for seed in range(20):
        path = tmp_path / f"{seed}.safetensors"
        settings = {"seed": seed, "stop_sequences": ["ab", "\nb"]}
        (found,) = completions(model, tokenizer, ["b"], save_state=path, **settings)
        state = load_state(path, model)
        assert tokenizer.decode(state.ids[0]) == f"b{found.text}"
        assert state.ids[0][2 : 2 + len(found.ids)] == tuple(found.ids)
        with torch.no_grad():
            logits, _ = model.prefill(torch.tensor(state.ids))
        torch.testing.assert_close(state.logits_BV, logits, rtol=1e-9, atol=1e-9)
        num_cut += len(state.ids[0]) > 2 + len(found.ids)
    assert 0 < num_cut < 20


def test_a_state_of_one_sequence_serves_many_prompts(
    model: LanguageModel, tokenizer: VocabTokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "one.safetensors"
    texts(model, tokenizer, ["a"], max_new_tokens=0, save_state=path)
    assert texts(model, tokenizer, ["\nb", "\n", ""], state=path) == texts(model, tokenizer, ["a\nb", "a\n", "a"])


def test_a_state_of_several_sequences_goes_with_as_many_prompts(
    model: LanguageModel, tokenizer: VocabTokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "three.safetensors"
    texts(model, tokenizer, ["a", "b", ""], max_new_tokens=2, save_state=path)
    assert len(completions(model, tokenizer, None, state=path)) == 3
    with pytest.raises(UserError, match="the state holds 3 sequences, but the prompts given are 2"):
        completions(model, tokenizer, ["a", "b"], state=path)


def test_an_unfinished_stream_saves_no_state(model: LanguageModel, tokenizer: VocabTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    stream = TextStream(model, tokenizer, ["a"], max_new_tokens=9, sampling=WARM, save_state=path)
    next(iter(stream))
    assert not path.exists()
    stream.completions()
    assert path.exists()
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match="is there already and was left alone"):
        TextStream(model, tokenizer, ["a"], max_new_tokens=9, sampling=WARM, save_state=path)
    assert path.read_bytes() == before


def test_one_prompt_and_one_stop_need_no_list(model: LanguageModel, tokenizer: VocabTokenizer) -> None:
    assert texts(model, tokenizer, "ab", stop_sequences="ba") == texts(model, tokenizer, ["ab"], stop_sequences=["ba"])


class WithoutDecoder:
    """A user's own tokenizer: the same tokens, but nothing beyond what the protocol asks for."""

    fingerprint = "own"

    def __init__(self, inner: VocabTokenizer) -> None:
        self._inner = inner
        self.vocab_size = inner.vocab_size

    def encode(self, text: str) -> list[int]:
        return self._inner.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._inner.decode(list(ids))


def test_a_tokenizer_of_the_users_own_streams_and_stops_like_ours(
    model: LanguageModel, tokenizer: VocabTokenizer
) -> None:
    for stops in ([], ["ab"], ["\nb", "é"]):
        assert texts(model, WithoutDecoder(tokenizer), PROMPTS, stop_sequences=stops) == texts(
            model, tokenizer, PROMPTS, stop_sequences=stops
        )


def test_broken_weights_are_said_in_words(tokenizer: VocabTokenizer) -> None:
    broken = small_model(len(TOKENS) + 1)
    broken.head.weight[3, 0] = float("nan")
    with pytest.raises(CheckpointError, match=r"not finite numbers.*its weights are damaged"):
        texts(broken, tokenizer, ["a"])


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"stop_sequences": [""]}, ValueError, "a stop sequence is empty"),
        ({"stop_sequences": [[1, 2]]}, UserError, "VocabTokenizer takes stop sequences of text"),
        ({"max_new_tokens": -1}, ValueError, "max_new_tokens must be"),
        ({"seed": -1}, ValueError, "seed must be"),
        ({"prompts": ["x"]}, UserError, "prompt 'x': "),
        ({"prompts": [[1, 2]]}, UserError, "VocabTokenizer takes text, not a list of values"),
        ({"prompts": [5]}, UserError, "prompt 5: is neither text nor a list of values"),
        ({"prompts": ["ab" * 5000 + "x"]}, UserError, r"prompt 'aba[^ ]{10,40}: at 10000: "),
        ({"stop_sequences": ["a\udcff"]}, UserError, r"stop sequence 'a.*half of a surrogate pair"),
        ({"prompts": [], "save_state": "state"}, ValueError, "save_state needs at least one prompt"),
        ({"save_state": "nosuch/folder/state"}, CheckpointError, "the folder nosuch/folder does not exist"),
        ({"state": "nosuch/state"}, CheckpointError, "nosuch"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_before_anything_is_generated(
    model: LanguageModel,
    tokenizer: VocabTokenizer,
    settings: dict[str, object],
    error: type[Exception],
    message: str,
) -> None:
    given = {"prompts": ["a"], "max_new_tokens": 3, "sampling": WARM} | settings
    with pytest.raises(error, match=message):
        TextStream(model, tokenizer, **given)  # type: ignore[arg-type]


def test_ids_that_no_token_has_are_never_generated(tmp_path: Path) -> None:
    """A vocabulary file may have gaps, and a model more rows than the file has ids."""
    path = tmp_path / "gaps.txt"
    path.write_text("".join(f"{index} {token!r} {len(token)}\n" for index, token in enumerate(TOKENS, 1) if index % 3))
    gaps = VocabTokenizer(path)
    assert gaps.unnamed_ids == (3, 6, 9)
    drawn = set()
    for sampling in (WARM, Sampling(temperature=3.0, top_p=0.99), Sampling(temperature=3.0, top_k=9), PENALISED):
        found = completions(small_model(20), gaps, ["ab", "", "b"], sampling=sampling, max_new_tokens=60)
        drawn |= {index for completion in found for index in completion.ids}
    assert drawn == {1, 2, 4, 5, 7, 8, 10, 11}


def test_an_id_beyond_the_model_is_said_with_its_place_in_the_prompt(tokenizer: VocabTokenizer) -> None:
    with pytest.raises(ValueError, match="prompt 0 holds id 4 at place 2, but the model's ids end at 3"):
        TextStream(small_model(4), tokenizer, ["bbba"], max_new_tokens=1, sampling=WARM)


def test_stops_of_numbers_must_be_numbers(model: LanguageModel) -> None:
    for stop, words in (("x", "stop sequence 'x': "), ([12], "stop sequence "), (" ", "a stop sequence is empty")):
        with pytest.raises((UserError, ValueError), match=words):
            TextStream(model, IntegerTokenizer(11), ["1"], max_new_tokens=3, sampling=WARM, stop_sequences=[stop])
