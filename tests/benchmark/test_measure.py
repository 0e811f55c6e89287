"""bench from end to end: one report of all rounds and programs, as text and as one JSON object."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from rwkv_spec import api
from rwkv_spec.benchmark.measure import _ratio
from rwkv_spec.benchmark.report import Machine, Peer, Ratio, Report, Speed
from rwkv_spec.benchmark.timed import Times
from rwkv_spec.cli import STATUS_DONE, STATUS_USER, main
from rwkv_spec.errors import UserError
from tests.tiny import tiny_spec


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny_spec(tmp_path, kernels="torch")))
    return path


def test_programs_take_turns_on_a_quiet_and_on_a_busy_machine(
    spec_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--steps", "2", "--rounds", "1", "--against", "gpt", "--beside-busy", "--json"]
    assert main(["bench", str(spec_file), *words]) == STATUS_DONE
    report = json.loads(capsys.readouterr().out)
    assert (report["num_steps"], report["num_rounds"]) == (2, 1)
    assert len(report["rounds"]) == len(report["beside_busy"]["rounds"]) == 1
    assert {"device", "num_threads", "torch", "python", "precision", "backend"} == report["machine"].keys()
    assert sum(report["shares"].values()) == pytest.approx(1.0)
    (peer,) = report["peers"]
    assert peer["name"] == "gpt" and not peer["problem"] and peer["peak_memory_bytes"] > 1e7
    assert peer["ratio"]["median"] == pytest.approx(report["tokens_per_s"] / peer["speed"]["tokens_per_s"])
    assert peer["beside_busy_ratio"]["median"] > 0
    assert not (spec_file.parent / "run").exists()


def test_a_ratio_is_that_of_the_rounds_in_which_both_ran() -> None:
    ours = [Times((1.0, 1.0, 3.0), None, 1), Times((2.0, 2.0), None, 1), Times((4.0,), None, 1)]
    theirs = [Times((2.0, 8.0, 3.0), None, 1), Times((3.0,), None, 1)]
    assert _ratio(ours, theirs) == Ratio(2.25, 1.5, 3.0)


def test_a_peer_that_fails_says_why_and_ours_is_told_all_the_same(spec_file: Path) -> None:
    report = api.bench(spec_file, num_steps=1, num_rounds=1, against=["gpt"], peer_limit_seconds=0.01)
    assert report.tokens_per_s > 0
    assert report.peers == (Peer("gpt", "it was not done after 0 s"),)
    assert "gpt           not measured: it was not done" in str(report)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "0"], "at least one step"),
        (["--rounds", "0"], "at least one round"),
        (["--against", "lstm"], "there is no peer lstm"),
    ],
)
def test_what_cannot_be_measured_is_told_before_anything_is(
    spec_file: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", str(spec_file), *words]) == STATUS_USER
    assert said in capsys.readouterr().err


def test_a_wrong_request_is_a_users_error(spec_file: Path) -> None:
    with pytest.raises(UserError, match="no peer"):
        api.bench(spec_file, against=["nothing"])


def test_the_text_says_all_that_a_person_asks() -> None:
    speed = Speed(1000.0, 900.0, 1100.0, (1000.0,))
    peer = Peer("gpt", "", 123456, Speed(500.0, 400.0, 600.0, (500.0,)), 2_000_000, Ratio(2.0, 1.9, 2.1))
    report = Report(
        shape="x070 L1 D32 V11, 4×16",
        machine=Machine("a processor", 2, "2.9", "3.11", "fp32", "cpu"),
        num_parameters=654321,
        micro_batch_size=2,
        num_steps=12,
        num_rounds=3,
        tokens_per_s=1000.0,
        tokens_per_s_slowest=900.0,
        tokens_per_s_fastest=1100.0,
        rounds=(1000.0,),
        flop_per_s=5e9,
        peak_flop_per_s=1e10,
        share_of_peak=0.5,
        step_seconds=0.064,
        data_wait_seconds=0.0002,
        forward_seconds=0.02,
        backward_seconds=0.03,
        optimizer_seconds=0.004,
        peak_memory_bytes=3_000_000,
        shares={"matrix products forward": 0.6, "wkv7 forward": 0.395, "norms": 0.005},
        beside_busy=speed,
        peers=(peer, Peer("compile", "it was not done after 600 s")),
    )
    text = str(report)
    for said in (
        "1,000 tokens/s (median of 3 × 12 steps; 900 to 1,100)",
        "50% = 5 of 10 GFLOP/s",
        "of which 0.2 ms wait for data",
        "a micro-batch of 2 alone: forward 20 ms",
        "3 MB",
        "  60.0%  matrix products forward",
        "   0.5%  what is below 1% each",
        "beside a process that keeps one busy: 1,000 tokens/s",
        "gpt           500 tokens/s (400 to 600), 2 MB, 123,456 parameters; ours is 2.00 times as fast (1.90 to 2.10)",
        "compile       not measured: it was not done after 600 s",
    ):
        assert said in text
