"""When "every k epochs, steps or tokens" falls due: exact arithmetic over finished optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from rwkv_spec.spec.types import Every


def exact(number: float) -> Fraction:
    """The decimal number that was written, exactly: 0.1 is a tenth, not the nearest double."""
    return Fraction(repr(number))


@dataclass(frozen=True)
class Cadence:
    """A period on the steps of a run; step * batch_size sequences are finished after a step, at most all of them."""

    every: Every
    batch_size: int
    ctx_len: int
    num_windows: int
    total_sequences: int

    def num_due(self, step: int) -> int:
        """How many multiples of the period lie at or before the end of `step`."""
        num_sequences = min(step * self.batch_size, self.total_sequences)
        if self.every.epochs is not None:
            return int(num_sequences // (exact(self.every.epochs) * self.num_windows))
        if self.every.tokens is not None:
            return num_sequences * self.ctx_len // self.every.tokens
        assert self.every.steps is not None
        return step // self.every.steps

    def fires(self, step: int) -> bool:
        """True at the first step that reaches a multiple; several multiples inside one step fire once."""
        return step > 0 and self.num_due(step) > self.num_due(step - 1)

    def num_fired(self, step: int) -> int:
        """How often it has fired by the end of `step`."""
        due = self.num_due(step)
        # A period shorter than a step fires once a step, so that firings never outnumber steps. Only the run's last
        # step can be short, and may then reach no new multiple.
        return min(step, due) if self.fires(step) or step == 0 else min(step - 1, due)

    def words(self) -> str:
        """`every 0.5 epochs`, `every epoch`, `every 1,000 steps`."""
        unit, count = next((u, c) for u, c in vars(self.every).items() if c is not None)
        return (
            f"every {unit[:-1]}"
            if count == 1
            else f"every {count:,g} {unit}"
            if unit == "epochs"
            else f"every {count:,} {unit}"
        )
