"""Texts made from the schema: the commented spec that `new` writes, and the table of other trainers' names."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

from rwkv_spec.spec.resolved import yaml_text
from rwkv_spec.spec.schema import Schema, default_of, keys, properties, schema

_HEAD = """\
# yaml-language-server: $schema={schema}
# One training run. Set the keys below; a line such as `#seed: 42` shows a default: remove its # to change it (and the #
# of its section). Everything is checked before anything starts: `rwkv-spec check FILE`.
"""
# Keys that a starting point sets although the schema does not ask for them.
_SHOWN = ("data", "data.train", "tokenizer", "model", "train.epochs")
_WIDTH = 116


def starter(schema_path: Path) -> str:
    """A commented spec that is valid as it is, with every key; its modeline names the installed schema."""
    location = str(schema_path)
    # The modeline ends at white space, so that such a path is written as an address.
    if any(letter.isspace() for letter in location):
        location = schema_path.absolute().as_uri()
    return _HEAD.format(schema=location) + "\n".join(_lines(schema(), "", 0, active=True)) + "\n"


def _lines(sub: Schema, prefix: str, depth: int, *, active: bool) -> Iterator[str]:
    pad = "  " * depth
    for name, child in properties(sub).items():
        key = f"{prefix}{name}"
        is_set = active and (name in sub.get("required", ()) or key in _SHOWN)
        sign = "" if is_set else "#"
        if depth == 0:
            yield ""
        yield from textwrap.wrap(child["description"], _WIDTH, initial_indent=f"{pad}# ", subsequent_indent=f"{pad}# ")
        if "properties" in child and depth == 0:
            yield f"{sign}{name}:"
            yield from _lines(child, f"{key}.", depth + 1, active=is_set)
        else:
            yield f"{pad}{sign}{name}: {_example(child)}"


def _example(sub: Schema) -> str:
    default = default_of(sub)
    value = default if default is not None else (sub.get("examples") or [None])[0]
    return yaml_text(value)


def migration_table() -> str:
    """A Markdown table: what other trainers call a key -> our key."""
    rows = ["| elsewhere | here |", "|---|---|"]
    for key, sub in keys().items():
        names = sub.get("x-also-known-as", ())
        if names:
            rows.append(f"| {', '.join(f'`{name}`' for name in names)} | `{key}` |")
    return "\n".join(rows) + "\n"
