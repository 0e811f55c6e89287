"""The world a run trains in: processes, device, threads, precision. The only file that imports accelerate.

The launch config decides processes and devices; the spec decides every number. So accelerate runs without mixed
precision and accumulation of its own: the loop autocasts and weighs the loss itself, the same way in every world.
"""

from __future__ import annotations

import contextlib
import gc
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs

from rwkv_spec.errors import UserError
from rwkv_spec.process import keep_freed_memory

AUTOCAST_DTYPES = {"bf16": torch.bfloat16}


@dataclass(frozen=True)
class Precision:
    """What the training computes in, and the sentence that says why."""

    name: str
    reason: str


def decide_precision(asked: str, *, device: str) -> Precision:
    """Resolve `train.precision`: the launch config's mixed_precision, else bf16 where the device has it, else fp32.

    Raises UserError when the spec and the launch config ask for different things.
    """
    # accelerate launch hands its mixed_precision down in this variable, "no" when nothing was asked for.
    launch = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    launch_name = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}.get(launch)
    if launch_name is not None and launch_name not in AUTOCAST_DTYPES:
        raise UserError(
            f"launch config: mixed_precision: {launch} is not a precision that this trainer has; "
            "remove it there, and set train.precision in the spec to auto, fp32 or bf16"
        )
    if asked != "auto":
        if launch_name is not None and launch_name != asked:
            raise UserError(
                f"spec: train.precision is {asked}, launch config: mixed_precision is {launch}; "
                "make them equal, or remove one of the two"
            )
        return Precision(asked, "as the spec says")
    if launch_name is not None:
        return Precision(launch_name, "as the launch config's mixed_precision says")
    if device == "cuda":
        if torch.cuda.is_bf16_supported():
            return Precision("bf16", "auto: this GPU computes in bf16")
        return Precision("fp32", "auto: this GPU does not compute in bf16")
    if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        return Precision("bf16", "auto: this CPU multiplies in bf16 (AVX512_BF16 or AMX)")
    return Precision("fp32", "auto: this CPU has no bf16 arithmetic")


def available_device() -> str:
    """`cuda` where a GPU answers, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def num_cores() -> int:
    """Physical cores this process may run on; hyper-threads count once: matrix products gain nothing from them."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    groups = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            groups.add(siblings.read_text(encoding="ascii").strip())
        except OSError:
            groups.add(str(cpu))
    return max(1, len(groups))


def _refuse_half_a_world() -> None:
    """Before accelerate looks: it would change the environment and its own class state, and fail in the middle."""
    asked = os.environ.get("WORLD_SIZE", "1")
    missing = [name for name in ("MASTER_ADDR", "RANK") if name not in os.environ]
    if asked != "1" and missing:
        raise UserError(
            f"launch config: WORLD_SIZE={asked} is in the environment, but {' and '.join(missing)} are not, so that no "
            "world can be made of it; start with accelerate launch, or unset WORLD_SIZE to train in one process"
        )


class Engine:
    """One accelerate world. Build it once a run, and `end()` it: a second run in the same process builds its own.

    `threads`: compute threads of this process; None takes this machine's cores shared by its processes. accelerate
    launch sets OMP_NUM_THREADS=1 for every process it starts without --cpu, which would leave all other cores idle.
    """

    def __init__(self, *, precision: str, trackers: Sequence[str], log_dir: Path, threads: int | None = None) -> None:
        self.precision = precision
        _refuse_half_a_world()
        self.accelerator = Accelerator(
            cpu=available_device() == "cpu",
            mixed_precision="no",
            gradient_accumulation_steps=1,
            log_with=list(trackers) or None,
            project_dir=str(log_dir),
            # Buffers never change, so broadcasting them at every step would only cost time.
            kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)],
        )
        self._refuse_unsynchronised()
        keep_freed_memory()
        self.num_threads = threads if threads is not None else max(1, num_cores() // self.num_local_processes)
        torch.set_num_threads(self.num_threads)
        self._trackers = bool(trackers)

    def _refuse_unsynchronised(self) -> None:
        asked = int(os.environ.get("WORLD_SIZE", "1"))
        if asked != self.num_processes:
            raise UserError(
                f"launch config: {asked} processes were started but they do not talk to each other (accelerate made "
                f"a world of {self.num_processes}); on CPUs use distributed_type: MULTI_GPU with use_cpu: true and "
                "set ACCELERATE_USE_CPU=true in the environment"
            )

    @property
    def num_processes(self) -> int:
        return int(self.accelerator.num_processes)

    @property
    def num_local_processes(self) -> int:
        return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    @property
    def rank(self) -> int:
        return int(self.accelerator.process_index)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        device: torch.device = self.accelerator.device
        return device

    @property
    def name(self) -> str:
        """The kind of world in a word: `single` or `ddp`."""
        return "ddp" if self.num_processes > 1 else "single"

    def prepare(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """Move the model to its device and wrap both for this world."""
        with warnings.catch_warnings():
            # Newer versions of torch announce another name, which older ones and accelerate do not know yet.
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
            prepared_model, prepared_optimizer = self.accelerator.prepare(model, optimizer)
        return prepared_model, prepared_optimizer

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """The context in which the forward pass computes in the run's precision; weights stay what they are."""
        dtype = AUTOCAST_DTYPES.get(self.precision)
        if dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=dtype)

    def accumulating(self, model: torch.nn.Module, *, last: bool) -> contextlib.AbstractContextManager[object]:
        """Gradients are exchanged between processes in the last micro-batch of a step only."""
        return contextlib.nullcontext() if last else self.accelerator.no_sync(model)

    def backward(self, loss: torch.Tensor) -> None:
        self.accelerator.backward(loss)

    def clip(self, model: torch.nn.Module, max_norm: float) -> float:
        """Clip the global gradient norm to `max_norm` (0: measure only) and return the norm before clipping."""
        limit = max_norm if max_norm > 0 else float("inf")
        return float(self.accelerator.clip_grad_norm_(model.parameters(), limit))

    def sum(self, values: Sequence[float]) -> list[float]:
        """Add float64 `values` up over all processes; every process gets the same sums."""
        if self.num_processes == 1:
            return [float(value) for value in values]
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        reduced = self.accelerator.reduce(total, reduction="sum")
        return [float(value) for value in reduced]

    def barrier(self) -> None:
        self.accelerator.wait_for_everyone()

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        unwrapped: torch.nn.Module = self.accelerator.unwrap_model(model)
        return unwrapped

    def start_trackers(self, name: str, config: Mapping[str, str | int | float | bool]) -> None:
        if self._trackers:
            self.accelerator.init_trackers(name, config=dict(config))

    def track(self, values: Mapping[str, float], *, step: int) -> None:
        if self._trackers:
            self.accelerator.log(dict(values), step=step)

    def end(self) -> None:
        """Leave the world. A gloo thread that outlives the interpreter aborts it, so everything is freed first."""
        self.accelerator.free_memory()
        gc.collect()
        self.accelerator.end_training()
        # A second run in this process may use another world: accelerate keeps its first one in class state.
        AcceleratorState._reset_state(reset_partial_state=True)
