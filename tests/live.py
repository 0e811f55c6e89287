"""Counts the bytes of all tensors that live, whoever keeps them: Python, autograd, or an operator unseen by both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """A context: what operators make in it counts while it lives. `known` tensors, such as the weights, never do."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self._known = {x.untyped_storage()._cdata for x in known}
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self._at_most = 0
        self.peak = 0

    @property
    def now(self) -> int:
        """Bytes that live at this moment."""
        self._seen = {key: (storage, size) for key, (storage, size) in self._seen.items() if not storage.expired()}
        self._at_most = sum(size for _, size in self._seen.values())
        return self._at_most

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self._see(x.untyped_storage())
        # Counting all of them after each operator would take far longer than the operators.
        if self._at_most > self.peak:
            self.peak = max(self.peak, self.now)
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        seen = self._seen.get(key)
        if key not in self._known and (seen is None or seen[0].expired()):
            self._seen[key] = StorageWeakRef(storage), storage.nbytes()
            self._at_most += storage.nbytes()


def zero_gradients(model: torch.nn.Module) -> list[Tensor]:
    """Gives every parameter a gradient of zeros, as after a first micro-batch: returns the gradients."""
    gradients = []
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    return gradients
