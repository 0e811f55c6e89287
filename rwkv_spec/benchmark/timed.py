"""What a measuring process hands back, as JSON: the seconds of its steps, its own peak of memory, its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

# Not counted: the first steps make threads, allocate, and read code from the disk.
WARMUP_STEPS = 3


@dataclass(frozen=True)
class Times:
    """Seconds of each timed step, the wait for its data included; memory in bytes, None where the system is silent."""

    seconds: tuple[float, ...]
    peak_memory_bytes: int | None
    num_parameters: int

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class OwnTimes(Times):
    """Ours. The seconds of a micro-batch's parts are 0, and `shares` is empty, where nobody asked for them."""

    wait_seconds: tuple[float, ...] = ()
    product_rate: float = 0.0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    shares: Mapping[str, float] = field(default_factory=dict)
