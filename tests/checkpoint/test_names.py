"""Other programs' names for the same tensors: each has one published name, and what is not known is left as it is."""

from __future__ import annotations

import pytest

from rwkv_spec.checkpoint.names import (
    AS_IS,
    FLAT,
    HF_RWKV7,
    HF_RWKV56,
    PUBLISHED,
    TURNED,
    Place,
    naming_of,
    to_huggingface,
)
from rwkv_spec.model.shapes import fresh_shape, parameter_shapes

# Written out from files that flash-linear-attention and rwkv7-hf make.
RWKV7 = {
    "emb.weight": ("model.embeddings.weight", AS_IS),
    "ln_out.bias": ("model.norm.bias", AS_IS),
    "head.weight": ("lm_head.weight", AS_IS),
    "blocks.0.ln0.weight": ("model.layers.0.pre_norm.weight", AS_IS),
    "blocks.11.ln1.weight": ("model.layers.11.attn_norm.weight", AS_IS),
    "blocks.11.ln2.bias": ("model.layers.11.ffn_norm.bias", AS_IS),
    "blocks.1.att.x_g": ("model.layers.1.attn.x_g", AS_IS),
    "blocks.1.att.k_k": ("model.layers.1.attn.k_k", FLAT),
    "blocks.1.att.k_a": ("model.layers.1.attn.k_a", FLAT),
    "blocks.1.att.r_k": ("model.layers.1.attn.r_k", AS_IS),
    "blocks.1.att.receptance.weight": ("model.layers.1.attn.r_proj.weight", AS_IS),
    "blocks.1.att.output.weight": ("model.layers.1.attn.o_proj.weight", AS_IS),
    "blocks.1.att.ln_x.weight": ("model.layers.1.attn.g_norm.weight", AS_IS),
    "blocks.1.att.w0": ("model.layers.1.attn.w_lora.lora.2.bias", FLAT),
    "blocks.1.att.w1": ("model.layers.1.attn.w_lora.lora.0.weight", TURNED),
    "blocks.1.att.w2": ("model.layers.1.attn.w_lora.lora.2.weight", TURNED),
    "blocks.1.att.v0": ("model.layers.1.attn.v_lora.lora.2.bias", FLAT),
    "blocks.1.att.g2": ("model.layers.1.attn.g_lora.lora.2.weight", TURNED),
    "blocks.1.ffn.x_k": ("model.layers.1.ffn.x_k", FLAT),
    "blocks.1.ffn.key.weight": ("model.layers.1.ffn.key.weight", AS_IS),
}
RWKV56 = {
    "rwkv.embeddings.weight": "emb.weight",
    "rwkv.ln_out.weight": "ln_out.weight",
    "head.weight": "head.weight",
    "rwkv.blocks.0.pre_ln.bias": "blocks.0.ln0.bias",
    "rwkv.blocks.3.ln1.weight": "blocks.3.ln1.weight",
    "rwkv.blocks.3.attention.time_decay": "blocks.3.att.time_decay",
    "rwkv.blocks.3.attention.time_mix_key": "blocks.3.att.time_mix_k",
    "rwkv.blocks.3.attention.time_mix_receptance": "blocks.3.att.time_mix_r",
    "rwkv.blocks.3.attention.time_mix_gate": "blocks.3.att.time_mix_g",
    "rwkv.blocks.3.attention.time_maa_w1": "blocks.3.att.time_maa_w1",
    "rwkv.blocks.3.attention.ln_x.weight": "blocks.3.att.ln_x.weight",
    "rwkv.blocks.3.feed_forward.time_mix_key": "blocks.3.ffn.time_mix_k",
    "rwkv.blocks.3.feed_forward.time_maa_r": "blocks.3.ffn.time_maa_r",
    "rwkv.blocks.3.feed_forward.value.weight": "blocks.3.ffn.value.weight",
}


def test_rwkv7_names_are_those_of_the_other_programs() -> None:
    for name, (theirs, change) in RWKV7.items():
        assert to_huggingface(name) == Place(theirs, change)
    naming = naming_of(theirs for theirs, _ in RWKV7.values())
    assert naming.layout == HF_RWKV7
    assert naming.places == {name: Place(theirs, change) for name, (theirs, change) in RWKV7.items()}


def test_every_published_name_of_x070_comes_back() -> None:
    names = list(parameter_shapes(fresh_shape("x070", n_layer=3, n_embd=64, head_size=64, vocab_size=9)))
    theirs = [to_huggingface(name).name for name in names]
    assert len(set(theirs)) == len(names)
    assert list(naming_of(theirs).places) == names


@pytest.mark.parametrize("name", ["blocks.0.att.time_decay", "blocks.1.ffn.receptance.weight", "emb.bias", "blocks.0"])
def test_names_that_x070_has_not_are_not_written(name: str) -> None:
    with pytest.raises(KeyError):
        to_huggingface(name)


def test_rwkv5_and_rwkv6_names_are_read() -> None:
    naming = naming_of(RWKV56)
    assert naming.layout == HF_RWKV56
    assert {place.name: name for name, place in naming.places.items()} == RWKV56


@pytest.mark.parametrize("generation", ["x052", "x060", "x070"])
def test_published_names_stay(generation: str) -> None:
    names = list(parameter_shapes(fresh_shape(generation, n_layer=2, n_embd=64, head_size=64, vocab_size=9)))
    naming = naming_of(names)
    assert naming.layout == PUBLISHED
    assert {name: place.name for name, place in naming.places.items()} == {name: name for name in names}
    assert not naming.left_out and not naming.twice
    # What may lie there without its sizes of 1 is just what is published with them.
    published = parameter_shapes(fresh_shape(generation, n_layer=2, n_embd=64, head_size=32, vocab_size=9))
    flat = {name for name, place in naming.places.items() if place.change == FLAT}
    with_ones = {name for name, parameter in published.items() if len(parameter.shape) == 3}
    decay = {f"blocks.{layer}.att.time_decay" for layer in (0, 1)}
    assert flat - decay == with_ones - decay - {name for name in with_ones if name.endswith("time_maa_w2")}


def test_six_mixes_in_one_tensor_are_six_tensors() -> None:
    naming = naming_of(["model.layers.4.attn.x_x"])
    assert list(naming.places) == [f"blocks.4.att.x_{letter}" for letter in "rwkvag"]
    assert [place.row for place in naming.places.values()] == list(range(6))


def test_unknown_names_are_left_as_they_are_for_the_accounting() -> None:
    unknown = ["model.layers.0.attn.bias", "model.rotary", "\x1b[2J", "blocks.0.extra"]
    naming = naming_of([*unknown, "model.layers.0.attn.r_k"])
    assert set(naming.places) == {*unknown, "blocks.0.att.r_k"}


def test_a_norm_that_no_block_but_the_first_has_is_left_out() -> None:
    naming = naming_of(f"blocks.{layer}.ln0.{part}" for layer in (0, 1, 12) for part in ("weight", "bias", "scale"))
    assert naming.left_out == ("blocks.1.ln0.weight", "blocks.1.ln0.bias", "blocks.12.ln0.weight", "blocks.12.ln0.bias")
    assert "blocks.0.ln0.weight" in naming.places and "blocks.1.ln0.scale" in naming.places


def test_two_names_of_one_tensor_are_noticed() -> None:
    naming = naming_of(["model.layers.0.attn.r_k", "blocks.0.att.r_k"])
    assert naming.twice == ("blocks.0.att.r_k",)
