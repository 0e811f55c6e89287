"""make_plan: exact meanings of windows, epochs, steps and periods; shares and memory; errors with their place."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rwkv_spec.errors import SpecError
from rwkv_spec.spec.describe import describe
from rwkv_spec.spec.memory import activation_bytes
from rwkv_spec.spec.plan import DataStats, ModelSizes, Plan, World, make_plan
from rwkv_spec.spec.split import MicroBatch
from rwkv_spec.spec.types import Source, Spec
from rwkv_spec.spec.validate import validate

SIZES = ModelSizes(
    type="x070", n_layer=3, n_embd=128, head_size=64, vocab_size=361,
    parameters_by_group={"decay": 700_000, "plain": 50_000, "double": 384, "untrained": 16_640},
    num_parameters=767_024, num_state_values=3 * (2 * 128 + 64 * 128),
)  # fmt: skip
WORLD = World(
    num_processes=1, engine="single", device="cpu", num_threads=2, memory_bytes=None, precision="fp32",
    precision_reason="this CPU has no bf16", backend="cpu", backend_reason="compiled",
)  # fmt: skip


def spec_of(**sections: object) -> Spec:
    source: dict[str, object] = {
        "version": 1, "data": {"train": "a.jsonl", "eval": {"fraction": 0.1}}, "tokenizer": {"type": "angle"},
        "model": {"n_layer": 3, "n_embd": 128}, "train": {"epochs": 2, "ctx_len": 8, "batch_size": 4},
    }  # fmt: skip
    return validate({**source, **sections})


def plan_of(
    spec: Spec,
    num_tokens: int = 81,
    *,
    world: World = WORLD,
    magic_prime: int | None = None,
    num_eval_documents: int = 2,
) -> Plan:
    stats = DataStats(num_tokens, 5, num_eval_documents, 20, False, magic_prime)
    return make_plan(spec, sizes=SIZES, data=stats, world=world)


def train(**keys: object) -> Spec:
    return spec_of(train={"ctx_len": 8, "batch_size": 4, **keys})


@pytest.mark.parametrize(("num_tokens", "num_windows"), [(2, 1), (9, 1), (10, 2), (17, 2), (81, 10), (82, 11)])
def test_windows_cover_every_target_once(num_tokens: int, num_windows: int) -> None:
    assert plan_of(train(epochs=1), num_tokens).num_windows == num_windows


def test_epochs_run_on_across_batches() -> None:
    plan = plan_of(train(epochs=3), 81)  # W = 10
    assert (plan.total_sequences, plan.total_steps, plan.steps_per_epoch) == (30, 8, 2.5)
    assert plan.total_tokens == 8 * 32 and plan.tokens_per_step == 32
    assert [plan.epoch_at(step) for step in (1, 5, 7, 8)] == [0.4, 2.0, 2.8, 3.0]


def test_fractions_of_an_epoch_are_decimal() -> None:
    assert plan_of(train(epochs=0.1), 81).total_sequences == 1
    assert plan_of(train(epochs=0.3), 81).total_sequences == 3
    assert plan_of(train(epochs=1.05), 161).total_sequences == 21  # 1.05 * 20 is 21, in floats too much
    assert plan_of(train(epochs=1e-5), 81).total_steps == 1


def test_steps_and_tokens_are_whole_steps() -> None:
    plan = plan_of(train(steps=5))
    assert (plan.total_steps, plan.total_sequences, plan.total_tokens) == (5, 20, 160)
    plan = plan_of(train(tokens=100))
    assert (plan.total_steps, plan.total_sequences, plan.total_tokens) == (4, 16, 100)


def test_the_published_trace_has_its_length() -> None:
    gold = json.loads((Path(__file__).parents[1] / "golden" / "x070_train_trace.json").read_text())
    spec = spec_of(
        data={"train": "a.bin", "order": "rwkv-lm", "eval": {"fraction": 0.1}},
        train={"tokens": gold["my_exit_tokens"], "ctx_len": gold["ctx"], "batch_size": gold["bsz"]},
    )
    plan = plan_of(spec, 296_553, magic_prime=gold["magic_prime"])
    assert plan.total_steps * plan.tokens_per_step >= gold["my_exit_tokens"] == plan.total_tokens
    assert plan.num_windows == gold["magic_prime"]


def test_saves_fall_on_the_first_step_that_finishes_the_epoch() -> None:
    plan = plan_of(train(epochs=3), 81)
    saves = {step: plan.saves_at(step) for step in range(1, 9) if plan.saves_at(step)}
    assert saves == {3: "rwkv-0", 5: "rwkv-1", 8: "rwkv-2"}
    assert [step for step in range(1, 9) if plan.evaluates_at(step)] == [3, 5, 8]


def test_several_multiples_inside_one_step_fire_once() -> None:
    spec = spec_of(train={"epochs": 3, "ctx_len": 8, "batch_size": 25}, save={"every": {"epochs": 0.5}, "keep": 9})
    plan = plan_of(spec, 81)  # W = 10, 30 sequences: steps of 25 and 5
    assert [plan.saves_at(step) for step in (1, 2)] == ["rwkv-0", "rwkv-1"]
    assert plan.total_steps == 2


def test_periods_in_steps_and_tokens() -> None:
    spec = spec_of(
        train={"steps": 10, "ctx_len": 8, "batch_size": 4},
        save={"every": {"steps": 4}}, eval={"every": {"tokens": 100}}, log={"every": {"steps": 3}},
    )  # fmt: skip
    plan = plan_of(spec)
    assert [plan.saves_at(step) for step in range(1, 11) if plan.saves_at(step)] == ["rwkv-step4", "rwkv-step8"]
    # 32 tokens a step: 128, 224, 320 are the first to reach 100, 200, 300; the last step always evaluates.
    assert [step for step in range(1, 11) if plan.evaluates_at(step)] == [4, 7, 10]
    assert [step for step in range(1, 11) if plan.logs_at(step)] == [1, 3, 6, 9, 10]
    assert not plan_of(spec, num_eval_documents=0).evaluates_at(10)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.sampled_from([0.1, 0.25, 0.3, 0.5, 1, 1.5, 2, 7]),
    st.integers(1, 40),
    st.integers(1, 30),
    st.sampled_from([0.5, 1, 3, 7.3]),
)
def test_periods_agree_with_counting(period: float, batch_size: int, num_windows: int, epochs: float) -> None:
    spec = spec_of(
        train={"epochs": epochs, "ctx_len": 8, "batch_size": batch_size},
        save={"every": {"epochs": period}}, scheduler={"warmup_steps": 0},
    )  # fmt: skip
    plan = plan_of(spec, num_windows * 8 + 1)
    tenths, num_fired = round(period * 100), 0
    for step in range(1, plan.total_steps + 1):
        done, before = min(step * batch_size, plan.total_sequences), (step - 1) * batch_size
        due = any(
            before * 100 < k * tenths * num_windows <= done * 100
            for k in range(1, done * 100 // (tenths * num_windows) + 1)
        )
        num_fired += due
        assert plan.saves_at(step) == (f"rwkv-{num_fired - 1}" if due else None)
        assert plan.save_cadence.num_fired(step) == num_fired


def test_warm_up_is_derived_and_a_given_one_is_held_against_the_run() -> None:
    assert [plan_of(train(steps=steps)).warmup_steps for steps in (1, 9, 10, 55, 100, 5000)] == [0, 0, 1, 5, 10, 10]
    spec = spec_of(scheduler={"warmup_steps": 5})  # 2 epochs of 10 windows in steps of 4: 5 steps
    with pytest.raises(SpecError, match=r"python: scheduler\.warmup_steps: 5 is not below the 5 steps of this run; "):
        plan_of(spec)
    assert plan_of(spec_of(scheduler={"warmup_steps": 0})).warmup_steps == 0


@pytest.mark.parametrize(("lr", "lr_final"), [(6e-4, 6e-5), (1e-3, 1e-4), (0, 0), (3, 0.3), (7e-4, 7e-5)])
def test_lr_final_is_a_tenth_in_decimal(lr: float, lr_final: float) -> None:
    assert plan_of(spec_of(optimizer={"lr": lr})).lr_final == lr_final
    assert plan_of(spec_of(optimizer={"lr": lr}, scheduler={"type": "constant"})).lr_final == lr


def test_every_problem_of_a_plan_at_once() -> None:
    world = dataclasses.replace(WORLD, num_processes=8)
    with pytest.raises(SpecError) as caught:
        plan_of(spec_of(scheduler={"warmup_steps": 99}), 81, world=world)
    assert [problem.key for problem in caught.value.problems] == ["scheduler.warmup_steps", "train.batch_size"]
    for num_tokens in (0, 1):
        with pytest.raises(SpecError, match=rf"data\.train: there are {num_tokens} tokens"):
            plan_of(spec_of(), num_tokens)
    with pytest.raises(SpecError, match=r"data\.order: 81 tokens are too few"):
        plan_of(spec_of(data={"train": "a", "order": "rwkv-lm", "eval": {"fraction": 0.1}}))


def test_the_share_of_a_process_and_its_micro_batches() -> None:
    world = dataclasses.replace(WORLD, num_processes=3)
    plan = plan_of(train(steps=1), world=world)  # shares of 2, 1, 1
    assert (plan.micro_batch_size, plan.accumulate) == (2, 1)
    plan = plan_of(train(steps=1, micro_batch_size=3))
    assert (plan.micro_batch_size, plan.accumulate, plan.notes) == (3, 2, ())
    plan = plan_of(train(steps=1, micro_batch_size=3), world=world)
    assert (plan.micro_batch_size, plan.accumulate) == (2, 1)
    assert plan.notes == ("train.micro_batch_size 3 is cut to 2, a process's whole share of batch_size",)


def test_auto_halves_until_the_activations_fit() -> None:
    def need(micro: int) -> int:
        return activation_bytes(
            micro * 8,
            type="x070",
            n_layer=3,
            n_embd=128,
            head_size=64,
            vocab_size=361,
            precision="fp32",
            dropout=False,
            compiled=WORLD.backend == "cpu",
            grad_checkpoint=False,
        )

    spec = spec_of(train={"steps": 1, "ctx_len": 8, "batch_size": 21})
    for micro, accumulate in ((21, 1), (11, 2), (6, 4), (3, 7), (2, 11), (1, 21)):
        world = dataclasses.replace(WORLD, memory_bytes=math.ceil(need(micro) / 0.4) + 1)
        plan = plan_of(spec, world=world)
        assert (plan.micro_batch_size, plan.accumulate) == (micro, accumulate)
        assert plan.bytes.activations == need(micro)
    assert plan_of(spec, world=dataclasses.replace(WORLD, memory_bytes=1)).micro_batch_size == 1


def test_a_long_run_on_a_cpu_compares_sizes_and_no_other_does() -> None:
    long, short = train(steps=700), train(steps=300)
    plan = plan_of(long)
    assert (plan.micro_batch_size, plan.sizes_to_compare, plan.compares_sizes) == (4, (1, 2, 4), True)
    assert "measured at the start of the run" in plan.notes[0]
    plan = plan_of(short)
    assert (plan.sizes_to_compare, plan.compares_sizes, plan.notes) == ((1, 2, 4), False, ())
    for spec, world in (
        (long, dataclasses.replace(WORLD, device="cuda")),
        (long, dataclasses.replace(WORLD, num_processes=4)),
        (train(steps=700, micro_batch_size=2), WORLD),
    ):
        plan = plan_of(spec, world=world)
        assert (plan.sizes_to_compare, plan.compares_sizes, plan.notes) == ((), False, ())
    # Each of two processes has half of the work.
    halves = dataclasses.replace(WORLD, num_processes=2)
    assert plan_of(train(steps=300), world=halves).compares_sizes
    assert not plan_of(train(steps=299), world=halves).compares_sizes


def test_a_settled_micro_batch_is_what_is_planned_with() -> None:
    stats, choice = DataStats(81, 5, 2, 20), MicroBatch(3, "for a reason")
    plan = make_plan(train(steps=700), sizes=SIZES, data=stats, world=WORLD, micro_batch=choice)
    assert (plan.micro_batch_size, plan.accumulate, plan.notes) == (3, 2, ("for a reason",))
    assert plan.sizes_to_compare == () and not plan.compares_sizes
    larger = make_plan(train(steps=700), sizes=SIZES, data=stats, world=WORLD)
    assert 0.7 * larger.bytes.activations < plan.bytes.activations < larger.bytes.activations
    given = train(steps=700, micro_batch_size=2)
    assert make_plan(given, sizes=SIZES, data=stats, world=WORLD, micro_batch=choice).micro_batch_size == 2


def test_documents_are_scored_in_batches_that_no_measurement_changes() -> None:
    stats, spec = DataStats(81, 5, 2, 20), train(steps=700)
    settled = make_plan(spec, sizes=SIZES, data=stats, world=WORLD, micro_batch=MicroBatch(1, ""))
    # As a resume has it, which takes the size from the state.
    sources = {**spec.sources, "train.micro_batch_size": Source("derived")}
    resumed = dataclasses.replace(spec, train=dataclasses.replace(spec.train, micro_batch_size=1), sources=sources)
    assert [plan.eval_batch_size for plan in (plan_of(spec), settled, plan_of(resumed))] == [4, 4, 4]
    assert plan_of(resumed).micro_batch_size == 1
    assert plan_of(train(steps=700, micro_batch_size=2)).eval_batch_size == 2


def test_bytes_in_memory_and_on_disk() -> None:
    plan = plan_of(spec_of(save={"keep": 3, "dtype": "bf16", "every": {"steps": 1}}))
    num_trained = SIZES.num_parameters - 16_640
    assert (plan.bytes.weights, plan.bytes.gradients) == (4 * SIZES.num_parameters, 4 * num_trained)
    assert plan.bytes.moments == 8 * num_trained and plan.bytes.total > plan.bytes.activations
    assert plan.disk.weights_file == 2 * SIZES.num_parameters
    assert plan.disk.state == 4 * SIZES.num_parameters + 8 * num_trained
    assert plan.disk.total == 6 * plan.disk.weights_file + 3 * plan.disk.state
    double = plan_of(spec_of(), world=dataclasses.replace(WORLD, precision="fp64"))
    assert double.bytes.weights == 8 * SIZES.num_parameters
    # The weights and their casts, which stand beside them.
    half = plan_of(spec_of(), world=dataclasses.replace(WORLD, precision="bf16"))
    assert half.bytes.weights == 6 * SIZES.num_parameters and half.bytes.gradients == plan.bytes.gradients


def test_gradient_checkpoints_are_foreseen_and_told() -> None:
    texts, needs = [], []
    for grad_checkpoint in (False, True):
        spec = train(epochs=1, grad_checkpoint=grad_checkpoint)
        plan = plan_of(spec)
        needs.append(plan.bytes.activations)
        texts.append(describe(plan, spec, sizes=SIZES, world=WORLD))
    assert needs[1] < needs[0]
    told = "blocks computed again in the backward pass"
    assert [told in text for text in texts] == [False, True]
    assert max(len(line) for line in texts[1].splitlines()) <= 130


def test_a_plan_for_people_is_compact_and_tells_what_is_written_when() -> None:
    spec = spec_of(train={"epochs": 3, "ctx_len": 8, "batch_size": 4})
    stats = DataStats(81, 5, 2, 20, approximate=True)
    plan = make_plan(spec, sizes=SIZES, data=stats, world=WORLD)
    text = describe(plan, spec, sizes=SIZES, world=WORLD)
    for part in (
        "767,024", "700,000", "≈ 81 tokens", "≈ 8 steps", "out/rwkv-0.pth at step ≈ 3", "out/rwkv-final.pth",
        "out/rwkv-best.pth", "every 10 steps", "moments", "activations", "this CPU has no bf16", "the last 3 are kept",
    ):  # fmt: skip
        assert part in text, part
    assert len(text.splitlines()) <= 25 and max(len(line) for line in text.splitlines()) <= 130
    exact = make_plan(spec, sizes=SIZES, data=dataclasses.replace(stats, approximate=False), world=WORLD)
    assert "≈ 8 steps" not in describe(exact, spec, sizes=SIZES, world=WORLD)


def test_a_run_that_ends_before_its_first_save_says_so() -> None:
    spec = spec_of(train={"steps": 2, "ctx_len": 8, "batch_size": 4}, save={"every": {"steps": 500}})
    plan = plan_of(spec, num_eval_documents=0)
    text = describe(plan, spec, sizes=SIZES, world=WORLD)
    assert "no numbered save" in text and "there is no evaluation" in text and "no warm-up" in text
