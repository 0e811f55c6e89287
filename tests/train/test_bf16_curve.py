"""Training in bf16 follows training in fp32: the mean losses of every 20 of 200 steps, on the same data.

A whole training, by the loop, the optimizer and the operators that a run uses. The data is made up and has structure,
so that there is something to learn: of 32 values, the next one hangs on the last, or is that of two values before.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rwkv_spec.data.batch import Batch
from rwkv_spec.model.build import build_model
from rwkv_spec.model.shapes import fresh_shape, parameter_groups
from rwkv_spec.objective.cross_entropy import cross_entropy
from rwkv_spec.train.engine import Engine
from rwkv_spec.train.loop import steps
from rwkv_spec.train.optimizer import build_optimizer

pytestmark = pytest.mark.slow

VALUES, STEPS, WINDOW, ROWS, LENGTH, LR = 32, 200, 20, 4, 32, 5e-4
# The largest difference of a window's mean loss, as a share of fp32's.
GATE = 0.005
PRECISIONS = ("fp32", "bf16")


def made_up_batches() -> Iterator[Batch]:
    generator = np.random.default_rng(3)
    cumulative = generator.dirichlet(np.full(VALUES, 0.2), size=VALUES).cumsum(axis=1)
    for step in range(STEPS):
        tokens = generator.integers(VALUES, size=(ROWS, LENGTH + 1))
        draw, copies = generator.random(tokens.shape), generator.random(tokens.shape) < 0.3
        for t in range(2, LENGTH + 1):
            drawn = (cumulative[tokens[:, t - 1]] < draw[:, t, None]).sum(axis=1).clip(max=VALUES - 1)
            tokens[:, t] = np.where(copies[:, t], tokens[:, t - 2], drawn)
        numbers = np.arange(step * ROWS, (step + 1) * ROWS)
        shape = (ROWS, LENGTH)
        yield Batch(
            tokens[:, :-1].copy(),
            tokens[:, 1:].copy(),
            np.ones(shape, np.float32),
            np.zeros(shape, np.bool_),
            numbers,
            numbers,
        )


def losses(folder: Path, *, precision: str, rounded: bool = False) -> NDArray[np.float64]:
    """The loss of each step. `rounded`: a wrong training, whose weights are cut to bf16 after each update."""
    shape = fresh_shape("x070", n_layer=2, n_embd=64, head_size=32, vocab_size=VALUES)
    engine = Engine(precision=precision, trackers=(), log_dir=folder)
    try:
        model = build_model(shape, seed=5)
        optimizer = build_optimizer(
            dict(model.named_parameters()),
            groups=parameter_groups(shape),
            lr=LR,
            betas=(0.9, 0.99),
            eps=1e-18,
            weight_decay=0.1,
        )
        wrapped, prepared = engine.prepare(model, optimizer)
        found = []
        for result in steps(
            wrapped,
            made_up_batches(),
            partial(cross_entropy, l2wrap=1e-4),
            engine=engine,
            optimizer=prepared,
            lr_at=lambda step: LR,
            first_step=0,
            num_micro_batches=1,
            micro_batch_size=ROWS,
            grad_clip=1.0,
            seed=42,
            should_stop=lambda: False,
        ):
            found.append(result.loss)
            if rounded:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.copy_(parameter.bfloat16())
        return np.array(found)
    finally:
        engine.end()


def means(curve: NDArray[np.float64]) -> NDArray[np.float64]:
    result: NDArray[np.float64] = curve.reshape(-1, WINDOW).mean(axis=1)
    return result


def largest_difference(curve: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    return float(np.abs(means(curve) / means(other) - 1.0).max())


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, NDArray[np.float64]]:
    return {name: losses(tmp_path_factory.mktemp(name), precision=name) for name in PRECISIONS}


def test_the_curve_of_bf16_stays_at_that_of_fp32(curves: dict[str, NDArray[np.float64]]) -> None:
    fp32, bf16 = (curves[name] for name in PRECISIONS)
    assert len(fp32) == len(bf16) == STEPS
    # It has learned something, and the two are not the same computation.
    assert means(fp32)[-1] < 0.85 * means(fp32)[0]
    assert not np.array_equal(fp32, bf16)
    assert largest_difference(bf16, fp32) < GATE


def test_weights_kept_in_bf16_leave_the_curve(curves: dict[str, NDArray[np.float64]], tmp_path: Path) -> None:
    wrong = losses(tmp_path, precision="bf16", rounded=True)
    assert largest_difference(wrong, curves["fp32"]) > GATE
