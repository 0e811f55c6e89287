"""Weights files come back as written; a bad file of any kind is a CheckpointError that says what it is."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import stat
import struct
import tarfile
import zipfile
from pathlib import Path

import pytest
import safetensors.torch
import torch

from rwkv_spec.checkpoint.format import FORMATS, read_header, read_weights, tensor_infos, write_weights
from rwkv_spec.errors import CheckpointError

GOLDEN = Path(__file__).parents[1] / "golden" / "x070_mini_L2-D128-V32.pth"


def some_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        "emb.weight": torch.randn(9, 4, generator=generator),
        "blocks.0.att.x_r": torch.randn(1, 1, 4, generator=generator),
        "blocks.0.att.r_k": torch.randn(2, 2, generator=generator),
        "ln_out.bias": torch.zeros(4),
    }


def refusal(path: Path) -> str:
    """What reading says of a bad file; the header and the weights must both refuse it."""
    with pytest.raises(CheckpointError) as of_weights:
        read_weights(path)
    with pytest.raises(CheckpointError):
        read_header(path)
    message = str(of_weights.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("dtype", "torch_dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_weights_come_back_as_written(tmp_path: Path, format: str, dtype: str, torch_dtype: torch.dtype) -> None:
    weights = some_weights()
    path = tmp_path / "new folder" / f"a.{format}"
    write_weights(path, weights, format=format, dtype=dtype)
    back = read_weights(path)
    assert back.keys() == weights.keys()
    for name, tensor in weights.items():
        assert back[name].dtype == torch_dtype
        assert torch.equal(back[name], tensor.to(torch_dtype)), name
    header = read_header(path)
    assert (header.format, header.file_bytes) == (format, path.stat().st_size)
    assert header.tensors == tensor_infos(back)


def test_torch_and_safetensors_read_what_is_written(tmp_path: Path) -> None:
    weights = some_weights()
    write_weights(tmp_path / "a.pth", weights, format="pth", dtype="fp32")
    write_weights(tmp_path / "a.safetensors", weights, format="safetensors", dtype="fp32")
    for back in (
        torch.load(tmp_path / "a.pth", weights_only=True),
        safetensors.torch.load_file(tmp_path / "a.safetensors"),
    ):
        assert {name: tensor.tolist() for name, tensor in back.items()} == {
            name: tensor.tolist() for name, tensor in weights.items()
        }


@pytest.mark.parametrize("format", FORMATS)
def test_equal_weights_give_equal_bytes(tmp_path: Path, format: str) -> None:
    write_weights(tmp_path / f"one.{format}", some_weights(), format=format, dtype="fp32")
    write_weights(tmp_path / f"two.{format}", some_weights(), format=format, dtype="fp32")
    assert (tmp_path / f"one.{format}").read_bytes() == (tmp_path / f"two.{format}").read_bytes()


@pytest.mark.parametrize("format", FORMATS)
def test_views_and_parameters_are_written_alone(tmp_path: Path, format: str) -> None:
    large = torch.nn.Parameter(torch.arange(1_000_000.0).reshape(1000, 1000))
    write_weights(tmp_path / "view", {"a": large[3:5, :7].t(), "b": large[3:5, :7]}, format=format, dtype="fp32")
    assert (tmp_path / "view").stat().st_size < 10_000
    back = read_weights(tmp_path / "view")
    assert torch.equal(back["a"], back["b"].t())
    assert not back["a"].requires_grad


@pytest.mark.parametrize("format", FORMATS)
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, format: str) -> None:
    path = tmp_path / "a"
    write_weights(path, some_weights(), format=format, dtype="fp32")
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match=r"emb.weight has values beyond the range of fp16"):
        write_weights(path, {"emb.weight": torch.full((2,), 1e6)}, format=format, dtype="fp16")
    folder_in_the_way = tmp_path / "b"
    (folder_in_the_way / "c").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="cannot write the weights"):
        write_weights(folder_in_the_way, some_weights(), format=format, dtype="fp32")
    assert path.read_bytes() == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize("format", FORMATS)
def test_a_full_disk_is_a_checkpoint_error(tmp_path: Path, format: str) -> None:
    resource = pytest.importorskip("resource", reason="limits on file sizes exist on POSIX only")
    import signal

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        with pytest.raises(CheckpointError, match=r"cannot write the weights: .*File too large"):
            write_weights(tmp_path / "a", {"a": torch.ones(100, 100)}, format=format, dtype="fp32")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="permission bits exist on POSIX only")
@pytest.mark.parametrize("format", FORMATS)
def test_files_have_the_usual_permissions(tmp_path: Path, format: str) -> None:
    (tmp_path / "plain").touch()
    write_weights(tmp_path / "a", some_weights(), format=format, dtype="fp32")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_prefixes_of_wrappers_are_taken_off(tmp_path: Path) -> None:
    torch.save(
        {"_forward_module.emb.weight": torch.ones(2), "module._orig_mod.module.head.weight": torch.ones(3)},
        tmp_path / "a.pth",
    )
    assert read_weights(tmp_path / "a.pth").keys() == {"emb.weight", "head.weight"}
    assert read_header(tmp_path / "a.pth").tensors.keys() == {"emb.weight", "head.weight"}
    # A Lightning module's own prefix begins the names of other libraries too: there it stays.
    names = ("model.blocks.0.ln1.bias", "model.model.norm.bias", "model.layers.0.attn.r_k", "model.embeddings.weight")
    torch.save({name: torch.ones(2) for name in names}, tmp_path / "c.pth")
    assert list(read_header(tmp_path / "c.pth").tensors) == ["blocks.0.ln1.bias", "model.norm.bias", *names[2:]]
    torch.save({"module.emb.weight": torch.ones(2), "emb.weight": torch.ones(2)}, tmp_path / "b.pth")
    assert "emb.weight twice" in refusal(tmp_path / "b.pth")


def test_files_of_old_torch_are_read(tmp_path: Path) -> None:
    torch.save(some_weights(), tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    back = read_weights(tmp_path / "old.pth")
    assert all(torch.equal(back[name], tensor) for name, tensor in some_weights().items())


def test_a_file_of_the_rwkv_package_for_one_strategy_is_called_so(tmp_path: Path) -> None:
    torch.save({**some_weights(), "_strategy": "cpu fp32", "_version": "0.7", "_rescale_layer": 0}, tmp_path / "a.pth")
    assert "was converted by the rwkv package" in refusal(tmp_path / "a.pth")


@pytest.mark.skipif(os.name != "posix", reason="file names of any bytes exist on POSIX only")
@pytest.mark.parametrize("format", FORMATS)
def test_a_name_that_is_no_text_is_said_to_be_none(tmp_path: Path, format: str) -> None:
    path = tmp_path / os.fsdecode(b"\xff.pth")
    path.write_bytes(GOLDEN.read_bytes())
    assert "its name is no UTF-8 text" in refusal(path)


def test_missing_files_are_named_with_their_neighbours(tmp_path: Path) -> None:
    (tmp_path / "rwkv-final.pth").touch()
    (tmp_path / "notes.txt").touch()
    assert "near it in" in refusal(tmp_path / "rwkv-finl.pth")
    assert "rwkv-final.pth" in refusal(tmp_path / "rwkv-final")
    assert refusal(tmp_path / "zzzzzz").endswith(f"weights files in {tmp_path}: rwkv-final.pth")
    assert "neither does the folder" in refusal(tmp_path / "no" / "a.pth")
    assert "is a folder" in refusal(tmp_path) and "rwkv-final.pth" in refusal(tmp_path)
    (tmp_path / "empty").mkdir()
    assert "it is empty" in refusal(tmp_path / "empty")
    assert "cannot be read" in refusal(tmp_path / ("a" * 300 + ".pth"))


CONTENTS = {
    "is empty": b"",
    "is a Git LFS pointer, not the weights of 1,234,567 bytes": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 1234567\n"
    ),
    "is a web page": b"\n<!DOCTYPE html>\n<html><body>Sign in</body></html>",
    "is text, not weights; it starts with 'Access denied'": b"Access denied",
    "it starts with 'vocab\xe4r": "vocab\u00e4r ".encode() * 400,
    "is a GGUF file": b"GGUF\3\0\0\0" + bytes(100),
    "is a compressed archive": b"\x1f\x8b\x08\x00" + bytes(range(200)),
    "is a zip archive without files": b"PK\x05\x06" + bytes(18),
    "nothing but zero bytes": bytes(5000),
    "is neither a torch nor a safetensors file": bytes(range(255, 0, -1)) * 9,
    "is damaged, cut off, or no safetensors file": struct.pack("<Q", 1 << 60) + b'{"a":' + bytes(100),
    "is damaged, or no torch file": b"\x80\x02}q\x00X",
    "is damaged, or a pickle of something else": b"\x80\x02\xff",
    "is cut off: the end of a torch file is missing after 500,000 bytes": GOLDEN.read_bytes()[:500_000],
}


@pytest.mark.parametrize("what", CONTENTS)
@pytest.mark.parametrize("name", ["a.pth", "a.safetensors"])
def test_other_files_are_called_by_their_name(tmp_path: Path, what: str, name: str) -> None:
    (tmp_path / name).write_bytes(CONTENTS[what])
    message = refusal(tmp_path / name)
    if name == "a.pth" or CONTENTS[what][:2] not in (b"PK", b"\x80\x02"):
        assert what in message


def test_archives_are_called_by_their_name(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "tar.pth", "w") as archive:
        archive.addfile(tarfile.TarInfo("storages"), io.BytesIO())
    assert "is a tar archive" in refusal(tmp_path / "tar.pth")
    with zipfile.ZipFile(tmp_path / "zip.pth", "w") as archive:
        archive.writestr("weights.npy", b"123")
    assert "a zip archive that torch did not write (it holds weights.npy)" in refusal(tmp_path / "zip.pth")
    with zipfile.ZipFile(GOLDEN) as old, zipfile.ZipFile(tmp_path / "packed.pth", "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    assert "packed anew by a zip program" in refusal(tmp_path / "packed.pth")


class Command:
    """Runs a command when a plain pickle reader meets it."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self.command,)


def test_a_malicious_pickle_runs_nothing(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    attack = Command(f"touch {proof}")
    torch.save({"emb.weight": torch.ones(2), "b": attack}, tmp_path / "zip.pth")
    torch.save({"b": attack}, tmp_path / "legacy.pth", _use_new_zipfile_serialization=False)
    (tmp_path / "plain.pth").write_bytes(pickle.dumps(attack, protocol=2))
    for name in ("zip.pth", "legacy.pth", "plain.pth"):
        assert ".system)" in refusal(tmp_path / name)
    assert not proof.exists()
    # The attack is a real one.
    pickle.loads((tmp_path / "plain.pth").read_bytes())
    assert proof.exists()


def test_other_things_saved_by_torch_are_called_by_their_name(tmp_path: Path) -> None:
    layer = torch.nn.Linear(2, 2)
    cases: dict[str, object] = {
        "is the state of an optimizer": torch.optim.AdamW(layer.parameters()).state_dict(),
        "its weights under 'state_dict'": {"state_dict": layer.state_dict(), "epoch": 3},
        "holds a single tensor of shape [2, 3]": torch.ones(2, 3),
        "holds a list": [torch.ones(2)],
        "holds no tensors": {},
        "where the name of a tensor belongs": {0: torch.ones(2)},
        "step is a int, not a tensor": {"weight": torch.ones(2), "step": 3},
        "weight is a quantized or sparse tensor": {"weight": torch.eye(3).to_sparse()},
        "weight has no data (a meta tensor)": {"weight": torch.ones(2, device="meta")},
    }
    for what, value in cases.items():
        torch.save(value, tmp_path / "a.pth")
        assert what in refusal(tmp_path / "a.pth")
    torch.save(layer.state_dict(), tmp_path / "b.safetensors")
    assert "rename it to .pth" in refusal(tmp_path / "b.safetensors")


def test_lying_safetensors_headers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    entry = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
    lies = [
        {"a": entry | {"shape": [2, 3]}},
        {"a": entry | {"data_offsets": [0, 1600]}},
        {"a": entry | {"data_offsets": [16, 0]}},
        {"a": entry | {"dtype": "F33"}},
        {"a": entry, "b": entry},
        {"a": entry | {"shape": [-2, -2]}},
        {"a": entry | {"shape": [1 << 62, 1 << 62]}},
        {"a": 3},
        [],
    ]
    for lie in lies:
        header = json.dumps(lie).encode()
        path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
        refusal(path)
    path.write_bytes(struct.pack("<Q", 2) + b"{}")
    assert "holds no tensors" in refusal(path)


def test_a_flipped_bit_in_a_pth_is_noticed(tmp_path: Path) -> None:
    content = bytearray(GOLDEN.read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "a.pth").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"is damaged: .*CRC"):
        read_weights(tmp_path / "a.pth")


def mutated(content: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        place, kind = rng.randrange(len(damaged)), rng.randrange(5)
        if kind < 2:
            damaged[place] = rng.randrange(256)
        elif kind == 2:
            damaged[place:place] = rng.randbytes(rng.randint(1, 9))
        elif kind == 3:
            del damaged[place : place + rng.randint(1, 30)]
        else:
            damaged = damaged[: place + 1]
    return bytes(damaged)


@pytest.mark.parametrize("kind", ["pth", "legacy", "safetensors"])
def test_damaged_files_give_weights_or_a_checkpoint_error(tmp_path: Path, kind: str) -> None:
    good = tmp_path / "good"
    if kind == "legacy":
        torch.save(some_weights(), good, _use_new_zipfile_serialization=False)
    else:
        write_weights(good, some_weights(), format=kind, dtype="fp32")
    rng, refused = random.Random(20), 0
    for number in range(200):
        path = tmp_path / f"{number}.{kind}"
        path.write_bytes(mutated(good.read_bytes(), rng))
        for read in (read_weights, read_header):
            try:
                read(path)
            except CheckpointError:
                refused += 1
    assert refused > 100


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes exist on POSIX only")
def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pth")
    assert "is a device or a pipe" in refusal(tmp_path / "pipe.pth")
