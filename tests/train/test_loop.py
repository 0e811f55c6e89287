"""One step is one step: no split into micro-batches, and no filler, changes its loss or its gradients."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from rwkv_spec.data.batch import Batch
from rwkv_spec.model.build import build_model
from rwkv_spec.model.language_model import LanguageModel
from rwkv_spec.model.shapes import fresh_shape, parameter_groups
from rwkv_spec.objective.cross_entropy import cross_entropy
from rwkv_spec.train.engine import Engine
from rwkv_spec.train.loop import NonFiniteLoss, StepResult, sequence_seeds, steps
from rwkv_spec.train.optimizer import build_optimizer

SHAPE = fresh_shape("x070", n_layer=2, n_embd=32, head_size=16, vocab_size=23)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    built = Engine(precision="fp32", trackers=(), log_dir=tmp_path)
    yield built
    built.end()


def make_batch(num_rows: int, ctx_len: int = 9) -> Batch:
    """Rows of unequal weight: the last one is mostly padding, as at the end of the data."""
    generator = np.random.default_rng(3)
    tokens = generator.integers(0, 23, (num_rows, ctx_len + 1))
    weights = generator.random((num_rows, ctx_len)).astype(np.float32)
    weights[-1, 2:] = 0.0
    return Batch(
        ids_BT=tokens[:, :-1].copy(),
        targets_BT=tokens[:, 1:].copy(),
        weights_BT=weights,
        starts_BT=np.zeros((num_rows, ctx_len), np.bool_),
        sequence_B=np.arange(num_rows, dtype=np.int64) + 70,
        window_B=np.arange(num_rows, dtype=np.int64),
    )


def train(
    engine: Engine, batches: list[Batch], *, micro: int, count: int, dropout: float = 0.25
) -> tuple[LanguageModel, list[StepResult]]:
    model = build_model(SHAPE, dropout=dropout, backend="torch", seed=5).double()
    optimizer = build_optimizer(
        dict(model.named_parameters()),
        groups=parameter_groups(SHAPE),
        lr=1e-3,
        betas=(0.9, 0.99),
        eps=1e-18,
        weight_decay=0.1,
    )
    wrapped, prepared = engine.prepare(model, optimizer)
    results = steps(
        wrapped,
        iter(batches),
        partial(cross_entropy, l2wrap=1e-4),
        engine=engine,
        optimizer=prepared,
        lr_at=lambda step: 1e-3,
        first_step=0,
        num_micro_batches=count,
        micro_batch_size=micro,
        grad_clip=1.0,
        seed=42,
        should_stop=lambda: False,
    )
    return model, list(results)


@pytest.mark.parametrize(("micro", "count"), [(1, 11), (3, 4), (4, 3), (11, 1), (6, 2), (2, 9)])
def test_no_split_into_micro_batches_changes_loss_or_weights(engine: Engine, micro: int, count: int) -> None:
    batches = [make_batch(11), make_batch(5)]
    whole, expected = train(engine, batches, micro=11, count=1)
    split, found = train(engine, batches, micro=micro, count=count)
    for one, other in zip(expected, found, strict=True):
        assert other.loss == pytest.approx(one.loss, rel=1e-12)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-10)
        assert other.num_tokens == one.num_tokens
    for (name, left), right in zip(whole.named_parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(right, left, rtol=1e-8, atol=1e-12, msg=name)


def test_the_loss_is_the_weighted_mean_over_the_whole_step(engine: Engine) -> None:
    batch = make_batch(4)
    model = build_model(SHAPE, backend="torch", seed=5).double()
    logits = model(torch.from_numpy(batch.ids_BT))
    each = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.from_numpy(batch.targets_BT).flatten(), reduction="none"
    )
    weights = torch.from_numpy(batch.weights_BT).double().flatten()
    _, (result,) = train(engine, [batch], micro=2, count=2, dropout=0.0)
    assert result.loss == pytest.approx(float((each.detach() * weights).sum() / weights.sum()), rel=1e-12)
    assert result.weight == pytest.approx(float(weights.sum()), rel=1e-12)


def test_a_loss_that_is_not_finite_stops_before_the_update(engine: Engine) -> None:
    batch = make_batch(3)
    model = build_model(SHAPE, backend="torch", seed=5)
    with torch.no_grad():
        model.head.weight[0, 0] = float("nan")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = build_optimizer(
        dict(model.named_parameters()),
        groups=parameter_groups(SHAPE),
        lr=1e-3,
        betas=(0.9, 0.99),
        eps=1e-18,
        weight_decay=0.1,
    )
    wrapped, prepared = engine.prepare(model, optimizer)
    results = steps(
        wrapped,
        iter([batch]),
        cross_entropy,
        engine=engine,
        optimizer=prepared,
        lr_at=lambda step: 1e-3,
        first_step=6,
        num_micro_batches=1,
        micro_batch_size=3,
        grad_clip=1.0,
        seed=42,
        should_stop=lambda: False,
    )
    with pytest.raises(NonFiniteLoss, match="step 7") as caught:
        list(results)
    assert caught.value.windows == (0, 1, 2)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.nan_to_num(9.0), before[name].nan_to_num(9.0)), name


def test_dropout_seeds_follow_the_sequence_and_not_its_place_in_the_batch() -> None:
    whole = sequence_seeds(np.array([7, 8, 9]), seed=1)
    assert torch.equal(sequence_seeds(np.array([9, 7]), seed=1), whole[[2, 0]])
    assert not torch.equal(sequence_seeds(np.array([7, 8, 9]), seed=2), whole)
    assert len(set(sequence_seeds(np.arange(10_000), seed=1).tolist())) == 10_000
    assert int(whole.min()) >= 0
