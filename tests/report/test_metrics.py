"""The two logs are readable at every moment, strict JSON, and cut back to a step without a trace of what came later."""

from __future__ import annotations

import json
import math
from datetime import datetime
from pathlib import Path

import pytest

from rwkv_spec.errors import UserError
from rwkv_spec.report.metrics import Row, RunLog, cut_back, read_rows


def row(step: int, **other: float) -> Row:
    values = {"loss": 2.0 + 0.1 / step, "lr": 6e-4, "grad_norm": 1.25, "tokens_per_s": 18000.0} | other
    return Row(step=step, epoch=step / 4, tokens=step * 8192, **values)


def noon() -> datetime:
    return datetime(2026, 1, 2, 12, 30, 45)


def write_run(out: Path, steps: int) -> None:
    with RunLog(out, now=noon) as log:
        log.start('{"name": "a",\n "seed": 42}')
        for step in range(1, steps + 1):
            log.write(row(step, eval_loss=1.9) if step % 2 == 0 else row(step))
        log.sync()


def test_rows_are_written_at_once_with_the_keys_of_the_design(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "out", now=noon)
    log.write(row(1))
    log.write(row(2, eval_loss=1.5))
    first, second = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert list(first) == ["step", "epoch", "tokens", "loss", "lr", "grad_norm", "tokens_per_s"]
    assert list(second) == [*first, "eval_loss"]
    assert (first["step"], first["tokens"], first["lr"], second["eval_loss"]) == (1, 8192, 6e-4, 1.5)
    log.close()
    log.close()
    assert read_rows(tmp_path / "out" / "metrics.jsonl") == [row(1), row(2, eval_loss=1.5)]


def test_the_plain_log_has_a_header_and_a_line_a_row(tmp_path: Path) -> None:
    write_run(tmp_path, 2)
    assert (tmp_path / "train_log.txt").read_text().splitlines() == [
        "NEW RUN 2026-01-02 12:30:45",
        'spec {"name": "a", "seed": 42}',
        "step 1 epoch 0.250 tokens 8192 loss 2.100000 lr 6.0000e-04 grad_norm 1.2500 tokens/s 18000 at 12:30:45",
        "step 2 epoch 0.500 tokens 16384 loss 2.050000 lr 6.0000e-04 grad_norm 1.2500 tokens/s 18000"
        " eval_loss 1.900000 at 12:30:45",
    ]


def test_numbers_come_back_exactly(tmp_path: Path) -> None:
    exact = row(3, loss=0.1 + 0.2, lr=1e-45, grad_norm=1 / 3)
    with RunLog(tmp_path) as log:
        log.write(exact)
    assert read_rows(tmp_path / "metrics.jsonl") == [exact]


def test_nan_and_infinity_are_valid_json(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.write(row(1, loss=math.nan, grad_norm=math.inf, eval_loss=math.nan))
    text = (tmp_path / "metrics.jsonl").read_text()
    values = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert values["loss"] is values["grad_norm"] is values["eval_loss"] is None
    (back,) = read_rows(tmp_path / "metrics.jsonl")
    assert math.isnan(back.loss) and math.isnan(back.grad_norm)
    assert back.eval_loss is not None and math.isnan(back.eval_loss)
    assert "loss nan" in (tmp_path / "train_log.txt").read_text()


@pytest.mark.parametrize("name", ["metrics.jsonl", "train_log.txt"])
def test_a_cut_back_log_is_that_of_a_shorter_run(tmp_path: Path, name: str) -> None:
    write_run(tmp_path / "long", 12)
    write_run(tmp_path / "short", 10)
    cut_back(tmp_path / "long" / name, 10)
    assert (tmp_path / "long" / name).read_bytes() == (tmp_path / "short" / name).read_bytes()
    cut_back(tmp_path / "long" / name, 0)
    header = [] if name == "metrics.jsonl" else ["NEW RUN 2026-01-02 12:30:45", 'spec {"name": "a", "seed": 42}']
    assert (tmp_path / "long" / name).read_text().splitlines() == header


@pytest.mark.parametrize("name", ["metrics.jsonl", "train_log.txt"])
def test_a_kill_in_the_middle_of_a_write_leaves_nothing_half(tmp_path: Path, name: str) -> None:
    write_run(tmp_path / "whole", 3)
    write_run(tmp_path / "two", 2)
    whole, two = (tmp_path / "whole" / name).read_bytes(), (tmp_path / "two" / name).read_bytes()
    cut = tmp_path / name
    for length in range(len(two), len(whole) - 1):
        cut.write_bytes(whole[:length])
        cut_back(cut, 2)
        assert cut.read_bytes() == two, length


def test_a_last_row_without_a_line_end_is_kept_if_it_is_whole(tmp_path: Path) -> None:
    write_run(tmp_path, 3)
    path = tmp_path / "metrics.jsonl"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    cut_back(path, 3)
    assert path.read_bytes() == content


def test_leavings_of_a_power_cut_are_dropped(tmp_path: Path) -> None:
    write_run(tmp_path, 3)
    path = tmp_path / "metrics.jsonl"
    content = path.read_bytes()
    path.write_bytes(content + bytes(300) + b'\n[1]\n{"loss": 3}\n"step"\n\xff\xfe\n')
    assert [row.step for row in read_rows(path)] == [1, 2, 3]
    cut_back(path, 9)
    assert path.read_bytes() == content


def test_a_log_that_needs_no_cut_is_not_touched(tmp_path: Path) -> None:
    write_run(tmp_path, 3)
    path = tmp_path / "metrics.jsonl"
    before = path.stat()
    cut_back(path, 3)
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == (before.st_mtime_ns, before.st_ino)
    cut_back(tmp_path / "absent.jsonl", 3)
    (tmp_path / "empty.jsonl").touch()
    cut_back(tmp_path / "empty.jsonl", 3)
    assert not (tmp_path / "absent.jsonl").exists()
    assert read_rows(tmp_path / "absent.jsonl") == read_rows(tmp_path / "empty.jsonl") == []


def test_a_place_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write"):
        RunLog(tmp_path / "file" / "out")
    (tmp_path / "out" / "metrics.jsonl").mkdir(parents=True)
    with pytest.raises(UserError, match="cannot be read"):
        cut_back(tmp_path / "out" / "metrics.jsonl", 3)
