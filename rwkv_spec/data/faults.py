"""Turns what was found wrong in rows into one DataError: the first twenty places, and how many more there were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

from rwkv_spec.data.part import Part
from rwkv_spec.data.rows import MAX_FAULTS, place
from rwkv_spec.errors import DataError


def raise_faults(parts_of_sources: Sequence[tuple[str, Sequence[Part]]]) -> None:
    """Raise if any part has faults. Lines are counted over the parts of one source, which come in order."""
    messages: list[str] = []
    for name, parts in parts_of_sources:
        lines_before = 0
        for part in parts:
            messages += [f"{place(name, lines_before + line, column)}: {text}" for line, column, text in part.faults]
            lines_before += part.num_lines
    if messages:
        more = sum(part.num_faults for _, parts in parts_of_sources for part in parts) - len(messages[:MAX_FAULTS])
        rest = [f"and {more} more faulty rows were seen before reading stopped"] if more else []
        raise DataError("\n".join(messages[:MAX_FAULTS] + rest))


def raise_no_match(where: Mapping[str, object], seen: Sequence[Mapping[str, Sequence[str]]]) -> NoReturn:
    """No row has the values that the rule asks for: show those that there are."""
    found = []
    for key in where:
        values = {value for part in seen for value in part.get(key, ())}
        shown = sorted(values, key=lambda value: (len(value), value))[:MAX_FAULTS]
        found.append(f"{key} has {', '.join(shown)}{', …' if len(shown) == MAX_FAULTS else ''}")
    asked = ", ".join(f"{key}: {value!r}" for key, value in where.items())
    raise DataError(f"data.eval.where: no row has {asked}; {'; '.join(found)}")
