"""The smallest workload that the tests of bench share."""

from __future__ import annotations

from rwkv_spec.benchmark.workload import Workload
from rwkv_spec.model.shapes import fresh_shape, num_parameters


def tiny_workload(type: str = "x070", *, precision: str = "fp32", backend: str = "cpu") -> Workload:
    """Two micro-batches of two windows, two layers 32 wide, with dropout."""
    shape = fresh_shape(type, n_layer=2, n_embd=32, head_size=16, vocab_size=11)
    return Workload(
        shape=shape,
        num_parameters=sum(num_parameters(shape).values()),
        precision=precision,
        backend=backend,
        num_threads=1,
        batch_size=4,
        ctx_len=16,
        accumulate=2,
        micro_batch_size=2,
        dropout=0.1,
        l2wrap=1e-4,
        grad_clip=1.0,
        beta1=0.9,
        beta2=0.99,
        eps=1e-8,
        weight_decay=0.1,
        grad_checkpoint=False,
        seed=0,
    )
