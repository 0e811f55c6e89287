"""Checks a spec by itself, against the schema and between its keys: every problem at once, each with its place.

Nothing that the spec names is opened here: whether files exist, and fit each other, is preflight's work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from rwkv_spec.errors import Problem, SpecError
from rwkv_spec.spec.build import build_spec, tree_of
from rwkv_spec.spec.cross import Passed, cross_check
from rwkv_spec.spec.explain import example_of, explain
from rwkv_spec.spec.load import load_file
from rwkv_spec.spec.origin import Source
from rwkv_spec.spec.override import apply_overrides
from rwkv_spec.spec.schema import Schema, at, properties, schema
from rwkv_spec.spec.suggest import listed, suggest
from rwkv_spec.spec.tree import KeyPath, Node, from_python, plain
from rwkv_spec.spec.types import Spec


def validate(
    source: str | Path | Mapping[str, object] | Spec,
    overrides: Sequence[str] = (),
    *,
    has_data: bool = False,
    has_tokenizer: bool = False,
    has_eval_data: bool = False,
) -> Spec:
    """The checked spec of a file, a dict or a Spec, with `key.path=value` overrides; or SpecError with every problem.

    The has_* flags say what is passed from Python, so that its key may be absent, and may not be given as well.
    """
    problems: list[Problem] = []
    root, stem = _read(source, overrides, problems)
    meant = apply_overrides(root, overrides, problems)
    found = _Findings(root, problems, meant)
    for error in Draft202012Validator(schema()).iter_errors(plain(root)):
        found.add(error)
    found.finish()
    passed = Passed(data=has_data, tokenizer=has_tokenizer, eval_data=has_eval_data)
    problems += cross_check(root, passed, wrong=found.wrong, meant=found.meant)
    spec = None if problems else build_spec(root, stem, problems)
    if spec is None:
        raise SpecError(problems)
    return spec


def _read(
    source: str | Path | Mapping[str, object] | Spec, overrides: Sequence[str], problems: list[Problem]
) -> tuple[Node, str]:
    """The tree, and the name that the run gets if it has none."""
    if isinstance(source, Spec):
        renamed = any(text.partition("=")[0].strip() == "name" for text in overrides)
        return tree_of(source, renamed=renamed, problems=problems), source.name
    if isinstance(source, Mapping):
        named = {name: value for name, value in source.items() if not (isinstance(name, str) and name.startswith("x-"))}
        return from_python(named, Source("python", "python"), Path.cwd(), problems), ""
    path = Path(source)
    return load_file(path, problems), path.stem


class _Findings:
    """Turns the errors of the schema into problems: one a place, in words, without misleading consequences."""

    def __init__(self, root: Node, problems: list[Problem], meant: set[str]) -> None:
        self.root, self.problems = root, problems
        # Places with a wrong value, and keys that an unknown one was probably meant to be.
        self.wrong: set[KeyPath] = {tuple(_split(problem.key)) for problem in problems if problem.key}
        self.meant = meant
        self.missing: list[tuple[KeyPath, str]] = []

    def add(self, error: ValidationError) -> None:
        """One error of the schema; what is missing waits until all the rest is known."""
        path: KeyPath = tuple(error.absolute_path)
        schema_path = [str(step) for step in error.absolute_schema_path]
        if "propertyNames" in schema_path:
            self._foreign(path, str(error.instance))
        elif error.validator == "additionalProperties":
            self._unknown(path)
        elif error.validator == "required":
            names, present = error.validator_value, error.instance
            assert isinstance(names, list) and isinstance(present, dict)
            for name in names:
                if name not in present and (path, name) not in self.missing:
                    self.missing.append((path, name))
        elif error.validator == "oneOf" or (
            error.validator in ("minProperties", "maxProperties") and self._is_group(path)
        ):
            # Exclusive groups are told by `finish`, in words.
            pass
        else:
            self._value(path)

    def finish(self) -> None:
        """Exclusive groups and missing keys, unless another problem already explains them."""
        self._exclusive((), self.root, schema())
        for path, name in self.missing:
            key = _joined((*path, name))
            if key in self.meant or any(target.startswith(f"{key}.") for target in self.meant) or path in self.wrong:
                continue
            sub = at(tuple(str(step) for step in (*path, name))) or {}
            self._report(path, key, "is missing", f"add {example_of(name, sub)}")

    def _is_group(self, path: KeyPath) -> bool:
        sub = at(tuple(str(step) for step in path))
        return sub is not None and "x-exclusive" in sub

    def _report(self, path: KeyPath, key: str, what: str, fix: str) -> None:
        self.problems.append(self.root.child(path).problem(key, what, fix))
        self.wrong.add(path if key == _joined(path) else tuple(_split(key)))

    def _foreign(self, path: KeyPath, name: str) -> None:
        sub = at(tuple(str(step) for step in path)) or {}
        if name not in properties(sub):
            return
        section = self.root.child(path).section or {}
        kind = section["type"].value if "type" in section else None
        owners = [
            str(rule["if"]["properties"]["type"]["const"])
            for rule in sub["allOf"]
            if name in rule["then"]["propertyNames"]["enum"]
        ]
        fix = f"remove it, or use type: {listed(owners or [str(sub['properties']['type']['default'])])}"
        self._report((*path, name), _joined((*path, name)), f"type {kind} has no {name}", fix)

    def _unknown(self, path: KeyPath) -> None:
        section = tuple(str(step) for step in path)
        known = properties(at(section) or {})
        for name in self.root.child(path).section or {}:
            if name in known:
                continue
            advice = suggest(section, name)
            if advice.target:
                self.meant.add(advice.target)
            self._report((*path, name), _joined((*path, name)), advice.what, advice.fix)

    def _value(self, path: KeyPath) -> None:
        if path in self.wrong:
            return
        # Inside a list or a mapping of free keys, the key that owns it explains.
        owner: tuple[str, ...] = tuple(str(step) for step in path)
        while owner and at(owner) is None:
            owner = owner[:-1]
        sub = at(owner)
        assert sub is not None
        inside, what, fix = explain(plain(self.root.child(path[: len(owner)])), sub)
        if not owner:
            what, fix = "no keys stand here", "a spec is keys and values"
        full = (*owner, *inside)
        if full not in self.wrong:
            self._report(full, _joined(full), what, fix)
        self.wrong.add(path)

    def _exclusive(self, path: KeyPath, node: Node, sub: Schema) -> None:
        if node.section is None or path in self.wrong:
            return
        group: list[str] = list(sub.get("x-exclusive", ()))
        present = [name for name, child in node.section.items() if name in group and child.value is not None]
        if len(present) > 1:
            by_place = sorted(present, key=lambda name: self._place(node, name))
            first, last = by_place[0], by_place[-1]
            line = node.section[first].source.line
            what = f"excludes {' and '.join(by_place[:-1])}" + (
                f", given on line {line}" if line else ", given as well"
            )
            self._report((*path, last), _joined((*path, last)), what, f"keep one of {', '.join(group)}")
        elif group and not present and not self._explained(path, group):
            examples = [example_of(name, properties(sub)[name]) for name in group]
            what = f"one of {', '.join(group)} is missing"
            self._report(path, _joined(path), what, f"add {' or '.join(examples)}")
        for name, child in node.section.items():
            below = properties(sub).get(name)
            if below is not None and "properties" in below:
                self._exclusive((*path, name), child, below)

    def _explained(self, path: KeyPath, group: list[str]) -> bool:
        """True if an unknown key was probably meant to be one of the group, or something inside it."""
        keys = [_joined((*path, name)) for name in group]
        return any(meant == key or meant.startswith(f"{key}.") for meant in self.meant for key in keys)

    def _place(self, node: Node, name: str) -> tuple[int, int]:
        assert node.section is not None
        source = node.section[name].source
        return (source.line, source.column)


def _joined(path: KeyPath) -> str:
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else str(step)
    return text


def _split(key: str) -> list[str | int]:
    path: list[str | int] = []
    for part in key.split("."):
        name, _, rest = part.partition("[")
        path.append(name)
        path.extend(int(index.rstrip("]")) for index in rest.split("[") if index.rstrip("]").isdigit())
    return path
