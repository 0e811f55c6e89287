"""YAML's traps are closed, every value knows its place, and whatever a file holds ends in a tree or a SpecError."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rwkv_spec.errors import Problem, SpecError
from rwkv_spec.spec.load import load_file
from rwkv_spec.spec.tree import Node, plain, read_scalar
from rwkv_spec.spec.validate import validate

BODY = "data: {train: a}\ntokenizer: {type: bytes}\nmodel: {n_layer: 2, n_embd: 64}\ntrain: {steps: 3}\n"


def load(folder: Path, text: str | bytes, name: str = "a.yaml") -> tuple[Node, list[Problem]]:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    problems: list[Problem] = []
    return load_file(path, problems), problems


def refused(folder: Path, text: str | bytes, name: str = "a.yaml") -> Problem:
    with pytest.raises(SpecError) as caught:
        load(folder, text, name)
    assert len(caught.value.problems) == 1
    return caught.value.problems[0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4), ("1e9", 10**9), ("1E3", 1000), ("-.5", -0.5), ("+3", 3), ("2.0", 2), ("0", 0), ("1.", 1),
        ("true", True), ("false", False), ("null", None), ("~", None), ("", None),
        ("yes", "yes"), ("no", "no"), ("on", "on"), ("off", "off"), ("y", "y"),
        ("2024-01-01", "2024-01-01"), ("017", "017"), ("0o17", "0o17"), ("0x1f", "0x1f"), ("1:30", "1:30"),
        ("1_000", "1_000"), (".inf", ".inf"), ("-.INF", "-.INF"), (".nan", ".nan"), ("1e999", "1e999"),
        ("٣", "٣"), ("9" * 5000, "9" * 5000),
    ],
)  # fmt: skip
def test_a_scalar_means_what_it_looks_like(text: str, value: object) -> None:
    read = read_scalar(text)
    assert read == value and type(read) is type(value)


def test_every_value_knows_its_place(tmp_path: Path) -> None:
    root, _ = load(tmp_path, "version: 1\ntrain:\n  steps: 3\n  list: [1,\n    22]\n")
    steps, second = root.child(("train", "steps")), root.child(("train", "list", 1))
    assert (steps.source.line, steps.source.column, steps.value) == (3, 3, 3)
    assert (second.source.line, second.source.column, second.value) == (5, 5, 22)
    assert steps.source.where == str(tmp_path / "a.yaml")


def test_duplicate_keys_are_errors_everywhere(tmp_path: Path) -> None:
    _, problems = load(tmp_path, "a: {b: 1, b: 2}\nc: [{d: 1, d: 2}]\na: 3\n")
    assert {(p.line, p.column, p.key) for p in problems} == {(1, 11, "a.b"), (2, 12, "c[0].d"), (3, 1, "a")}


def test_anchors_aliases_and_merges_work(tmp_path: Path) -> None:
    text = "x-base: &base {steps: 3, ctx_len: 8}\ntrain:\n  <<: *base\n  ctx_len: 16\neval: &e [1, 2]\nsave: *e\n"
    root, problems = load(tmp_path, text)
    assert plain(root) == {"train": {"ctx_len": 16, "steps": 3}, "eval": [1, 2], "save": [1, 2]}
    assert not problems
    assert root.child(("train", "steps")).source.line == 1
    assert root.child(("save",)).source.line == 6


def test_a_list_of_merges_takes_the_first(tmp_path: Path) -> None:
    root, _ = load(tmp_path, "x-a: &a {k: 1, m: 1}\nx-b: &b {k: 2, n: 2}\nt: {<<: [*a, *b]}\n")
    assert plain(root) == {"t": {"k": 1, "m": 1, "n": 2}}


def test_a_merge_of_something_else_is_an_error(tmp_path: Path) -> None:
    _, problems = load(tmp_path, "x-a: &a 3\nt: {<<: *a}\n")
    assert [(p.line, p.what) for p in problems] == [(2, "<< needs a mapping")]


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ("", 1, "empty"), ("# only a comment\n", 1, "empty"), ("- a\n- b\n", 1, "list"),
        ("just text\n", 1, "single value"),
        ("a: 1\n---\nb: 2\n", 2, "second document"), ("a:\n\tb: 1\n", 2, "tab"),
        ("a: 1\n b: 2\n", 2, "':'"),
        ("a: {b: 1\n", 2, "missing"),
        ("a: [1, 2\nb: 3\n", 2, "missing"), ("a: 'x\n", 2, "quote"), ("a: *b\n", 1, "anchor"),
        ("a: @x\n", 1, "quotes"), ("a: 1\nb\n", 3, "':'"), ('a: "\\q"\n', 1, "backslash"),
        ("a: &a [*a]\n", 1, "itself"), ("t: &t {<<: *t}\n", 1, "never end"), ("a: " + "[" * 60 + "]" * 60, 1, "deeply"),
        ("a: " + "[" * 5000, 1, "deeply"), ("a: \x07\n", 1, "U+0007"), ("%YAML 3.0\n---\na: 1\n", 1, "YAML"),
    ],
)  # fmt: skip
def test_what_is_not_a_spec_is_told_with_its_line(text: str, line: int, word: str, tmp_path: Path) -> None:
    problem = refused(tmp_path, text)
    assert problem.line == line
    assert word in f"{problem.what} {problem.fix}"


def test_alias_bombs_are_refused_at_once(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    assert "without end" in refused(tmp_path, "\n".join(lines)).what
    merges = ["m0: &m0 {k: 1}"] + [f"m{n}: &m{n} {{<<: [*m{n - 1}, *m{n - 1}]}}" for n in range(1, 38)]
    assert "never end" in refused(tmp_path, "\n".join(merges)).what


def test_encodings(tmp_path: Path) -> None:
    root, _ = load(tmp_path, b"\xef\xbb\xbfa: 1\r\nb:\r\n  c: \xc3\xa4\r\n")
    assert plain(root) == {"a": 1, "b": {"c": "ä"}}
    assert root.child(("b", "c")).source.line == 3
    problem = refused(tmp_path, b"a: 1\nb: x\xff\n")
    assert (problem.line, problem.column) == (2, 5) and "UTF-8" in problem.what
    assert "UTF-16" in refused(tmp_path, "a: 1".encode("utf-16")).what
    assert "spec has at most" in refused(tmp_path, b"#" * 300_000).what


def test_json_specs_keep_their_places(tmp_path: Path) -> None:
    root, problems = load(tmp_path, '{\n\t"version":1,\n\t"a": {"b": "\\ud83d\\ude00", "c": 1e-4}\n}\n', "a.json")
    assert plain(root) == {"version": 1, "a": {"b": "😀", "c": 1e-4}} and not problems
    assert (root.child(("a", "b")).source.line, root.child(("a", "b")).source.column) == (3, 8)
    _, problems = load(tmp_path, json.dumps({"a": "\ud83d"}), "b.json")
    assert "surrogate" in problems[0].what


def test_tags_are_refused_and_the_plain_ones_understood(tmp_path: Path) -> None:
    root, problems = load(
        tmp_path, 'a: !!str 12\nb: !!int "12"\nc: !!python/object/apply:os.system [ls]\nd: !x {a: 1}\n'
    )
    assert plain(root) == {"a": "12", "b": 12, "c": None, "d": None}
    assert [problem.line for problem in problems] == [3, 4]


def test_a_missing_file_names_those_like_it(tmp_path: Path) -> None:
    (tmp_path / "angles.yaml").write_text("version: 1\n")
    for name in ("angels.yaml", "angles.yml"):
        with pytest.raises(SpecError, match=r"did you mean .*angles\.yaml\?"):
            validate(tmp_path / name)
    with pytest.raises(SpecError, match="did you mean"):
        validate(tmp_path / "angles.txt")
    with pytest.raises(SpecError, match=r"is a folder.*angles\.yaml"):
        validate(tmp_path)
    with pytest.raises(SpecError, match="there is no folder"):
        validate(tmp_path / "nowhere" / "a.yaml")
    with pytest.raises(SpecError, match="not a file name"):
        validate("a\0.yaml")


def test_keys_that_begin_with_x_are_ignored_at_the_top_only(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("version: 1\nx-anything: {a: 1}\n" + BODY)
    assert validate(path).train.steps == 3
    path.write_text("version: 1\n" + BODY.replace("{steps: 3}", "{steps: 3, x-a: 1}"))
    with pytest.raises(SpecError, match=r"train\.x-a"):
        validate(path)
