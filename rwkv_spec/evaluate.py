"""Held-out loss: nats a token over whole documents, each from a fresh state that is carried through it in chunks.

Counted are all tokens of a document but its final token 0; the first one is predicted from token 0. No regulariser, no
dropout. The caller divides sum by count, after adding up over processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rwkv_spec.model.language_model import LanguageModel


@dataclass(frozen=True)
class Evaluation:
    """`loss_sum` in nats over `num_tokens` tokens."""

    loss_sum: float
    num_tokens: int


def evaluate(model: LanguageModel, documents: Sequence[np.ndarray], *, chunk_len: int, batch_size: int) -> Evaluation:
    """Score `documents` (1-D integer arrays without the final token 0) in the dtype of the model's weights.

    At most batch_size × chunk_len tokens are computed at once; the result depends on neither.
    """
    was_training = model.training
    model.eval()
    # Documents of like length share a batch, longest first: those that end early are then the last rows.
    order = sorted((i for i in range(len(documents)) if len(documents[i])), key=lambda i: -len(documents[i]))
    loss_sum = 0.0
    with torch.inference_mode():
        for start in range(0, len(order), batch_size):
            loss_sum += _score([documents[i] for i in order[start : start + batch_size]], model, chunk_len)
    model.train(was_training)
    return Evaluation(loss_sum, sum(len(documents[i]) for i in order))


def _score(documents: list[np.ndarray], model: LanguageModel, chunk_len: int) -> float:
    """The summed loss of a batch of documents sorted from long to short."""
    device = next(model.parameters()).device
    state = model.initial_state(len(documents))
    loss_sum = 0.0
    for begin in range(0, len(documents[0]), chunk_len):
        alive = [document for document in documents if len(document) > begin]
        if len(alive) < state.batch_size:
            state = state.select(torch.arange(len(alive), device=device))
        width = min(chunk_len, len(alive[0]) - begin)
        inputs = np.zeros((len(alive), width), dtype=np.int64)
        targets = np.full((len(alive), width), -1, dtype=np.int64)
        for row, document in enumerate(alive):
            piece = np.asarray(document[begin : begin + width], dtype=np.int64)
            targets[row, : len(piece)] = piece
            inputs[row, 1 : len(piece)] = piece[:-1]
            inputs[row, 0] = document[begin - 1] if begin else 0
        logits_BTV, state = model(torch.from_numpy(inputs).to(device), state, return_state=True)
        loss = torch.nn.functional.cross_entropy(
            logits_BTV.flatten(0, 1).float() if logits_BTV.dtype != torch.float64 else logits_BTV.flatten(0, 1),
            torch.from_numpy(targets).to(device).flatten(),
            ignore_index=-1,
            reduction="none",
        )
        loss_sum += float(loss.double().sum())
    return loss_sum
