"""Generation as people ask for it: from Python, from a run and on the command line, all with the same settings."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import rwkv_spec
from rwkv_spec.checkpoint.format import write_weights
from rwkv_spec.cli import main
from rwkv_spec.errors import CheckpointError, UserError
from rwkv_spec.generation.sample import Sampling
from rwkv_spec.generation.text import TextStream
from rwkv_spec.model.build import build_model, weights
from rwkv_spec.model.shapes import fresh_shape
from rwkv_spec.tokenizer.byte import BytesTokenizer
from rwkv_spec.tokenizer.integer import IntegerTokenizer
from tests.tiny import tiny_spec, write_bare

ROOT = Path(__file__).parents[1]
SETTINGS: dict[str, object] = {
    "max_new_tokens": 12,
    "temperature": 1.4,
    "top_p": 0.95,
    "top_k": 9,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.2,
    "penalty_decay": 0.9,
    "repetition_penalty": 1.1,
    "stop_sequences": ["3 3"],
    "seed": 5,
}
# One other value for each, under which this model goes on differently.
OTHERS: dict[str, object] = {
    "max_new_tokens": 5,
    "temperature": 0.3,
    "top_p": 0.2,
    "top_k": 1,
    "presence_penalty": 900.0,
    "frequency_penalty": -900.0,
    "penalty_decay": 0.0,
    "repetition_penalty": 900.0,
    "seed": 6,
}
AS_OPTIONS = ["--stop" if name == "stop_sequences" else "--" + name.replace("_", "-") for name in SETTINGS]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> rwkv_spec.Run:
    return rwkv_spec.run(tiny_spec(tmp_path_factory.mktemp("generate"), train={"steps": 2}))


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    return write_bare(tmp_path)


def words(run_or_file: Path, settings: dict[str, object]) -> list[str]:
    options: list[str] = ["generate", str(run_or_file)]
    for option, value in zip(AS_OPTIONS, settings.values(), strict=True):
        options += [f"{option}={item}" for item in (value if isinstance(value, list) else [value])]
    return options


def expected(run: rwkv_spec.Run, prompts: list[str], settings: dict[str, object]) -> list[str]:
    """What the model gives with these settings, each passed by its name to the lowest layer."""
    rest = {name: value for name, value in settings.items() if name in ("max_new_tokens", "stop_sequences", "seed")}
    sampling = Sampling(**{name: value for name, value in settings.items() if name not in rest})  # type: ignore[arg-type]
    stream = TextStream(run.model, run.tokenizer, prompts, sampling=sampling, **rest)  # type: ignore[arg-type]
    return [completion.text for completion in stream.completions()]


def streamed(run: rwkv_spec.Run, prompts: list[str], settings: dict[str, object]) -> list[str]:
    """One prompt at a time: row i of a batch has seed + i."""
    seed = settings["seed"]
    assert isinstance(seed, int)
    return [
        "".join(rwkv_spec.generate_stream(run.dir, prompt, **{**settings, "seed": seed + row}))  # type: ignore[arg-type]
        for row, prompt in enumerate(prompts)
    ]


WAYS: dict[str, Callable[[rwkv_spec.Run, list[str], dict[str, object]], list[str]]] = {
    "Run.generate": lambda run, prompts, settings: run.generate(prompts, **settings),  # type: ignore[arg-type]
    "generate": lambda run, prompts, settings: rwkv_spec.generate(run.dir, prompts, **settings),  # type: ignore[arg-type]
    "generate_stream": streamed,
}


@pytest.mark.parametrize("way", WAYS)
def test_every_setting_reaches_the_model(run: rwkv_spec.Run, way: str) -> None:
    prompts = ["1 2 3", "7", "4 4"]
    first = expected(run, prompts, SETTINGS)
    assert WAYS[way](run, prompts, SETTINGS) == first
    for name, value in OTHERS.items():
        settings = SETTINGS | {name: value}
        changed = expected(run, prompts, settings)
        assert changed != first, name
        assert WAYS[way](run, prompts, settings) == changed, name


def test_every_option_reaches_the_model(run: rwkv_spec.Run, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in [("seed", 5), *OTHERS.items()]:
        settings = SETTINGS | {name: value}
        assert main([*words(run.dir, settings), "--prompt", "1 2 3", "--prompt", "7"]) == 0
        assert capsys.readouterr().out.splitlines() == expected(run, ["1 2 3", "7"], settings), name


def test_a_stop_changes_the_text_however_it_is_asked_for(
    run: rwkv_spec.Run, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {**SETTINGS, "repetition_penalty": 1.0, "stop_sequences": []}
    (free,) = run.generate(["1"], **settings)  # type: ignore[arg-type]
    values = free.split()
    assert len(values) > 4
    cut = values.index(values[3])
    settings["stop_sequences"] = [values[3]]
    assert run.generate("1", **settings) == [" ".join(values[:cut])]  # type: ignore[arg-type]
    settings["stop_sequences"] = [[int(values[3])]]
    assert rwkv_spec.generate(run.dir, "1", **settings) == [" ".join(values[:cut])]  # type: ignore[arg-type]
    settings["stop_sequences"] = ["3 3 3 3 3", values[3]]
    assert main([*words(run.dir, settings), "--prompt", "1"]) == 0
    assert capsys.readouterr().out == " ".join(values[:cut]) + "\n"


def test_generate_stream_has_the_arguments_of_generate() -> None:
    generate, stream = (
        inspect.signature(function).parameters for function in (rwkv_spec.generate, rwkv_spec.generate_stream)
    )
    of_run = inspect.signature(rwkv_spec.Run.generate).parameters
    assert [name for name in generate if name != "prompts"] == [name for name in stream if name != "prompt"]
    for name, parameter in of_run.items():
        if name not in ("self", "prompts"):
            assert generate[name] == stream[name] == parameter


def test_a_stream_is_checked_before_its_first_piece_is_asked_for(run: rwkv_spec.Run) -> None:
    with pytest.raises(ValueError, match="presence_penalty must be"):
        rwkv_spec.generate_stream(run.dir, "1", presence_penalty=5000.0)
    with pytest.raises(UserError, match="prompt 'x'"):
        rwkv_spec.generate_stream(run.dir, "x")


def test_a_state_goes_on_where_it_was_saved_in_all_three(
    run: rwkv_spec.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"max_new_tokens": 8, "temperature": 1.3, "seed": 2}
    (whole,) = run.generate(["1 2 3 4"], **settings)  # type: ignore[arg-type]
    assert whole
    state = tmp_path / "state.safetensors"
    assert run.generate(["1 2"], max_new_tokens=0, save_state=state) == [""]
    assert run.generate(["3 4"], state=state, **settings) == [whole]  # type: ignore[arg-type]
    assert rwkv_spec.generate(run.dir, ["3 4"], state=state, **settings) == [whole]  # type: ignore[arg-type]
    assert "".join(rwkv_spec.generate_stream(run.dir, "3 4", state=state, **settings)) == whole  # type: ignore[arg-type]
    options = ["--max-new-tokens", "8", "--temperature", "1.3", "--seed", "2"]
    command = ["generate", str(run.dir)]
    assert main([*command, "--prompt", "3 4", "--state", str(state), *options]) == 0
    assert capsys.readouterr().out == f"{whole}\n"
    # Without a prompt it goes on with the text itself; the verb saves, too.
    second = tmp_path / "second"
    assert main([*command, "--prompt", "1 2 3 4", "--save-state", str(second), *options]) == 0
    assert capsys.readouterr().out == f"{whole}\n"
    assert main([*command, "--state", str(second), *options]) == 0
    continued = capsys.readouterr().out.strip()
    (longer,) = run.generate(["1 2 3 4"], **{**settings, "max_new_tokens": 16})  # type: ignore[arg-type]
    assert longer == f"{whole} {continued}".strip()
    assert main([*command, "--prompt", "1", "--save-state", str(second)]) == 2
    assert "is there already and was left alone" in capsys.readouterr().err


def test_a_state_of_several_texts_needs_no_prompts(
    run: rwkv_spec.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "state"
    run.generate(["1 2", "3"], max_new_tokens=0, save_state=state)
    assert main(["generate", str(run.dir), "--state", str(state), "--temperature", "0"]) == 0
    assert capsys.readouterr().out.splitlines() == run.generate(["1 2", "3"], temperature=0)


def test_the_state_of_another_checkpoint_is_refused(run: rwkv_spec.Run, bare: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    run.generate(["1 2"], max_new_tokens=0, save_state=state)
    with pytest.raises(CheckpointError, match=r"is the state of another model.*n_layer 2.*n_layer 1"):
        rwkv_spec.generate(bare, ["3"], state=state, tokenizer=IntegerTokenizer(9))


def test_json_tells_prompts_texts_ids_logprobs_and_the_reason(
    run: rwkv_spec.Run, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--prompt", "1 2", "--prompt", "5", "--max-new-tokens", "6", "--seed", "3", "--json"]
    assert main(["generate", str(run.dir), *options]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["prompt"] for row in rows] == ["1 2", "5"]
    assert [row["text"] for row in rows] == run.generate(["1 2", "5"], max_new_tokens=6, seed=3)
    for row in rows:
        assert row.keys() == {"prompt", "text", "ids", "logprobs", "stopped_by"}
        assert run.tokenizer.decode(row["ids"]) == row["text"]
        assert len(row["logprobs"]) == len(row["ids"]) and all(logprob < 0 for logprob in row["logprobs"])
        assert row["stopped_by"] == ("length" if len(row["ids"]) == 6 else "end_of_document")


def test_a_bare_checkpoint_needs_and_takes_a_tokenizer(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", str(bare), "--prompt", "1 2", "--max-new-tokens", "4", "--temperature", "0"]
    assert main(command) == 2
    assert "--tokenizer" in capsys.readouterr().err
    assert main([*command, "--tokenizer", "integer:9"]) == 0
    (text,) = rwkv_spec.generate(bare, ["1 2"], tokenizer=IntegerTokenizer(9), max_new_tokens=4, temperature=0)
    assert capsys.readouterr().out == f"{text}\n" and len(text.split()) == 4


@pytest.mark.parametrize(("max_value", "num_ids"), [(8, 10), (10, 12), (254, 256), (255, 257)])
def test_a_tokenizer_goes_with_as_many_rows_or_with_rows_padded_a_little(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], max_value: int, num_ids: int
) -> None:
    path = tmp_path / "padded.pth"
    shape = fresh_shape("x070", n_layer=1, n_embd=32, head_size=16, vocab_size=256)
    write_weights(path, weights(build_model(shape)), format="pth", dtype="fp32")
    status = main(["generate", str(path), "--tokenizer", f"integer:{max_value}", "--prompt", "1"])
    words = f"the checkpoint has 256 vocabulary rows and the tokenizer {num_ids} ids"
    assert (status, words in capsys.readouterr().err) == ((2, True) if num_ids > 256 else (0, False))


def test_bytes_are_not_taken_for_a_world_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "world.pth"
    shape = fresh_shape("x070", n_layer=1, n_embd=32, head_size=16, vocab_size=65536)
    write_weights(path, weights(build_model(shape)), format="pth", dtype="fp32")
    with pytest.raises(UserError, match=r"has 65536 vocabulary rows and the tokenizer 257 ids.*do not belong together"):
        rwkv_spec.generate(path, "a", tokenizer=BytesTokenizer(), max_new_tokens=1)


class OwnIntegers:
    """A tokenizer from Python: of which no spec can tell."""

    vocab_size, fingerprint = 11, "own"

    def encode(self, text: str) -> list[int]:
        return [int(word) + 1 for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(str(index - 1) for index in ids if index)


@pytest.mark.parametrize("own", [False, True], ids=["of the spec", "from Python"])
def test_a_run_that_was_asked_for_more_rows_generates_with_its_tokenizer_and_no_other(
    tmp_path: Path, own: bool
) -> None:
    spec = tiny_spec(tmp_path, model={"vocab_size": 700}, train={"steps": 1})
    if own:
        del spec["tokenizer"]
    run = rwkv_spec.run(spec, tokenizer=OwnIntegers() if own else None)
    assert run.model.shape.vocab_size == 700
    (text,) = run.generate("1 2", max_new_tokens=3)
    assert rwkv_spec.generate(run.dir, "1 2", tokenizer=OwnIntegers() if own else None, max_new_tokens=3) == [text]
    if not own:
        with pytest.raises(UserError, match="has 700 vocabulary rows and the tokenizer 257 ids"):
            rwkv_spec.generate(run.dir, "1 2", tokenizer=BytesTokenizer())


@pytest.mark.parametrize(
    ("tokenizer", "words"),
    [("world", "str lacks decode, vocab_size, fingerprint"), (OwnIntegers, "OwnIntegers is a class")],
    ids=["a name", "a class"],
)
def test_what_is_no_tokenizer_is_a_value_error_in_words(bare: Path, tokenizer: object, words: str) -> None:
    with pytest.raises(ValueError, match=rf"tokenizer: {words}.*a tokenizer has encode\(text\)"):
        rwkv_spec.generate(bare, "1", tokenizer=tokenizer)  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers(run: rwkv_spec.Run) -> None:
    plain = run.generate("1 2", max_new_tokens=6, seed=4, top_k=5, temperature=1.5)
    of_numpy = {
        "max_new_tokens": np.int64(6),
        "seed": np.uint32(4),
        "top_k": np.int8(5),
        "temperature": np.float32(1.5),
    }
    assert run.generate("1 2", **of_numpy) == plain  # type: ignore[arg-type]
