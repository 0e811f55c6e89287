"""Writes a Spec as YAML that is itself a spec which runs: every key, absolute paths, each value's origin in a comment.

Read again, it gives an equal Spec, but for what was auto and now is a number.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from rwkv_spec.spec.origin import Source
from rwkv_spec.spec.schema import Schema, properties, schema
from rwkv_spec.spec.tree import read_scalar
from rwkv_spec.spec.types import Every, Spec

_HEAD = "# Every key of this run, and where its value comes from. This file is itself a spec that runs.\n"
# Words of these letters need no quotes, in a flow mapping either.
_SAFE = re.compile(r"[A-Za-z_./][A-Za-z0-9_./+-]*")


def resolved_yaml(spec: Spec, derived: Mapping[str, object]) -> str:
    """The text of resolved.yaml; `derived` maps keys that are auto, such as `scheduler.lr_final`, to their values."""
    lines = [f"{'  ' * depth}{text}" for depth, text in _lines(spec, spec, schema(), "", derived, 0)]
    return _HEAD + "\n".join(lines) + "\n"


def _lines(
    spec: Spec, holder: object, sub: Schema, prefix: str, derived: Mapping[str, object], depth: int
) -> Iterator[tuple[int, str]]:
    group = sub.get("x-exclusive", ())
    types = properties(sub).get("type")
    for name, child in properties(sub).items():
        key = f"{prefix}{name}"
        value = getattr(holder, name)
        source = spec.sources.get(key, Source("default"))
        if value is None:
            if key in ("data.train", "tokenizer"):
                yield depth, f"# {name} is passed from Python"
            elif name not in group and types is None:
                # A key of another type, or another member of the group, is not there; all else is null.
                yield depth, f"{name}: null{_comment(source)}"
        elif value == "auto" and key in derived:
            yield depth, f"{name}: {yaml_text(derived[key])}{_comment(dataclasses.replace(source, kind='derived'))}"
        elif (
            key == "eval"
            and spec.data.eval is None
            and not any(spec.is_given(f"eval.{inner}") for inner in vars(value))
        ):
            # Written out, they would be given, and there is nothing to evaluate.
            yield depth, "# eval is not needed: nothing is held out"
        elif dataclasses.is_dataclass(value) and not isinstance(value, Every):
            yield depth, f"{name}:{_comment(source) if source.replaces else ''}"
            yield from _lines(spec, value, child, f"{key}.", derived, depth + 1)
        else:
            yield depth, f"{name}: {yaml_text(_bare(value))}{_comment(_origin(spec, key))}"


def _bare(value: object) -> object:
    """A period as the mapping of its one unit; a list of one path as the path."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {unit: count for unit, count in dataclasses.asdict(value).items() if count is not None}
    if isinstance(value, tuple) and len(value) == 1 and isinstance(value[0], Path):
        return value[0]
    return value


def _origin(spec: Spec, key: str) -> Source:
    """The source of a key; of a period, that of its unit, which alone knows what an override replaced."""
    below = [source for name, source in spec.sources.items() if name.startswith(f"{key}.") and source.replaces]
    return below[0] if below else spec.sources.get(key, Source("default"))


def _comment(source: Source) -> str:
    place = f" {Path(source.where).name}:{source.line}" if source.kind == "given" and source.line else ""
    replaced = f", instead of {source.replaces}" if source.replaces else ""
    text = "".join(letter if letter.isprintable() else "?" for letter in f"{source.kind}{place}{replaced}")
    return f"  # {text}"


def yaml_text(value: object) -> str:
    """A value on one line of YAML, read back as the same value by this program and by other YAML readers."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        # Readers of YAML 1.1 take 1e-18 for text, and 1.0e-18 for a number.
        mantissa, e, exponent = repr(value).partition("e")
        return f"{mantissa}.0{e}{exponent}" if e and "." not in mantissa else repr(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, Path | str):
        return _quoted(str(value))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_quoted(str(name))}: {yaml_text(child)}" for name, child in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(yaml_text(child) for child in value) + "]"
    raise TypeError(f"a {type(value).__name__} cannot stand in a spec")


def _quoted(text: str) -> str:
    # yes, no, on and off are text here, and booleans to readers of YAML 1.1.
    is_word = text.lower() in ("yes", "no", "on", "off", "y", "n")
    if _SAFE.fullmatch(text) and isinstance(read_scalar(text), str) and not is_word:
        return text
    return '"' + "".join(_escaped(letter) for letter in text) + '"'


def _escaped(letter: str) -> str:
    if letter in '"\\':
        return f"\\{letter}"
    if letter.isprintable():
        return letter
    code = ord(letter)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
