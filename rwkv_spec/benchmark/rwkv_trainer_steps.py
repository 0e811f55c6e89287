"""The PyPI package rwkv-trainer, timed from inside: its pipeline prepares, and its own training script runs unchanged.

A program of its own, for the Python that has that package: it takes a JSON request and imports nothing of ours. Only
the callback that its script makes is extended, by a clock and by the end after enough steps.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import runpy
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from types import ModuleType


class _Done(BaseException):
    """Enough steps were timed. No Exception, so that nothing on the way takes it for a fault."""


def main(request_path: str) -> None:
    """Measure what the request says and write the times to the file that it names."""
    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    import torch

    torch.set_num_threads(request["num_threads"])
    package = importlib.import_module("rwkv_trainer")
    num_steps, warmup_steps = request["num_steps"], request["warmup_steps"]
    with tempfile.TemporaryDirectory(prefix="rwkv_spec-bench-", ignore_cleanup_errors=True) as folder:
        command = _command(package, request, Path(folder), num_steps=num_steps + warmup_steps)
        marks, sizes = _timed(num_steps + warmup_steps)
        sys.argv = command[1:]
        with contextlib.suppress(_Done):
            runpy.run_path(command[1], run_name="__main__")
    seconds = [after - before for before, after in pairwise(marks)]
    times = {
        "seconds": seconds[warmup_steps - 1 :],
        "peak_memory_bytes": _peak_memory(),
        "num_parameters": sizes[0],
    }
    Path(request["result"]).write_text(json.dumps(times), encoding="utf-8")


def _command(package: ModuleType, request: dict[str, object], folder: Path, *, num_steps: int) -> list[str]:
    """Data and initial weights by its pipeline, and the command that the pipeline would train with."""
    import numpy as np

    ctx_len, batch_size, vocab_size = (int(str(request[name])) for name in ("ctx_len", "batch_size", "vocab_size"))
    pipeline = package.RWKVTrainingPipeline(
        folder,
        model_config=package.ModelConfig(
            model_type=request["type"],
            n_layer=request["n_layer"],
            n_embd=request["n_embd"],
            ctx_len=ctx_len,
            head_size_a=request["head_size"],
        ),
        training_config=package.TrainingConfig(micro_bsz=batch_size, precision=request["precision"]),
        data_config=package.DataConfig(sequence_length=ctx_len, n_epochs_duplication=1),
        tokenizer=package.IntegerTokenizer(max_value=vocab_size - 2),
    )
    # It ends after as many tokens as there are: some more steps' than are timed.
    rows = (num_steps + 5) * batch_size
    pipeline.prepare_data(np.random.default_rng(0).integers(0, vocab_size - 1, (rows, ctx_len)))
    pipeline.initialize_model(random_seed=0)
    command: list[str] = pipeline._build_train_command(stage=3, num_epochs=1)
    return command


def _timed(num_steps: int) -> tuple[list[float], list[int]]:
    """Puts a clock into the callback that its script is about to make: the end of each step, and the model's size."""
    module = importlib.import_module("trainer.trainer_module")
    marks: list[float] = []
    sizes: list[int] = []

    class Timed(module.train_callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer, pl_module, *rest):  # type: ignore[no-untyped-def]
            super().on_train_batch_end(trainer, pl_module, *rest)
            marks.append(time.perf_counter())
            sizes.append(sum(x.numel() for x in pl_module.parameters()))
            if len(marks) == num_steps:
                raise _Done

    module.train_callback = Timed  # type: ignore[attr-defined]
    return marks, sizes


def _peak_memory() -> int | None:
    """As machine.peak_memory: the largest resident size of this process, where Linux tells."""
    try:
        found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return None
    return int(found.group(1)) * 1024 if found else None
