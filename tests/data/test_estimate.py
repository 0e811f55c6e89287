"""A plan's figures: exact where everything was read, marked and near the truth where not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rwkv_spec.data.binidx import IndexedWriter
from rwkv_spec.data.estimate import Estimate, estimate
from rwkv_spec.data.holdout import EvalRule
from rwkv_spec.data.prepare import prepare
from rwkv_spec.errors import DataError
from rwkv_spec.tokenizer.byte import BytesTokenizer
from rwkv_spec.tokenizer.integer import AngleTokenizer


def test_what_is_read_whole_is_exact(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"m": 1, "text": "1 2"}\n\n{"m": 2, "text": [3]}\n{"m": 1, "text": ""}\n')
    with IndexedWriter(tmp_path / "p", np.dtype("<u2")) as writer:
        writer.add(np.array([1, 2, 0]))
    rule = EvalRule(where={"m": 2})
    found = estimate([tmp_path / "a.jsonl"], tokenizer=AngleTokenizer(), eval_rule=rule)
    assert found == Estimate(1, 3, 1, 2, approximate=False)
    store = prepare(sources=[tmp_path / "a.jsonl"], tokenizer=AngleTokenizer(), eval_rule=rule, store=tmp_path / "s")
    assert (store.train.num_tokens, store.manifest.eval_tokens) == (found.train_tokens, found.eval_tokens)
    others = [tmp_path / "p", [5, 6], [[1], [], [2, 3]], np.ones((2, 4), int)]
    rule = EvalRule(path=([7],))
    assert estimate(others, tokenizer=AngleTokenizer(), eval_rule=rule) == Estimate(6, 21, 1, 2, approximate=False)


def test_what_is_read_in_part_is_near_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(f"{'x' * (i % 50 + 1)}\n" for i in range(150_000)))
    found = estimate([path], tokenizer=BytesTokenizer(), max_bytes=1 << 20, eval_rule=EvalRule(fraction=0.1))
    total = sum(i % 50 + 2 for i in range(150_000))
    assert found.approximate
    assert abs(found.train_tokens - 0.9 * total) < 0.02 * total
    assert abs(found.eval_documents - 15_000) < 300


def test_faults_are_found_while_planning(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1\nx\n")
    with pytest.raises(DataError, match=r"a\.txt:2:1: 'x'"):
        estimate([tmp_path / "a.txt"], tokenizer=AngleTokenizer())
    with pytest.raises(DataError, match="no such file"):
        estimate([tmp_path / "b.txt"], tokenizer=AngleTokenizer())
