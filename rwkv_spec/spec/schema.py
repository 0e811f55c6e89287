"""Reads schema.json, the only home of keys, types, ranges, defaults and descriptions, and answers about it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

# A schema is free-form JSON: this is the one place of the package where Any is the honest type.
Schema = Mapping[str, Any]


def schema_path() -> Path:
    """Where the installed schema.json lies, for an editor's modeline."""
    return Path(str(files("rwkv_spec.spec").joinpath("schema.json")))


@cache
def schema() -> Schema:
    """The whole schema. Read it, do not change it."""
    loaded: Schema = json.loads(schema_path().read_text(encoding="utf-8"))
    return loaded


def followed(sub: Schema) -> Schema:
    """The schema with its reference followed; what stands beside the reference wins."""
    if "$ref" not in sub:
        return sub
    target = schema()["$defs"][sub["$ref"].rpartition("/")[2]]
    return {**target, **{key: value for key, value in sub.items() if key != "$ref"}}


def properties(sub: Schema) -> Mapping[str, Schema]:
    """The keys that a section declares; empty for a value, and for a mapping of free keys."""
    found: Mapping[str, Schema] = sub.get("properties", {})
    return {name: followed(child) for name, child in found.items()}


def at(path: tuple[str, ...]) -> Schema | None:
    """The schema of a key given by its path, or None if there is no such key."""
    current = schema()
    for name in path:
        child = properties(current).get(name)
        if child is None:
            return None
        current = child
    return current


@cache
def keys() -> Mapping[str, Schema]:
    """Every key of the spec by its full name, sections included, in the order of the schema."""
    return dict(_walk(schema(), ""))


def _walk(sub: Schema, prefix: str) -> Iterator[tuple[str, Schema]]:
    for name, child in properties(sub).items():
        key = f"{prefix}{name}"
        yield key, child
        yield from _walk(child, f"{key}.")


@cache
def other_names() -> Mapping[str, str]:
    """Names that other trainers use -> our full key."""
    return {other: key for key, sub in keys().items() for other in sub.get("x-also-known-as", ())}


def default_of(sub: Schema) -> object:
    """The default of a key, or None if it has none."""
    return sub.get("default")


def type_keys(section: Schema) -> Mapping[str, tuple[str, ...]]:
    """For a section with variants: its type -> the keys that this type may have. Empty if types make no difference."""
    found: dict[str, tuple[str, ...]] = {}
    for rule in section.get("allOf", ()):
        name = rule["if"]["properties"]["type"]["const"]
        found[name] = tuple(rule["then"]["propertyNames"]["enum"])
    if found:
        for name in properties(section)["type"]["enum"]:
            found.setdefault(name, tuple(properties(section)))
    return found
