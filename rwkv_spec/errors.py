"""Errors a user can fix. Each says where it is, what is wrong, and what to do about it.

A SpecError carries every problem that was found, sorted by place; the others carry one message. Anything else that
escapes is a fault of ours and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a spec. `where` is a file, `command line` or `python`; line and column from 1, 0 is none."""

    where: str
    line: int
    column: int
    key: str
    what: str
    fix: str = ""

    def __str__(self) -> str:
        place = f"{self.where}:{self.line}:{self.column}" if self.line else self.where
        subject = f"{place}: {self.key}" if self.key else place
        return f"{subject}: {self.what}; {self.fix}" if self.fix else f"{subject}: {self.what}"


class UserError(Exception):
    """The root of all errors that a user can fix: the command line prints it without a traceback."""


class SpecError(UserError):
    """The spec, or something it names, is wrong. `problems` holds every one, sorted by file, line and column."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(set(problems), key=lambda p: (p.where, p.line, p.column, p.key, p.what)))
        super().__init__("\n".join(str(problem) for problem in self.problems))


class DataError(UserError):
    """A data file, a vocabulary file or a token store cannot be used as it is."""


class CheckpointError(UserError):
    """A weights file or a saved state cannot be used as it is."""


class KernelError(UserError):
    """A compiled operator cannot be built, or was called with tensors that it does not take."""
