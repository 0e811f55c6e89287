"""A training run in progress: what has been counted, and how its weights, states, evaluations and rows are written.

api.py decides when; here is how. Everything counted is part of a state, so that a resumed run writes the same rows.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from rwkv_spec.checkpoint.format import write_weights
from rwkv_spec.checkpoint.resume import Resolved, spec_values
from rwkv_spec.checkpoint.state import list_states, rotate_states, write_state
from rwkv_spec.data.store import Store
from rwkv_spec.errors import CheckpointError
from rwkv_spec.evaluate import evaluate
from rwkv_spec.generation.decode import generate
from rwkv_spec.model.build import weights
from rwkv_spec.model.language_model import LanguageModel
from rwkv_spec.report.console import Console, Continuation
from rwkv_spec.report.metrics import Row, RunLog
from rwkv_spec.run_folder import RunFolder
from rwkv_spec.spec.plan import Plan
from rwkv_spec.spec.types import Spec
from rwkv_spec.tokenizer.protocol import NumericTokenizer, Tokenizer, undrawable_ids
from rwkv_spec.train.engine import Engine
from rwkv_spec.train.loop import StepResult
from rwkv_spec.train.optimizer import optimizer_state
from rwkv_spec.train.schedule import learning_rate

_PROMPT_TOKENS = 48
_NEW_TOKENS = 24


@dataclass
class Progress:
    """Counted since the start of the run, and since the last row (loss_sum, weight). `lr` is that of the last step."""

    step: int = 0
    tokens: int = 0
    lr: float = 0.0
    loss_sum: float = 0.0
    weight: float = 0.0
    best: tuple[float, int] | None = None
    last_eval: tuple[float, int] | None = None
    # Timings only; they are in no state and decide nothing.
    row_seconds: float = 0.0
    row_tokens: int = 0
    new_tokens: int = 0
    _started: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        """Since this process began to train."""
        return time.perf_counter() - self._started

    @property
    def mean_loss(self) -> float:
        """The weighted mean since the last row."""
        return self.loss_sum / self.weight

    @property
    def tokens_per_s(self) -> float:
        return self.row_tokens / max(self.row_seconds, 1e-9)

    def add(self, result: StepResult) -> None:
        self.step = result.step
        self.tokens += result.num_tokens
        self.lr = result.lr
        self.loss_sum += result.loss_sum
        self.weight += result.weight
        self.row_seconds += result.seconds
        self.row_tokens += result.num_tokens
        self.new_tokens += result.num_tokens

    def row(self, result: StepResult, *, epoch: float, eval_loss: float | None) -> Row:
        """The row of this step, its loss averaged over all tokens since the row before; starts counting anew."""
        row = Row(
            step=result.step,
            epoch=epoch,
            tokens=self.tokens,
            loss=self.mean_loss,
            lr=result.lr,
            grad_norm=result.grad_norm,
            tokens_per_s=self.tokens_per_s,
            eval_loss=eval_loss,
        )
        self.loss_sum = self.weight = self.row_seconds = 0.0
        self.row_tokens = 0
        return row

    def record(self) -> dict[str, object]:
        return {
            "tokens": self.tokens,
            "lr": self.lr,
            "loss_sum": self.loss_sum,
            "weight": self.weight,
            "best": self.best,
            "last_eval": self.last_eval,
        }

    @staticmethod
    def from_record(step: int, record: Mapping[str, object]) -> Progress:
        """Raises CheckpointError when the record is not one that `record` wrote."""
        try:
            return Progress(
                step=step,
                tokens=int(str(record["tokens"])),
                lr=float(str(record["lr"])),
                loss_sum=float(str(record["loss_sum"])),
                weight=float(str(record["weight"])),
                best=_pair(record["best"]),
                last_eval=_pair(record["last_eval"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the state of step {step} has no usable progress record: {error!r}") from error


def _pair(value: object) -> tuple[float, int] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f"{value!r} is not a loss and its step")
    return float(value[0]), int(value[1])


@dataclass(frozen=True)
class Session:
    """Everything a run works with. `model` is the bare model, `wrapped_model` what the engine made of it to train."""

    spec: Spec
    plan: Plan
    folder: RunFolder
    engine: Engine
    model: LanguageModel
    wrapped_model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    store: Store
    tokenizer: Tokenizer
    resolved: Resolved
    console: Console
    log: RunLog | None

    def lr_at(self, step: int) -> float:
        """The learning rate of the update that follows `step` finished ones."""
        scheduler, plan = self.spec.scheduler, self.plan
        return learning_rate(
            step,
            type=scheduler.type,
            lr=self.spec.optimizer.lr,
            lr_final=plan.lr_final,
            warmup_steps=plan.warmup_steps,
            tokens_per_step=plan.tokens_per_step,
            total_tokens=plan.total_tokens,
        )

    def evaluate(self, progress: Progress) -> float:
        """The loss of all held-out documents, shared out over the processes; keeps rwkv-best up to date."""
        engine, plan = self.engine, self.plan
        documents = self.store.eval_documents
        mine = [documents[i] for i in range(engine.rank, len(documents), engine.num_processes)]
        found = evaluate(self.model, mine, chunk_len=self.spec.train.ctx_len, batch_size=plan.eval_batch_size)
        loss_sum, num_tokens = engine.sum([found.loss_sum, float(found.num_tokens)])
        loss = loss_sum / max(num_tokens, 1.0)
        progress.last_eval = (loss, progress.step)
        is_best = progress.best is None or loss < progress.best[0]
        if is_best:
            progress.best = progress.last_eval
            self.save_weights("rwkv-best")
        if engine.is_main:
            self.console.evaluation(
                step=progress.step, eval_loss=loss, is_best=is_best, continuations=self._continuations(progress.step)
            )
        return loss

    def _continuations(self, step: int) -> list[Continuation]:
        """Samples that go on from the starts of held-out documents: the same documents each time, another draw."""
        documents = [document for document in self.store.eval_documents if len(document)]
        documents = documents[: self.spec.eval.continuations]
        if not documents:
            return []
        prompts = [document[: min(_PROMPT_TOKENS, max(1, len(document) // 2))] for document in documents]
        samples = generate(
            self.model,
            [[0, *prompt.tolist()] for prompt in prompts],
            max_new_tokens=_NEW_TOKENS,
            temperature=1.0,
            seed=self.spec.seed + step,
            left_out=undrawable_ids(self.tokenizer, num_rows=self.model.shape.vocab_size),
        )
        return [
            Continuation(shown_ids(self.tokenizer, prompt), shown_ids(self.tokenizer, sample.ids))
            for prompt, sample in zip(prompts, samples, strict=True)
        ]

    def save_weights(self, stem: str) -> None:
        """A weights file in out/, in the spec's format and dtype."""
        if self.engine.is_main:
            save = self.spec.save
            path = self.folder.weights(stem, save.format)
            write_weights(path, weights(self.model), format=save.format, dtype=save.dtype)

    def save_state(self, progress: Progress) -> None:
        """state/step-…: all that a resume needs, on the disk when any process goes on."""
        if self.engine.is_main:
            # Rows written so far must not be lost if the state is not.
            if self.log is not None:
                self.log.sync()
            self._write_state(progress)
            self.rotate()
        self.engine.barrier()

    def _write_state(self, progress: Progress) -> None:
        write_state(
            self.folder.states,
            progress.step,
            weights=weights(self.model),
            optimizer=optimizer_state(self.optimizer, dict(self.model.named_parameters())),
            record={
                "spec": spec_values(self.spec),
                "derived": dict(derived_values(self.plan)),
                "resolved": asdict(self.resolved),
                "progress": progress.record(),
            },
        )

    def rotate(self) -> None:
        """Delete numbered weights and states beyond the newest `keep`."""
        rotate_states(self.folder.states, keep=self.spec.save.keep)
        for path in self.folder.numbered_weights(self.spec.save.format)[: -self.spec.save.keep]:
            path.unlink(missing_ok=True)

    def newest_state(self) -> Path | None:
        states = list_states(self.folder.states)
        return states[-1] if states else None

    def show(self, progress: Progress, result: StepResult) -> None:
        """The progress line: the loss of this step, the pace since the last row."""
        pace = progress.tokens_per_s if progress.row_tokens else result.num_tokens / max(result.seconds, 1e-9)
        self.console.step(
            result.step,
            self.plan.total_steps,
            loss=result.loss,
            lr=result.lr,
            tokens_per_s=pace,
            is_log_row=self.plan.logs_at(result.step),
        )

    def start_trackers(self) -> None:
        config = {key: str(value) for key, value in spec_values(self.spec).items()}
        self.engine.start_trackers(self.spec.name, config)

    def end(self) -> None:
        if self.log is not None:
            self.log.close()

    def write_row(self, row: Row) -> None:
        if self.log is not None:
            self.log.write(row)
        values = {"loss": row.loss, "lr": row.lr, "grad_norm": row.grad_norm, "tokens_per_s": row.tokens_per_s}
        if row.eval_loss is not None:
            values["eval_loss"] = row.eval_loss
        self.engine.track(values, step=row.step)


def derived_values(plan: Plan) -> dict[str, object]:
    """What the spec's autos became, by key, for resolved.yaml and for a later resume."""
    return {
        "model.vocab_size": plan.vocab_size,
        "train.micro_batch_size": plan.micro_batch_size,
        "train.precision": plan.precision,
        "scheduler.warmup_steps": plan.warmup_steps,
        "scheduler.lr_final": plan.lr_final,
        "kernels": plan.backend,
    }


def shown_ids(tokenizer: Tokenizer, ids: Sequence[int] | np.ndarray) -> str | list[int]:
    """Ids as a person reads them: the values of a numeric tokenizer, else text; ends of documents left out."""
    plain = [int(index) for index in ids if int(index) != 0]
    try:
        return tokenizer.decode_sequence(plain) if isinstance(tokenizer, NumericTokenizer) else tokenizer.decode(plain)
    except ValueError:
        # An untrained model draws rows that no token has: a vocabulary with gaps, or a padded one.
        return plain
