"""AdamW: the published groups, a state keyed by name that resumes bit for bit, and the published training steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rwkv_spec.errors import CheckpointError
from rwkv_spec.model.build import build_model, load_state
from rwkv_spec.model.language_model import LanguageModel
from rwkv_spec.model.shapes import fresh_shape, parameter_groups
from rwkv_spec.train.optimizer import build_optimizer, load_optimizer_state, optimizer_state, set_lr
from rwkv_spec.train.schedule import learning_rate
from tests.model.models import loss_of

GOLDEN = Path(__file__).parents[1] / "golden"
SHAPE = fresh_shape("x070", n_layer=2, n_embd=32, head_size=16, vocab_size=9)


def trainable(model: LanguageModel) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def optimizer_of(model: LanguageModel, *, weight_decay: float = 0.1) -> torch.optim.AdamW:
    return build_optimizer(
        trainable(model),
        groups=parameter_groups(model.shape),
        lr=1e-3,
        betas=(0.9, 0.99),
        eps=1e-18,
        weight_decay=weight_decay,
    )


def update(model: LanguageModel, optimizer: torch.optim.AdamW, *, seed: int) -> None:
    ids = torch.randint(9, (2, 7), generator=torch.Generator().manual_seed(seed))
    value, weight = loss_of(model, ids[:, :-1], ids[:, 1:], torch.ones(2, 6))
    optimizer.zero_grad()
    (value / weight).backward()
    optimizer.step()


def test_groups_are_the_published_ones() -> None:
    golden = json.loads((GOLDEN / "x070_train_trace.json").read_text(encoding="utf-8"))["groups"]
    model = build_model(fresh_shape("x070", n_layer=3, n_embd=128, head_size=64, vocab_size=256), seed=None)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {
        group["group"]: (group["lr_scale"], group["weight_decay"], {names[id(p)] for p in group["params"]})
        for group in optimizer_of(model).param_groups
    }
    untrained = {f"blocks.0.att.v{i}" for i in range(3)}
    assert found == {
        "decay": (1.0, 0.1, set(golden["decay"])),
        "plain": (1.0, 0.0, set(golden["1x"]) - untrained),
        "double": (2.0, 0.0, set(golden["2x"])),
    }


def test_the_rate_of_every_group_is_set_by_its_scale() -> None:
    optimizer = optimizer_of(build_model(SHAPE))
    assert {group["group"]: group["lr"] for group in optimizer.param_groups} == pytest.approx(
        {"decay": 1e-3, "plain": 1e-3, "double": 2e-3}
    )
    set_lr(optimizer, 5e-4)
    assert {group["group"]: group["lr"] for group in optimizer.param_groups} == pytest.approx(
        {"decay": 5e-4, "plain": 5e-4, "double": 1e-3}
    )


def test_a_parameter_without_a_group_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="parameter odd is in group None"):
        build_optimizer(
            {"odd": torch.zeros(1, requires_grad=True)},
            groups={},
            lr=1.0,
            betas=(0.9, 0.99),
            eps=1e-8,
            weight_decay=0.0,
        )


def test_a_row_that_never_gets_a_gradient_stays_finite_with_a_tiny_eps() -> None:
    model = build_model(SHAPE)
    optimizer = optimizer_of(model, weight_decay=0.0)
    before = model.emb.weight[8].detach().clone()
    value, _ = loss_of(model, torch.tensor([[1, 2]]), torch.tensor([[2, 3]]), torch.ones(1, 2))
    value.backward()
    optimizer.step()
    assert torch.equal(model.emb.weight[8], before)
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_state_that_is_loaded_goes_on_bit_for_bit(dtype: torch.dtype) -> None:
    model = build_model(SHAPE).to(dtype)
    optimizer = optimizer_of(model)
    for seed in range(3):
        update(model, optimizer, seed=seed)
    saved = {key: tensor.clone() for key, tensor in optimizer_state(optimizer, trainable(model)).items()}
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert float(saved["head.weight.step"]) == 3.0
    assert len(saved) == 3 * len(weights)

    other = build_model(SHAPE, seed=7).to(dtype)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(weights[name])
    other_optimizer = optimizer_of(other)
    load_optimizer_state(other_optimizer, trainable(other), saved)
    for seed in range(3, 6):
        update(model, optimizer, seed=seed)
        update(other, other_optimizer, seed=seed)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_state_from_before_the_first_update_loads_as_a_fresh_one() -> None:
    model, other = build_model(SHAPE), build_model(SHAPE)
    optimizer, other_optimizer = optimizer_of(model), optimizer_of(other)
    state = optimizer_state(optimizer, trainable(model))
    assert all(bool((tensor == 0).all()) for tensor in state.values())
    load_optimizer_state(other_optimizer, trainable(other), state)
    update(model, optimizer, seed=1)
    update(other, other_optimizer, seed=1)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    model = build_model(SHAPE)
    optimizer = optimizer_of(model)
    update(model, optimizer, seed=1)
    state = {key: tensor.clone() for key, tensor in optimizer_state(optimizer, trainable(model)).items()}
    for change, message in (
        ({"head.weight.exp_avg": None}, "head.weight.exp_avg is missing"),
        ({"tail.weight.step": torch.zeros(())}, "tail.weight.step belongs to no parameter"),
        ({"head.weight.exp_avg_sq": torch.zeros(3)}, r"head.weight.exp_avg_sq has shape \[3\], not \[9, 32\]"),
        ({"head.weight.step": torch.zeros(2)}, "head.weight.step holds 2 numbers"),
    ):
        broken = {key: tensor for key, tensor in {**state, **change}.items() if tensor is not None}
        with pytest.raises(CheckpointError, match=message):
            load_optimizer_state(optimizer, trainable(model), broken)
    for key, tensor in optimizer_state(optimizer, trainable(model)).items():
        assert torch.equal(tensor, state[key])


def _trace(
    golden: dict[str, Any], *, dtype: torch.dtype, backend: str, num_steps: int
) -> list[tuple[float, float, float]]:
    """(learning rate, loss, gradient norm) of the first steps of the golden run."""
    ctx_len, batch_size = golden["ctx"], golden["bsz"]
    tokens = torch.from_numpy(np.fromfile(GOLDEN / "demo_bytes_unshuffled.bin", dtype="<u2").astype(np.int64))
    shape = fresh_shape("x070", n_layer=3, n_embd=128, head_size=64, vocab_size=256)
    model = build_model(shape, backend=backend, seed=None).to(dtype)
    load_state(model, torch.load(GOLDEN / "x070_init_L3-D128-V256.pth", weights_only=True))
    optimizer = build_optimizer(
        trainable(model),
        groups=parameter_groups(shape),
        lr=golden["lr_init"],
        betas=(golden["betas"][0], golden["betas"][1]),
        eps=golden["eps"],
        weight_decay=golden["wd"],
    )
    rows = []
    for row in golden["trace"][:num_steps]:
        lr = learning_rate(
            row["step"],
            type="cosine",
            lr=golden["lr_init"],
            lr_final=golden["lr_final"],
            warmup_steps=golden["warmup"],
            tokens_per_step=ctx_len * batch_size,
            total_tokens=golden["my_exit_tokens"],
        )
        set_lr(optimizer, lr)
        window = torch.stack([tokens[offset : offset + ctx_len + 1] for offset in row["offsets"]])
        value, weight = loss_of(model, window[:, :-1], window[:, 1:], torch.ones(batch_size, ctx_len), l2wrap=1e-4)
        optimizer.zero_grad()
        loss = value / weight
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), golden["clip"])
        optimizer.step()
        rows.append((lr, float(loss.detach()), float(grad_norm)))
    return rows


@pytest.mark.parametrize(
    ("dtype", "backend", "num_steps", "tolerance"),
    [
        (torch.float64, "torch", 10, 1e-6),
        (torch.float32, "auto", 60, 1e-4),
        pytest.param(torch.float64, "torch", 60, 1e-6, marks=pytest.mark.slow),
        pytest.param(torch.float32, "torch", 60, 1e-4, marks=pytest.mark.slow),
    ],
)
def test_the_published_training_steps_are_reproduced(
    dtype: torch.dtype, backend: str, num_steps: int, tolerance: float
) -> None:
    golden = json.loads((GOLDEN / "x070_train_trace.json").read_text(encoding="utf-8"))
    rows = _trace(golden, dtype=dtype, backend=backend, num_steps=num_steps)
    for row, (lr, loss, grad_norm) in zip(golden["trace"], rows, strict=False):
        assert lr == pytest.approx(row["lr"], rel=1e-12), row["step"]
        assert loss == pytest.approx(row["loss"], rel=tolerance), row["step"]
        assert grad_norm == pytest.approx(row["grad_norm"], rel=tolerance), row["step"]
