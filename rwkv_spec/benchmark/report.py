"""What `bench` found, as numbers and as text. Times are seconds, rates are a second, memory is bytes of a process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

# Smaller shares of the time are summed up in the text; the JSON has them all.
_SMALLEST_SHOWN = 0.01


@dataclass(frozen=True)
class Machine:
    """Where and how it was measured."""

    device: str
    num_threads: int
    torch: str
    python: str
    precision: str
    backend: str


@dataclass(frozen=True)
class Speed:
    """Tokens a second: the median of all timed steps, the slowest and fastest step, the medians of the rounds."""

    tokens_per_s: float
    tokens_per_s_slowest: float
    tokens_per_s_fastest: float
    rounds: tuple[float, ...]

    def __str__(self) -> str:
        return (
            f"{self.tokens_per_s:,.0f} tokens/s ({self.tokens_per_s_slowest:,.0f} to {self.tokens_per_s_fastest:,.0f})"
        )


@dataclass(frozen=True)
class Ratio:
    """Our tokens a second over a peer's: the median of the rounds, and the lowest and highest of them."""

    median: float
    lowest: float
    highest: float


@dataclass(frozen=True)
class Peer:
    """Another program on the same tokens. `problem` says why there are no figures, and is empty where there are."""

    name: str
    problem: str = ""
    num_parameters: int = 0
    speed: Speed | None = None
    peak_memory_bytes: int | None = None
    ratio: Ratio | None = None
    beside_busy: Speed | None = None
    beside_busy_ratio: Ratio | None = None

    def __str__(self) -> str:
        if self.speed is None or self.ratio is None:
            return f"{self.name:<13} not measured: {self.problem}"
        ratio = self.ratio
        lines = [
            f"{self.name:<13} {self.speed}, {_memory(self.peak_memory_bytes)}, {self.num_parameters:,} parameters; "
            f"ours is {ratio.median:.2f} times as fast ({ratio.lowest:.2f} to {ratio.highest:.2f})"
        ]
        if self.beside_busy is not None and self.beside_busy_ratio is not None:
            lines.append(
                f"{'':<13} beside a busy core {self.beside_busy}; ours is {self.beside_busy_ratio.median:.2f} times "
                "as fast"
            )
        elif self.problem:
            lines.append(f"{'':<13} later on: {self.problem}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Report:
    """Medians over the timed steps of all rounds. `shares`: name -> share of the time, in sum 1; empty on a GPU."""

    shape: str
    machine: Machine
    num_parameters: int
    micro_batch_size: int
    num_steps: int
    num_rounds: int
    tokens_per_s: float
    tokens_per_s_slowest: float
    tokens_per_s_fastest: float
    rounds: tuple[float, ...]
    flop_per_s: float
    peak_flop_per_s: float
    share_of_peak: float
    step_seconds: float
    data_wait_seconds: float
    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float
    peak_memory_bytes: int | None
    shares: Mapping[str, float]
    beside_busy: Speed | None
    peers: tuple[Peer, ...]

    def as_dict(self) -> dict[str, object]:
        return asdict(self)

    def __str__(self) -> str:
        machine = self.machine
        parts = {"forward": self.forward_seconds, "backward": self.backward_seconds, "update": self.optimizer_seconds}
        split = ", ".join(f"{name} {1e3 * seconds:,.0f} ms" for name, seconds in parts.items())
        each = f"{self.num_rounds} × {self.num_steps}" if self.num_rounds > 1 else f"{self.num_steps}"
        lines = [
            f"{self.shape}, {self.num_parameters:,} parameters, {machine.precision}, kernels {machine.backend}, "
            f"{machine.num_threads} threads of {machine.device}, torch {machine.torch}",
            f"speed        {self.tokens_per_s:,.0f} tokens/s (median of {each} steps; "
            f"{self.tokens_per_s_slowest:,.0f} to {self.tokens_per_s_fastest:,.0f})",
            f"of the peak  {100 * self.share_of_peak:.0f}% = {self.flop_per_s / 1e9:,.0f} of "
            f"{self.peak_flop_per_s / 1e9:,.0f} GFLOP/s (a large square product, same dtype and threads)",
            f"a step       {1e3 * self.step_seconds:,.0f} ms, of which {1e3 * self.data_wait_seconds:,.1f} ms wait for "
            f"data; a micro-batch of {self.micro_batch_size} alone: {split}",
            f"peak memory  {_memory(self.peak_memory_bytes)}",
        ]
        if self.beside_busy is not None:
            lines.append(f"busy core    beside a process that keeps one busy: {self.beside_busy}")
        lines += self._shown_shares()
        if self.peers:
            lines.append("peers, in turn with ours, each a process of its own:")
            lines += [f"  {line}" for peer in self.peers for line in str(peer).splitlines()]
        return "\n".join(lines)

    def _shown_shares(self) -> list[str]:
        if not self.shares:
            return []
        shown = {name: share for name, share in self.shares.items() if share >= _SMALLEST_SHOWN}
        rest = 1 - sum(shown.values())
        rows = [*shown.items(), *([("what is below 1% each", rest)] if len(shown) < len(self.shares) else [])]
        return ["where the time goes (under the profiler, which slows small operators):"] + [
            f"  {100 * share:4.1f}%  {name}" for name, share in rows
        ]


def _memory(count: int | None) -> str:
    return "memory not known here" if count is None else f"{count / 1e6:,.0f} MB"
