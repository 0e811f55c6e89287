"""A run from its checked inputs to its last file: who owns the folder, where it starts, the one loop, and how it ends.

In the loop stands in plain sight when a run evaluates, writes a row, saves weights and saves a state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rwkv_spec.checkpoint.state import WEIGHTS
from rwkv_spec.data.batch import batches
from rwkv_spec.data.store import Store
from rwkv_spec.errors import CheckpointError
from rwkv_spec.interrupt import StopRequest
from rwkv_spec.micro_batch import noted_choice, notes_folder, settled
from rwkv_spec.model.language_model import LanguageModel
from rwkv_spec.objective.cross_entropy import cross_entropy
from rwkv_spec.planning import Planned, make_planned, make_world
from rwkv_spec.preflight import Inputs
from rwkv_spec.preparing import foreseen, prepare_inputs, silent_console, stored_data, terminal_console
from rwkv_spec.report.console import Console, Summary
from rwkv_spec.report.metrics import Row, read_rows
from rwkv_spec.run_folder import RunFolder
from rwkv_spec.session import Progress, Session
from rwkv_spec.spec.plan import Plan
from rwkv_spec.start import Beginning, begin, build_session, find_beginning
from rwkv_spec.tokenizer.protocol import Tokenizer
from rwkv_spec.train.engine import Engine
from rwkv_spec.train.loop import NonFiniteLoss, StepResult, steps

OBJECTIVES = {"pretrain": cross_entropy}


@dataclass(frozen=True)
class Run:
    """What a run leaves. `checkpoint` is the weights file to use; `stopped` is set when a signal ended it early."""

    dir: Path
    plan: Plan
    metrics: list[Row]
    model: LanguageModel
    tokenizer: Tokenizer
    checkpoint: Path
    stopped: bool

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        *,
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
        """The continuation of each prompt, without it; rwkv_spec.generate says what each argument is."""
        from rwkv_spec.generation.sample import Sampling
        from rwkv_spec.generation.text import TextStream

        stream = TextStream(
            self.model.eval(),
            self.tokenizer,
            prompts,
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


def train(inputs: Inputs, *, given: object, resume: str) -> Run:
    """Train what the inputs say, in their work_dir; `given` is the spec as it was passed, for the run folder's copy."""
    # Made first: it notices a launcher that goes away while data is prepared.
    stop = StopRequest()
    spec = inputs.spec
    folder = RunFolder(spec.work_dir)
    beginning = find_beginning(spec, folder, resume=resume)
    engine = Engine(
        precision=beginning.precision.name,
        trackers=spec.log.trackers,
        log_dir=folder.trackers,
        threads=beginning.num_threads,
    )
    console = terminal_console() if engine.is_main else silent_console()
    try:
        lock = folder.claim() if engine.is_main else None
        try:
            return _train(inputs, folder, beginning, engine, console, stop, given=given)
        except BaseException as error:
            # Whatever ended it: run.json must not go on saying that it runs.
            if engine.is_main:
                folder.mark_failed(str(error) or type(error).__name__)
            raise
        finally:
            if lock is not None:
                lock.release()
    finally:
        console.close()
        engine.end()


def _train(
    inputs: Inputs,
    folder: RunFolder,
    beginning: Beginning,
    engine: Engine,
    console: Console,
    stop: StopRequest,
    *,
    given: object,
) -> Run:
    planned, store = _plan_and_prepare(inputs, beginning, engine, console)
    session = build_session(inputs, beginning, planned, store, folder=folder, engine=engine, console=console)
    try:
        if engine.is_main:
            folder.write_status("running", step=beginning.step, total_steps=session.plan.total_steps)
        progress = begin(session, beginning, given=given)
        if progress.step >= session.plan.total_steps:
            return _already_done(session, progress)
        with stop:
            stopped = _loop(session, progress, stop)
        return _stopped(session, progress) if stopped else _done(session, progress)
    finally:
        session.end()


def _plan_and_prepare(inputs: Inputs, beginning: Beginning, engine: Engine, console: Console) -> tuple[Planned, Store]:
    """Print the plan, prepare the data, find the micro-batch size, and print anew what was not known before."""
    spec = beginning.spec
    world = make_world(
        spec,
        shape=inputs.shape,
        num_processes=engine.num_processes,
        num_local_processes=engine.num_local_processes,
        engine=engine.name,
        precision=beginning.precision,
        num_threads=engine.num_threads,
    )
    expected, notes = foreseen(inputs), notes_folder()
    make = partial(make_planned, spec, shape=inputs.shape, world=world, checkpoint_rows=inputs.checkpoint_rows)
    first = noted_choice(make(data=expected), inputs.shape, notes=notes)
    console.lines(str(first))
    store = prepare_inputs(inputs, console)
    exact = settled(make(data=stored_data(store, spec)), inputs.shape, engine, notes=notes)
    if expected.approximate:
        console.lines(f"with all data read:\n{exact}")
    elif exact.plan.notes != first.plan.notes:
        console.lines("\n".join(exact.plan.notes))
    return exact, store


def _loop(session: Session, progress: Progress, stop: StopRequest) -> bool:
    """Train to the end of the plan, or to a signal: then True, and the state is saved either way."""
    plan = session.plan
    for result in _results(session, progress, stop):
        progress.add(result)
        eval_loss = session.evaluate(progress) if plan.evaluates_at(result.step) else None
        if plan.logs_at(result.step) or eval_loss is not None:
            session.write_row(progress.row(result, epoch=plan.epoch_at(result.step), eval_loss=eval_loss))
        session.show(progress, result)
        numbered = plan.saves_at(result.step)
        if numbered is not None:
            session.save_weights(numbered)
        if numbered is not None or result.stop or result.step == plan.total_steps:
            session.save_state(progress)
        if result.stop and result.step < plan.total_steps:
            return True
    return False


def _results(session: Session, progress: Progress, stop: StopRequest) -> Iterator[StepResult]:
    """The steps that are left. A loss that is not finite ends the run with the documents it came from."""
    spec, plan, engine = session.spec, session.plan, session.engine
    stream = session.store.train
    data = batches(
        stream,
        ctx_len=spec.train.ctx_len,
        batch_size=spec.train.batch_size,
        order=spec.data.order,
        seed=spec.seed,
        total_sequences=plan.total_sequences,
        first_step=progress.step,
        rank=engine.rank,
        world=engine.num_processes,
    )
    try:
        yield from steps(
            session.wrapped_model,
            data,
            partial(OBJECTIVES[spec.train.objective], l2wrap=spec.train.l2wrap, backend=plan.backend),
            engine=engine,
            optimizer=session.optimizer,
            lr_at=session.lr_at,
            first_step=progress.step,
            num_micro_batches=plan.accumulate,
            micro_batch_size=plan.micro_batch_size,
            grad_clip=spec.train.grad_clip,
            seed=spec.seed,
            should_stop=stop.requested,
        )
    except NonFiniteLoss as error:
        raise CheckpointError(_not_finite(session, error)) from error


def _not_finite(session: Session, error: NonFiniteLoss) -> str:
    ctx_len = session.spec.train.ctx_len
    count = session.store.train.documents_before
    spans = sorted({(count(window * ctx_len), count((window + 1) * ctx_len)) for window in error.windows})
    documents = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in spans)
    state = session.newest_state()
    kept = f"the last good state is {state}" if state is not None else "no state was saved before it"
    return (
        f"step {error.step}: {error.what}; its windows hold the training documents {documents} (counted from 0). "
        f"The run was stopped before this update; {kept}. Lower optimizer.lr, look at those documents, or use "
        "train.precision: fp32"
    )


def _done(session: Session, progress: Progress) -> Run:
    session.save_weights("rwkv-final")
    return _finished(session, progress, "done")


def _already_done(session: Session, progress: Progress) -> Run:
    """The newest state is the end of this plan: nothing is trained, and only what a kill kept from being written is."""
    final = session.folder.weights("rwkv-final", session.spec.save.format)
    if not final.is_file():
        session.save_weights("rwkv-final")
    if session.engine.is_main:
        session.rotate()
    return _finished(session, progress, "already finished, nothing to do")


def _finished(session: Session, progress: Progress, outcome: str) -> Run:
    # The first process wrote the final weights; every process's caller may go on to read them.
    session.engine.barrier()
    final = session.folder.weights("rwkv-final", session.spec.save.format)
    if session.engine.is_main:
        session.folder.write_status("done", step=progress.step, total_steps=session.plan.total_steps)
    folder = session.folder.shown
    commands = (f"rwkv-spec generate {folder} --prompt ...", f"rwkv-spec inspect {folder}/out/{final.name}")
    return _end(session, progress, outcome=outcome, checkpoint=final, stopped=False, commands=commands)


def _stopped(session: Session, progress: Progress) -> Run:
    state = session.newest_state()
    assert state is not None
    if session.engine.is_main:
        session.folder.write_status("stopped", step=progress.step, total_steps=session.plan.total_steps)
    return _end(
        session,
        progress,
        outcome=f"stopped by a signal after step {progress.step} of {session.plan.total_steps}, state saved",
        checkpoint=state / WEIGHTS,
        stopped=True,
        commands=("start the same command again: it goes on from this state",),
    )


def _end(
    session: Session, progress: Progress, *, outcome: str, checkpoint: Path, stopped: bool, commands: tuple[str, ...]
) -> Run:
    rows = read_rows(session.folder.metrics)
    paths = {"weights": str(checkpoint), "rows": str(session.folder.metrics), "state": str(session.newest_state())}
    best = session.folder.weights("rwkv-best", session.spec.save.format)
    if best.is_file():
        paths["best weights"] = str(best)
    session.console.summary(
        Summary(
            outcome=outcome,
            steps=progress.step,
            tokens=progress.new_tokens,
            seconds=progress.seconds,
            last_row=rows[-1] if rows else None,
            best_eval=progress.best,
            final_eval=progress.last_eval,
            paths=paths,
            commands=commands,
        )
    )
    return Run(
        dir=session.spec.work_dir,
        plan=session.plan,
        metrics=rows,
        model=session.model.eval(),
        tokenizer=session.tokenizer,
        checkpoint=checkpoint,
        stopped=stopped,
    )
