"""The published learning rates, to the last digit, and no division by zero at any edge."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest

from rwkv_spec.train.schedule import learning_rate

GOLDEN = Path(__file__).parents[1] / "golden"


def test_rates_are_the_golden_ones() -> None:
    golden = json.loads((GOLDEN / "lr_golden.json").read_text(encoding="utf-8"))
    config = golden["config"]
    for step, expected in golden["lr"].items():
        ours = learning_rate(
            int(step),
            type="cosine",
            lr=config["li"],
            lr_final=config["lf"],
            warmup_steps=config["warm"],
            tokens_per_step=config["ctx"] * config["bsz"],
            total_tokens=config["exit"],
        )
        assert ours == pytest.approx(expected, rel=1e-12), step


def rate(
    step: int, *, type: str = "cosine", lr: float = 1e-3, lr_final: float = 1e-4, warmup: int = 4, total: int = 20
) -> float:
    return learning_rate(
        step, type=type, lr=lr, lr_final=lr_final, warmup_steps=warmup, tokens_per_step=8, total_tokens=8 * total
    )


def test_constant_warms_up_and_stays() -> None:
    assert rate(0, type="constant") == pytest.approx(1e-5)
    assert rate(2, type="constant") == pytest.approx(1e-3 * (0.01 + 0.99 / 2))
    assert [rate(step, type="constant") for step in (4, 10, 19, 1000)] == [1e-3] * 4


def test_cosine_goes_from_lr_to_lr_final() -> None:
    assert rate(4) == pytest.approx(1e-3)
    assert rate(12) == pytest.approx((1e-3 + 1e-4) / 2)
    assert rate(20) == rate(1000) == pytest.approx(1e-4)
    rates = [rate(step) for step in range(4, 21)]
    assert rates == sorted(rates, reverse=True)


def test_no_warmup_starts_at_the_full_rate() -> None:
    assert rate(0, warmup=0) == 1e-3
    assert rate(0, warmup=0, type="constant") == 1e-3


def test_no_edge_divides_by_zero() -> None:
    for type, lr, lr_final, warmup, total in itertools.product(
        ("cosine", "constant"), (0.0, 1e-3), (0.0, 1e-4), (0, 1, 2, 5), (1, 2)
    ):
        for step in range(7):
            value = rate(step, type=type, lr=lr, lr_final=lr_final, warmup=warmup, total=total)
            assert math.isfinite(value)
            assert 0.0 <= value <= max(lr, lr_final)


def test_a_warmup_as_long_as_the_run_only_warms_up() -> None:
    assert rate(1, warmup=2, total=2) == pytest.approx(1e-3 * (0.01 + 0.99 / 2))
    assert rate(3, warmup=2, total=2) == pytest.approx(1e-4)


def test_an_unknown_type_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="'linear' is not known; known: cosine, constant"):
        rate(0, type="linear")
