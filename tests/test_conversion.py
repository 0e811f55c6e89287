"""convert: round trips are bit for bit, a narrower dtype is told, and what cannot be written leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

import rwkv_spec
from rwkv_spec.checkpoint.format import read_weights, write_weights
from rwkv_spec.cli import main
from rwkv_spec.conversion import compare
from rwkv_spec.errors import CheckpointError
from rwkv_spec.model.build import build_model
from rwkv_spec.model.build import weights as model_weights
from rwkv_spec.model.shapes import fresh_shape, parameter_shapes
from tests.checkpoint.layouts import golden_file, golden_weights, in_layout_of_rwkv7, write_folder
from tests.tiny import tiny_spec

GENERATIONS = ("x052", "x060", "x070")
IDS = torch.tensor([[0, 3, 4, 5, 6, 7, 31, 2, 1, 30, 12, 13]])


def assert_same(path: Path, expected: dict[str, Tensor]) -> None:
    found = read_weights(path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("generation", GENERATIONS)
def test_pth_to_safetensors_and_back_is_bit_for_bit(tmp_path: Path, generation: str) -> None:
    source = golden_file(generation)
    there = rwkv_spec.convert(source, tmp_path / "a.safetensors")
    rwkv_spec.convert(tmp_path / "a.safetensors", tmp_path / "b.pth")
    for path in (tmp_path / "a.safetensors", tmp_path / "b.pth"):
        assert_same(path, read_weights(source))
    # Our own files are the same byte for byte, whichever way they came.
    rwkv_spec.convert(source, tmp_path / "direct.pth")
    assert (tmp_path / "b.pth").read_bytes() == (tmp_path / "direct.pth").read_bytes()
    assert (there.type, there.dtype, there.greatest_difference) == (generation, "bf16", 0.0)
    assert there.greatest_logit > 0.5
    assert names_in(tmp_path) == {"a.safetensors", "b.pth", "direct.pth"}


@pytest.mark.parametrize("whole", [True, False], ids=["with block 0's unused", "as published"])
def test_pth_to_huggingface_and_back_is_bit_for_bit(tmp_path: Path, whole: bool) -> None:
    weights = read_weights(golden_file("x070")) if whole else golden_weights("x070")
    # A published file may keep its decay bias in more bits than the rest.
    weights["blocks.1.att.w0"] = weights["blocks.1.att.w0"].float() + 1e-7
    write_weights(tmp_path / "a.pth", weights, format="pth", dtype=None)
    rwkv_spec.convert(tmp_path / "a.pth", tmp_path / "hf")
    rwkv_spec.convert(tmp_path / "hf", tmp_path / "b.pth")
    rwkv_spec.convert(tmp_path / "a.pth", tmp_path / "c.pth")
    assert_same(tmp_path / "b.pth", weights)
    assert (tmp_path / "b.pth").read_bytes() == (tmp_path / "c.pth").read_bytes()
    # Our folder is tensor for tensor what other programs write.
    theirs = golden_weights("x070") | {"blocks.1.att.w0": weights["blocks.1.att.w0"]}
    assert_same(tmp_path / "hf" / "model.safetensors", in_layout_of_rwkv7(theirs))
    assert names_in(tmp_path / "hf") == {"config.json", "model.safetensors"} | (
        {"block0_value_residual.safetensors"} if whole else set()
    )


def test_a_folder_is_read_wherever_a_checkpoint_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = in_layout_of_rwkv7(golden_weights("x070"))
    folder = write_folder(tmp_path / "hf", theirs, num_shards=3)
    ours = rwkv_spec.load(golden_file("x070"))(IDS)
    assert torch.equal(rwkv_spec.load(folder)(IDS), ours)
    (text,) = rwkv_spec.generate(
        folder, ["1 2 3"], tokenizer=rwkv_spec.IntegerTokenizer(30), max_new_tokens=3, temperature=0
    )
    assert len(text.split()) <= 3
    assert main(["inspect", str(folder), "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert (info["type"], info["format"]) == ("x070", "huggingface") and "rwkv7-hf" in info["layout"]
    assert sum(info["parameters_by_group"].values()) == info["num_parameters"]


def test_a_run_is_converted_and_its_tokenizer_found_beside_the_result(tmp_path: Path) -> None:
    sections = {"n_layer": 2, "n_embd": 64, "head_size": 64}
    run = rwkv_spec.run(tiny_spec(tmp_path, model=sections, train={"steps": 1}))
    converted = rwkv_spec.convert(run.dir, run.dir / "out" / "hf")
    assert converted.source == run.checkpoint
    texts = [rwkv_spec.generate(source, ["1 2"], max_new_tokens=3, seed=1) for source in (run.dir, converted.target)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_another_dtype_rounds_every_tensor_once_and_tells_what_it_costs(
    tmp_path: Path, generation: str, dtype: str
) -> None:
    weights = {name: tensor.float() * 1.001 for name, tensor in read_weights(golden_file(generation)).items()}
    write_weights(tmp_path / "a.pth", weights, format="pth", dtype=None)
    converted = rwkv_spec.convert(tmp_path / "a.pth", tmp_path / "b.safetensors", dtype=dtype)
    to = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    assert_same(tmp_path / "b.safetensors", {name: tensor.to(to) for name, tensor in weights.items()})
    assert converted.dtype == dtype
    bounds = {"fp32": (0.0, 0.0), "fp16": (1e-6, 0.05), "bf16": (1e-4, 0.5)}[dtype]
    assert bounds[0] <= converted.greatest_difference <= bounds[1]


def test_an_overflow_names_the_tensor_and_leaves_nothing(tmp_path: Path) -> None:
    weights = {name: tensor.float() for name, tensor in read_weights(golden_file("x070")).items()}
    weights["blocks.1.ffn.value.weight"][3, 4] = 70_000.0
    write_weights(tmp_path / "a.pth", weights, format="pth", dtype=None)
    for target in ("b.pth", "b.safetensors", "hf"):
        with pytest.raises(CheckpointError, match=r"a\.pth: blocks\.1\.ffn\.value\.weight has values beyond the range"):
            rwkv_spec.convert(tmp_path / "a.pth", tmp_path / target, dtype="fp16")
    rwkv_spec.convert(tmp_path / "a.pth", tmp_path / "b.pth", dtype="bf16")
    assert names_in(tmp_path) == {"a.pth", "b.pth"}


def test_weights_that_are_no_numbers_are_not_written(tmp_path: Path) -> None:
    weights = read_weights(golden_file("x060"))
    weights["ln_out.weight"] = torch.full_like(weights["ln_out.weight"], float("nan"))
    write_weights(tmp_path / "a.pth", weights, format="pth", dtype=None)
    with pytest.raises(CheckpointError, match=r"a\.pth: gives logits that are not finite"):
        rwkv_spec.convert(tmp_path / "a.pth", tmp_path / "b.pth")
    assert names_in(tmp_path) == {"a.pth"}


def test_numbers_that_are_not_finite_and_move_no_logit_are_written_as_they_are_and_told(tmp_path: Path) -> None:
    weights = read_weights(golden_file("x070"))
    for name in ("emb.weight", "head.weight"):
        weights[name] = torch.cat([weights[name]] * 40)
    weights["emb.weight"][-1] = float("nan")
    write_weights(tmp_path / "a.pth", weights, format="pth", dtype=None)
    converted = rwkv_spec.convert(tmp_path / "a.pth", tmp_path / "b.safetensors")
    assert converted.remarks == ("some numbers are not finite: emb.weight",)
    back = read_weights(tmp_path / "b.safetensors")
    assert all(torch.equal(back[name].view(torch.int16), weights[name].view(torch.int16)) for name in weights)


@pytest.mark.parametrize("damage", ["a bit", "a dtype", "a name", "a sign of zero", "a bit beside a NaN"])
def test_the_check_notices_what_was_not_written_as_it_should_be(tmp_path: Path, damage: str) -> None:
    weights = golden_weights("x070")
    wrong, name = dict(weights), "blocks.0.att.g1"
    if damage == "a bit":
        # The last bit of one number, which moves no logit by much.
        wrong["emb.weight"] = weights["emb.weight"].clone()
        wrong["emb.weight"].view(torch.int16)[31, 5] ^= 1
        name = "emb.weight"
    elif damage == "a sign of zero":
        for each, zero in ((weights, 0.0), (wrong, -0.0)):
            each["ln_out.bias"] = torch.full((128,), zero, dtype=torch.bfloat16)
        name = "ln_out.bias"
    elif damage == "a bit beside a NaN":
        # What can be checked is checked, whatever else the file holds.
        name = "emb.weight"
        rows = torch.cat([weights[name]] * 40)
        rows[-1] = float("nan")
        head = torch.cat([weights["head.weight"]] * 40)
        weights |= {name: rows, "head.weight": head}
        wrong |= {name: rows.clone(), "head.weight": head}
        wrong[name].view(torch.int16)[100, 5] ^= 1
    elif damage == "a dtype":
        wrong[name] = weights[name].float()
    else:
        wrong |= {unused: torch.zeros(1, 1, 128) for unused in ("blocks.0.att.v0",)}
        name = "blocks.0.att.v0"
    write_weights(tmp_path / "b.pth", wrong, format="pth", dtype=None)
    given = {"source": tmp_path / "a.pth", "target": tmp_path / "c.pth"}
    with pytest.raises(CheckpointError, match=rf"c\.pth: does not read back as it was written \({name}\)"):
        compare(weights, tmp_path / "b.pth", dtype=None, **given)
    write_weights(tmp_path / "b.pth", weights, format="pth", dtype=None)
    assert compare(weights, tmp_path / "b.pth", dtype=None, **given)[0] == 0.0


def test_what_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "b.pth").write_text("mine")
    (tmp_path / "hf").mkdir()
    (tmp_path / "link.pth").symlink_to(tmp_path / "nowhere")
    for target in ("b.pth", "hf", "link.pth"):
        with pytest.raises(CheckpointError, match="is there already and was left alone"):
            rwkv_spec.convert(golden_file("x070"), tmp_path / target)
    assert (tmp_path / "b.pth").read_text() == "mine"
    assert names_in(tmp_path) == {"b.pth", "hf", "link.pth"} and not names_in(tmp_path / "hf")


@pytest.mark.parametrize("generation", ["x052", "x060"])
def test_the_huggingface_layout_is_for_x070_only(tmp_path: Path, generation: str) -> None:
    with pytest.raises(CheckpointError, match=f"is {generation}; the Hugging Face layout is written for x070 only"):
        rwkv_spec.convert(golden_file(generation), tmp_path / "hf")
    assert not names_in(tmp_path)


def test_heads_that_others_would_compute_otherwise_are_not_written_for_them(tmp_path: Path) -> None:
    model = build_model(fresh_shape("x070", n_layer=1, n_embd=64, head_size=32, vocab_size=9))
    write_weights(tmp_path / "a.pth", model_weights(model), format="pth", dtype="fp32")
    with pytest.raises(CheckpointError, match=r"has heads of 32; .* for heads of 64 only"):
        rwkv_spec.convert(tmp_path / "a.pth", tmp_path / "hf")
    rwkv_spec.convert(tmp_path / "a.pth", tmp_path / "b.safetensors")
    assert names_in(tmp_path) == {"a.pth", "b.safetensors"}


@pytest.mark.parametrize("name", ["a.gguf", "a.pt", "a.bin", "a.json", "a.pht", "a.pth.bak", "a.safetensor", ".st"])
def test_endings_of_other_forms_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=r"is no form that is written; end the name in \.pth"):
        rwkv_spec.convert(golden_file("x070"), tmp_path / name)


def test_an_ending_in_capitals_and_a_name_that_is_all_ending_are_files(tmp_path: Path) -> None:
    for name, form in (("a.PTH", "pth"), (".pth", "pth"), ("a.SafeTensors", "safetensors")):
        assert rwkv_spec.convert(golden_file("x052"), tmp_path / name).format == form
        assert (tmp_path / name).is_file() and rwkv_spec.inspect(tmp_path / name).format == form


def test_a_name_with_a_dot_may_be_a_folder(tmp_path: Path) -> None:
    assert rwkv_spec.convert(golden_file("x070"), tmp_path / "new" / "rwkv7-0.1b").format == "huggingface"
    assert rwkv_spec.inspect(tmp_path / "new" / "rwkv7-0.1b").n_layer == 2


def test_a_source_that_is_no_model_is_called_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.pth").write_text("version https://git-lfs.github.com/spec/v1\nsize 5\n")
    with pytest.raises(CheckpointError, match="Git LFS pointer"):
        rwkv_spec.convert(tmp_path / "a.pth", tmp_path / "b.pth")
    with pytest.raises(ValueError, match="bf16, fp16, fp32"):
        rwkv_spec.convert(golden_file("x070"), tmp_path / "b.pth", dtype="float32")
    assert names_in(tmp_path) == {"a.pth"}


def test_the_verb_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["convert", str(golden_file("x060")), str(tmp_path / "a.safetensors")]
    assert main([*words, "--dtype", "fp32"]) == 0
    out = capsys.readouterr().out
    assert "a.safetensors: x060, 553,472 parameters, safetensors, fp32" in out and "greatest difference" in out
    assert main(words) == 2
    assert "is there already" in capsys.readouterr().err
    assert main([*words[:2], str(tmp_path / "b.pth"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["greatest_difference"] == 0.0


def test_a_disk_that_cannot_be_written_is_said_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/b\.pth: cannot be written"):
        rwkv_spec.convert(golden_file("x070"), tmp_path / "file" / "b.pth")


@pytest.mark.skipif(os.name != "posix", reason="other systems send no such signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing_half_written(tmp_path: Path, number: signal.Signals) -> None:
    words = [sys.executable, "-m", "rwkv_spec", "convert", str(golden_file("x060")), str(tmp_path / "b.pth")]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    # From the moment that its file is begun, most of the work lies before it.
    while not list(tmp_path.glob(".b.pth.*.tmp")) and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number, errors
    assert "Traceback" not in errors and names_in(tmp_path) == set()


# What the process itself holds, without the files that it has mapped.
MEASURE = """
import sys, threading, time
import rwkv_spec
from rwkv_spec import conversion
def held():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))
before, most, done = held(), 0, threading.Event()
def watch():
    global most
    while not done.wait(0.005):
        most = max(most, held())
thread = threading.Thread(target=watch)
thread.start()
rwkv_spec.convert(sys.argv[1], sys.argv[2])
done.set()
thread.join()
print(most - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="the system does not say what a process holds")
def test_only_one_copy_of_the_weights_is_in_memory(tmp_path: Path) -> None:
    shape = fresh_shape("x070", n_layer=1, n_embd=1536, head_size=64, vocab_size=16)
    weights = {name: torch.full(sizes.shape, 0.01) for name, sizes in parameter_shapes(shape).items()}
    write_weights(tmp_path / "a.pth", weights, format="pth", dtype=None)
    size = (tmp_path / "a.pth").stat().st_size
    words = [sys.executable, "-c", MEASURE, str(tmp_path / "a.pth"), str(tmp_path / "hf")]
    finished = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    assert int(finished.stdout.split()[-1]) < 1.6 * size
