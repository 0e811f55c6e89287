"""The command line as a person types it: verbs, overrides, status codes, and errors without a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from rwkv_spec.cli import main, split_overrides
from tests.tiny import tiny_spec


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny_spec(tmp_path)))
    return path


def test_overrides_are_told_from_all_other_words() -> None:
    plain, overrides = split_overrides(
        ["a.yaml", "train.steps=5", "--optimizer.lr", "1e-3", "--save.keep=2", "--resume", "must", "data.train=x.json"]
    )
    assert plain == ["a.yaml", "--resume", "must"]
    assert overrides == ["train.steps=5", "optimizer.lr=1e-3", "save.keep=2", "data.train=x.json"]


def test_a_spec_alone_runs_and_a_second_start_says_that_nothing_is_left(
    spec_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(spec_file), "train.steps=2", "--save.keep", "1"]) == 0
    assert "plan" in capsys.readouterr().out
    assert main(["run", str(spec_file), "train.steps=2", "--save.keep", "1"]) == 0
    assert "already finished" in capsys.readouterr().out


def test_check_plan_and_prepare_say_what_they_found(spec_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(spec_file)]) == 0
    assert main(["plan", str(spec_file), "--processes", "2"]) == 0
    assert "2 processes" in capsys.readouterr().out
    assert main(["prepare", str(spec_file), "--verify"]) == 0
    assert "held out" in capsys.readouterr().out


def test_every_problem_is_printed_with_its_place_and_the_status_is_2(
    spec_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec_file.write_text(spec_file.read_text().replace("n_layer: 2", "n_layers: 2").replace("steps: 8", "steps: -8"))
    assert main([str(spec_file)]) == 2
    error = capsys.readouterr().err
    assert f"{spec_file}:" in error and "model.n_layers" in error and "train.steps" in error
    assert "problems" in error and "Traceback" not in error


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["chekc", "x.yaml"],
        ["nosuch.yaml"],
        ["check"],
        ["plan", "nosuch.yaml", "--processes", "0"],
        ["run", "nosuch.yaml", "--resume", "sometimes"],
        ["inspect", "nosuch.pth"],
        ["generate", "nosuch", "--prompt", "1"],
        ["nosuch.yaml", "--train.steps"],
        ["frobnicate"],
        ["check", "."],
    ],
    ids=str,
)
def test_wrong_commands_end_with_status_2_and_words(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert (captured.err or captured.out).strip() and "Traceback" not in captured.err


def test_a_mistyped_verb_is_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["chekc", "x.yaml"])
    assert "did you mean check" in capsys.readouterr().err


def test_new_writes_a_starter_that_checks_and_never_overwrites(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "mine.yaml"]) == 0
    before = (tmp_path / "mine.yaml").read_text()
    assert before.startswith("# yaml-language-server: $schema=")
    assert main(["new", "mine.yaml"]) == 2
    assert (tmp_path / "mine.yaml").read_text() == before and "left alone" in capsys.readouterr().err


def test_schema_and_inspect_print_json(spec_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["properties"]["train"]
    assert main(["initialize", str(spec_file)]) == 0
    path = capsys.readouterr().out.strip().splitlines()[-1]
    assert main(["inspect", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["n_layer"] == 2
    assert main(["inspect", path]) == 0
    assert "x070" in capsys.readouterr().out


def test_generate_prints_one_continuation_for_each_prompt(
    spec_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(spec_file), "train.steps=2"]) == 0
    capsys.readouterr()
    words = ["generate", str(tmp_path / "run"), "--prompt", "1 2", "--prompt", "3", "--max-new-tokens", "4"]
    assert main([*words, "--temperature", "0"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert main([*words, "--temperature", "-1"]) == 2
    assert main(["generate", str(tmp_path / "run"), "--prompt", "77"]) == 2


def test_bench_reports_speed_share_of_peak_and_memory(spec_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(spec_file), "--steps", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tokens_per_s"] > 0 and 0 < report["share_of_peak"] < 1.5 and report["peak_memory_bytes"] > 1e7


def test_check_needs_no_torch_and_answers_at_once(spec_file: Path) -> None:
    code = "import sys; from rwkv_spec.cli import main; s = main(sys.argv[1:]); sys.exit(s or 'torch' in sys.modules)"
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code, "check", str(spec_file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    # Generous, for loaded machines: with torch it would take several times as long.
    assert time.perf_counter() - started < 10
