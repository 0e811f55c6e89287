"""The published recipe, step by step: 60 updates of an independent float64 run are met through a spec."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rwkv_spec

GOLDEN = Path(__file__).parent / "golden"


def golden_spec(tmp_path: Path, *, precision: str, kernels: str) -> dict[str, object]:
    return {
        "version": 1,
        "work_dir": str(tmp_path / precision),
        "data": {"train": str(GOLDEN / "demo_bytes_unshuffled.bin"), "order": "rwkv-lm"},
        "tokenizer": {"type": "ids", "vocab_size": 256},
        "checkpoint": {"path": str(GOLDEN / "x070_init_L3-D128-V256.pth")},
        "train": {"ctx_len": 64, "batch_size": 4, "tokens": 30720, "precision": precision, "l2wrap": 1e-4},
        "optimizer": {"lr": 6e-4, "weight_decay": 0.1},
        "scheduler": {"lr_final": 6e-5, "warmup_steps": 10},
        "log": {"every": {"steps": 1}},
        "kernels": kernels,
    }


@pytest.mark.parametrize(
    ("precision", "kernels", "tolerance"),
    [
        pytest.param("fp64", "torch", 1e-6, marks=pytest.mark.slow),
        pytest.param("fp32", "auto", 1e-4),
        pytest.param("fp32", "torch", 1e-4, marks=pytest.mark.slow),
    ],
)
def test_sixty_published_steps_are_reproduced(tmp_path: Path, precision: str, kernels: str, tolerance: float) -> None:
    trace = json.loads((GOLDEN / "x070_train_trace.json").read_text())["trace"]
    run = rwkv_spec.run(golden_spec(tmp_path, precision=precision, kernels=kernels))
    assert run.plan.total_steps == 120 and run.plan.num_windows == 4583
    rows = run.metrics[: len(trace)]
    for expected, row in zip(trace, rows, strict=True):
        assert row.loss == pytest.approx(expected["loss"], rel=tolerance), f"step {row.step}"
        assert row.lr == pytest.approx(expected["lr"], rel=1e-12), f"step {row.step}"
        assert row.grad_norm == pytest.approx(expected["grad_norm"], rel=50 * tolerance), f"step {row.step}"
