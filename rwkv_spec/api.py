"""The public face, to be read like a table of contents. Only this module and training.py know all the others.

Each function takes a spec (a path, a dict or a checked Spec) and plain keywords. What only some of them need, as torch,
is imported there: checking a spec waits for none of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rwkv_spec.data.source import Given
from rwkv_spec.errors import UserError
from rwkv_spec.paths import expanded
from rwkv_spec.preflight import Inputs, preflight
from rwkv_spec.process import wait_briefly
from rwkv_spec.spec.types import Spec
from rwkv_spec.spec.validate import validate
from rwkv_spec.tokenizer.protocol import Tokenizer

if TYPE_CHECKING:
    from rwkv_spec.benchmark.report import Report
    from rwkv_spec.checkpoint.detect import Info
    from rwkv_spec.conversion import Converted
    from rwkv_spec.data.store import Store
    from rwkv_spec.generation.sample import Sampling
    from rwkv_spec.generation.text import TextStream
    from rwkv_spec.model.language_model import LanguageModel
    from rwkv_spec.planning import Planned
    from rwkv_spec.spec.plan import Plan
    from rwkv_spec.training import Run

SpecSource = str | Path | Mapping[str, object] | Spec


def check(spec: SpecSource, overrides: Sequence[str] = ()) -> Spec:
    """The checked spec, everything it names opened once; or SpecError with every problem in `.problems`."""
    return _inputs(spec, overrides).spec


def run(
    spec: SpecSource,
    *,
    data: Given | None = None,
    eval_data: Given | None = None,
    tokenizer: Tokenizer | None = None,
    overrides: Sequence[str] = (),
    resume: str = "auto",
) -> Run:
    """Check, plan, prepare and train, or go on where the run in work_dir stopped; then everything lies in work_dir.

    `data`, `eval_data`: arrays or lists of integers in place of the spec's data.train and data.eval. `resume`: auto |
    never | must. Raises a UserError (SpecError, DataError, CheckpointError, KernelError) for what a user can fix.
    """
    if resume not in ("auto", "never", "must"):
        raise ValueError(f"resume is {resume!r}; it is auto, never or must")
    inputs = _inputs(spec, overrides, data=data, eval_data=eval_data, tokenizer=tokenizer)
    wait_briefly()

    from rwkv_spec.training import train

    return train(inputs, given=spec, resume=resume)


def plan(
    spec: SpecSource,
    *,
    data: Given | None = None,
    eval_data: Given | None = None,
    tokenizer: Tokenizer | None = None,
    overrides: Sequence[str] = (),
    num_processes: int = 1,
    engine: str | None = None,
) -> Plan:
    """What a run of this spec would do. Reads the token store if there is one, else at most 64 MB of each source."""
    return planned(
        spec,
        data=data,
        eval_data=eval_data,
        tokenizer=tokenizer,
        overrides=overrides,
        num_processes=num_processes,
        engine=engine,
    ).plan


def planned(
    spec: SpecSource,
    *,
    data: Given | None = None,
    eval_data: Given | None = None,
    tokenizer: Tokenizer | None = None,
    overrides: Sequence[str] = (),
    num_processes: int = 1,
    engine: str | None = None,
) -> Planned:
    """The plan with what it was made from: as text it is what `rwkv-spec plan` prints."""
    if num_processes < 1:
        raise UserError(f"{num_processes} processes: a world has at least one")
    inputs = _inputs(spec, overrides, data=data, eval_data=eval_data, tokenizer=tokenizer)

    from rwkv_spec.micro_batch import noted_choice, notes_folder
    from rwkv_spec.planning import make_planned, make_world
    from rwkv_spec.preparing import foreseen

    world = make_world(inputs.spec, shape=inputs.shape, num_processes=num_processes, engine=engine)
    first = make_planned(
        inputs.spec,
        shape=inputs.shape,
        data=foreseen(inputs),
        world=world,
        checkpoint_rows=inputs.checkpoint_rows,
    )
    return noted_choice(first, inputs.shape, notes=notes_folder())


def prepare(
    spec: SpecSource,
    *,
    data: Given | None = None,
    eval_data: Given | None = None,
    tokenizer: Tokenizer | None = None,
    overrides: Sequence[str] = (),
    verify: bool = False,
) -> Store:
    """Turn the data into a token store and return it; `verify` hashes sources even if their size and time match."""
    inputs = _inputs(spec, overrides, data=data, eval_data=eval_data, tokenizer=tokenizer)

    from rwkv_spec.preparing import prepare_inputs, terminal_console

    return prepare_inputs(inputs, terminal_console(), verify=verify)


def initialize(spec: SpecSource, *, overrides: Sequence[str] = ()) -> Path:
    """Write the weights that a run would start from to out/rwkv-init and return that path."""
    inputs = _inputs(spec, overrides)

    from rwkv_spec.start import write_initial_weights

    return write_initial_weights(inputs)


def bench(
    spec: SpecSource,
    *,
    overrides: Sequence[str] = (),
    num_steps: int = 12,
    num_rounds: int | None = None,
    against: Sequence[str] = (),
    beside_busy: bool = False,
    peer_python: Path | None = None,
    peer_limit_seconds: float = 600.0,
) -> Report:
    """Time optimizer steps of this spec on random tokens on this machine, and of peers in turn with them.

    `against`: names of peers (rwkv-trainer, gpt, compile, or all); `peer_python` is the python that has rwkv-trainer.
    `beside_busy` measures all once more while another process keeps a core busy.
    """
    inputs = _inputs(spec, overrides)

    from rwkv_spec.benchmark.measure import Request, measure

    request = Request(num_steps, num_rounds, tuple(against), beside_busy, peer_python, peer_limit_seconds)
    return measure(inputs, request)


def inspect(path: str | Path) -> Info:
    """What a checkpoint (a file, or a Hugging Face folder) holds, read from its header; or what else it is."""
    from rwkv_spec.checkpoint.detect import describe
    from rwkv_spec.checkpoint.published import open_header

    return describe(open_header(expanded(path)))


def convert(source: str | Path, target: str | Path, *, dtype: str | None = None) -> Converted:
    """Write a checkpoint as .pth, .safetensors or, for a name without such an ending, a Hugging Face folder; check it.

    `dtype`: bf16 | fp16 | fp32, None keeps the source's. What is at `target` already is never overwritten.
    """
    from rwkv_spec.conversion import convert
    from rwkv_spec.inference import find_weights

    return convert(find_weights(expanded(source)), expanded(target), dtype=dtype)


def load(path: str | Path, *, device: str = "cpu", dtype: str = "fp32") -> LanguageModel:
    """A checkpoint as a model: `model(ids_BT) -> logits_BTV`, `model.step(ids_B, state) -> (logits_BV, state)`."""
    from rwkv_spec.inference import load_model

    return load_model(expanded(path), device=device, dtype=dtype)


def generate(
    checkpoint_or_run_dir: str | Path,
    prompts: str | Sequence[str | Sequence[int]],
    *,
    tokenizer: Tokenizer | None = None,
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    penalty_decay: float = 1.0,
    repetition_penalty: float = 1.0,
    stop_sequences: str | Sequence[str | Sequence[int]] = (),
    seed: int = 0,
    state: str | Path | None = None,
    save_state: str | Path | None = None,
) -> list[str]:
    """Continue each prompt with a run's final weights, or with those of a file; the tokenizer defaults to the run's.

    A prompt is text, or a list of values of a numeric tokenizer, and so is a stop: the first one to be complete ends
    the text, and is no part of it. temperature 0 takes the likeliest token; the penalties (off by default) lower the
    logits of tokens that the text holds, as rwkv_spec.generation.sample.Sampling says. Prompt i draws with seed + i.

    `save_state` is a file that the state after each prompt and its text is written to; a file that is there is left
    alone. From a `state` so saved the prompts go on instead of beginning a document. Each token's draw depends on its
    seed and its place in the sequence alone, so that a text does not depend on where it was cut by saving its state,
    up to the rounding of its logits.
    """
    from rwkv_spec.generation.sample import Sampling

    stream = text_stream(
        checkpoint_or_run_dir,
        prompts,
        tokenizer=tokenizer,
        max_new_tokens=max_new_tokens,
        sampling=Sampling(
            temperature, top_k, top_p, presence_penalty, frequency_penalty, penalty_decay, repetition_penalty
        ),
        stop_sequences=stop_sequences,
        seed=seed,
        state=state,
        save_state=save_state,
    )
    return [completion.text for completion in stream.completions()]


def generate_stream(
    checkpoint_or_run_dir: str | Path,
    prompt: str | Sequence[int],
    *,
    tokenizer: Tokenizer | None = None,
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    penalty_decay: float = 1.0,
    repetition_penalty: float = 1.0,
    stop_sequences: str | Sequence[str | Sequence[int]] = (),
    seed: int = 0,
    state: str | Path | None = None,
    save_state: str | Path | None = None,
) -> Iterator[str]:
    """The text that generate() gives for one prompt, in pieces, each as soon as it is certain to stay.

    No piece ends in half a character, or is part of a stop. Arguments are checked before the first piece is asked for;
    `save_state` is written after the last.
    """
    from rwkv_spec.generation.sample import Sampling

    stream = text_stream(
        checkpoint_or_run_dir,
        [prompt],
        tokenizer=tokenizer,
        max_new_tokens=max_new_tokens,
        sampling=Sampling(
            temperature, top_k, top_p, presence_penalty, frequency_penalty, penalty_decay, repetition_penalty
        ),
        stop_sequences=stop_sequences,
        seed=seed,
        state=state,
        save_state=save_state,
    )
    return (piece for _, piece in stream)


def text_stream(
    checkpoint_or_run_dir: str | Path,
    prompts: str | Sequence[str | Sequence[int]] | None,
    *,
    tokenizer: Tokenizer | None,
    max_new_tokens: int,
    sampling: Sampling,
    stop_sequences: str | Sequence[str | Sequence[int]],
    seed: int,
    state: str | Path | None,
    save_state: str | Path | None,
) -> TextStream:
    """What generate(), generate_stream() and the command line run: more than texts, and for many prompts at once."""
    from rwkv_spec.generation.text import TextStream
    from rwkv_spec.inference import find_weights, load_model, tokenizer_for

    source = expanded(checkpoint_or_run_dir)
    model = load_model(find_weights(source), device="cpu", dtype="fp32")
    return TextStream(
        model,
        tokenizer_for(source, tokenizer, num_rows=model.shape.vocab_size),
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop_sequences=stop_sequences,
        seed=seed,
        state=state,
        save_state=save_state,
    )


def _inputs(
    spec: SpecSource,
    overrides: Sequence[str],
    *,
    data: Given | None = None,
    eval_data: Given | None = None,
    tokenizer: Tokenizer | None = None,
) -> Inputs:
    checked = validate(
        spec,
        overrides,
        has_data=data is not None,
        has_tokenizer=tokenizer is not None,
        has_eval_data=eval_data is not None,
    )
    return preflight(checked, data=data, eval_data=eval_data, tokenizer=tokenizer)
