"""Says in words what is wrong with a value and what to write instead; no text of the schema library gets out."""

from __future__ import annotations

import re

from jsonschema import Draft202012Validator

from rwkv_spec.spec.schema import Schema, default_of, followed
from rwkv_spec.spec.suggest import listed, near_value
from rwkv_spec.spec.tree import Scalar, read_scalar

_ZEROS = {"k": 3, "m": 6, "g": 9, "b": 9}
# Maxima from here on are not told.
_FAR = 1e6

_KINDS = {
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "null": "null",
}


def explain(value: object, sub: Schema) -> tuple[tuple[int | str, ...], str, str]:
    """For a value that its schema refuses: (path to the guilty part inside it, what is wrong, what to do)."""
    forms = _forms(sub)
    if isinstance(value, list):
        lists = [form for form in forms if form.get("type") == "array"]
        if lists:
            return _explain_list(value, lists[0], sub)
    if isinstance(value, dict):
        for form in forms:
            free = form.get("additionalProperties")
            if isinstance(free, dict):
                for name, child in value.items():
                    if not _suits(child, followed(free)):
                        inside, what, fix = explain(child, followed(free))
                        return (name, *inside), what, fix
                return (), "is empty", f"write {wanted(sub)}"
    if isinstance(value, dict | list):
        return (), f"a {'section' if isinstance(value, dict) else 'list'} stands here", f"write {wanted(sub)}"
    assert value is None or isinstance(value, str | int | float | bool)
    return (), *_explain_scalar(value, forms, sub)


def _explain_list(value: list[object], form: Schema, sub: Schema) -> tuple[tuple[int | str, ...], str, str]:
    items = form.get("items", {})
    for index, item in enumerate(value):
        if not _suits(item, items):
            inside, what, fix = explain(item, items)
            return (index, *inside), what, fix
    if not value:
        return (), "is an empty list", f"write {wanted(sub)}"
    if form.get("uniqueItems") and any(item in value[:index] for index, item in enumerate(value)):
        twice = next(item for index, item in enumerate(value) if item in value[:index])
        return (), f"{shown(twice)} stands twice in the list", "name each once"
    return (), f"has {len(value)} items", f"write {wanted(sub)}"


def _explain_scalar(value: Scalar, forms: list[Schema], sub: Schema) -> tuple[str, str]:
    instead = f"write {wanted(sub)}{_default(sub)}"
    if value is None and "properties" in sub:
        return "is empty", "put its keys under it, indented, or remove the line"
    if value is None:
        return "has no value", f"{instead}, or remove the line"
    if "properties" in sub:
        example = "{type: " + str(value) + "}" if value in sub["properties"].get("type", {}).get("enum", ()) else ""
        return f"{shown(value)} stands where a section belongs", f"write {example}" if example else instead
    numeric = [form for form in forms if form.get("type") in ("integer", "number")]
    options = [str(option) for form in forms for option in (*form.get("enum", ()), *_const(form))]
    if isinstance(value, str):
        near = near_value(value, options)
        if near:
            return (
                f"{shown(value)} is not one of the choices",
                f"did you mean {near}? The choices are {listed(options)}",
            )
        if numeric:
            return f"{shown(value)} is not {_KINDS[numeric[0]['type']]}", _number_hint(value) or instead
        return _explain_text(value, forms), instead
    if numeric and not isinstance(value, bool):
        return _explain_number(value, numeric[0]), instead
    if any(_has_kind(form, "string") for form in forms):
        return f"{shown(value)} is not text", f'put it in quotes: "{shown(value)}"'
    return f"{shown(value)} is not {wanted(sub)}", instead


def _explain_number(value: int | float, form: Schema) -> str:
    if form["type"] == "integer" and not isinstance(value, int):
        return f"{shown(value)} is not a whole number"
    if "minimum" in form and value < form["minimum"]:
        return f"{shown(value)} is less than {shown(form['minimum'])}"
    if "exclusiveMinimum" in form and value <= form["exclusiveMinimum"]:
        return f"{shown(value)} is not above {shown(form['exclusiveMinimum'])}"
    if "maximum" in form and value > form["maximum"]:
        return f"{shown(value)} is more than {shown(form['maximum'])}"
    if "exclusiveMaximum" in form and value >= form["exclusiveMaximum"]:
        return f"{shown(value)} is not below {shown(form['exclusiveMaximum'])}"
    return f"{shown(value)} is not a multiple of {form.get('multipleOf')}"


def _explain_text(value: str, forms: list[Schema]) -> str:
    if not value:
        return "is empty text"
    if any("enum" in form or "const" in form for form in forms):
        return f"{shown(value)} is not one of the choices"
    form = next((form for form in forms if _has_kind(form, "string")), None)
    if form is None:
        return f"{shown(value)} is text"
    if len(value) > form.get("maxLength", len(value)):
        return f"has {len(value)} characters, more than {form['maxLength']}"
    return f"{shown(value)} has a character that cannot stand here"


def _number_hint(value: str) -> str:
    """The usual ways to write a number that is read as text."""
    if read_scalar(value) is not value and isinstance(read_scalar(value), int | float):
        return f"remove the quotes: {value}"
    bare = value.replace("_", "").replace(",", "")
    if bare != value and isinstance(read_scalar(bare), int | float):
        return f"write {bare}"
    if re.fullmatch(r"0[0-9]+", value):
        return f"write {int(value)}"
    if re.fullmatch(r"[-+]?\.?(inf|nan|infinity)", value.lower()):
        return "write a finite number"
    suffix = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kKmMgGbB])", value)
    if suffix is not None:
        return f"write the number out, such as {suffix[1]}e{_ZEROS[suffix[2].lower()]}"
    return ""


def wanted(sub: Schema) -> str:
    """What a value may be, in words."""
    if "x-exclusive" in sub or "properties" in sub:
        return f"a section such as {{{_section_example(sub)}}}"
    return listed([_form_words(form) for form in _forms(sub) if form.get("type") != "null"])


def example_of(name: str, sub: Schema) -> str:
    """A key with a value that it may have: `steps: 1000`, or `model: {n_layer: 3, n_embd: 128}`."""
    sub = followed(sub)
    if "properties" in sub:
        return f"{name}: {{{_section_example(sub)}}}"
    return f"{name}: {shown(_example_value(sub), plain_words=True)}"


def _section_example(sub: Schema) -> str:
    names = sub.get("required") or sub.get("x-exclusive", ())[:1] or list(sub["properties"])[:2]
    return ", ".join(example_of(name, sub["properties"][name]) for name in names)


def _example_value(sub: Schema) -> object:
    return sub["examples"][0] if "examples" in sub else default_of(sub)


def _form_words(form: Schema) -> str:
    if "enum" in form:
        return listed([str(option) for option in form["enum"]])
    if "const" in form:
        return shown(form["const"], plain_words=True)
    kinds = form["type"] if isinstance(form.get("type"), list) else [form.get("type")]
    if "array" in kinds:
        count = f"{form['minItems']} " if form.get("minItems") == form.get("maxItems", 0) else ""
        items = form.get("items", {})
        return f"a list of {count}{listed([str(one) for one in items['enum']]) if 'enum' in items else _plural(items)}"
    if "object" in kinds:
        return f"a mapping such as {shown(_example_value(form))}" if "examples" in form else "a mapping"
    words = listed([_KINDS[kind] for kind in kinds if kind in _KINDS and kind != "null"] or ["a value"])
    return words + _range(form)


def _plural(items: Schema) -> str:
    kind = items.get("type")
    named = {"integer": "whole numbers", "number": "numbers", "string": "texts"}
    return (named[kind] if isinstance(kind, str) and kind in named else "values") + _range(items)


def _range(form: Schema) -> str:
    step = f", a multiple of {form['multipleOf']}," if "multipleOf" in form else ""
    low = f" from {shown(form['minimum'])}" if "minimum" in form else ""
    low = f" above {shown(form['exclusiveMinimum'])}" if "exclusiveMinimum" in form else low
    # A bound that only keeps nonsense out is not worth reading.
    high = f" to {shown(form['maximum'])}" if "maximum" in form and form["maximum"] < _FAR else ""
    high = f" to below {shown(form['exclusiveMaximum'])}" if "exclusiveMaximum" in form else high
    if low.startswith(" above") and high.startswith(" to below"):
        high = high.replace(" to below", " and below")
    elif low.startswith(" above"):
        high = high.replace(" to", " and at most")
    return step + low + high


def _default(sub: Schema) -> str:
    value = default_of(sub)
    return "" if value is None or "properties" in sub else f" (default {shown(value, plain_words=True)})"


def _forms(sub: Schema) -> list[Schema]:
    """The alternatives of a schema, or the schema itself."""
    return [followed(form) for form in sub["anyOf"]] if "anyOf" in sub else [sub]


def _const(form: Schema) -> tuple[object, ...]:
    return (form["const"],) if "const" in form else ()


def _has_kind(form: Schema, kind: str) -> bool:
    kinds = form.get("type")
    return kinds == kind or (isinstance(kinds, list) and kind in kinds)


def _suits(value: object, sub: Schema) -> bool:
    return bool(Draft202012Validator(sub).is_valid(value))


def shown(value: object, *, plain_words: bool = False) -> str:
    """A value as one would write it in YAML, cut if it is long."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{name}: {shown(child, plain_words=plain_words)}" for name, child in value.items()) + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(shown(child, plain_words=plain_words) for child in value) + "]"
    if isinstance(value, str):
        if re.fullmatch(r"[A-Za-z][A-Za-z0-9_./-]*", value) and plain_words:
            return value
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}...'"
    # Python refuses to print integers of more than some thousand digits.
    if isinstance(value, int) and value.bit_length() > 100:
        return "a number of more than 30 digits"
    return repr(value)
