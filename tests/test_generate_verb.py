"""The `generate` verb: what a person types, where its prompts come from and its texts go, and words where it cannot."""

from __future__ import annotations

import codecs
import io
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import rwkv_spec
from rwkv_spec.cli import main
from rwkv_spec.generate_verb import parse_tokenizer
from tests.tiny import tiny_spec, write_bare

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> rwkv_spec.Run:
    return rwkv_spec.run(tiny_spec(tmp_path_factory.mktemp("verb"), train={"steps": 2}))


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    return write_bare(tmp_path)


@pytest.mark.parametrize("start", [b"", codecs.BOM_UTF8])
@pytest.mark.parametrize("ending", [b"", b"\n", b"\r\n"])
def test_a_prompt_may_come_from_standard_input(
    run: rwkv_spec.Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, start: bytes, ending: bytes
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(start + b"4\n5 6" + ending)))
    options = ["--prompt", "1", "--prompt", "-", "--json", "--max-new-tokens", "2"]
    assert main(["generate", str(run.dir), *options]) == 0
    assert [row["prompt"] for row in json.loads(capsys.readouterr().out)] == ["1", "4\n5 6"]


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


def test_words_of_the_command_line_are_utf8_in_every_locale(
    run: rwkv_spec.Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the locale knows no such bytes, Python keeps each as half of a surrogate pair."""
    kept = "你好".encode().decode("ascii", "surrogateescape")
    for option in ("--prompt", "--stop"):
        assert main(["generate", str(run.dir), option, kept]) == 2
        assert "'你好'" in capsys.readouterr().err
        assert main(["generate", str(run.dir), option, kept[:-1]]) == 2
        assert f"{option} '\\udce4" in (error := capsys.readouterr().err) and "is not UTF-8" in error


def _quick(bare: Path, *options: str, **streams: object) -> tuple[int, str]:
    """Status and errors of a short generation in a process of its own."""
    command = [sys.executable, "-m", "rwkv_spec", "generate", str(bare), "--tokenizer", "integer:9"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [*command, "--max-new-tokens", "5", *options],
        env=environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        **streams,  # type: ignore[call-overload]
    )
    return done.returncode, done.stderr.strip()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is full")
@pytest.mark.parametrize("option", ["--json", "--stream", "--seed=1"])
def test_a_full_disk_under_the_output_is_said_in_words(bare: Path, option: str) -> None:
    with open("/dev/full", "w") as full:
        status, error = _quick(bare, option, stdout=full)
    assert (status, error) == (2, "rwkv-spec: standard output: cannot be written: No space left on device")


@pytest.mark.skipif(sys.platform == "win32", reason="closes descriptors between fork and exec")
@pytest.mark.parametrize(("descriptor", "name"), [(0, "standard input"), (1, "standard output")])
def test_a_stream_that_is_closed_is_said_in_words(bare: Path, descriptor: int, name: str) -> None:
    status, error = _quick(bare, "--prompt", "-", preexec_fn=lambda: os.close(descriptor))
    assert status == 2 and re.fullmatch(f"rwkv-spec: .*{name}:? is closed.*", error)


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
