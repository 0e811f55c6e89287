"""The starter is a valid spec, and whatever one types into it ends in a Spec or a SpecError."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rwkv_spec.errors import SpecError
from rwkv_spec.spec.schema import keys, other_names, schema_path
from rwkv_spec.spec.starter import migration_table, starter
from rwkv_spec.spec.types import Spec
from rwkv_spec.spec.validate import validate

STARTER = starter(schema_path())


def check(folder: Path, text: str) -> Spec:
    path = folder / "starter.yaml"
    path.write_text(text, encoding="utf-8", newline="")
    return validate(path)


def modeline_path(text: str) -> str:
    found = re.match(r"# yaml-language-server: \$schema=(\S+)\n", text)
    assert found is not None
    return found[1]


def test_the_starter_is_valid_and_short_of_nothing(tmp_path: Path) -> None:
    spec = check(tmp_path, STARTER)
    assert spec.train.epochs == 1 and spec.tokenizer is not None and spec.tokenizer.type == "bytes"
    for key in keys():
        if key.count(".") < 2 and not key.endswith((".epochs.", ".every.")):
            assert re.search(rf"^ *#?{key.rpartition('.')[2]}:", STARTER, re.MULTILINE), key
    assert all(len(line) <= 120 for line in STARTER.splitlines()[1:])


def test_its_modeline_names_the_installed_schema() -> None:
    assert Path(modeline_path(STARTER)) == schema_path() and schema_path().is_file()
    assert modeline_path(starter(Path("/a folder/schema.json"))).endswith("/a%20folder/schema.json")


def test_an_editors_checker_takes_the_modelines_schema(tmp_path: Path) -> None:
    program = shutil.which("check-jsonschema", path=str(Path(sys.executable).parent)) or shutil.which(
        "check-jsonschema"
    )
    if program is None:
        pytest.skip("check-jsonschema is not installed")
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(STARTER, encoding="utf-8")
    bad.write_text(STARTER.replace("n_layer: 3", "n_layer: three"), encoding="utf-8")
    for path, status in ((good, 0), (bad, 1)):
        command = [program, "--schemafile", modeline_path(STARTER), str(path)]
        assert subprocess.run(command, capture_output=True, check=False).returncode == status


def _commented() -> list[tuple[int, int]]:
    """The lines of keys that may be uncommented alone, each with the line of its section.

    Left out are those that exclude what the starter sets, belong to another type, or need data.eval.
    """
    found, head, section = [], 0, ""
    for number, line in enumerate(STARTER.splitlines()):
        match = re.match(r"( *)#?([a-z]\w*):(.?)", line)
        if match is None:
            continue
        if not match[1]:
            head, section = number, match[2]
        needs_more = section in ("checkpoint", "eval") or (section == "tokenizer" and match[1])
        excludes = section == "train" and match[2] in ("steps", "tokens")
        if "#" in line and match[3] and not needs_more and not excludes:
            found.append((head, number))
    return found


def test_any_one_commented_key_can_be_uncommented(tmp_path: Path) -> None:
    assert len(_commented()) > 30
    for head, number in _commented():
        lines = STARTER.splitlines()
        lines[number] = lines[number].replace("#", "", 1)
        lines[head] = lines[head].lstrip("#")
        check(tmp_path, "\n".join(lines) + "\n")


def test_the_migration_table_has_every_other_name() -> None:
    table = migration_table()
    for name, key in other_names().items():
        row = next(line for line in table.splitlines() if f"`{name}`" in line)
        assert f"| `{key}` |" in row


def test_the_readme_prints_the_migration_table() -> None:
    readme = Path(__file__).parents[2] / "README.md"
    if not readme.is_file():
        pytest.skip("there is no README beside the tests")
    assert migration_table() in readme.read_text(encoding="utf-8")


_PIECES = st.sampled_from(
    ["\t", ":", ": ", "- ", "#", "{", "}", "[", "]", "'", '"', "&a ", "*a", "<<: ", "!!str ", "---\n", "\n",
     "\r\n", "null", "yes", "1e9", ".nan", "-1", "0", "\ufeff", "\x00", "\ud7ff", "é", "every", "type",
     "  ", "| ", "%", "@", "1:30", "auto"]
)  # fmt: skip
_EDIT = st.tuples(st.integers(0, 10**6), st.integers(0, 12), st.one_of(_PIECES, st.text(max_size=4)))


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(_EDIT, min_size=1, max_size=4), st.booleans())
def test_no_edit_ends_in_anything_but_a_spec_or_a_spec_error(
    tmp_path: Path, edits: list[tuple[int, int, str]], uncomment: bool
) -> None:
    # Without its comments nearly every edit hits something that means something.
    text = re.sub(r"^ *# .*\n", "", STARTER, flags=re.MULTILINE)
    if uncomment:
        text = text.replace("#", "")
    for place, num_removed, piece in edits:
        at = place % (len(text) + 1)
        text = text[:at] + piece + text[at + num_removed :]
    path = tmp_path / "starter.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        assert isinstance(validate(path), Spec)
    except SpecError as error:
        assert error.problems
        for problem in error.problems:
            assert problem.where == str(path) and problem.line >= 1 and problem.column >= 1 and problem.what
