"""What the keys of a spec say about each other. Only values that are sound by themselves are compared."""

from __future__ import annotations

from dataclasses import dataclass

from rwkv_spec.errors import Problem
from rwkv_spec.spec.explain import shown
from rwkv_spec.spec.schema import at, default_of
from rwkv_spec.spec.tree import KeyPath, Node, Scalar


@dataclass(frozen=True)
class Passed:
    """What comes from Python instead of the spec."""

    data: bool
    tokenizer: bool
    eval_data: bool


@dataclass(frozen=True)
class _View:
    """The tree as values: given ones, or defaults; None for what is wrong or absent."""

    root: Node
    wrong: set[KeyPath]
    meant: set[str]

    def node(self, key: str) -> Node | None:
        """The node of a key that was given with a sound value."""
        path = tuple(key.split("."))
        if any(path[:depth] in self.wrong for depth in range(1, len(path) + 1)):
            return None
        section = self.root.section
        for name in path[:-1]:
            section = section[name].section if section is not None and name in section else None
        node = section.get(path[-1]) if section is not None else None
        return None if node is None or node.value is None else node

    def value(self, key: str) -> Scalar:
        """The value of a key with a plain value, or its default."""
        node = self.node(key)
        if node is not None:
            return None if isinstance(node.value, dict | list) else node.value
        path = tuple(key.split("."))
        if any(path[:depth] in self.wrong for depth in range(1, len(path) + 1)):
            return None
        default = default_of(at(path) or {})
        assert default is None or isinstance(default, str | int | float | bool)
        return default

    def number(self, key: str) -> int | float | None:
        """The value of a key if it is a number."""
        value = self.value(key)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    def has(self, key: str) -> bool:
        """True if the key stands there, sound or not, or seems to be meant by a key that is misspelt."""
        path = tuple(key.split("."))
        wrong = any(place[: len(path)] == path or path[: len(place)] == place for place in self.wrong)
        meant = any(name == key or name.startswith(f"{key}.") for name in self.meant)
        return self.node(key) is not None or wrong or meant


def cross_check(root: Node, passed: Passed, *, wrong: set[KeyPath], meant: set[str]) -> list[Problem]:
    """Every problem between the keys."""
    if root.section is None or () in wrong:
        return []
    view = _View(root, wrong, meant)
    return [*_passed(view, passed), *_model(view), *_lengths(view), *_evaluation(view, passed)]


def _passed(view: _View, passed: Passed) -> list[Problem]:
    problems = []
    rows = (
        ("data.train", passed.data, "data", "data: {train: data/train.jsonl}"),
        ("tokenizer", passed.tokenizer, "tokenizer", "tokenizer: {type: bytes}"),
        ("data.eval", passed.eval_data, "eval_data", ""),
    )
    for key, is_passed, argument, example in rows:
        node = view.node(key)
        if is_passed and node is not None:
            what = f"is given, and {argument}= is passed from Python as well"
            problems.append(node.problem(key, what, f"remove the key, or pass no {argument}="))
        elif not is_passed and example and not view.has(key):
            place = view.root.child(tuple(key.split(".")))
            problems.append(
                place.problem(key, "is missing", f"add {example}, for instance, or pass {argument}= from Python")
            )
    where = view.node("data.eval.where")
    if passed.data and where is not None:
        fix = "use fraction or documents"
        problems.append(
            where.problem("data.eval.where", "looks at the fields of rows, and data passed from Python has none", fix)
        )
    return problems


def _model(view: _View) -> list[Problem]:
    n_embd, head_size = view.number("model.n_embd"), view.number("model.head_size")
    node = view.node("model.n_embd")
    if node is None or n_embd is None or head_size is None or n_embd % head_size == 0:
        return []
    below = int(n_embd // head_size * head_size)
    nearest = [value for value in (below, below + int(head_size)) if value > 0]
    # Of equal distance both are named; else the nearer one first.
    nearest.sort(key=lambda value: abs(value - n_embd))
    what = f"{shown(n_embd)} is not a multiple of head_size {shown(head_size)}"
    return [node.problem("model.n_embd", what, f"nearest: {' and '.join(str(value) for value in nearest)}")]


def _lengths(view: _View) -> list[Problem]:
    problems = []
    warmup, steps = view.node("scheduler.warmup_steps"), view.number("train.steps")
    num_warmup = view.number("scheduler.warmup_steps")
    if (
        warmup is not None
        and num_warmup is not None
        and steps is not None
        and num_warmup >= steps > 0
        and num_warmup > 0
    ):
        what = f"{shown(num_warmup)} is not below train.steps {shown(steps)}"
        problems.append(warmup.problem("scheduler.warmup_steps", what, "use fewer, or auto"))
    final, lr = view.node("scheduler.lr_final"), view.number("optimizer.lr")
    lr_final = view.number("scheduler.lr_final")
    if final is not None and lr_final is not None and lr is not None and lr_final > lr:
        what = f"{shown(lr_final)} is above optimizer.lr {shown(lr)}, from which the learning rate falls"
        problems.append(final.problem("scheduler.lr_final", what, "use a smaller one, or auto"))
    return problems


def _evaluation(view: _View, passed: Passed) -> list[Problem]:
    if passed.eval_data or view.has("data.eval") or view.has("data.eval.where"):
        return []
    fix = "add data.eval, such as {fraction: 0.05}, or remove it"
    problems = []
    for key in ("eval.every", "eval.continuations"):
        node = view.node(key)
        if node is not None and node.source.is_given and node.value != 0:
            problems.append(node.problem(key, "there is no data.eval to evaluate", fix))
    return problems
