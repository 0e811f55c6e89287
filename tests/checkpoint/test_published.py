"""Whatever layout a checkpoint has, its tensors come back under the published names, bit for bit, or it is refused."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rwkv_spec.checkpoint.detect import describe, detect
from rwkv_spec.checkpoint.folder import UNUSED
from rwkv_spec.checkpoint.format import write_weights
from rwkv_spec.checkpoint.published import checkpoint_sha256, open_header, open_weights, to_huggingface_layout
from rwkv_spec.errors import CheckpointError
from rwkv_spec.model.build import build_model
from rwkv_spec.model.build import weights as model_weights
from rwkv_spec.model.shapes import fresh_shape
from tests.checkpoint.layouts import UNUSED as UNUSED_NAMES
from tests.checkpoint.layouts import (
    golden_file,
    golden_weights,
    in_layout_of_rwkv7,
    in_layout_of_rwkv56,
    write_folder,
)

GENERATIONS = ("x052", "x060", "x070")


def in_their_layout(generation: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return in_layout_of_rwkv7(weights) if generation == "x070" else in_layout_of_rwkv56(weights)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name


def refusal(path: Path) -> str:
    messages = []
    for read in (open_header, open_weights):
        with pytest.raises(CheckpointError) as caught:
            read(path)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert str(path) in messages[0] and "\n" not in messages[0]
    return messages[0]


@pytest.mark.parametrize("binary", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_folder_of_another_program_is_the_same_model(
    tmp_path: Path, generation: str, num_shards: int, binary: bool
) -> None:
    weights = golden_weights(generation)
    theirs = in_their_layout(generation, weights)
    assert not theirs.keys() & (weights.keys() - {"head.weight"})
    folder = write_folder(tmp_path / "hf", theirs, num_shards=num_shards, binary=binary)
    assert_same(open_weights(folder), weights)
    header = open_header(folder)
    published = detect(open_header(golden_file(generation)).tensors, where=folder)
    assert detect(header.tensors, where=folder).shape == published.shape
    assert header.format == "huggingface" and header.layout.startswith("Hugging Face")
    assert header.file_bytes == sum(file.stat().st_size for file in folder.glob("*model*") if file.suffix != ".json")


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("prefix", ["", "_forward_module.", "module.", "_orig_mod.module."])
def test_a_single_file_in_their_layout_is_read_too(tmp_path: Path, generation: str, prefix: str) -> None:
    weights = golden_weights(generation)
    theirs = {prefix + name: tensor for name, tensor in in_their_layout(generation, weights).items()}
    path = tmp_path / "a.pth"
    torch.save({name: tensor.clone() for name, tensor in theirs.items()}, path)
    assert_same(open_weights(path), weights)
    assert detect(open_header(path).tensors, where=path).shape.type == generation


def test_an_early_file_with_six_mixes_in_one_tensor_is_read(tmp_path: Path) -> None:
    weights = golden_weights("x070")
    theirs = in_layout_of_rwkv7(weights)
    for stacked_shape in ((6, 128), (6, 1, 1, 128)):
        for layer in range(2):
            mixes = [f"model.layers.{layer}.attn.x_{letter}" for letter in "rwkvag"]
            rows = [theirs.pop(name) for name in mixes if name in theirs]
            if rows:
                theirs[f"model.layers.{layer}.attn.x_x"] = torch.stack([row.reshape(-1) for row in rows])
            stacked = theirs[f"model.layers.{layer}.attn.x_x"]
            theirs[f"model.layers.{layer}.attn.x_x"] = stacked.reshape(stacked_shape)
        folder = write_folder(tmp_path / f"hf{len(stacked_shape)}", theirs)
        assert_same(open_weights(folder), weights)
    theirs["model.layers.1.attn.x_x"] = torch.zeros(7, 128)
    header = open_header(write_folder(tmp_path / "seven", theirs))
    with pytest.raises(CheckpointError, match=r"blocks\.1\.att\.x_r \[7, 128\] instead of"):
        detect(header.tensors, where=tmp_path)


def test_our_layout_of_theirs_is_theirs() -> None:
    weights = golden_weights("x070")
    assert_same(to_huggingface_layout(weights), in_layout_of_rwkv7(weights))


def test_misshapen_tensors_of_their_layout_are_refused_by_the_accounting(tmp_path: Path) -> None:
    theirs = in_layout_of_rwkv7(golden_weights("x070"))
    bent = theirs["model.layers.1.attn.w_lora.lora.0.weight"]
    theirs["model.layers.1.attn.w_lora.lora.0.weight"] = bent.t().contiguous()
    theirs["model.layers.1.attn.extra"] = torch.zeros(2)
    del theirs["model.layers.0.ffn.x_k"]
    header = open_header(write_folder(tmp_path / "hf", theirs))
    with pytest.raises(CheckpointError) as caught:
        detect(header.tensors, where=tmp_path)
    for words in ("missing: blocks.0.ffn.x_k", "unexpected: model.layers.1.attn.extra", "blocks.1.att.w1 [32, 128]"):
        assert words in str(caught.value)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_vectors_without_their_sizes_of_1_are_the_published_ones(tmp_path: Path, generation: str) -> None:
    weights = golden_weights(generation)
    bare = {name: tensor.reshape(-1) if tensor.shape == (1, 1, 128) else tensor for name, tensor in weights.items()}
    assert sum(bare[name].shape != weights[name].shape for name in weights) >= 12
    write_weights(tmp_path / "a.pth", bare, format="pth", dtype=None)
    assert_same(open_weights(tmp_path / "a.pth"), weights)
    published = detect(open_header(golden_file(generation)).tensors, where=tmp_path)
    assert detect(open_header(tmp_path / "a.pth").tensors, where=tmp_path).shape == published.shape


def test_a_norm_in_every_block_is_left_out_with_a_remark(tmp_path: Path) -> None:
    weights = golden_weights("x060")
    more = weights | {f"blocks.1.ln0.{part}": torch.ones(128, dtype=torch.bfloat16) for part in ("weight", "bias")}
    write_weights(tmp_path / "a.pth", more, format="pth", dtype=None)
    assert_same(open_weights(tmp_path / "a.pth"), weights)
    info = describe(open_header(tmp_path / "a.pth"))
    assert "blocks.1.ln0.weight, blocks.1.ln0.bias: left out" in info.remarks[0]
    assert "remark" in str(info) and json.dumps(info.as_dict())


def test_what_block_0_does_not_use_lies_beside_the_weights(tmp_path: Path) -> None:
    weights = golden_weights("x070")
    folder = write_folder(tmp_path / "hf", in_layout_of_rwkv7(weights))
    before = checkpoint_sha256(folder)
    whole = open_weights(golden_file("x070"))
    unused = {name: tensor for name, tensor in whole.items() if name not in weights}
    write_weights(folder / UNUSED, unused, format="safetensors", dtype=None)
    assert_same(open_weights(folder), whole)
    assert checkpoint_sha256(folder) != before
    write_weights(folder / UNUSED, {"emb.weight": weights["emb.weight"]}, format="safetensors", dtype=None)
    assert "emb.weight twice" in refusal(folder)


def test_the_hash_is_that_of_the_weights(tmp_path: Path) -> None:
    theirs = in_layout_of_rwkv7(golden_weights("x070"))
    folder = write_folder(tmp_path / "hf", theirs, num_shards=2)
    before = checkpoint_sha256(folder)
    (folder / "README.md").write_text("words")
    assert checkpoint_sha256(folder) == before
    theirs["lm_head.weight"] = theirs["lm_head.weight"] + 1
    assert checkpoint_sha256(write_folder(tmp_path / "other", theirs, num_shards=2)) != before
    assert checkpoint_sha256(golden_file("x070")) != checkpoint_sha256(golden_file("x060"))


BAD_INDEXES = {
    "a missing shard": ({"emb": "model-00009-of-00009.safetensors"}, "'model-00009-of-00009.safetensors' is not there"),
    "a path upwards": ({"emb": "../secret.safetensors"}, "'../secret.safetensors' as the file of a tensor"),
    "an absolute path": ({"emb": "/etc/passwd"}, "'/etc/passwd' as the file"),
    "a path of Windows": ({"emb": "..\\secret"}, "as the file of a tensor"),
    "the folder itself": ({"emb": "."}, "'.' as the file"),
    "the folder above": ({"emb": ".."}, "'..' as the file"),
    "a number": ({"emb": 3}, "'3' as the file"),
    "a NUL": ({"emb": "a\0b"}, "as the file of a tensor"),
    "nothing": ({}, "no weight_map"),
    "a list": ([], "no weight_map"),
}


@pytest.mark.parametrize("case", BAD_INDEXES)
def test_an_index_that_leads_elsewhere_is_refused(tmp_path: Path, case: str) -> None:
    weight_map, words = BAD_INDEXES[case]
    write_weights(tmp_path / "secret.safetensors", golden_weights("x070"), format="safetensors", dtype=None)
    folder = write_folder(tmp_path / "hf", in_layout_of_rwkv7(golden_weights("x070")), num_shards=2)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert words in refusal(folder)


def test_a_shard_that_is_not_what_the_index_says_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", in_layout_of_rwkv7(golden_weights("x070")), num_shards=2)
    first, second = sorted(folder.glob("model-*.safetensors"))
    content = second.read_bytes()
    second.write_bytes(first.read_bytes())
    assert "its tensors are not those that the index gives it" in refusal(folder)
    second.write_bytes(content[: len(content) // 2])
    assert "is damaged, cut off" in refusal(folder)
    second.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    assert "is a Git LFS pointer, not the weights of 5 bytes" in refusal(folder)


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff", "[" * 100_000, '"text"'])
def test_a_damaged_description_is_refused(tmp_path: Path, text: str) -> None:
    folder = write_folder(tmp_path / "hf", in_layout_of_rwkv7(golden_weights("x070")), num_shards=2)
    (folder / "model.safetensors.index.json").write_text(text, encoding="latin-1")
    assert "index.json: " in refusal(folder)
    (folder / "config.json").write_text(text, encoding="latin-1")
    assert "config.json: " in refusal(folder)


CONFIGS = {
    "another epsilon": ({"norm_eps": 1e-6}, "norm_eps is 1e-06"),
    "another epsilon of RWKV-6": ({"layer_norm_epsilon": 1e-3}, "layer_norm_epsilon is 0.001"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "another divisor of RWKV-6": ({"head_size_divisor": 1}, "head_size_divisor is 1; RWKV's is 8"),
    "another width": ({"hidden_size": 256}, "hidden_size 256 instead of 128"),
    "fewer layers": ({"num_hidden_layers": 1}, "num_hidden_layers 1 instead of 2"),
    "more rows": ({"vocab_size": 65536}, "vocab_size 65536 instead of 32"),
    "another head size": ({"head_dim": 32}, "head_dim 32 instead of 64"),
    "another channel-mix": ({"intermediate_size": 448}, "intermediate_size 448 instead of 512"),
    "other ranks": ({"decay_low_rank_dim": 64, "v_low_rank_dim": 16}, "decay_low_rank_dim 64 instead of 32, v_low"),
    "words": ({"a_low_rank_dim": "many"}, "a_low_rank_dim many instead of 32"),
    "one matrix for both": ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantized"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_configuration_that_changes_the_numbers_is_refused(tmp_path: Path, case: str) -> None:
    config, words = CONFIGS[case]
    folder = write_folder(tmp_path / "hf", in_layout_of_rwkv7(golden_weights("x070")))
    (folder / "config.json").write_text(json.dumps(config))
    assert words in refusal(folder)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_configuration_of_the_same_model_is_good(tmp_path: Path, generation: str) -> None:
    folder = write_folder(tmp_path / "hf", in_their_layout(generation, golden_weights(generation)))
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "vocab_size": 32, "intermediate_size": None, "num_heads": 32}
    sizes |= {"head_size_divisor": 8, "model_type": "any"}
    (folder / "config.json").write_text(json.dumps({**sizes, "hidden_act": "sqrelu", "norm_eps": 1e-5}))
    assert_same(open_weights(folder), golden_weights(generation))
    assert detect(open_header(folder).tensors, where=folder).shape.n_layer == 2


def test_heads_that_the_other_programs_compute_otherwise_are_not_read_from_their_layout(tmp_path: Path) -> None:
    model = build_model(fresh_shape("x070", n_layer=1, n_embd=64, head_size=32, vocab_size=9))
    published = {name: tensor for name, tensor in model_weights(model).items() if name not in UNUSED_NAMES}
    folder = write_folder(tmp_path / "hf", in_layout_of_rwkv7(published))
    assert "has heads of 32" in refusal(folder)
    assert "has heads of 32" in refusal(folder / "model.safetensors")
    write_weights(tmp_path / "a.pth", published, format="pth", dtype=None)
    assert_same(open_weights(tmp_path / "a.pth"), published)


def test_a_folder_without_weights_says_what_it_holds(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", in_layout_of_rwkv7(golden_weights("x070")))
    (folder / "model.safetensors").unlink()
    assert "folder without weights" in refusal(folder) and "config.json" in refusal(folder)
    (folder / "config.json").unlink()
    assert "is a folder (it is empty)" in refusal(folder)


class Command:
    """Runs a command when a plain pickle reader meets it."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self.command,)


def test_a_malicious_pickle_in_a_folder_runs_nothing(tmp_path: Path) -> None:
    folder, proof = tmp_path / "hf", tmp_path / "proof"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Command(f"touch {proof}"), protocol=2))
    assert "reading it could run code" in refusal(folder)
    assert not proof.exists()
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert proof.exists()
