"""The public functions on a tiny run: what they return, what they leave on the disk, and that its numbers are true."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import rwkv_spec
from rwkv_spec.checkpoint.state import list_states
from tests.tiny import VALUES, outputs, tiny_spec


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, object]:
    tmp_path = tmp_path_factory.mktemp("finished")
    return tmp_path, rwkv_spec.run(tiny_spec(tmp_path))


def test_every_public_name_is_there() -> None:
    assert all(getattr(rwkv_spec, name) is not None for name in rwkv_spec.__all__)


def test_a_run_leaves_the_whole_run_folder(finished: tuple[Path, rwkv_spec.Run]) -> None:
    tmp_path, run = finished
    work_dir = tmp_path / "run"
    assert run.dir == work_dir and not run.stopped
    assert sorted(path.name for path in (work_dir / "out").iterdir()) == [
        "metrics.jsonl",
        "rwkv-best.pth",
        "rwkv-final.pth",
        "rwkv-init.pth",
        "rwkv-step6.pth",
        "rwkv-step8.pth",
        "train_log.txt",
    ]
    assert [path.name for path in list_states(work_dir / "state")] == ["step-00000006", "step-00000008"]
    assert json.loads((work_dir / "run.json").read_text())["status"] == "done"
    assert not (work_dir / "run.lock").exists()
    assert {path.name for path in (work_dir / "data").iterdir()} >= {
        "train.bin",
        "train.idx",
        "vocab.txt",
        "manifest.json",
    }
    assert run.checkpoint == work_dir / "out" / "rwkv-final.pth"


def test_rows_come_at_the_first_step_each_period_each_evaluation_and_the_last(
    finished: tuple[Path, rwkv_spec.Run],
) -> None:
    _, run = finished
    assert [row.step for row in run.metrics] == [1, 3, 4, 6, 8]
    assert [row.step for row in run.metrics if row.eval_loss is not None] == [4, 8]
    assert run.metrics[0].loss == pytest.approx(math.log(11), abs=0.2)
    assert [row.tokens for row in run.metrics] == [step * 64 for step in (1, 3, 4, 6, 8)] or run.metrics[
        -1
    ].tokens < 512


def test_eval_loss_is_what_an_outsider_computes_from_the_saved_weights(finished: tuple[Path, rwkv_spec.Run]) -> None:
    tmp_path, run = finished
    model = rwkv_spec.load(tmp_path / "run" / "out" / "rwkv-final.pth", dtype="fp64")
    store = rwkv_spec.prepare(tiny_spec(tmp_path))
    (document,) = store.eval_documents
    assert [index - 1 for index in document.tolist()] in VALUES
    ids = torch.from_numpy(np.concatenate([[0], document]))[None]
    logits = model(ids[:, :-1])
    expected = torch.nn.functional.cross_entropy(logits[0], ids[0, 1:])
    assert run.metrics[-1].eval_loss == pytest.approx(float(expected), rel=1e-5)


def test_a_finished_run_started_again_does_nothing(
    finished: tuple[Path, rwkv_spec.Run], capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path, first = finished
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run" / "out").iterdir()}
    again = rwkv_spec.run(tiny_spec(tmp_path))
    assert "already finished" in capsys.readouterr().out
    assert again.metrics == first.metrics
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run" / "out").iterdir()} == before


def test_two_runs_of_one_spec_have_the_same_bytes(finished: tuple[Path, rwkv_spec.Run], tmp_path: Path) -> None:
    rwkv_spec.run(tiny_spec(tmp_path))
    left, right = outputs(finished[0] / "run"), outputs(tmp_path / "run")
    left.pop("train_log.txt"), right.pop("train_log.txt")  # Its first lines name the work_dir.
    assert left == right


def test_the_resolved_file_is_a_spec_that_resumes_the_same_run(finished: tuple[Path, rwkv_spec.Run]) -> None:
    tmp_path, first = finished
    again = rwkv_spec.run(tmp_path / "run" / "configs" / "resolved.yaml")
    assert again.metrics == first.metrics


def test_load_gives_a_model_with_parallel_and_step_form(finished: tuple[Path, rwkv_spec.Run]) -> None:
    model = rwkv_spec.load(finished[1].checkpoint)
    ids = torch.tensor([[0, 3, 4, 5], [0, 9, 1, 2]])
    parallel = model(ids)
    state = model.initial_state(2)
    for t in range(4):
        logits, state = model.step(ids[:, t], state)
        torch.testing.assert_close(logits, parallel[:, t], rtol=1e-4, atol=1e-5)


def test_generate_continues_text_and_values_and_repeats_with_the_seed(finished: tuple[Path, rwkv_spec.Run]) -> None:
    tmp_path, run = finished
    texts = rwkv_spec.generate(tmp_path / "run", ["1 2 3", [1, 2, 3]], max_new_tokens=5, temperature=0)
    assert texts[0] == texts[1] and all(0 <= int(value) <= 9 for value in texts[0].split())
    assert run.generate(["1 2 3"], max_new_tokens=5, temperature=0) == texts[:1]
    draws = [rwkv_spec.generate(run.checkpoint, ["5"], max_new_tokens=8, seed=seed) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def test_inspect_tells_what_a_checkpoint_holds(finished: tuple[Path, rwkv_spec.Run]) -> None:
    info = rwkv_spec.inspect(finished[1].checkpoint)
    assert (info.type, info.n_layer, info.n_embd, info.head_size, info.vocab_size) == ("x070", 2, 32, 16, 11)
    assert info.num_parameters == sum(info.parameters_by_group.values()) and info.dtype == "fp32"


def test_initialize_writes_what_a_run_starts_from(tmp_path: Path, finished: tuple[Path, rwkv_spec.Run]) -> None:
    path = rwkv_spec.initialize(tiny_spec(tmp_path))
    assert path.read_bytes() == (finished[0] / "run" / "out" / "rwkv-init.pth").read_bytes()
    with pytest.raises(rwkv_spec.CheckpointError, match="left alone"):
        rwkv_spec.initialize(tiny_spec(tmp_path))


def test_a_run_goes_on_from_a_checkpoint_with_its_own_sizes(
    tmp_path: Path, finished: tuple[Path, rwkv_spec.Run]
) -> None:
    spec = tiny_spec(
        tmp_path, model=None, checkpoint={"path": str(finished[1].checkpoint)}, save={"format": "safetensors"}
    )
    run = rwkv_spec.run(spec)
    assert run.metrics[0].loss < 2.3 and run.checkpoint.name == "rwkv-final.safetensors"
    first = rwkv_spec.load(tmp_path / "run" / "out" / "rwkv-init.safetensors").state_dict()
    for name, tensor in rwkv_spec.load(finished[1].checkpoint).state_dict().items():
        assert torch.equal(first[name], tensor), name


def test_plan_says_what_a_run_does_without_writing_anything(tmp_path: Path) -> None:
    plan = rwkv_spec.plan(tiny_spec(tmp_path), num_processes=2)
    assert plan.total_steps == 8 and plan.accumulate * plan.micro_batch_size == 2
    assert [path.name for path in tmp_path.iterdir()] == ["values.txt"]


def test_arrays_lists_and_a_custom_tokenizer_come_from_python(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, data={"train": None, "eval": None}, tokenizer={"max_value": 999})
    spec["data"] = {}
    run = rwkv_spec.run(spec, data=np.arange(300).reshape(3, 100), eval_data=[[1, 2, 3], [5]])
    assert run.plan.num_tokens == 303 and run.plan.num_eval_documents == 2


class Letters:
    """A user's own tokenizer: the four things that one needs."""

    vocab_size = 27
    fingerprint = "letters 1"

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 96 for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(index + 96) for index in ids)


def test_a_tokenizer_of_the_users_own_trains_and_generates(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("abcabcabc\nbcabca\n")
    spec = tiny_spec(tmp_path, tokenizer=None)
    spec["data"] = {"train": str(tmp_path / "words.txt")}
    del spec["eval"]
    run = rwkv_spec.run(spec, tokenizer=Letters())
    (text,) = run.generate(["abc"], max_new_tokens=4)
    assert set(text) <= set("abcdefghijklmnopqrstuvwxyz")
    with pytest.raises(rwkv_spec.errors.UserError, match="tokenizer="):
        rwkv_spec.generate(run.checkpoint, ["abc"])


@pytest.mark.parametrize("values", [[[3]], [[3], [4]], [[1, 2, 3]]])
def test_tiny_data_just_trains(tmp_path: Path, values: list[list[int]]) -> None:
    spec = tiny_spec(tmp_path, data=None, model={"n_layer": 1})
    spec["data"] = {}
    del spec["eval"]
    run = rwkv_spec.run(spec, data=values)
    assert run.metrics[-1].step == 8 and math.isfinite(run.metrics[-1].loss)


@pytest.mark.parametrize(
    "changes",
    [
        {"train": {"batch_size": 11, "ctx_len": 17}},
        {"train": {"ctx_len": 1}},
        {"train": {"batch_size": 11, "micro_batch_size": 3}},
        {"model": {"n_layer": 1, "n_embd": 64, "head_size": 32}},
        {"model": {"n_embd": 48, "head_size": 48}},
        {"train": {"steps": None, "epochs": 0.5}},
        {"train": {"steps": None, "tokens": 100}},
        {"optimizer": {"lr": 0.0}},
        {"train": {"steps": 1}},
        {"train": {"precision": "bf16"}},
        {"scheduler": {"type": "constant"}},
        {"data": {"order": "sequential", "eval": None}, "eval": None},
    ],
    ids=str,
)
def test_odd_sizes_just_train(tmp_path: Path, changes: dict[str, dict[str, object]]) -> None:
    spec = tiny_spec(tmp_path, **changes)
    for name, section in spec.items():
        if isinstance(section, dict):
            spec[name] = {key: value for key, value in section.items() if value is not None}
    run = rwkv_spec.run(spec)
    assert run.metrics[-1].step == run.plan.total_steps and math.isfinite(run.metrics[-1].loss)
    assert yaml.safe_load((tmp_path / "run" / "configs" / "spec.yaml").read_text())["version"] == 1


def test_trackers_get_the_rows_and_leave_out_alone(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    run = rwkv_spec.run(tiny_spec(tmp_path, log={"trackers": ["tensorboard"]}))
    assert list((run.dir / "trackers").rglob("events.out.tfevents.*"))
    assert not list((run.dir / "out").rglob("*tfevents*"))
