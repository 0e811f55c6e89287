"""Generation as people ask for it: from Python, from a run and on the command line, all with the same settings."""

from __future__ import annotations

import inspect
import io
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import rwkv_spec
from rwkv_spec.checkpoint.format import write_weights
from rwkv_spec.cli import main
from rwkv_spec.errors import CheckpointError, UserError
from rwkv_spec.generate_verb import parse_tokenizer
from rwkv_spec.generation.sample import Sampling
from rwkv_spec.generation.text import TextStream
from rwkv_spec.model.build import build_model, weights
from rwkv_spec.model.shapes import fresh_shape
from rwkv_spec.tokenizer.integer import IntegerTokenizer
from tests.tiny import tiny_spec

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
    """A checkpoint outside any run folder, whose likeliest token is never the end of a document."""
    model = build_model(fresh_shape("x070", n_layer=1, n_embd=32, head_size=16, vocab_size=11))
    tensors = {name: tensor.clone() for name, tensor in weights(model).items()}
    tensors["head.weight"] = torch.randn(11, 32, generator=torch.Generator().manual_seed(1))
    tensors["head.weight"][0] = 0
    tensors["emb.weight"] = torch.randn(11, 32, generator=torch.Generator().manual_seed(2))
    write_weights(tmp_path / "bare.pth", tensors, format="pth", dtype="fp32")
    return tmp_path / "bare.pth"


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


@pytest.mark.parametrize("ending", [b"", b"\n", b"\r\n"])
def test_a_prompt_may_come_from_standard_input(
    run: rwkv_spec.Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, ending: bytes
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"4\n5 6" + ending)))
    options = ["--prompt", "1", "--prompt", "-", "--json", "--max-new-tokens", "2"]
    assert main(["generate", str(run.dir), *options]) == 0
    assert [row["prompt"] for row in json.loads(capsys.readouterr().out)] == ["1", "4\n5 6"]


def test_a_bare_checkpoint_needs_and_takes_a_tokenizer(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", str(bare), "--prompt", "1 2", "--max-new-tokens", "4", "--temperature", "0"]
    assert main(command) == 2
    assert "--tokenizer" in capsys.readouterr().err
    assert main([*command, "--tokenizer", "integer:9"]) == 0
    (text,) = rwkv_spec.generate(bare, ["1 2"], tokenizer=IntegerTokenizer(9), max_new_tokens=4, temperature=0)
    assert capsys.readouterr().out == f"{text}\n" and len(text.split()) == 4


def test_tokenizers_are_named_as_in_a_spec(tmp_path: Path) -> None:
    vocabulary = tmp_path / "of: mine.txt"
    vocabulary.write_text("1 'a' 1\n2 'b' 1\n")
    for text, ids in (
        ("angle", parse_tokenizer("angle").encode("3 5")),
        ("integer:9", [4, 6]),
        ("ids:9", [3, 5]),
        ("bytes", [52, 33, 54]),
    ):
        assert parse_tokenizer(text).encode("3 5") == ids
    assert parse_tokenizer("angle").vocab_size == 361
    assert parse_tokenizer(f"vocab:{vocabulary}").encode("ba") == [2, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature", "-1"], "temperature must be"),
        (["--top-p", "2"], "top_p must be"),
        (["--top-k", "-1"], "top_k must be"),
        (["--max-new-tokens", "-1"], "max_new_tokens must be"),
        (["--seed", "-1"], "seed must be"),
        (["--presence-penalty", "nan"], "presence_penalty must be"),
        (["--frequency-penalty", "1e9"], "frequency_penalty must be"),
        (["--penalty-decay", "2"], "penalty_decay must be"),
        (["--repetition-penalty", "0"], "repetition_penalty must be"),
        (["--stop", ""], "a stop sequence is empty"),
        (["--stop", "x"], "stop sequence 'x'"),
        (["--prompt", "77"], "prompt '77'"),
        (["--prompt", "1", "--prompt", "2", "--stream"], "--stream shows one text as it comes, but there are 2"),
        (["--prompt", "-", "--prompt", "-"], "--prompt - can be given once"),
        (["--state", "nosuch.state"], "nosuch.state: does not exist"),
        (["--save-state", "nosuch/folder/state"], "the folder nosuch/folder does not exist"),
        (["--tokenizer", "wrold"], "'wrold' is no type of tokenizer; it is angle, integer, vocab, world, bytes, ids"),
        (["--tokenizer", "integer"], "needs max_value; write --tokenizer TYPE:VALUE"),
        (["--tokenizer", "integer:"], "the value is missing"),
        (["--tokenizer", "integer:nine"], "'nine' is no whole number"),
        (["--tokenizer", "integer:-1"], "'-1' is no whole number"),
        (["--tokenizer", "ids:1"], "vocab_size is 1"),
        (["--tokenizer", "bytes:3"], "bytes takes no value"),
        (["--tokenizer", "vocab"], "needs path"),
        (["--tokenizer", "vocab:nosuch.txt"], "nosuch.txt"),
        (["--temperature", "warm"], "--temperature"),
        (["--json", "--stream"], "--stream"),
    ],
    ids=" ".join,
)
def test_what_a_person_mistypes_is_one_clear_message_and_status_2(
    run: rwkv_spec.Run, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["generate", str(run.dir), *options]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""
    # The parser of options puts its usage above its one line.
    lines = [line for line in captured.err.splitlines() if not line.startswith(("usage", " "))]
    assert len(lines) == 1


def test_bytes_that_are_no_text_are_said_with_their_place(
    run: rwkv_spec.Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"12\xff")))
    assert main(["generate", str(run.dir), "--prompt", "-"]) == 2
    assert "standard input: is not UTF-8 at byte 2" in capsys.readouterr().err


def _endless(bare: Path, *options: str, **streams: object) -> subprocess.Popen[bytes]:
    """A generation without an end, in a process of its own."""
    command = [sys.executable, "-m", "rwkv_spec", "generate", str(bare), "--tokenizer", "integer:9"]
    command += ["--temperature", "0", "--max-new-tokens", "1000000000", "--prompt", "1", *options]
    return subprocess.Popen(
        command,
        cwd=bare.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        **streams,  # type: ignore[call-overload]
    )


def test_an_interrupt_in_the_middle_keeps_what_was_printed(bare: Path) -> None:
    process = _endless(bare, "--stream", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    shown = process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    rest, error = process.communicate(timeout=60)
    assert process.returncode == 130
    numbers = (shown + rest).decode().split()
    assert len(numbers) >= 10 and all(number.isdecimal() for number in numbers)
    assert error.decode().strip() == "rwkv-spec: interrupted"


def test_a_reader_that_goes_away_is_no_error(bare: Path) -> None:
    process = _endless(bare, "--stream", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(20)
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    assert (process.wait(timeout=60), error) == (0, b"")


@pytest.mark.skipif(shutil.which("sh") is None or sys.platform == "win32", reason="needs pseudo-terminals")
def test_one_prompt_streams_on_a_terminal_of_its_own_accord(bare: Path) -> None:
    import pty

    ours, theirs = pty.openpty()
    process = _endless(bare, stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    shown = b""
    # Without streaming nothing would come before the end, and there is none.
    while len(shown) < 20 and select.select([ours], [], [], 120)[0]:
        shown += os.read(ours, 64)
    process.kill()
    process.communicate()
    os.close(ours)
    assert len(shown) >= 20 and all(number.isdecimal() for number in shown.decode().split())
