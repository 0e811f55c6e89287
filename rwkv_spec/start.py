"""Where a run begins: from fresh weights, from a checkpoint, or from the newest state of its own folder.

A resume takes its autos from the state, refuses what may not change, and cuts the logs back to the state's step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import yaml

from rwkv_spec.atomic import write_text
from rwkv_spec.checkpoint.format import write_weights
from rwkv_spec.checkpoint.published import checkpoint_sha256
from rwkv_spec.checkpoint.resume import Resolved, Settings, changed_contents, changes, refuse_changes, spec_values
from rwkv_spec.checkpoint.state import (
    SavedState,
    list_states,
    read_manifest,
    read_state,
    remove_leftovers,
    step_of,
)
from rwkv_spec.checkpoint.vocabulary import starting_weights
from rwkv_spec.data.store import Store
from rwkv_spec.errors import CheckpointError
from rwkv_spec.model.build import build_model, load_state, weights
from rwkv_spec.model.language_model import LanguageModel
from rwkv_spec.model.shapes import parameter_groups
from rwkv_spec.planning import Planned
from rwkv_spec.preflight import Inputs
from rwkv_spec.report.console import Console
from rwkv_spec.report.metrics import RunLog, cut_back
from rwkv_spec.run_folder import RunFolder
from rwkv_spec.session import Progress, Session, derived_values
from rwkv_spec.spec.resolved import resolved_yaml
from rwkv_spec.spec.types import Source, Spec
from rwkv_spec.train.engine import Engine, Precision, available_device, decide_precision, num_cores
from rwkv_spec.train.optimizer import build_optimizer, load_optimizer_state


@dataclass(frozen=True)
class Beginning:
    """The newest state, if there is one, and what follows from it before anything is built.

    `spec` is the run's spec with the state's autos filled in; `num_threads` None leaves the engine to decide.
    """

    spec: Spec
    state: Path | None
    precision: Precision
    num_threads: int | None

    @property
    def step(self) -> int:
        return 0 if self.state is None else step_of(self.state)


def find_beginning(spec: Spec, folder: RunFolder, *, resume: str) -> Beginning:
    """Look for a state. CheckpointError where `resume` forbids what is there, or asks for what is not."""
    states = list_states(folder.states)
    if not states:
        if resume == "must":
            raise CheckpointError(f"{folder.states}: there is no state to resume from; use resume auto to start anew")
        final = folder.weights("rwkv-final", spec.save.format)
        if final.is_file():
            raise CheckpointError(
                f"{final}: a finished run lies here, but no state to go on from; use another work_dir, or move "
                f"{folder.out} away to train anew"
            )
        return Beginning(spec, None, decide_precision(spec.train.precision, device=available_device()), None)
    newest = states[-1]
    if resume == "never":
        raise CheckpointError(
            f"{newest}: this work_dir holds a run already; use resume auto to go on with it, or another work_dir"
        )
    return _from_state(spec, newest)


def _from_state(spec: Spec, state: Path) -> Beginning:
    """The autos of the state, and a refusal of every setting that may not change: before any data is prepared anew."""
    resolved = _part(state, "resolved")
    derived = _part(state, "derived")
    # The model's and the schedule's autos follow from data and length, which are compared later.
    kept = {**derived, "train.precision": resolved.get("precision")}
    refuse_changes(state, changes(Settings(_part(state, "spec"), kept), Settings(spec_values(spec), kept)))
    micro = resolved.get("micro_batch_size")
    if spec.train.micro_batch_size == "auto" and isinstance(micro, int):
        sources = {**spec.sources, "train.micro_batch_size": Source("derived")}
        spec = replace(spec, train=replace(spec.train, micro_batch_size=micro), sources=sources)
    threads = resolved.get("num_threads")
    # Another machine may have fewer cores than the one that the run began on.
    usable = threads if isinstance(threads, int) and 0 < threads <= num_cores() else None
    return Beginning(spec, state, Precision(str(resolved.get("precision")), "as the run began"), usable)


def _part(state: Path, name: str) -> Mapping[str, object]:
    record = read_manifest(state)["record"]
    part = record.get(name) if isinstance(record, dict) else None
    if not isinstance(part, dict):
        raise CheckpointError(
            f"{state}: its manifest has no {name}; delete or move this state to go on from the one before it"
        )
    return part


def build_session(
    inputs: Inputs,
    beginning: Beginning,
    planned: Planned,
    store: Store,
    *,
    folder: RunFolder,
    engine: Engine,
    console: Console,
) -> Session:
    """Model and optimizer of the run on their device, not yet filled; refuses a state of other data or a longer run."""
    spec, plan = beginning.spec, planned.plan
    checkpoint_hash = "" if spec.checkpoint is None else checkpoint_sha256(spec.checkpoint.path)
    if beginning.state is not None:
        found = changed_contents(
            _part(beginning.state, "resolved"),
            data_hash=store.hash,
            checkpoint_hash=checkpoint_hash,
            total_sequences=plan.total_sequences,
        )
        refuse_changes(beginning.state, found)
    model, optimizer = _model_and_optimizer(inputs, planned, from_state=beginning.state is not None)
    wrapped, prepared = engine.prepare(model, optimizer)
    return Session(
        spec=spec,
        plan=plan,
        folder=folder,
        engine=engine,
        model=model,
        wrapped_model=wrapped,
        optimizer=prepared,
        store=store,
        tokenizer=inputs.tokenizer,
        resolved=Resolved(
            precision=plan.precision,
            micro_batch_size=plan.micro_batch_size,
            num_threads=engine.num_threads,
            num_processes=engine.num_processes,
            backend=plan.backend,
            total_sequences=plan.total_sequences,
            data_hash=store.hash,
            checkpoint_hash=checkpoint_hash,
        ),
        console=console,
        log=_open_log(folder, beginning.step, spec) if engine.is_main else None,
    )


def _model_and_optimizer(
    inputs: Inputs, planned: Planned, *, from_state: bool
) -> tuple[LanguageModel, torch.optim.Optimizer]:
    spec, plan = planned.spec, planned.plan
    # A checkpoint or a state fills it; what starts fresh draws each parameter from the seed and its name.
    fresh = spec.checkpoint is None and not from_state
    model = build_model(
        inputs.shape,
        dropout=spec.dropout,
        backend=plan.backend,
        grad_checkpoint=spec.train.grad_checkpoint,
        seed=spec.seed if fresh else None,
    )
    if plan.precision == "fp64":
        model = model.double()
    optimizer = build_optimizer(
        dict(model.named_parameters()),
        groups=parameter_groups(inputs.shape),
        lr=spec.optimizer.lr,
        betas=spec.optimizer.betas,
        eps=spec.optimizer.eps,
        weight_decay=spec.optimizer.weight_decay,
    )
    return model, optimizer


def _open_log(folder: RunFolder, step: int, spec: Spec) -> RunLog:
    """The run's rows up to `step`. Only a run that begins writes a header: resumed or not, the bytes are the same."""
    for path in (folder.metrics, folder.train_log):
        cut_back(path, step)
    log = RunLog(folder.out)
    if folder.train_log.stat().st_size == 0:
        log.start(" ".join(f"{key}={value}" for key, value in spec_values(spec).items()))
    return log


def begin(session: Session, beginning: Beginning, *, given: object) -> Progress:
    """Fill the model, bring the run folder to the step it starts at, and say how far the run is."""
    if session.engine.is_main:
        session.folder.remove_leftovers()
        remove_leftovers(session.folder.states)
        _write_configs(session, given)
    if beginning.state is not None:
        progress = _restore(session, read_state(beginning.state))
    else:
        _fill_from_checkpoint(session)
        session.save_weights("rwkv-init")
        progress = Progress()
    session.start_trackers()
    if beginning.state is not None:
        session.console.lines(
            f"going on after step {progress.step:,} of {session.plan.total_steps:,} ({beginning.state})"
        )
        before = _part(beginning.state, "resolved").get("total_sequences")
        if before != session.plan.total_sequences:
            session.console.lines(
                f"the run is longer now: {before:,} sequences → {session.plan.total_sequences:,}; its schedule is "
                f"stretched, and the learning rate goes from {progress.lr:.3e} to {session.lr_at(progress.step):.3e}"
            )
    return progress


def _restore(session: Session, saved: SavedState) -> Progress:
    load_state(session.model, saved.weights)
    load_optimizer_state(session.optimizer, dict(session.model.named_parameters()), saved.optimizer)
    progress = saved.record.get("progress")
    if not isinstance(progress, dict):
        raise CheckpointError(f"the state of step {saved.step} records no progress")
    return Progress.from_record(saved.step, progress)


def _fill_from_checkpoint(session: Session) -> None:
    if session.spec.checkpoint is not None:
        path, shape = session.spec.checkpoint.path, session.model.shape
        load_state(session.model, starting_weights(path, shape=shape, seed=session.spec.seed))


def write_initial_weights(inputs: Inputs) -> Path:
    """The weights that a run of this spec would start from, in out/. CheckpointError if a file lies there already."""
    spec, folder = inputs.spec, RunFolder(inputs.spec.work_dir)
    path = folder.weights("rwkv-init", spec.save.format)
    if path.exists():
        raise CheckpointError(f"{path}: is there already and was left alone; move it, or use another work_dir")
    model = build_model(inputs.shape, seed=spec.seed if spec.checkpoint is None else None, backend="torch")
    if spec.checkpoint is not None:
        load_state(model, starting_weights(spec.checkpoint.path, shape=inputs.shape, seed=spec.seed))
    write_weights(path, weights(model), format=spec.save.format, dtype=spec.save.dtype)
    return path


def _write_configs(session: Session, given: object) -> None:
    """configs/: the spec as it was given, and with every key and where its value comes from."""
    folder, resolved = session.folder, resolved_yaml(session.spec, derived_values(session.plan))
    try:
        write_text(folder.resolved_spec, resolved)
        write_text(folder.given_spec, _given_text(given, resolved))
    except OSError as error:
        raise CheckpointError(
            f"{folder.work_dir}: cannot be written to: {error}; free space or name another work_dir"
        ) from error


def _given_text(given: object, resolved: str) -> str:
    if isinstance(given, str | Path):
        return Path(given).read_text(encoding="utf-8-sig")
    if isinstance(given, Mapping):
        return yaml.safe_dump(_plain(given), sort_keys=False, allow_unicode=True)
    return resolved


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
