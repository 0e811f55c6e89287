"""x052 and x060 start as published: every vector by its formula, every matrix by its kind and size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rwkv_spec.model.build import build_model, weights
from rwkv_spec.model.shapes import fresh_shape

# (channel, its share n / C, its ramp n / (C - 1), depth from 0 to 1, depth from 1 to nearly 0) -> the published value.
Formula = Callable[[int, float, float, float, float], float]


def decay(n: int, share: float, ramp: float, up: float, down: float) -> float:
    return -6 + 5 * ramp ** (0.7 + 1.3 * up)


def bonus(n: int, share: float, ramp: float, up: float, down: float) -> float:
    return up * (1 - ramp) + 0.1 * ((n + 1) % 3 - 1)


VECTORS: dict[str, dict[str, Formula]] = {
    "x052": {
        "att.time_mix_k": lambda n, share, ramp, up, down: share**down,
        "att.time_mix_v": lambda n, share, ramp, up, down: share**down + 0.3 * up,
        "att.time_mix_r": lambda n, share, ramp, up, down: share ** (down / 2),
        "att.time_mix_g": lambda n, share, ramp, up, down: share ** (down / 2),
        "att.time_decay": decay,
        "att.time_faaaa": bonus,
        "ffn.time_mix_k": lambda n, share, ramp, up, down: share**down,
        "ffn.time_mix_r": lambda n, share, ramp, up, down: share**down,
    },
    "x060": {
        "att.time_maa_x": lambda n, share, ramp, up, down: 1 - share**down,
        "att.time_maa_w": lambda n, share, ramp, up, down: 1 - share**down,
        "att.time_maa_k": lambda n, share, ramp, up, down: 1 - share**down,
        "att.time_maa_v": lambda n, share, ramp, up, down: 1 - share**down - 0.3 * up,
        "att.time_maa_r": lambda n, share, ramp, up, down: 1 - share ** (down / 2),
        "att.time_maa_g": lambda n, share, ramp, up, down: 1 - share ** (down / 2),
        "att.time_decay": decay,
        "att.time_faaaa": bonus,
        "ffn.time_maa_k": lambda n, share, ramp, up, down: 1 - share ** (down**3),
        "ffn.time_maa_r": lambda n, share, ramp, up, down: 1 - share ** (down**3),
    },
}
GAINS = {"att.receptance": 1.0, "att.key": 0.1, "att.value": 1.0, "att.gate": 0.1, "att.output": 0.0} | {
    "ffn.key": 1.0,
    "ffn.receptance": 0.0,
    "ffn.value": 0.0,
}


@pytest.mark.parametrize("n_layer", [1, 2, 5])
@pytest.mark.parametrize("type", ["x052", "x060"])
def test_every_vector_follows_its_published_formula(type: str, n_layer: int) -> None:
    width = 48
    ours = weights(build_model(fresh_shape(type, n_layer=n_layer, n_embd=width, head_size=16, vocab_size=9)))
    for layer in range(n_layer):
        up, down = layer / max(1, n_layer - 1), 1 - layer / n_layer
        for name, formula in VECTORS[type].items():
            wanted = [formula(n, n / width, n / (width - 1), up, down) for n in range(width)]
            found = ours[f"blocks.{layer}.{name}"].flatten()
            torch.testing.assert_close(found, torch.tensor(wanted), rtol=1e-6, atol=1e-6, msg=f"{layer}: {name}")
        scale = ours[f"blocks.{layer}.att.ln_x.weight"]
        torch.testing.assert_close(scale, torch.full((width,), ((1 + layer) / n_layer) ** 0.7))
        assert not bool(ours[f"blocks.{layer}.att.ln_x.bias"].any())


@pytest.mark.parametrize("type", ["x052", "x060"])
def test_every_matrix_is_of_its_published_kind_and_size(type: str) -> None:
    ours = weights(build_model(fresh_shape(type, n_layer=2, n_embd=64, head_size=16, vocab_size=256)))
    for layer in range(2):
        for name, gain in GAINS.items():
            matrix = ours[f"blocks.{layer}.{name}.weight"].double()
            narrow = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
            wanted = gain**2 * torch.eye(len(narrow), dtype=torch.float64)
            torch.testing.assert_close(narrow @ narrow.T, wanted, rtol=1e-5, atol=1e-5, msg=f"{layer}: {name}")
    head = ours["head.weight"].double()
    torch.testing.assert_close(head.T @ head, torch.eye(64, dtype=torch.float64), rtol=1e-5, atol=1e-5)
    assert 0.9e-4 < float(ours["emb.weight"].abs().max()) <= 1e-4


def test_the_low_rank_pairs_of_x060_start_as_zeros_times_a_small_uniform() -> None:
    ours = weights(build_model(fresh_shape("x060", n_layer=2, n_embd=64, head_size=16, vocab_size=9)))
    for layer in range(2):
        for pair, sizes in (("time_maa", (5, 32, 64)), ("time_decay", (64, 64))):
            first, second = (ours[f"blocks.{layer}.att.{pair}_w{i}"] for i in (1, 2))
            assert not bool(first.any())
            assert second.shape == sizes
            assert 0.0099 < float(second.abs().max()) <= 0.01
            # The standard deviation of a uniform number is its bound over the square root of 3.
            assert float(second.std()) == pytest.approx(0.01 / 3**0.5, rel=0.05)
            assert abs(float(second.mean())) < 5e-4
