"""The language model: embedding, blocks, head; a parallel form over whole sequences and a step form, both with State.

The two forms give the same numbers, and a sequence may be cut anywhere between them. Nothing here draws random numbers:
dropout is a function of the seeds that the caller gives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rwkv_spec.model.rwkv7 import Block, LayerState
from rwkv_spec.model.shapes import ModelShape


# Not compared by value: tensors have no single answer to ==.
@dataclass(frozen=True, eq=False)
class State:
    """All that a model carries from one token to the next, for B sequences.

    att_shift and ffn_shift [L, B, C]: the last normed inputs of each block's halves. wkv [L, B, H, value, key]:
    float32, or float64 for a float64 model.
    """

    att_shift: Tensor
    wkv: Tensor
    ffn_shift: Tensor

    @property
    def batch_size(self) -> int:
        return self.att_shift.shape[1]

    def layer(self, index: int) -> LayerState:
        return LayerState(self.att_shift[index], self.wkv[index], self.ffn_shift[index])

    def select(self, rows: Tensor) -> State:
        """The states of the sequences `rows` (int64), in that order."""
        return State(*(tensor.index_select(1, rows) for tensor in (self.att_shift, self.wkv, self.ffn_shift)))

    def replaced(self, rows: Tensor, other: State) -> State:
        """A copy in which the sequences `rows` have the states of `other`, in that order."""
        return State(
            self.att_shift.index_copy(1, rows, other.att_shift.to(self.att_shift.dtype)),
            self.wkv.index_copy(1, rows, other.wkv),
            self.ffn_shift.index_copy(1, rows, other.ffn_shift.to(self.ffn_shift.dtype)),
        )

    def detach(self) -> State:
        return State(self.att_shift.detach(), self.wkv.detach(), self.ffn_shift.detach())

    def clone(self) -> State:
        return State(self.att_shift.clone(), self.wkv.clone(), self.ffn_shift.clone())

    @staticmethod
    def stacked(layers: list[LayerState]) -> State:
        return State(
            torch.stack([layer.att_shift_BC for layer in layers]),
            torch.stack([layer.wkv_BHNN for layer in layers]),
            torch.stack([layer.ffn_shift_BC for layer in layers]),
        )


class LanguageModel(nn.Module):
    """An RWKV-7 language model under the published parameter names."""

    def __init__(self, shape: ModelShape, *, dropout: float, backend: str) -> None:
        super().__init__()
        self.shape = shape
        self.emb = nn.Embedding(shape.vocab_size, shape.n_embd)
        self.blocks = nn.ModuleList(
            Block(shape, layer=layer, dropout=dropout, backend=backend) for layer in range(shape.n_layer)
        )
        self.ln_out = nn.LayerNorm(shape.n_embd)
        self.head = nn.Linear(shape.n_embd, shape.vocab_size, bias=False)

    def forward(
        self,
        ids_BT: Tensor,
        state: State | None = None,
        *,
        starts_BT: Tensor | None = None,
        dropout_seed_B: Tensor | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, State]:
        """Logits [B, T, V] of every position, and the State after the last one if asked for.

        `starts_BT` (bool) marks tokens before which state and token shift are forgotten. Dropout is applied if
        `dropout_seed_B` (int64) is given, in training and evaluation mode alike; without it there is none.
        """
        x_BTC, layers = self._run(ids_BT, state, starts_BT=starts_BT, dropout_seed_B=dropout_seed_B)
        logits_BTV: Tensor = self.head(self.ln_out(x_BTC))
        return (logits_BTV, State.stacked(layers)) if return_state else logits_BTV

    def prefill(self, ids_BT: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """The parallel form for prompts: logits [B, V] of the last position alone, and the State after it."""
        x_BTC, layers = self._run(ids_BT, state, starts_BT=None, dropout_seed_B=None)
        return self.head(self.ln_out(x_BTC[:, -1])), State.stacked(layers)

    def step(self, ids_B: Tensor, state: State) -> tuple[Tensor, State]:
        """One token for each sequence: logits [B, V] and the new State; the given State is left as it is."""
        x_BC = F.embedding(ids_B, self.emb.weight)
        v_first_BC: Tensor | None = None
        layers = []
        for index, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            x_BC, v_first_BC, layer_state = block.step(x_BC, v_first_BC, state.layer(index))
            layers.append(layer_state)
        return self.head(self.ln_out(x_BC)), State.stacked(layers)

    def initial_state(self, batch_size: int) -> State:
        """The State before the first token: zeros."""
        shape, weight = self.shape, self.emb.weight
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        shift = weight.new_zeros((shape.n_layer, batch_size, shape.n_embd))
        wkv = weight.new_zeros(
            (shape.n_layer, batch_size, shape.num_heads, shape.head_size, shape.head_size), dtype=wide
        )
        return State(shift, wkv, shift.clone())

    def _run(
        self, ids_BT: Tensor, state: State | None, *, starts_BT: Tensor | None, dropout_seed_B: Tensor | None
    ) -> tuple[Tensor, list[LayerState]]:
        if ids_BT.dim() != 2 or ids_BT.shape[1] == 0:
            raise ValueError(f"ids must be [batch, time] with at least one token, got {list(ids_BT.shape)}")
        x_BTC = self.emb(ids_BT)
        v_first_BTC: Tensor | None = None
        layers = []
        for index, block in enumerate(self.blocks):
            x_BTC, v_first_BTC, layer_state = block(
                x_BTC,
                v_first_BTC,
                state=None if state is None else state.layer(index),
                starts_BT=starts_BT,
                dropout_seed_B=dropout_seed_B,
            )
            layers.append(layer_state)
        return x_BTC, layers
