"""The step that bench times is the one that the spec asks for, in the process that times it too."""

from __future__ import annotations

from pathlib import Path

import pytest

from rwkv_spec.benchmark.own import _prepared
from rwkv_spec.benchmark.workload import Workload, workload_of
from rwkv_spec.model.shapes import fresh_shape, num_parameters
from rwkv_spec.spec.plan import DataStats, ModelSizes, World, make_plan
from rwkv_spec.spec.validate import validate
from rwkv_spec.train.engine import Engine
from tests.tiny import tiny_spec

WORLD = World(
    num_processes=1, engine="single", device="cpu", num_threads=1, memory_bytes=None, precision="fp32",
    precision_reason="", backend="torch", backend_reason="",
)  # fmt: skip


@pytest.mark.parametrize("grad_checkpoint", [False, True])
def test_the_timed_model_has_the_gradient_checkpoints_of_the_spec(tmp_path: Path, grad_checkpoint: bool) -> None:
    spec = validate(tiny_spec(tmp_path, train={"grad_checkpoint": grad_checkpoint}))
    shape = fresh_shape("x070", n_layer=2, n_embd=32, head_size=16, vocab_size=11)
    numbers = num_parameters(shape)
    total = sum(numbers.values())
    sizes = ModelSizes("x070", 2, 32, 16, 11, numbers, total, 0)
    plan = make_plan(spec, sizes=sizes, data=DataStats(200, 5, 1, 40), world=WORLD)
    workload = workload_of(spec, plan, shape, num_parameters=total, num_threads=1)
    sent = Workload.from_dict(workload.as_dict())
    assert sent == workload and sent.grad_checkpoint is grad_checkpoint
    engine = Engine(precision="fp32", trackers=(), log_dir=tmp_path)
    try:
        model, *_ = _prepared(sent, engine)
    finally:
        engine.end()
    assert model.grad_checkpoint is grad_checkpoint and model.blocks[0].dropout == spec.dropout
