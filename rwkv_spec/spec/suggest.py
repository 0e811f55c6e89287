"""What a person meant by an unknown key: another trainer's name, another section, a slip of the keyboard."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from rwkv_spec.spec.schema import at, keys, other_names, properties, schema


@dataclass(frozen=True)
class Suggestion:
    """`what` and `fix` of a problem; `target` is the full key that was probably meant, or empty."""

    what: str
    fix: str
    target: str = ""


def suggest(section: tuple[str, ...], name: str) -> Suggestion:
    """Why `name` is no key of `section`, and what to write instead."""
    here = list(properties(at(section) or {}))
    prefix = ".".join(section)
    place = prefix or "a spec"
    elsewhere: dict[str, str] = schema()["x-elsewhere"]
    for candidate in here:
        if _bare(candidate) == _bare(name):
            return Suggestion("is not a key", f"write it as {candidate}", _join(prefix, candidate))
    for other, advice in elsewhere.items():
        if _bare(other) == _bare(name):
            return Suggestion("is not a key of a spec", advice)
    for other, key in other_names().items():
        if _bare(other) == _bare(name):
            return Suggestion("is not a key", f"here this is {key}", key)
    for parent in here if section else []:
        for child in properties(properties(at(section) or {})[parent]):
            if _bare(child) == _bare(name):
                target = f"{_join(prefix, parent)}.{child}"
                return Suggestion("does not belong here", f"write {parent}: {{{child}: ...}}", target)
    owners = [key for key in keys() if key.count(".") <= 1 and _bare(key.rpartition(".")[2]) == _bare(name)]
    if owners:
        return _belongs(owners, name)
    near = difflib.get_close_matches(name, here, n=1, cutoff=0.7)
    if near:
        return Suggestion("is not a key", f"did you mean {_join(prefix, near[0])}?", _join(prefix, near[0]))
    target = _near_anywhere(name)
    if target:
        return Suggestion("is not a key", f"did you mean {target}?", target)
    return Suggestion(
        "is not a key", f"the keys of {place} are {', '.join(here)}" if here else f"{place} has no keys of its own"
    )


def _belongs(owners: list[str], name: str) -> Suggestion:
    parents = [key.rpartition(".")[0] for key in owners]
    if "" in parents:
        return Suggestion(
            "does not belong here", f"{name} belongs at the top of the spec, not indented", owners[parents.index("")]
        )
    target = owners[0] if len(owners) == 1 else ""
    return Suggestion("does not belong here", f"{name} belongs under {listed(parents)}", target)


def _near_anywhere(name: str) -> str:
    """The full key whose own name, or whose name in another trainer, looks most like this one."""
    candidates = dict(other_names())
    for key in keys():
        if key.count(".") <= 1:
            candidates.setdefault(key.rpartition(".")[2], key)
    near = difflib.get_close_matches(name.lower(), list(candidates), n=1, cutoff=0.75)
    return candidates[near[0]] if near else ""


def near_value(value: str, options: list[str]) -> str:
    """The option that looks most like a value, or the empty string."""
    near = difflib.get_close_matches(value.lower(), options, n=1, cutoff=0.6)
    return near[0] if near else ""


def listed(names: list[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _bare(name: str) -> str:
    """lr_init, lr-init, lrInit and LR_INIT are one name."""
    return name.lower().replace("_", "").replace("-", "")


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
