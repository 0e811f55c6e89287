"""Applies `key.path=value` to a tree, in an order-free way: sections first, then single keys.

A section replaces the whole section. One member of an exclusive group replaces the others, and a new `type` drops the
keys that only the old type has: what was dropped is kept in the new value's source, so that resolved.yaml can say so.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rwkv_spec.errors import Problem
from rwkv_spec.spec.load import load_value
from rwkv_spec.spec.origin import Source
from rwkv_spec.spec.schema import Schema, at, properties, type_keys
from rwkv_spec.spec.suggest import suggest
from rwkv_spec.spec.tree import Node, plain

COMMAND_LINE = Source("command line", "command line")


@dataclass(frozen=True)
class _Override:
    path: tuple[str, ...]
    node: Node

    @property
    def key(self) -> str:
        return ".".join(self.path)


def apply_overrides(root: Node, overrides: Sequence[str], problems: list[Problem]) -> set[str]:
    """Changes the tree in place. What is wrong with an override becomes a problem on the command line.

    Returns the keys that misspelt ones were probably meant to be.
    """
    meant: set[str] = set()
    if root.section is None:
        return meant
    found: dict[str, _Override] = {}
    for text in overrides:
        override = _parse(text, problems, meant)
        if override is None:
            continue
        if override.key in found:
            problems.append(_problem(override.key, "is given twice on the command line", "give it once"))
        found[override.key] = override
    given = {override.path for override in found.values()}
    for override in sorted(found.values(), key=lambda one: len(one.path)):
        _apply(root, override, given)
    return meant


def _parse(text: str, problems: list[Problem], meant: set[str]) -> _Override | None:
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        problems.append(_problem("", f"{text!r} is not an override", "write key.path=value, such as train.steps=100"))
        return None
    path = tuple(key.split("."))
    # Fields of a row are free names, so that any name may follow data.eval.where.
    known = path[:3] if path[:3] == ("data", "eval", "where") else path
    for depth in range(len(known)):
        if at(known[: depth + 1]) is None:
            advice = suggest(known[:depth], known[depth])
            problems.append(_problem(key, advice.what, advice.fix))
            meant.add(advice.target)
            return None
    node = load_value(value, Path.cwd(), key, problems)
    return None if node is None else _Override(path, node)


def _apply(root: Node, override: _Override, given: set[tuple[str, ...]]) -> None:
    parent, sub = root, at(())
    for depth, name in enumerate(override.path[:-1]):
        assert sub is not None and parent.section is not None
        if name not in parent.section or parent.section[name].value is None:
            if override.node.value is None:
                return
            _replace(parent, name, Node(COMMAND_LINE, override.node.base, {}), sub, override.path[:depth], given)
        parent = parent.section[name]
        sub = at(override.path[: depth + 1]) or {}
        if parent.section is None:
            # The file holds something else where a section belongs; the schema says so, with its place.
            return
    assert sub is not None and parent.section is not None
    name = override.path[-1]
    if override.node.value is None:
        parent.section.pop(name, None)
        return
    _replace(parent, name, override.node, sub, override.path[:-1], given)


def _replace(
    parent: Node, name: str, node: Node, sub: Schema, path: tuple[str, ...], given: set[tuple[str, ...]]
) -> None:
    section = parent.section
    assert section is not None
    dropped: list[str] = []
    for other in _rivals(sub, name, node):
        if other in section and not any(key[: len(path) + 1] == (*path, other) for key in given):
            dropped.append(_described((*path, other), section.pop(other)))
    if name in section and node is not section[name]:
        dropped.insert(0, _described((*path, name), section[name], short=True))
    section[name] = dataclasses.replace(node, source=dataclasses.replace(node.source, replaces=", ".join(dropped)))


def _rivals(sub: Schema, name: str, node: Node) -> list[str]:
    """The keys beside `name` that cannot stand with its new value."""
    rivals = (
        [other for other in sub.get("x-exclusive", ()) if other != name] if name in sub.get("x-exclusive", ()) else []
    )
    types = type_keys(sub)
    if name == "type" and isinstance(node.value, str) and node.value in types:
        rivals += [other for other in properties(sub) if other not in types[node.value]]
    return rivals


def _described(path: tuple[str, ...], node: Node, *, short: bool = False) -> str:
    """What was dropped, for a comment: on one line, and not too long."""
    value = str(plain(node)) if node.section is None and node.items is None else "…"
    value = re.sub(r"[^ -~…]", "?", value)
    value = value if len(value) <= 40 else f"{value[:39]}…"
    place = f"{Path(node.source.where).name}:{node.source.line}" if node.source.line else node.source.where
    name = "" if short else ".".join(path)
    return f"{name} {value} ({place})".strip()


def _problem(key: str, what: str, fix: str) -> Problem:
    return Problem("command line", 0, 0, key, what, fix)
