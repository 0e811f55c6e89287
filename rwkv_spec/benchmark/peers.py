"""Other models in a loop of a few lines, on the same tokens: a GPT of our size, and our own model under torch.compile.

The loop is the plainest that trains, with what makes it fast: fused AdamW, autocast, freed memory kept. It knows
nothing of ours, so that it stays a yardstick when ours changes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rwkv_spec.benchmark.machine import now, peak_memory
from rwkv_spec.benchmark.timed import WARMUP_STEPS, Times
from rwkv_spec.benchmark.workload import Workload, random_batch
from rwkv_spec.model.build import build_model
from rwkv_spec.process import keep_freed_memory


class GPT(nn.Module):
    """Pre-norm, causal attention by torch's scaled_dot_product_attention, GELU of four widths, learned positions.

    No dropout, and embedding and head apart: with equal widths and layers, about as many parameters as an x070.
    """

    def __init__(self, *, n_layer: int, n_embd: int, num_heads: int, vocab_size: int, ctx_len: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, n_embd)
        self.positions = nn.Embedding(ctx_len, n_embd)
        self.blocks = nn.ModuleList(GPTBlock(n_embd, num_heads=num_heads) for _ in range(n_layer))
        self.norm = nn.LayerNorm(n_embd)
        self.head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Logits [B, T, V]."""
        x_BTC = self.tokens(ids_BT) + self.positions.weight[: ids_BT.shape[1]]
        for block in self.blocks:
            x_BTC = block(x_BTC)
        logits_BTV: Tensor = self.head(self.norm(x_BTC))
        return logits_BTV


class GPTBlock(nn.Module):
    """Attention and a two-layer perceptron, each on a normed input and added to it."""

    def __init__(self, n_embd: int, *, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_att, self.norm_ffn = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.qkv, self.output = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.up, self.down = nn.Linear(n_embd, 4 * n_embd), nn.Linear(4 * n_embd, n_embd)

    def forward(self, x_BTC: Tensor) -> Tensor:
        B, T, C = x_BTC.shape
        heads = self.qkv(self.norm_att(x_BTC)).view(B, T, 3, self.num_heads, C // self.num_heads)
        q_BHTN, k_BHTN, v_BHTN = heads.permute(2, 0, 3, 1, 4)
        y_BHTN = F.scaled_dot_product_attention(q_BHTN, k_BHTN, v_BHTN, is_causal=True)
        x_BTC = x_BTC + self.output(y_BHTN.transpose(1, 2).reshape(B, T, C))
        mixed_BTC: Tensor = x_BTC + self.down(F.gelu(self.up(self.norm_ffn(x_BTC))))
        return mixed_BTC


def measure_gpt(workload: Workload, *, num_steps: int) -> Times:
    """Optimizer steps of a GPT as deep and as wide as the workload's model."""
    torch.set_num_threads(workload.num_threads)
    torch.manual_seed(0)
    shape = workload.shape
    model = GPT(
        n_layer=shape.n_layer,
        n_embd=shape.n_embd,
        num_heads=shape.num_heads,
        vocab_size=shape.vocab_size,
        ctx_len=workload.ctx_len,
    )
    return _train(workload, model, model, num_steps=num_steps)


def measure_compiled(workload: Workload, *, num_steps: int) -> Times:
    """Optimizer steps of our model with plain torch operators, compiled by torch; takes minutes before it starts.

    Without dropout: the integers that ours is made of are larger than what that compiler takes.
    """
    torch.set_num_threads(workload.num_threads)
    model = build_model(workload.shape, backend="torch", seed=workload.seed)
    return _train(workload, model, torch.compile(model), num_steps=num_steps)


def _train(workload: Workload, model: nn.Module, logits_of: Callable[[Tensor], Tensor], *, num_steps: int) -> Times:
    keep_freed_memory()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device=device, dtype=torch.float64 if workload.precision == "fp64" else torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=0.0,
        betas=(workload.beta1, workload.beta2),
        eps=workload.eps,
        weight_decay=workload.weight_decay,
        fused=True,
    )
    batch = random_batch(workload)
    seconds = []
    for _ in range(WARMUP_STEPS + num_steps):
        started = now(device)
        optimizer.zero_grad(set_to_none=True)
        for micro in batch.split(workload.micro_batch_size, workload.accumulate):
            ids_BT, targets_BT = (torch.from_numpy(x).to(device) for x in (micro.ids_BT, micro.targets_BT))
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=workload.precision == "bf16"):
                logits_BTV = logits_of(ids_BT)
                loss = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten()) / workload.accumulate
            loss.backward()
        if workload.grad_clip > 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), workload.grad_clip)
        optimizer.step()
        seconds.append(now(device) - started)
    return Times(tuple(seconds[WARMUP_STEPS:]), peak_memory(), sum(x.numel() for x in model.parameters()))
