"""Where sequences stand: what a model has read, and how it reads on by its parallel form.

Prompts of unequal length share a batch without padding, so that a sequence gets the numbers it would get alone, up to
rounding: a matrix product of another size may add in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rwkv_spec.model.language_model import LanguageModel, State

# Tokens in one parallel pass, over all rows: bounds the memory of a prefill.
_PREFILL_TOKENS = 4096


# Not compared by value: tensors have no single answer to ==.
@dataclass(frozen=True, eq=False)
class GenerationState:
    """All that going on with B sequences needs: the model's State after their last tokens, the logits [B, V] there,
    and the tokens themselves, each with whether it was generated (or read from a prompt).

    The tokens place the draws of those to come, and are what penalties count.
    """

    state: State
    logits_BV: Tensor
    ids: tuple[tuple[int, ...], ...]
    generated: tuple[tuple[bool, ...], ...]

    @property
    def batch_size(self) -> int:
        return len(self.ids)

    def repeated(self, count: int) -> GenerationState:
        """The one sequence of this state, `count` times over."""
        rows = torch.zeros(count, dtype=torch.int64, device=self.logits_BV.device)
        return GenerationState(
            self.state.select(rows), self.logits_BV.index_select(0, rows), self.ids * count, self.generated * count
        )


def fresh(model: LanguageModel, *, batch_size: int) -> GenerationState:
    """Before the first token. Its logits are no model's: read at least one token with each sequence."""
    return GenerationState(
        model.initial_state(batch_size),
        model.head.weight.new_zeros((batch_size, model.shape.vocab_size)),
        ((),) * batch_size,
        ((),) * batch_size,
    )


def read(
    model: LanguageModel, before: GenerationState, tokens: Sequence[Sequence[int]], *, generated: bool
) -> GenerationState:
    """Read more tokens with each sequence, none or any number."""
    with torch.no_grad():
        logits_BV, state = prefill(model, tokens, before.state, logits_BV=before.logits_BV)
    return GenerationState(
        state,
        logits_BV,
        tuple((*old, *new) for old, new in zip(before.ids, tokens, strict=True)),
        tuple((*old, *[generated] * len(new)) for old, new in zip(before.generated, tokens, strict=True)),
    )


def prefill(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    state: State | None = None,
    *,
    logits_BV: Tensor | None = None,
) -> tuple[Tensor, State]:
    """Logits [B, V] after the last token of every prompt and the State there, in as few parallel passes as fit.

    An empty prompt leaves its row of `state` and `logits_BV` as given (zeros, where they are not).
    """
    device = model.emb.weight.device
    state = model.initial_state(len(prompts)) if state is None else state
    if logits_BV is None:
        logits_BV = model.head.weight.new_zeros((len(prompts), model.shape.vocab_size))
    done = 0
    while True:
        rows = [row for row, prompt in enumerate(prompts) if len(prompt) > done]
        if not rows:
            return logits_BV, state
        # As far as the shortest unfinished prompt reaches: rows of one pass are equally long and need no padding.
        length = min(len(prompts[row]) for row in rows) - done
        length = min(length, max(1, _PREFILL_TOKENS // len(rows)))
        ids_BT = torch.tensor([list(prompts[row][done : done + length]) for row in rows], device=device)
        rows_B = torch.tensor(rows, device=device)
        part_BV, part = model.prefill(ids_BT, state.select(rows_B))
        logits_BV = logits_BV.index_copy(0, rows_B, part_BV.to(logits_BV.dtype))
        state = state.replaced(rows_B, part)
        done += length
