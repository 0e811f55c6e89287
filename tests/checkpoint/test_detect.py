"""A file is judged by its tensors alone, and whatever is not a whole model of a known generation is called by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rwkv_spec.checkpoint.detect import describe, detect, detect_model
from rwkv_spec.checkpoint.format import Header, TensorInfo, read_header
from rwkv_spec.errors import CheckpointError
from rwkv_spec.model.shapes import ModelShape, Ranks, parameter_shapes

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "x070_mini_L2-D128-V32.pth"
SHARED = ROOT.parent / "shared" / "golden"
WHERE = Path("some.pth")
BLOCK0_VALUE_RESIDUAL = ("blocks.0.att.v0", "blocks.0.att.v1", "blocks.0.att.v2")

# Sizes that no published rule gives, all different, so that no two can be taken for each other.
ODD = ModelShape(
    type="x070",
    n_layer=3,
    n_embd=96,
    head_size=16,
    vocab_size=50,
    rank_decay=5,
    rank_iclr=7,
    rank_value=9,
    rank_gate=11,
    dim_ffn=100,
)


ODD_X060 = replace(ODD, type="x060", rank_iclr=0, rank_value=0, rank_gate=0, rank_mix=13)
ODD_X052 = replace(ODD_X060, type="x052", rank_decay=0, rank_mix=0)
ODDS = {"x052": ODD_X052, "x060": ODD_X060, "x070": ODD}


def tensors_of(shape: ModelShape, dtype: str = "fp32") -> dict[str, TensorInfo]:
    return {name: TensorInfo(parameter.shape, dtype) for name, parameter in parameter_shapes(shape).items()}


def without_block0_value_residual(tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    return {name: info for name, info in tensors.items() if name not in BLOCK0_VALUE_RESIDUAL}


def refusal(tensors: dict[str, TensorInfo]) -> str:
    with pytest.raises(CheckpointError) as caught:
        detect(tensors, where=WHERE)
    message = str(caught.value)
    assert message.startswith("some.pth: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("num_layers", [1, 3, 12])
@pytest.mark.parametrize("generation", ODDS)
def test_every_size_is_read_from_the_tensors(generation: str, num_layers: int) -> None:
    shape = replace(ODDS[generation], n_layer=num_layers)
    tensors = tensors_of(shape)
    found = detect(tensors, where=WHERE)
    assert found.shape == shape
    assert found.has_block0_value_residual == (generation == "x070")
    # Key order is never relied on.
    assert detect(dict(reversed(tensors.items())), where=WHERE) == found


@pytest.mark.parametrize("num_layers", [1, 3])
def test_block_0_may_lack_its_value_residual(num_layers: int) -> None:
    shape = replace(ODD, n_layer=num_layers)
    whole = detect(tensors_of(shape), where=WHERE)
    found = detect(without_block0_value_residual(tensors_of(shape)), where=WHERE)
    assert not found.has_block0_value_residual
    assert whole.num_parameters - found.num_parameters == 96 + 2 * 96 * 9
    if num_layers > 1:
        assert found.shape == shape
    tensors = tensors_of(shape)
    del tensors["blocks.0.att.v1"]
    assert "blocks.0.att.v1" in refusal(tensors)


def test_the_dtype_is_that_of_most_numbers() -> None:
    tensors = tensors_of(ODD, "bf16")
    tensors["blocks.0.att.w0"] = replace(tensors["blocks.0.att.w0"], dtype="fp32")
    assert detect(tensors, where=WHERE).dtype == "bf16"
    info = describe(Header(WHERE, "pth", 1, tensors))
    assert info.remarks == (f"not all of its {len(tensors)} tensors are in bf16: 1 in fp32",)
    assert describe(Header(WHERE, "pth", 1, tensors_of(ODD, "bf16"))).remarks == ()
    tensors["blocks.0.att.w0"] = replace(tensors["blocks.0.att.w0"], dtype="int8")
    assert "of a dtype other than fp32, bf16, fp16, fp64: blocks.0.att.w0 int8" in refusal(tensors)


def test_missing_unexpected_and_misshapen_tensors_are_all_listed() -> None:
    tensors = tensors_of(ODD)
    del tensors["blocks.1.att.k_a"]
    del tensors["ln_out.bias"]
    tensors["blocks.2.att.time_state"] = TensorInfo((6, 16, 16), "fp32")
    tensors["blocks.2.att.w1"] = TensorInfo((96, 6), "fp32")
    message = refusal(tensors)
    assert "missing: blocks.1.att.k_a, ln_out.bias" in message
    assert "unexpected: blocks.2.att.time_state" in message
    assert "blocks.2.att.w1 [96, 6] instead of [96, 5]" in message


@pytest.mark.parametrize(
    ("generation", "name"),
    [
        (generation, name)
        for generation, shape in ODDS.items()
        for name in tensors_of(replace(shape, n_layer=2))
        if name not in BLOCK0_VALUE_RESIDUAL
    ],
)
def test_no_tensor_can_be_left_out_or_bent(generation: str, name: str) -> None:
    tensors = tensors_of(replace(ODDS[generation], n_layer=2))
    info = tensors.pop(name)
    refusal(tensors)
    refusal(tensors | {name: replace(info, shape=(*info.shape[:-1], info.shape[-1] + 1))})
    refusal(tensors | {name: replace(info, shape=(*info.shape, 1))})
    refusal(tensors | {name: replace(info, shape=())})
    refusal(tensors | {name: replace(info, shape=(*info.shape[:-1], 0))})


def test_lost_blocks_are_named() -> None:
    tensors = tensors_of(replace(ODD, n_layer=4))
    for lost in (0, 2):
        part = {name: info for name, info in tensors.items() if not name.startswith(f"blocks.{lost}.")}
        assert f"has blocks up to 3, but not {lost};" in refusal(part)
    far = tensors_of(replace(ODD, n_layer=1)) | {"blocks.999999.att.r_k": TensorInfo((6, 16), "fp32")}
    assert "has blocks up to 999999, but not 1, 2, 3" in refusal(far)


def block_of(*names: str, decay: tuple[int, ...] = (2, 64)) -> dict[str, TensorInfo]:
    every = {f"blocks.{layer}.{name}": TensorInfo((64,), "bf16") for layer in (0, 1) for name in names}
    every |= {name: replace(info, shape=decay) for name, info in every.items() if name.endswith("time_decay")}
    return {"emb.weight": TensorInfo((32, 64), "bf16"), "head.weight": TensorInfo((32, 64), "bf16")} | every


V5 = ("att.time_decay", "att.time_mix_k", "att.ln_x.weight")
V6 = ("att.time_decay", "att.time_maa_x", "att.ln_x.weight")
# What it is called, and what this version lacks for it.
OTHERS = {
    "RWKV-4": (block_of("att.time_decay", "att.time_first", decay=(64,)), "att.time_first"),
    "RWKV-5.0 (x050)": (block_of(*V5, decay=(2,)), "one decay a head and no gate"),
    "RWKV-5.1 (x051)": (block_of(*V5, "att.gate.weight", decay=(2, 1)), "one decay a head (att.time_decay of one"),
    "RWKV-6 (x060a)": (block_of(*V6, "att.gate_w1", decay=(1, 1, 64)), "att.gate_w1"),
    "RWKV-6 (x060b or x060c)": (block_of(*V6, "att.time_maa_rkvw_w1", decay=(1, 1, 64)), "att.time_maa_rkvw_w1"),
    "RWKV-7a (x070a)": (block_of("att.r_k", "ffn.s_emb.weight"), "the DeepEmbed tensors (ffn.s_emb"),
    "RWKV-7b (x070b)": (block_of("att.r_k", "ffn.s_emb.weight", "qkv.qq.weight"), "(qkv.*)"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_generations_are_called_by_their_name_with_what_is_missing(name: str) -> None:
    tensors, lacking = OTHERS[name]
    message = refusal(tensors)
    assert f"this is an {name} file; this version trains x052, x060, x070 only and does not have" in message
    assert lacking in message


@pytest.mark.parametrize("generation", ODDS)
def test_an_initial_state_beside_the_weights_is_said_and_makes_no_model(generation: str) -> None:
    shape = ODDS[generation]
    states = {f"blocks.{layer}.att.time_state": TensorInfo((6, 16, 16), "fp32") for layer in range(shape.n_layer)}
    tensors = tensors_of(shape) | states
    found = detect(tensors, where=WHERE)
    assert found.has_initial_state and found.shape == shape
    info = describe(Header(WHERE, "pth", 1, tensors))
    assert info.parameters_by_group["initial state"] == 3 * 6 * 16 * 16
    assert sum(info.parameters_by_group.values()) == info.num_parameters
    assert "state tuning" in str(info)
    with pytest.raises(CheckpointError, match="initial state from state tuning"):
        detect_model(tensors, where=WHERE)
    # Part of a state, or one of another size, is no such state.
    tensors["blocks.1.att.time_state"] = TensorInfo((6, 16, 15), "fp32")
    assert "blocks.1.att.time_state [6, 16, 15]" in refusal(tensors)
    del tensors["blocks.1.att.time_state"]
    assert "unexpected: blocks.0.att.time_state" in refusal(tensors)


def test_what_is_no_published_layout_is_called_by_its_name() -> None:
    info = TensorInfo((4, 4), "fp32")
    assert "state tuning" in refusal({f"blocks.{layer}.att.time_state": info for layer in range(3)})
    moments = {f"{name}.{kind}": info for name in tensors_of(ODD) for kind in ("exp_avg", "exp_avg_sq", "step")}
    assert "this is the state of an optimizer" in refusal(moments)
    assert "an adapter (LoRA)" in refusal({"blocks.0.att.receptance.lora_A.weight": info})
    assert "the layout of another library" in refusal({"model.layers.0.attn.q_proj.weight": info})
    assert "no RWKV file (it holds conv1.weight)" in refusal({"conv1.weight": info})
    assert "\x1b" not in refusal({"\x1b[2J": info})


def test_a_golden_file_is_described() -> None:
    info = describe(read_header(GOLDEN))
    assert (info.type, info.n_layer, info.n_embd, info.head_size, info.vocab_size) == ("x070", 2, 128, 64, 32)
    assert info.ranks == Ranks(decay=32, iclr=32, value=32, gate=64)
    assert (info.dtype, info.format, info.file_bytes) == ("bf16", "pth", GOLDEN.stat().st_size)
    # The published count: 2VC + 4C + L (19C + 12C^2 + 2C (Rw + Ra + Rv + Rg)).
    assert info.num_parameters == 2 * 32 * 128 + 4 * 128 + 2 * (19 * 128 + 12 * 128**2 + 2 * 128 * 160)
    assert sum(info.parameters_by_group.values()) == info.num_parameters
    assert info.parameters_by_group["double"] == 2 * 128
    assert info.parameters_by_group["untrained"] == 128 + 2 * 128 * 32
    assert json.loads(json.dumps(info.as_dict()))["ranks"] == {
        "decay": 32,
        "iclr": 32,
        "value": 32,
        "gate": 64,
        "mix": 0,
    }
    assert "parameters  " in str(info) and f"{info.num_parameters:,}" in str(info)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the full set of golden files is not beside the repository")
def test_all_golden_files_are_recognised() -> None:
    found = detect(read_header(SHARED / "x070_init_L3-D128-V256.pth").tensors, where=WHERE)
    assert (found.shape.n_layer, found.shape.vocab_size, found.dtype) == (3, 256, "fp32")
    for generation, ranks in (("x052", Ranks(0, 0, 0, 0)), ("x060", Ranks(64, 0, 0, 0, 32))):
        info = describe(read_header(SHARED / f"{generation}_mini_L2-D128-V32.pth"))
        assert (info.type, info.n_layer, info.n_embd, info.head_size, info.vocab_size) == (generation, 2, 128, 64, 32)
        assert (info.ranks, info.dtype) == (ranks, "bf16")
        assert sum(info.parameters_by_group.values()) == info.num_parameters
