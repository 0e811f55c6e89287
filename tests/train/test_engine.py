"""The world a run trains in: which precision and why, what is no world is refused, two runs in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState

from rwkv_spec.errors import UserError
from rwkv_spec.train.engine import Engine, Precision, decide_precision, num_cores

LAUNCH = "ACCELERATE_MIXED_PRECISION"


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (LAUNCH, "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Builds engines and ends those that a test leaves."""
    built: list[Engine] = []
    threads = torch.get_num_threads()

    def build(precision: str = "fp32", threads: int | None = 1) -> Engine:
        built.append(Engine(precision=precision, trackers=(), log_dir=tmp_path, threads=threads))
        return built[-1]

    yield build
    for engine in built:
        engine.end()
    torch.set_num_threads(threads)


@pytest.mark.parametrize("launch", [None, "no", "bf16"])
def test_auto_takes_the_launch_configs_precision_if_it_has_one(
    monkeypatch: pytest.MonkeyPatch, launch: str | None
) -> None:
    if launch is not None:
        monkeypatch.setenv(LAUNCH, launch)
    decided = decide_precision("auto", device="cpu")
    if launch == "bf16":
        assert decided == Precision("bf16", "as the launch config's mixed_precision says")
    else:
        assert decided.name in ("bf16", "fp32") and decided.reason.startswith("auto: this CPU")


def test_the_specs_precision_stands_where_the_launch_config_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for launch in ("no", "NO"):
        monkeypatch.setenv(LAUNCH, launch)
        for asked in ("fp32", "bf16", "fp64"):
            assert decide_precision(asked, device="cpu") == Precision(asked, "as the spec says")


def test_equal_precisions_are_no_contradiction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCH, "BF16")
    assert decide_precision("bf16", device="cpu").name == "bf16"


@pytest.mark.parametrize("asked", ["fp32", "fp64"])
def test_a_contradiction_names_both_and_the_ways_out(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setenv(LAUNCH, "bf16")
    with pytest.raises(UserError) as caught:
        decide_precision(asked, device="cpu")
    words = str(caught.value)
    assert f"train.precision is {asked}" in words and "mixed_precision is bf16" in words and "remove one" in words


@pytest.mark.parametrize("launch", ["fp16", "fp8"])
@pytest.mark.parametrize("asked", ["auto", "fp32"])
def test_a_launch_precision_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, launch: str, asked: str
) -> None:
    monkeypatch.setenv(LAUNCH, launch)
    with pytest.raises(UserError, match=f"mixed_precision: {launch} .*remove it there"):
        decide_precision(asked, device="cpu")


def test_processes_that_do_not_talk_to_each_other_are_refused(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes were started, and each one is alone: training would go on unsynchronised."""
    alone = PartialState(cpu=True)
    assert alone.num_processes == 1
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    try:
        with pytest.raises(UserError, match=r"2 processes were started.*world of 1.*ACCELERATE_USE_CPU"):
            make()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_a_world_that_cannot_be_made_is_said_in_words(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cluster software leaves WORLD_SIZE in the environment of a shell without saying where rank 0 is."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    try:
        with pytest.raises(UserError, match=r"WORLD_SIZE=2.*accelerate launch.*unset"):
            make()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_engines_of_different_precision_follow_each_other_in_one_process(make: Callable[..., Engine]) -> None:
    """accelerate keeps its first world in class state, and refuses a second one of another precision."""
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp32", torch.float32)):
        engine = make(precision)
        linear = torch.nn.Linear(4, 4)
        model, optimizer = engine.prepare(linear, torch.optim.SGD(linear.parameters(), lr=0.1))
        with engine.autocast():
            out = model(torch.ones(2, 4))
        assert out.dtype == dtype and next(model.parameters()).dtype == torch.float32
        engine.backward(out.float().sum())
        optimizer.step()
        engine.end()
        # Nothing of this world is left that could decide something in the next one.
        assert not AcceleratorState._shared_state and not PartialState._shared_state


def test_the_autocast_of_fp64_leaves_everything_as_it_is(make: Callable[..., Engine]) -> None:
    with make("fp64").autocast():
        assert torch.ones(2, 2, dtype=torch.float64).mm(torch.ones(2, 2, dtype=torch.float64)).dtype == torch.float64


def test_one_process_sums_to_what_it_gave(make: Callable[..., Engine]) -> None:
    values = [0.1, 2**53 + 1.0, -3.0]
    engine = make()
    assert engine.sum(values) == values and engine.sum([]) == []
    assert (engine.num_processes, engine.rank, engine.is_main, engine.name) == (1, 0, True, "single")


def test_clip_returns_the_norm_before_and_zero_only_measures(make: Callable[..., Engine]) -> None:
    engine = make()
    linear = torch.nn.Linear(2, 1, bias=False)
    for limit, left in ((0.0, 5.0), (1.0, 1.0), (10.0, 5.0)):
        linear.weight.grad = torch.tensor([[3.0, 4.0]])
        assert engine.clip(linear, limit) == pytest.approx(5.0)
        assert float(linear.weight.grad.norm()) == pytest.approx(left, rel=1e-5)


def test_threads_are_those_asked_for_else_all_cores_of_this_process(make: Callable[..., Engine]) -> None:
    for asked in (2, 1):
        engine = make(threads=asked)
        assert engine.num_threads == torch.get_num_threads() == asked
        engine.end()
    torch.set_num_threads(num_cores() + 1)
    assert make(threads=None).num_threads == torch.get_num_threads() == num_cores() >= 1


def test_processes_of_one_machine_share_its_cores(make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    assert make(threads=None).num_threads == 1
