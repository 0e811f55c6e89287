"""Checkpoints in the layouts of other programs, written tensor by tensor for the tests that read them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from rwkv_spec.checkpoint.format import read_weights

GOLDEN = Path(__file__).parents[1] / "golden"
UNUSED = ("blocks.0.att.v0", "blocks.0.att.v1", "blocks.0.att.v2")


def golden_file(generation: str) -> Path:
    return GOLDEN / f"{generation}_mini_L2-D128-V32.pth"


def golden_weights(generation: str) -> dict[str, Tensor]:
    """A small real checkpoint, as published ones are: without what block 0 of x070 never uses."""
    return {name: tensor for name, tensor in read_weights(golden_file(generation)).items() if name not in UNUSED}


def in_layout_of_rwkv7(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As flash-linear-attention and rwkv7-hf name and shape an x070."""
    words = {
        "emb.": "model.embeddings.", "ln_out.": "model.norm.", "head.": "lm_head.", "blocks.": "model.layers.",
        ".ln0.": ".pre_norm.", ".ln1.": ".attn_norm.", ".ln2.": ".ffn_norm.", ".att.ln_x.": ".attn.g_norm.",
        ".att.receptance.": ".attn.r_proj.", ".att.key.": ".attn.k_proj.", ".att.value.": ".attn.v_proj.",
        ".att.output.": ".attn.o_proj.", ".att.": ".attn.",
    }  # fmt: skip
    result = {}
    for name, tensor in weights.items():
        last = name.rsplit(".", 1)[-1]
        for ours, theirs in words.items():
            name = name.replace(ours, theirs, 1) if ours[0] == "." or name.startswith(ours) else name
        if len(last) == 2 and last[0] in "wavg" and last[1] in "012":
            place = {"0": "2.bias", "1": "0.weight", "2": "2.weight"}[last[1]]
            name = name.removesuffix(last) + f"{last[0]}_lora.lora.{place}"
            tensor = tensor.reshape(-1) if last[1] == "0" else tensor.t()
        elif last in ("k_k", "k_a") or name.endswith("ffn.x_k"):
            tensor = tensor.reshape(-1)
        result[name] = tensor.contiguous()
    return result


def in_layout_of_rwkv56(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As the transformers code of RWKV-5 and RWKV-6 names an x052 or x060."""
    words = {
        "emb.": "embeddings.", ".ln0.": ".pre_ln.", ".att.": ".attention.", ".ffn.": ".feed_forward.",
        "time_mix_k": "time_mix_key", "time_mix_v": "time_mix_value", "time_mix_g": "time_mix_gate",
        "time_mix_r": "time_mix_receptance",
    }  # fmt: skip
    result = {}
    for name, tensor in weights.items():
        for ours, theirs in words.items():
            name = name.replace(ours, theirs, 1)
        result[name if name == "head.weight" else f"rwkv.{name}"] = tensor
    return result


def write_folder(folder: Path, tensors: Mapping[str, Tensor], *, num_shards: int = 1, binary: bool = False) -> Path:
    """A Hugging Face folder: one file, or shards with an index; safetensors, or pickles as older ones are."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "rwkv7", "norm_eps": 1e-5}))
    single = "pytorch_model.bin" if binary else "model.safetensors"
    stem, ending = single.rsplit(".", 1)
    names = sorted(tensors)
    weight_map = {}
    for shard in range(num_shards):
        file = single if num_shards == 1 else f"{stem}-{shard + 1:05d}-of-{num_shards:05d}.{ending}"
        part = {name: tensors[name].clone() for name in names[shard::num_shards]}
        weight_map |= dict.fromkeys(part, file)
        if binary:
            torch.save(part, folder / file)
        else:
            safetensors.torch.save_file(part, folder / file, metadata={"format": "pt"})
    if num_shards > 1:
        (folder / f"{single}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder
