"""Where the time of some steps goes, by operator, from torch's profiler: every microsecond counted once.

An operator's own time is counted under the innermost name that a person knows: matrix products first, then compiled
and fused operators by their names, the optimizer, and so on. What lies between operators is Python.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from torch.autograd.profiler import record_function
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

PYTHON = "Python between operators"
_STEPS = "rwkv_spec: profiled steps"
_BACKWARD = "autograd::engine::evaluate_function: "
_PRODUCTS = re.compile(r"aten::(mm|addmm|bmm|baddbmm|_scaled_mm|mkldnn_linear|mkl_linear)$")
# An autograd function of ours (_NormMix, _NormMixBackward), and an operator in torch's own terms (rwkv_spec::wkv7_...).
_FUNCTION = re.compile(r"_([A-Z]\w*?)(Backward)?$")
_OPERATOR = re.compile(
    r"(?:GeneratedBackwardFor_)?rwkv_spec(?:::|_)([a-z0-9_]+?)(?:_forward|_backward)?(?:_default\w*)?$"
)
_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_OPTIMIZER = re.compile(r"Optimizer\.|aten::_fused_adam|aten::_foreach_|torch::autograd::AccumulateGrad$")
_EMBEDDING = re.compile(r"aten::embedding")
_NORM = re.compile(r"aten::(native_)?(layer|group|batch|rms)_norm")
_ATTENTION = re.compile(r"aten::_?scaled_dot_product")
_COPY = re.compile(
    r"aten::(copy_|_to_copy|to|clone|contiguous|cat|stack|fill_|zero_|zeros|zeros_like|pad|constant_pad_nd)$"
)
_BY_ANCESTOR = (
    (_OPTIMIZER, "optimizer and clipping"),
    (_EMBEDDING, "embedding"),
    (_NORM, "norms"),
    (_ATTENTION, "attention"),
)


def breakdown(work: Callable[[], object]) -> dict[str, float]:
    """Name -> share of the time of `work` on the thread that calls, the largest first; they sum to 1."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function(_STEPS):
        work()
    return shares(list(profiler.events() or []))


def shares(events: list[FunctionEvent]) -> dict[str, float]:
    """The same, of events that were recorded."""
    whole = next(event for event in events if event.name == _STEPS)
    totals: dict[str, float] = {}
    for event in events:
        if event.thread == whole.thread and whole in _chain(event):
            name = PYTHON if event is whole else name_of([link.name for link in _chain(event)])
            totals[name] = totals.get(name, 0.0) + max(0.0, event.self_cpu_time_total)
    total = sum(totals.values())
    return {name: spent / total for name, spent in sorted(totals.items(), key=lambda item: -item[1])}


def name_of(chain: list[str]) -> str:
    """What an operator is called, by its name and those of all that it runs inside, the innermost first."""
    direction = "backward" if any(_is_backward(name) for name in chain) else "forward"
    if _PRODUCTS.match(chain[0]):
        return f"matrix products {direction}"
    for name in chain:
        function, operator = _FUNCTION.match(name), _OPERATOR.match(name)
        if function:
            return f"{_WORD.sub(' ', function.group(1)).lower()} {direction}"
        if operator:
            return f"{operator.group(1)} {direction}"
    for pattern, known in _BY_ANCESTOR:
        if any(pattern.match(name.removeprefix(_BACKWARD)) for name in chain):
            return known
    return "copies and fills" if _COPY.match(chain[0]) else "other operators"


def _is_backward(name: str) -> bool:
    return name.startswith(_BACKWARD) or name.endswith(("Backward", "_backward"))


def _chain(event: FunctionEvent) -> Iterator[FunctionEvent]:
    link: FunctionEvent | None = event
    while link is not None:
        yield link
        link = link.cpu_parent
