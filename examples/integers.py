"""Train on integers 0 to 999, straight from a numpy array, with the spec as a dict.

    python examples/integers.py [WORK_DIR]

The data are orbits of the logistic map x -> 3.9 x (1 - x) from random starts, in steps of a thousandth. An orbit looks
like noise, but its rule gives the next value from the last one to within a few steps: that is what the model finds out.
"""

from __future__ import annotations

import math
import sys

import numpy as np

import rwkv_spec

NUM_ORBITS, LENGTH = 160, 256

generator = np.random.default_rng(1)
x = generator.uniform(0.1, 0.9, size=NUM_ORBITS)
columns = []
for _ in range(LENGTH):
    x = 3.9 * x * (1 - x)
    columns.append((x * 1000).astype(np.int64))
orbits = np.stack(columns, axis=1)  # one row a document, every value within 0..999

spec = {
    "version": 1,
    "name": "integers",
    "work_dir": sys.argv[1] if len(sys.argv) > 1 else "runs/integers",
    "tokenizer": {"type": "integer", "max_value": 999},
    "model": {"type": "x070", "n_layer": 1, "n_embd": 64, "head_size": 32},
    "train": {"ctx_len": 128, "batch_size": 16, "steps": 80, "precision": "fp32"},
    "optimizer": {"lr": 5e-3, "weight_decay": 0.1},
    "eval": {"every": {"steps": 20}, "continuations": 1},
    "save": {"every": {"steps": 40}},
    "log": {"every": {"steps": 10}},
}
run = rwkv_spec.run(spec, data=orbits[:-10], eval_data=orbits[-10:])

eval_loss = run.metrics[-1].eval_loss
assert eval_loss is not None
print(f"\nheld-out loss {eval_loss:.3f} nats a value; knowing nothing costs ln 1000 = {math.log(1000):.3f}")

start = [500]
(continuation,) = run.generate([start], max_new_tokens=12, temperature=0)
print(f"after {start[0]} the model goes on with {continuation}")
following = [int(3.9 * value * (1000 - value) / 1000) for value in [*start, *map(int, continuation.split())]]
print(f"the map itself, from each of them:  {' '.join(map(str, following[:-1]))}")
