"""The language model: embedding, blocks, head; a parallel form over whole sequences and a step form, both with State.

The two forms give the same numbers, and a sequence may be cut anywhere between them. Nothing here draws random numbers:
dropout is a function of the seeds that the caller gives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rwkv_spec.errors import KernelError
from rwkv_spec.model.block import Block, ChannelMix, LayerState, TimeMix, final_norm
from rwkv_spec.model.compiled_step import CompiledStep, takes_step
from rwkv_spec.model.rwkv5 import ChannelMix5, TimeMix5
from rwkv_spec.model.rwkv6 import ChannelMix6, TimeMix6
from rwkv_spec.model.rwkv7 import ChannelMix7, TimeMix7
from rwkv_spec.model.shapes import ModelShape

# Of the normed hidden vectors [B, T, C] and the head's matrix [V, C]: a weighted sum, and its weight.
Loss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

# Far above what another order of sums makes in float32.
_MOST_STEP_ERROR = 1e-3


# Not compared by value: tensors have no single answer to ==.
@dataclass(frozen=True, eq=False)
class State:
    """All that a model carries from one token to the next, for B sequences.

    att_shift and ffn_shift [L, B, C]: the last normed inputs of each block's halves. wkv: [L, B, H, key, value] for
    x052 and x060, [L, B, H, value, key] for x070, as published; float32, or float64 for a float64 model.
    """

    att_shift: Tensor
    wkv: Tensor
    ffn_shift: Tensor

    @property
    def batch_size(self) -> int:
        return self.att_shift.shape[1]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.att_shift, self.wkv, self.ffn_shift

    def empty_like(self) -> State:
        """A State of the same sizes whose numbers are yet to be filled in."""
        return State(*(torch.empty_like(tensor) for tensor in self.tensors))

    def is_plain(self, shape: ModelShape, *, batch_size: int) -> bool:
        """Whether it is that of so many sequences of such a model, laid out as compiled code takes it."""
        L, H, N = shape.n_layer, shape.num_heads, shape.head_size
        shift = (L, batch_size, shape.n_embd)
        return all(
            tensor.shape == size
            and tensor.dtype == torch.float32
            and tensor.device.type == "cpu"
            and tensor.is_contiguous()
            for tensor, size in zip(self.tensors, (shift, (L, batch_size, H, N, N), shift), strict=True)
        )

    def layer(self, index: int) -> LayerState:
        return LayerState(self.att_shift[index], self.wkv[index], self.ffn_shift[index])

    def select(self, rows: Tensor) -> State:
        """The states of the sequences `rows` (int64), in that order."""
        return State(*(tensor.index_select(1, rows) for tensor in self.tensors))

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
    """An RWKV language model of the generation `shape.type`, under the published parameter names.

    With `grad_checkpoint` each block keeps its inputs alone, and is computed again in the backward pass.
    """

    def __init__(self, shape: ModelShape, *, dropout: float, backend: str, grad_checkpoint: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.grad_checkpoint = grad_checkpoint
        self.backend = backend
        self._compiled_step: CompiledStep | None = None
        self.emb = nn.Embedding(shape.vocab_size, shape.n_embd)
        self.blocks = nn.ModuleList(
            _block(shape, layer=layer, dropout=dropout, backend=backend) for layer in range(shape.n_layer)
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
        loss: Loss | None = None,
    ) -> Tensor | tuple[Tensor, State] | tuple[Tensor, Tensor]:
        """Logits [B, T, V] of every position, and the State after the last one if asked for.

        With a `loss` no logits are made: its result, for the last hidden vectors, is returned alone in their place.

        `starts_BT` (bool) marks tokens before which state and token shift are forgotten. Dropout is applied if
        `dropout_seed_B` (int64) is given, in training and evaluation mode alike; without it there is none.
        """
        x_BTC, added_BTC, layers = self._run(
            ids_BT,
            state,
            starts_BT=starts_BT,
            dropout_seed_B=dropout_seed_B,
            keep_layers=return_state and loss is None,
        )
        hidden_BTC = final_norm(x_BTC, added_BTC, self.ln_out, backend=self.backend)
        if loss is not None:
            return loss(hidden_BTC, self.head.weight)
        logits_BTV: Tensor = self.head(hidden_BTC)
        return (logits_BTV, State.stacked(layers)) if return_state else logits_BTV

    def prefill(self, ids_BT: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """The parallel form for prompts: logits [B, V] of the last position alone, and the State after it."""
        x_BTC, added_BTC, layers = self._run(ids_BT, state, starts_BT=None, dropout_seed_B=None, keep_layers=True)
        last_BC = final_norm(x_BTC[:, -1:], added_BTC[:, -1:], self.ln_out, backend=self.backend)[:, 0]
        return self.head(last_BC), State.stacked(layers)

    def step(self, ids_B: Tensor, state: State, *, out: State | None = None) -> tuple[Tensor, State]:
        """One token for each sequence: logits [B, V] and the new State.

        The given State is left as it is, unless it is `out`, which takes the new one: then nothing is allocated.
        """
        if list(ids_B.shape) != [state.batch_size] or state.batch_size == 0:
            raise ValueError(
                f"ids must be one for each of the state's {state.batch_size} sequences, got {list(ids_B.shape)}"
            )
        new_state = state.empty_like() if out is None else out
        if (
            takes_step(self.emb.weight, head_size=self.shape.head_size, backend=self.backend)
            and state.is_plain(self.shape, batch_size=len(ids_B))
            and new_state.is_plain(self.shape, batch_size=len(ids_B))
        ):
            return self._compiled(ids_B, state)(ids_B, state.tensors, new_state.tensors), new_state
        return self._plain_step(ids_B, state, new_state), new_state

    def _plain_step(self, ids_B: Tensor, state: State, new_state: State) -> Tensor:
        x_BC = F.embedding(ids_B, self.emb.weight)
        v_first_BC: Tensor | None = None
        for index, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            x_BC, v_first_BC = block.step(x_BC, v_first_BC, state.layer(index), new_state=new_state.layer(index))
        logits_BV: Tensor = self.head(self.ln_out(x_BC))
        return logits_BV

    def _compiled(self, ids_B: Tensor, state: State) -> CompiledStep:
        """The compiled step form, made anew where a weight was exchanged; its first token is compared."""
        if self._compiled_step is not None and self._compiled_step.is_current():
            return self._compiled_step
        step = CompiledStep(self, self.shape)
        # A plain token leads away from a state of zeros, in which nothing that is forgotten would show.
        before, found, wanted = (state.empty_like() for _ in range(3))
        self._plain_step(ids_B, state, before)
        logits_BV = step(ids_B, before.tensors, found.tensors)
        expected_BV = self._plain_step(ids_B, before, wanted)
        expected = (expected_BV, *wanted.tensors)
        if not all(bool(torch.isfinite(want).all()) for want in expected):
            # The model itself gives no numbers to compare with: not kept, so that the next token is compared.
            return step
        errors = [_error(got, want) for got, want in zip((logits_BV, *found.tensors), expected, strict=True)]
        # Written so that what is not a number is no agreement.
        if not all(error < _MOST_STEP_ERROR for error in errors):
            raise KernelError(
                "step: the compiler made a call that computes wrong numbers (errors of logits and state "
                f"{', '.join(f'{error:.1e}' for error in errors)}); try another compiler by CXX=..., or choose "
                "kernels: torch"
            )
        self._compiled_step = step
        return step

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
        self,
        ids_BT: Tensor,
        state: State | None,
        *,
        starts_BT: Tensor | None,
        dropout_seed_B: Tensor | None,
        keep_layers: bool,
    ) -> tuple[Tensor, Tensor, list[LayerState]]:
        """x, what is still to be added to it, and what each layer carries on, if that is to be kept."""
        if ids_BT.dim() != 2 or ids_BT.shape[1] == 0:
            raise ValueError(f"ids must be [batch, time] with at least one token, got {list(ids_BT.shape)}")
        x_BTC = self.emb(ids_BT)
        added_BTC: Tensor | None = None
        v_first_BTC: Tensor | None = None
        layers = []
        # Dropout is a function of its seeds: there is no random state to bring back.
        again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        run = again if self.grad_checkpoint and torch.is_grad_enabled() else _call
        for index, block in enumerate(self.blocks):
            x_BTC, added_BTC, v_first_BTC, layer_state = run(
                block,
                x_BTC,
                added_BTC,
                v_first_BTC,
                state=None if state is None else state.layer(index),
                starts_BT=starts_BT,
                dropout_seed_B=dropout_seed_B,
            )
            # In plain torch its last inputs are views, each of which would keep a whole [B, T, C].
            if keep_layers:
                layers.append(layer_state)
        assert added_BTC is not None
        return x_BTC, added_BTC, layers


def _call(block: nn.Module, *inputs: Tensor | None, **others: Any) -> Any:
    return block(*inputs, **others)


def _error(got: Tensor, want: Tensor) -> float:
    """The norm of the difference, as a share of what is wanted; of zeros, any difference is large."""
    return float(torch.linalg.vector_norm(got - want) / torch.linalg.vector_norm(want).clamp(min=1e-30))


def _block(shape: ModelShape, *, layer: int, dropout: float, backend: str) -> Block:
    att: TimeMix
    ffn: ChannelMix
    match shape.type:
        case "x052":
            att, ffn = TimeMix5(shape, backend=backend), ChannelMix5(shape, backend=backend)
        case "x060":
            att, ffn = TimeMix6(shape, backend=backend), ChannelMix6(shape, backend=backend)
        case "x070":
            att, ffn = TimeMix7(shape, layer=layer, backend=backend), ChannelMix7(shape, backend=backend)
        case _:
            raise AssertionError(f"no modules are known for {shape.type}")
    return Block(shape.n_embd, att=att, ffn=ffn, layer=layer, dropout=dropout, backend=backend)
