"""Where a value of a spec comes from. Every value of a tree, and every key of a Spec, has a Source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """Where a value comes from. `kind`: given | default | command line | python | derived.

    Line and column count from 1; 0 is none.

    `replaces` names what this value took the place of, such as `train.epochs 20 (angles.yaml:14)`.
    """

    kind: str
    where: str = ""
    line: int = 0
    column: int = 0
    replaces: str = ""

    @property
    def is_given(self) -> bool:
        """True if a person wrote the value: in the file, on the command line or in Python."""
        return self.kind in ("given", "command line", "python")
