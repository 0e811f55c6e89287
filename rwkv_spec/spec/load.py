"""Reads a YAML or JSON spec into a tree that knows file, line and column of every value.

Whatever the file holds, the outcome is a tree or a SpecError: duplicate keys, tabs, wrong encodings, alias bombs and
values that YAML would read as something unexpected are all told, with their place.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import yaml

from rwkv_spec.errors import Problem, SpecError
from rwkv_spec.spec.origin import Source
from rwkv_spec.spec.tree import MAX_DEPTH, MAX_NODES, Node, Scalar, problem_at, read_scalar

SUFFIXES = (".yaml", ".yml", ".json")
MAX_BYTES = 256 * 1024

_PLAIN = "plain"
_SCALAR_TAGS = tuple(f"tag:yaml.org,2002:{name}" for name in ("int", "float", "bool", "null"))
_STR_TAG = "tag:yaml.org,2002:str"
_MAP_TAG = "tag:yaml.org,2002:map"
_SEQ_TAG = "tag:yaml.org,2002:seq"

# What PyYAML says (as it begins) -> what a person can act on.
_SYNTAX = (
    ("found character '\\t'", "a tab stands where spaces are needed", "indent with spaces"),
    ("found a tab character", "a tab stands where spaces are needed", "indent with spaces"),
    (
        "mapping values are not allowed here",
        "a ':' is not expected here",
        "check the indentation, or quote text with ': ' in it",
    ),
    ("could not find expected ':'", "a ':' is missing after the key", "write key: value"),
    ("expected <block end>", "this does not line up with the lines above", "check the indentation"),
    ("found undefined alias", "this alias has no anchor above it", "define it with &name first"),
    ("found duplicate anchor", "this anchor is defined twice", "give each anchor its own name"),
    ("expected ',' or '}'", "a ',' or '}' is missing", "close the braces, and separate the keys with commas"),
    ("expected ',' or ']'", "a ',' or ']' is missing", "close the brackets, and separate the items with commas"),
    ("found unexpected end of stream", "a quote is opened and never closed", "close the quote"),
    ("found unknown escape character", "this backslash means nothing inside double quotes", "use single quotes"),
    ("found character", "this character cannot begin a value", "put the value in quotes"),
    ("sequence entries are not allowed here", "a '-' is not expected here", "check the indentation"),
)


class _Composer(yaml.SafeLoader):
    """PyYAML's composer without its own reading of scalars: everything unquoted is tagged `plain`."""

    yaml_implicit_resolvers = {None: [(_PLAIN, re.compile(""))]}  # noqa: RUF012


def load_file(path: Path, problems: list[Problem]) -> Node:
    """The tree of a spec file; relative paths in it start at its folder. Duplicate keys and the like are collected."""
    where = str(path)
    text = _decode(_read_bytes(path), where)
    if path.suffix.lower() == ".json":
        # Tabs are white space in JSON, and not allowed inside its strings.
        text = text.replace("\t", " ")
    base = Path(path).absolute().parent
    node = _compose(text, where)
    if node is None:
        raise SpecError(
            [Problem(where, 1, 1, "", "the file is empty", "`rwkv-spec new FILE` writes a spec to start from")]
        )
    if not isinstance(node, yaml.MappingNode):
        what = "a list stands at the top" if isinstance(node, yaml.SequenceNode) else "a single value stands at the top"
        line, column = node.start_mark.line + 1, node.start_mark.column + 1
        raise SpecError([Problem(where, line, column, "", what, "a spec is keys and values, such as `version: 1`")])
    return _Builder(where, base, "given", problems).build(node, "", ignore_x=True)


def load_value(text: str, base: Path, key: str, problems: list[Problem]) -> Node | None:
    """The value of an override on the command line, read with the same rules; None if it cannot be read."""
    where = "command line"
    quote = f"quote it, for instance {key}='\"...\"'"
    try:
        node = _compose(text, where)
    except SpecError:
        problems.append(Problem(where, 0, 0, key, f"the value {text} cannot be read as YAML", quote))
        return None
    if node is None:
        problems.append(
            Problem(where, 0, 0, key, "nothing stands after the =", f"give a value, or {key}=null to take the key out")
        )
        return None
    # A comment would cut the value short without a word.
    if text[node.end_mark.index :].strip():
        problems.append(
            Problem(where, 0, 0, key, f"the value {text} ends early, at {text[node.end_mark.index :].strip()}", quote)
        )
        return None
    return _Builder(where, base, "command line", problems).build(node, key)


def _read_bytes(path: Path) -> bytes:
    where = str(path)
    if "\0" in where:
        raise SpecError([Problem("spec", 0, 0, "", f"{where!r} is not a file name")])
    if path.is_dir():
        inside = sorted(child.name for child in path.iterdir() if child.suffix.lower() in SUFFIXES)[:5]
        fix = f"name a file in it: {', '.join(inside)}" if inside else "name a .yaml file"
        raise SpecError([Problem(where, 0, 0, "", "is a folder, not a spec", fix)])
    if path.suffix.lower() not in SUFFIXES:
        raise SpecError(
            [Problem(where, 0, 0, "", "is not a spec by its name", _near(path, "a spec ends in .yaml, .yml or .json"))]
        )
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            what = f"has {size:,} bytes; a spec has at most {MAX_BYTES:,}"
            raise SpecError([Problem(where, 0, 0, "", what, "name the spec, not the data")])
        return path.read_bytes()
    except FileNotFoundError:
        fix = _near(
            path, f"looked in {path.absolute().parent}; `rwkv-spec new {path.name}` writes a spec to start from"
        )
        raise SpecError([Problem(where, 0, 0, "", "there is no such file", fix)]) from None
    except OSError as error:
        raise SpecError([Problem(where, 0, 0, "", f"cannot be read: {error.strerror or error}")]) from None


def _near(path: Path, otherwise: str) -> str:
    """Spec files with a similar name in the same folder, or the other advice."""
    try:
        names = [child.name for child in path.parent.iterdir() if child.suffix.lower() in SUFFIXES]
    except OSError:
        return f"there is no folder {path.parent}" if str(path.parent) != "." else otherwise
    stems = {name for name in names if Path(name).stem == path.stem}
    near = sorted(stems) or difflib.get_close_matches(path.name, names, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(str(path.parent / name) for name in near)}?" if near else otherwise


def _decode(raw: bytes, where: str) -> str:
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise SpecError([Problem(where, 1, 1, "", "the file is UTF-16", "save it as UTF-8")])
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        line = before.count(b"\n") + 1
        column = len(before[before.rfind(b"\n") + 1 :].decode("utf-8-sig", errors="replace")) + 1
        what = f"the byte 0x{raw[error.start]:02x} is not UTF-8"
        raise SpecError([Problem(where, line, column, "", what, "save the file as UTF-8")]) from None


def _compose(text: str, where: str) -> yaml.Node | None:
    """The node graph of the only document; None if there is nothing. SpecError on anything that is not sound YAML."""
    try:
        # Parsing keeps its own stack, composing recurses: so depth and size are checked on the events first.
        _check_events(text, where)
        return yaml.compose(text, Loader=_Composer)
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        what = f"the character U+{int(error.character):04X} cannot stand in YAML"
        raise SpecError([Problem(where, line, column, "", what, 'remove it, or write "\\u...." in quotes')]) from None
    except yaml.MarkedYAMLError as error:
        raise SpecError([_syntax_problem(error, where)]) from None


def _check_events(text: str, where: str) -> None:
    depth = num_documents = num_nodes = 0
    for event in yaml.parse(text, Loader=_Composer):
        mark = event.start_mark
        line, column = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
        if isinstance(event, yaml.DocumentStartEvent):
            num_documents += 1
            if num_documents > 1:
                raise SpecError(
                    [
                        Problem(
                            where, line, column, "", "a second document begins here", "one spec a file: remove the ---"
                        )
                    ]
                )
        elif isinstance(event, yaml.NodeEvent):
            num_nodes += 1
            depth += isinstance(event, yaml.CollectionStartEvent)
            if depth > MAX_DEPTH or num_nodes > MAX_NODES:
                raise SpecError(
                    [Problem(where, line, column, "", "is nested too deeply or too long", "a spec is small and flat")]
                )
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _syntax_problem(error: yaml.MarkedYAMLError, where: str) -> Problem:
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
    said = str(error.problem or error.context or "unknown")
    for begins, what, fix in _SYNTAX:
        if said.startswith(begins):
            return Problem(where, line, column, "", what, fix)
    return Problem(where, line, column, "", f"this is not YAML: {said}", "see the line above it too")


class _Builder:
    """Turns a graph of YAML nodes, aliases and merges included, into a tree; collects problems on the way."""

    def __init__(self, where: str, base: Path, kind: str, problems: list[Problem]) -> None:
        self.where, self.base, self.kind, self.problems = where, base, kind, problems
        self.num_nodes = 0
        self.open_nodes: list[int] = []

    def build(self, node: yaml.Node, key: str, *, at: yaml.Node | None = None, ignore_x: bool = False) -> Node:
        """The tree of `node`; `at` is the node of its key, whose place it takes."""
        source = self._source(at or node)
        self.num_nodes += 1
        if id(node) in self.open_nodes:
            raise SpecError([self._problem(at or node, key, "this alias contains itself", "write the value out")])
        if self.num_nodes > MAX_NODES or len(self.open_nodes) > MAX_DEPTH:
            raise SpecError([self._problem(at or node, key, "the aliases expand without end", "write the values out")])
        self.open_nodes.append(id(node))
        tree = Node(source, self.base, self._value(node, key, ignore_x))
        self.open_nodes.pop()
        return tree

    def _value(self, node: yaml.Node, key: str, ignore_x: bool) -> Scalar | dict[str, Node] | list[Node]:
        if isinstance(node, yaml.MappingNode) and node.tag == _MAP_TAG:
            section: dict[str, Node] = {}
            for name, (name_node, value_node) in self._pairs(node, key).items():
                if not (ignore_x and name.startswith("x-")):
                    section[name] = self.build(value_node, f"{key}.{name}" if key else name, at=name_node)
            return section
        if isinstance(node, yaml.SequenceNode) and node.tag == _SEQ_TAG:
            return [self.build(child, f"{key}[{index}]") for index, child in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            if node.tag == _PLAIN or node.tag in _SCALAR_TAGS:
                return self._text(node, key) if isinstance(value := read_scalar(node.value), str) else value
            if node.tag == _STR_TAG:
                return self._text(node, key)
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        self.problems.append(self._problem(node, key, f"the tag {tag} is not understood", "remove the tag"))
        return None

    def _pairs(self, node: yaml.MappingNode, key: str) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """The keys of a mapping with their nodes: its own ones first, then those merged in by <<, which never win."""
        own: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        merged: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for name_node, value_node in node.value:
            if not isinstance(name_node, yaml.ScalarNode):
                self.problems.append(self._problem(name_node, key, "a key must be a plain word", "write key: value"))
                continue
            name = self._text(name_node, key)
            if name == "<<" and name_node.tag == _PLAIN:
                self._merge(value_node, key, merged, at=name_node)
                continue
            if name in own:
                first = own[name][0].start_mark.line + 1
                full = f"{key}.{name}" if key else name
                self.problems.append(
                    self._problem(name_node, full, f"is given twice, first on line {first}", "remove one of the two")
                )
                continue
            own[name] = (name_node, value_node)
        return {**own, **{name: pair for name, pair in merged.items() if name not in own}}

    def _merge(
        self, node: yaml.Node, key: str, merged: dict[str, tuple[yaml.Node, yaml.Node]], *, at: yaml.Node
    ) -> None:
        parts = node.value if isinstance(node, yaml.SequenceNode) else [node]
        for part in parts:
            if not isinstance(part, yaml.MappingNode):
                self.problems.append(self._problem(at, key, "<< needs a mapping", "write <<: *anchor"))
                continue
            self.num_nodes += 1
            if id(part) in self.open_nodes or len(self.open_nodes) > MAX_DEPTH or self.num_nodes > MAX_NODES:
                raise SpecError([self._problem(at, key, "these merges never end", "write the keys out")])
            self.open_nodes.append(id(part))
            for name, pair in self._pairs(part, key).items():
                merged.setdefault(name, pair)
            self.open_nodes.pop()

    def _text(self, node: yaml.ScalarNode, key: str) -> str:
        """The text, with the surrogate pairs of JSON escapes joined."""
        text = str(node.value)
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            try:
                return text.encode("utf-16", "surrogatepass").decode("utf-16")
            except UnicodeDecodeError:
                self.problems.append(
                    self._problem(node, key, "half of a surrogate pair stands alone", "write the whole character")
                )
                return "?"
        return text

    def _source(self, node: yaml.Node) -> Source:
        if self.kind == "command line":
            return Source(self.kind, self.where)
        return Source(self.kind, self.where, node.start_mark.line + 1, node.start_mark.column + 1)

    def _problem(self, node: yaml.Node, key: str, what: str, fix: str) -> Problem:
        return problem_at(self._source(node), key, what, fix)
