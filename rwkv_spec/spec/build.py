"""Turns a checked tree into a Spec: defaults filled in, paths made absolute, the source of every key written down.

`tree_of` goes the other way, so that a Spec can be checked again or changed by overrides.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from rwkv_spec.errors import Problem
from rwkv_spec.spec import types
from rwkv_spec.spec.origin import Source
from rwkv_spec.spec.schema import Schema, default_of, properties, schema, type_keys
from rwkv_spec.spec.tree import Node, Scalar, from_python
from rwkv_spec.spec.types import Spec

T = TypeVar("T")

DEFAULT = Source("default")
DEFAULT_NAME = "rwkv"


def build_spec(root: Node, stem: str, problems: list[Problem]) -> Spec | None:
    """The Spec of a tree without problems; a path that cannot be made absolute adds one, and then there is no Spec."""
    sources: dict[str, Source] = {"": root.source}
    values = _section(root, schema(), "", sources, problems)
    if problems:
        return None
    name = values["name"] or stem or DEFAULT_NAME
    work_dir = values["work_dir"] or Path(os.path.abspath(Path("runs") / str(name)))
    assert isinstance(work_dir, Path)
    data = _mapping(values["data"])
    data["store"] = data["store"] or work_dir / "data"
    sections: dict[str, object] = {
        "data": types.Data(**{**data, "eval": _make(types.DataEval, data["eval"])}),  # type: ignore[arg-type]
        "tokenizer": _make(types.Tokenizer, values["tokenizer"]),
        "model": _make(types.Model, values["model"]),
        "checkpoint": _make(types.Checkpoint, values["checkpoint"]),
        "train": _make(types.Train, values["train"]),
        "optimizer": _make(types.Optimizer, values["optimizer"]),
        "scheduler": _make(types.Scheduler, values["scheduler"]),
        "eval": _with_every(types.Eval, values["eval"]),
        "save": _with_every(types.Save, values["save"]),
        "log": _with_every(types.Log, values["log"]),
    }
    # The sections were built from the very schema that names the fields; a test holds the two equal.
    rest = {"name": name, "work_dir": work_dir, "sources": sources}
    return Spec(**{**values, **sections, **rest})  # type: ignore[arg-type]


def _make(cls: Callable[..., T], values: object) -> T | None:
    return None if values is None else cls(**_mapping(values))


def _with_every(cls: Callable[..., T], values: object) -> T:
    found = _mapping(values)
    return cls(**{**found, "every": types.Every(**_mapping(found["every"]))})  # type: ignore[arg-type]


def _mapping(values: object) -> dict[str, object]:
    assert isinstance(values, dict)
    return values


def _section(
    node: Node, sub: Schema, prefix: str, sources: dict[str, Source], problems: list[Problem]
) -> dict[str, object]:
    """Every key of a section with its value, given or default."""
    given = node.section or {}
    kind = given["type"].value if "type" in given else default_of(properties(sub).get("type", {}))
    allowed = type_keys(sub).get(str(kind))
    values: dict[str, object] = {}
    for name, child in properties(sub).items():
        key = f"{prefix}{name}"
        found = given.get(name)
        if found is not None and found.value is not None:
            sources[key] = found.source
            if found.items is not None and len(found.items) > 1:
                sources.update((f"{key}[{index}]", item.source) for index, item in enumerate(found.items))
            values[name] = _given(found, child, key, sources, problems)
            continue
        sources[key] = DEFAULT if found is None else found.source
        values[name] = (
            None if allowed is not None and name not in allowed else _default(node, child, key, sources, problems)
        )
    return values


def _given(node: Node, sub: Schema, key: str, sources: dict[str, Source], problems: list[Problem]) -> object:
    if "properties" in sub:
        return _section(node, sub, f"{key}.", sources, problems)
    if "x-path" in sub:
        return _path(node, sub["x-path"], key, problems)
    if node.section is not None:
        return {name: _values(child) for name, child in node.section.items()}
    if node.items is not None:
        return tuple(_number(item.value, sub.get("items", {})) for item in node.items)
    return _number(node.value, sub)


def _default(parent: Node, sub: Schema, key: str, sources: dict[str, Source], problems: list[Problem]) -> object:
    value = default_of(sub)
    if "properties" in sub:
        # These four are absent as a whole; the other sections exist through their defaults.
        optional = key in ("data.eval", "tokenizer", "model", "checkpoint")
        if optional:
            return None
        node = from_python(value or {}, DEFAULT, parent.base, problems)
        return _section(node, sub, f"{key}.", sources, problems)
    if isinstance(value, list):
        return tuple(_number(item, sub.get("items", {})) for item in value)
    assert value is None or isinstance(value, str | int | float | bool)
    return _number(value, sub)


def _values(node: Node) -> tuple[Scalar, ...]:
    return tuple(_scalar(item) for item in node.items) if node.items is not None else (_scalar(node),)


def _scalar(node: Node) -> Scalar:
    assert node.value is None or isinstance(node.value, str | int | float | bool)
    return node.value


def _number(value: object, sub: Schema) -> object:
    """A number as a float where the schema says number, as it is elsewhere."""
    kinds = [form.get("type") for form in sub.get("anyOf", [sub])]
    if isinstance(value, int) and not isinstance(value, bool) and "number" in kinds:
        return float(value)
    return value


def _path(node: Node, kind: str, key: str, problems: list[Problem]) -> Path | tuple[Path, ...]:
    if node.items is not None:
        return tuple(_absolute(item, kind, f"{key}[{index}]", problems) for index, item in enumerate(node.items))
    path = _absolute(node, kind, key, problems)
    return (path,) if kind == "list" else path


def _absolute(node: Node, kind: str, key: str, problems: list[Problem]) -> Path:
    base = Path.cwd() if kind == "work" else node.base
    try:
        return Path(os.path.abspath(base / Path(str(node.value)).expanduser()))
    except RuntimeError:
        problems.append(node.problem(key, f"the home folder in {node.value} is not known", "write the whole path"))
        return base


def tree_of(spec: Spec, *, renamed: bool, problems: list[Problem]) -> Node:
    """The tree of what a person gave in a spec, or changed in it since; what is default stays away.

    A default work_dir follows the name only if the spec is `renamed`, and never the current directory of another
    moment.
    """
    root = Node(spec.sources.get("", Source("python", "python")), Path.cwd(), {})
    assert root.section is not None
    for key, value in _kept(spec, "", schema()):
        source = spec.sources.get(key, DEFAULT)
        if not source.is_given:
            if (key == "work_dir" and renamed) or (key == "data.store" and value == spec.work_dir / "data"):
                continue
            source = source if key in ("name", "work_dir") else Source("python", "python")
        section, path = root.section, key.split(".")
        for depth, name in enumerate(path[:-1]):
            parent = spec.sources.get(".".join(path[: depth + 1]), DEFAULT)
            node = section.setdefault(name, Node(parent if parent.is_given else source, Path.cwd(), {}))
            assert node.section is not None
            section = node.section
        section[path[-1]] = from_python(value, source, Path.cwd(), problems, key=key)
    for name in ("tokenizer", "model", "checkpoint"):
        if getattr(spec, name) is None:
            root.section.pop(name, None)
    return root


def _kept(spec: Spec, prefix: str, sub: Schema, holder: object = None) -> Iterator[tuple[str, object]]:
    """The keys that were given, or whose value is not the default."""
    for name, child in properties(sub).items():
        key = f"{prefix}{name}"
        value = getattr(spec if holder is None else holder, name)
        if value is None:
            continue
        if isinstance(value, types.Every):
            value = {unit: count for unit, count in dataclasses.asdict(value).items() if count is not None}
        elif dataclasses.is_dataclass(value):
            yield from _kept(spec, f"{key}.", child, value)
            continue
        default = default_of(child)
        unchanged = value == (tuple(default) if isinstance(default, list) else default)
        if spec.is_given(key) or not unchanged:
            yield key, value
