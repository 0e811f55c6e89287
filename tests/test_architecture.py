"""The house rules that a machine can hold: who may import whom, what no file may do, how long files may be."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

import rwkv_spec

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "rwkv_spec"

# The order of the house plan: a module may import only from lines above its own. A folder's files named here keep this
# order too; its other files may stand anywhere between, as long as some order without a cycle exists.
LAYERS: dict[str, list[str]] = {
    "errors": [],
    "paths": [],
    "atomic": [],
    "lock": [],
    "interrupt": [],
    "process": [],
    "spec": ["types", "load", "validate", "plan"],
    "ops": ["build", "build_cuda", "backend", "recurrence", "reference", "wkv"],
    "tokenizer": ["integer", "vocab", "build"],
    "data": ["binidx", "source", "prepare", "order", "batch"],
    "model": ["shapes", "block", "initial", "rwkv5", "rwkv6", "rwkv7", "language_model", "build"],
    "objective": [],
    "evaluate": [],
    "train": ["engine", "optimizer", "schedule", "loop"],
    "checkpoint": ["format", "detect", "state"],
    "generation": ["penalty", "sample", "stop", "context", "decode", "text"],
    "report": ["metrics", "console"],
    "run_folder": [],
    "preflight": [],
    "planning": [],
    "micro_batch": [],
    "preparing": [],
    "session": [],
    "start": [],
    "inference": [],
    "conversion": [],
    "training": [],
    "benchmark": ["workload", "timed", "machine", "breakdown", "gate", "own", "peers", "worker", "programs", "measure"],
    "api": [],
    "__init__": [],
    "generate_verb": [],
    "cli": [],
    "__main__": [],
}
NEVER_IMPORT_EACH_OTHER = ("data", "model")

# Planning, checking and reading need no torch: they answer at once, also where it is not installed properly.
TORCH_FREE = ("errors", "paths", "atomic", "lock", "interrupt", "spec", "tokenizer", "data", "model.shapes", "report")
TORCH_LIKE = {"torch", "accelerate", "safetensors", "deepspeed"}
MAY_IMPORT_ACCELERATE = {"train.engine"}

# The compiler and the cache; the launcher's world; which process of a launch speaks; whether there is a launcher.
MAY_READ_ENVIRONMENT = {"ops.build", "ops.build_cuda", "train.engine", "cli", "interrupt", "process"}
MAY_PRINT = ("report", "cli")
POSIX_ONLY = {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "posix", "readline", "curses"}
MAX_FILE_LINES, MAX_CUDA_LINES, MAX_FUNCTION_LINES = 400, 300, 60

FILES = sorted(PACKAGE.rglob("*.py"))
SOURCES = [path for folder in ("rwkv_spec", "kernels", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]
NATIVE = [
    path for path in sorted((ROOT / "kernels").rglob("*")) if path.suffix in (".cpp", ".cu", ".h", ".hpp", ".cuh")
]


def name_of(path: Path) -> str:
    """rwkv_spec/spec/load.py -> spec.load, rwkv_spec/spec/__init__.py -> spec, rwkv_spec/__init__.py -> __init__"""
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def shown(path: Path, line: int = 0) -> str:
    place = path.relative_to(ROOT).as_posix()
    return f"{place}:{line}" if line else place


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    """Every dotted name that a file imports, anywhere in it, with the line. `from a.b import c` gives a.b and a.b.c."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{shown(path, node.lineno)}: relative import"
            yield str(node.module), node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def own_imports_of(path: Path) -> Iterator[tuple[str, int]]:
    """The modules of the package that a file imports, named as by name_of."""
    names = {name_of(file) for file in FILES}
    for dotted, line in imports_of(path):
        if dotted == "rwkv_spec":
            yield "__init__", line
        elif dotted.startswith("rwkv_spec.") and dotted.removeprefix("rwkv_spec.") in names:
            yield dotted.removeprefix("rwkv_spec."), line


def is_among(name: str, layers: tuple[str, ...]) -> bool:
    return any(name == layer or name.startswith(f"{layer}.") for layer in layers)


def test_every_module_has_a_place_in_the_order() -> None:
    homeless = {name_of(path).split(".")[0] for path in FILES} - LAYERS.keys()
    assert not homeless, "give the new module its place in LAYERS, here and in the house plan"


def test_modules_import_only_from_lines_above_their_own() -> None:
    order = [*LAYERS, *(name_of(path).split(".")[0] for path in FILES)]
    wrong = []
    for path in FILES:
        own = name_of(path).split(".")[0]
        for imported, line in own_imports_of(path):
            other = imported.split(".")[0]
            # `from rwkv_spec import x` reaches the table of public names, which only what stands below it may use.
            if other != own and order.index(other) > order.index(own):
                wrong.append(f"{shown(path, line)}: {own} imports {other}, which stands below it")
            if {own, other} == set(NEVER_IMPORT_EACH_OTHER):
                wrong.append(f"{shown(path, line)}: {own} and {other} do not import each other")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("folder", [name for name in LAYERS if (PACKAGE / name).is_dir()])
def test_the_files_of_a_folder_import_in_one_direction(folder: str) -> None:
    files = {path.stem: path for path in (PACKAGE / folder).glob("*.py") if path.stem != "__init__"}
    needs = {
        stem: {name.split(".")[1] for name, _ in own_imports_of(path) if name.startswith(f"{folder}.")}
        for stem, path in files.items()
    }
    printed = [stem for stem in LAYERS[folder] if stem in files]
    for before, after in pairwise(printed):
        needs[after] = needs[after] | {before}
    while ready := [stem for stem, needed in needs.items() if not needed & (needs.keys() - {stem})]:
        for stem in ready:
            del needs[stem]
    assert not needs, f"{folder}/: no order of these files fits their imports and the printed order: {needs}"


def test_torch_stays_out_of_what_needs_none() -> None:
    wrong = [
        f"{shown(path, line)}: imports {imported}"
        for path in FILES
        if is_among(name_of(path), TORCH_FREE)
        for imported, line in imports_of(path)
        if imported.split(".")[0] in TORCH_LIKE
    ]
    assert not wrong, "\n".join(wrong)


def test_torch_free_modules_do_not_load_torch_through_others() -> None:
    names = [f"rwkv_spec.{name_of(path)}" for path in FILES if is_among(name_of(path), TORCH_FREE)]
    load = f"for name in {names!r}: importlib.import_module(name)"
    assert python(f"import importlib, sys\n{load}\nprint('torch' in sys.modules)") == "False"


def test_only_the_engine_imports_accelerate() -> None:
    wrong = [
        f"{shown(path, line)}: imports {imported}"
        for path in FILES
        if name_of(path) not in MAY_IMPORT_ACCELERATE
        for imported, line in imports_of(path)
        if imported.split(".")[0] == "accelerate"
    ]
    assert not wrong, "\n".join(wrong)


def test_no_module_bears_the_name_of_a_public_function() -> None:
    # Importing rwkv_spec/run.py would put the module in the place of the function rwkv_spec.run.
    modules = {name_of(path).split(".")[0] for path in FILES}
    assert not modules & set(rwkv_spec.__all__)


def test_importing_the_package_is_free() -> None:
    code = "import sys; before = set(sys.modules); import rwkv_spec; print(*sorted(set(sys.modules) - before))"
    loaded = {name.split(".")[0] for name in python(code).split()}
    assert loaded - set(sys.stdlib_module_names) == {"rwkv_spec"}


def test_init_files_hold_nothing() -> None:
    for path in FILES:
        if path.name == "__init__.py" and path.parent != PACKAGE:
            assert all(is_docstring(node) for node in tree_of(path).body), shown(path)


def test_every_file_says_what_it_is() -> None:
    wrong = [shown(path) for path in SOURCES if path.read_text(encoding="utf-8").strip() and not has_docstring(path)]
    assert not wrong, wrong


def test_nothing_runs_at_import() -> None:
    allowed = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    wrong = [
        f"{shown(path, node.lineno)}: {type(node).__name__}"
        for path in FILES
        if name_of(path) != "__main__"
        for node in tree_of(path).body
        if not isinstance(node, allowed)
        and not is_docstring(node)
        and not is_type_checking(node)
        and not registers_operator(node)
    ]
    assert not wrong, "\n".join(wrong)


def test_files_and_functions_are_short() -> None:
    wrong = []
    for path in [*SOURCES, *NATIVE]:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        most = MAX_CUDA_LINES if path.suffix == ".cu" else MAX_FILE_LINES
        if lines > most:
            wrong.append(f"{shown(path)}: {lines} lines, at most {most}")
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                lines = node.end_lineno - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    wrong.append(f"{shown(path, node.lineno)}: {node.name} has {lines} lines")
    assert not wrong, "\n".join(wrong)


def test_no_exception_is_swallowed() -> None:
    wrong = []
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ExceptHandler) and is_broad(node) and not raises_at_the_end(node):
                wrong.append(f"{shown(path, node.lineno)}: catches everything")
    assert not wrong, "\n".join(wrong)


def test_only_the_named_files_read_the_environment() -> None:
    wrong = []
    for path in FILES:
        if name_of(path) in MAY_READ_ENVIRONMENT:
            continue
        for node in ast.walk(tree_of(path)):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if name in ("environ", "environb", "getenv", "getenvb", "putenv"):
                wrong.append(f"{shown(path, node.lineno)}: {name}")
    assert not wrong, "\n".join(wrong)


def test_only_the_report_and_the_command_line_print() -> None:
    wrong = [
        shown(path, node.lineno)
        for path in FILES
        if not is_among(name_of(path), MAY_PRINT)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not wrong, "\n".join(wrong)


def test_no_module_needs_posix_to_be_imported() -> None:
    wrong = []
    for path in FILES:
        for node in outside_functions(tree_of(path)):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [str(node.module)]
            elif isinstance(node, ast.Attribute) and node.attr in ("fork", "register_at_fork"):
                names = ["posix"]
            wrong += [f"{shown(path, node.lineno)}: {name}" for name in names if name.split(".")[0] in POSIX_ONLY]
    assert not wrong, "\n".join(wrong)


def test_w_alone_is_no_name() -> None:
    wrong = []
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME and token.string == "w":
                wrong.append(shown(path, token.start[0]))
    for path in NATIVE:
        text = without_comments_and_strings(path.read_text(encoding="utf-8"))
        wrong += [shown(path, number) for number, line in enumerate(text.splitlines(), 1) if re.search(r"\bw\b", line)]
    assert not wrong, f"`w` means three things: say w_raw, w_log or decay\n{wrong}"


def python(code: str) -> str:
    """What a fresh interpreter prints; the package comes from this checkout."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def has_docstring(path: Path) -> bool:
    return ast.get_docstring(tree_of(path)) is not None


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def registers_operator(node: ast.stmt) -> bool:
    """The definition of an operator in torch's own terms, through a torch.library.Library or torch.library itself."""
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return False
    return ast.unparse(node.value).startswith(("_LIBRARY.", "torch.library.register_", "register("))


def is_broad(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or ast.unparse(kind) in ("Exception", "BaseException") for kind in kinds)


def raises_at_the_end(handler: ast.ExceptHandler) -> bool:
    return isinstance(handler.body[-1], ast.Raise)


def outside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes that run when the module is imported."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            yield from outside_functions(node)


def without_comments_and_strings(text: str) -> str:
    """C++ with comments and literals blanked out, line for line."""
    pattern = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])+'", re.DOTALL)
    return pattern.sub(lambda found: "\n" * found.group(0).count("\n"), text)
