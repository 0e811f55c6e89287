"""What a person sees of a run: plain lines, and on a terminal one line of progress that is drawn over and over.

Nothing that a model or a file brings can move the cursor or break the encoding: it is shown escaped, cut to the width.
A reader that goes away (a closed pipe, a lost connection) silences the console and never stops the run.
"""

from __future__ import annotations

import shutil
import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from rwkv_spec.errors import SpecError
from rwkv_spec.report.metrics import Row

_SECONDS_BETWEEN_DRAWINGS = 0.1
_SECONDS_BETWEEN_LINES = 10.0
_SMALLEST_BAR = 8
_LARGEST_BAR = 30


@dataclass(frozen=True)
class Continuation:
    """A sampled continuation and what it continues: text, or the values of a numeric tokenizer."""

    prompt: str | Sequence[int]
    continuation: str | Sequence[int]


@dataclass(frozen=True)
class Summary:
    """The end of a run. `paths` maps a label to a place; `commands` are what to type next."""

    outcome: str
    steps: int
    tokens: int
    seconds: float
    last_row: Row | None = None
    best_eval: tuple[float, int] | None = None
    final_eval: tuple[float, int] | None = None
    paths: Mapping[str, str] = field(default_factory=dict)
    commands: Sequence[str] = ()


def _terminal_width() -> int:
    return shutil.get_terminal_size().columns


class Console:
    """Writes to one stream. `clock` gives seconds, `width` the columns of the terminal at this moment."""

    def __init__(
        self,
        stream: TextIO,
        *,
        is_terminal: bool,
        clock: Callable[[], float] = time.monotonic,
        width: Callable[[], int] = _terminal_width,
    ) -> None:
        self._stream: TextIO | None = stream
        self._is_terminal = is_terminal
        self._clock = clock
        self._width = width
        self._drawn = 0
        self._drawn_at: float | None = None
        self._preparing_since: float | None = None
        self._training_since: tuple[float, int] | None = None

    def lines(self, text: str) -> None:
        """Text as it is, one line or more."""
        self._erase()
        self._write(text.rstrip("\n") + "\n")

    def problems(self, error: SpecError) -> None:
        """Every problem of a spec on a line of its own, `file:line:column: key: what; fix`."""
        number = len(error.problems)
        self.lines(f"{error}\n{number} problem{'' if number == 1 else 's'}; nothing was run")

    def preparing(self, what: str, done_bytes: int, total_bytes: int) -> None:
        """Call often while data is read; drawn at most ten times a second, or as a line every ten seconds."""
        now = self._clock()
        if self._preparing_since is None:
            self._preparing_since = now
            if not self._is_terminal:
                self._drawn_at = now
        if not self._is_due(now, finished=False):
            return
        speed = done_bytes / max(now - self._preparing_since, 1e-9)
        parts = [f"{_megabytes(done_bytes)}/{_megabytes(total_bytes)} MB", shorten(escape(what), 40)]
        if done_bytes > 0 and now > self._preparing_since:
            parts += [f"{_megabytes(speed)} MB/s", f"ETA {duration(max(total_bytes - done_bytes, 0) / speed)}"]
        self._show(now, "prepare", done_bytes, total_bytes, parts)

    def prepared(self, text: str) -> None:
        """The end of a preparation: its progress line gives way to a lasting line."""
        self._preparing_since = None
        self.lines(text)

    def step(
        self, step: int, total_steps: int, *, loss: float, lr: float, tokens_per_s: float, is_log_row: bool
    ) -> None:
        """Call after every step. A terminal shows each (at most ten a second), a file only the log rows."""
        now = self._clock()
        if self._training_since is None:
            self._training_since = (now, step)
        if not (self._is_due(now, finished=step >= total_steps) if self._is_terminal else is_log_row):
            return
        parts = [f"{step}/{total_steps}", f"loss {loss:.4f}", f"lr {lr:.2e}", f"{tokens_per_s:,.0f} tokens/s"]
        since, first = self._training_since
        # Evaluations and saves so far are part of the pace, as those to come are part of the rest.
        if step > first:
            parts.append(f"ETA {duration((now - since) / (step - first) * max(total_steps - step, 0))}")
        self._show(now, "train", step, total_steps, parts)

    def evaluation(
        self, *, step: int, eval_loss: float, is_best: bool, continuations: Sequence[Continuation] = ()
    ) -> None:
        """The loss on the held-out documents, then a line for each sampled continuation."""
        lines = [f"eval at step {step}: {eval_loss:.4f} nats a token{' (best so far)' if is_best else ''}"]
        room = max((self._width() if self._is_terminal else 120) - 1, 40)
        for sample in continuations:
            # The end of the prompt says most about what follows, the start of the continuation most about the model.
            prompt = shorten(_shown(sample.prompt), room // 3, keep_end=True)
            start = f"  {prompt} -> "
            lines.append(start + shorten(_shown(sample.continuation), room - _columns(start)))
        self.lines("\n".join(lines))

    def summary(self, summary: Summary) -> None:
        """The last block: what came out, where it lies, what to type next."""
        speed = f", {summary.tokens / summary.seconds:,.0f} tokens/s" if summary.seconds > 0 and summary.tokens else ""
        lines = [
            f"{summary.outcome}: {summary.steps:,} step{'' if summary.steps == 1 else 's'}, {summary.tokens:,} tokens "
            f"in {duration(summary.seconds)}{speed}"
        ]
        pairs: list[tuple[str, str]] = []
        if summary.last_row is not None:
            pairs.append(("train loss", f"{summary.last_row.loss:.4f} (step {summary.last_row.step})"))
        for label, figure in (("best eval loss", summary.best_eval), ("final eval loss", summary.final_eval)):
            if figure is not None:
                pairs.append((label, f"{figure[0]:.4f} (step {figure[1]})"))
        pairs += summary.paths.items()
        indent = max((len(label) for label, _ in pairs), default=0)
        lines += [f"  {label:<{indent}}  {text}" for label, text in pairs]
        if summary.commands:
            lines += ["Next:", *(f"  {command}" for command in summary.commands)]
        self.lines("\n".join(lines))

    def close(self) -> None:
        """Take the progress line away, if one is drawn."""
        self._erase()

    def _is_due(self, now: float, *, finished: bool) -> bool:
        pause = _SECONDS_BETWEEN_DRAWINGS if self._is_terminal else _SECONDS_BETWEEN_LINES
        return finished or self._drawn_at is None or now - self._drawn_at >= pause

    def _show(self, now: float, label: str, done: int, total: int, parts: list[str]) -> None:
        """Draw over the last drawing on a terminal, or write a line elsewhere."""
        self._drawn_at = now
        share = min(done / total, 1.0) if total > 0 else 1.0
        start, rest = f"{label} {int(share * 100):3d}%", "  ".join(parts)
        if not self._is_terminal:
            self._write(f"{start}  {rest}\n")
            return
        # The last column stays free: a full line would wrap on some terminals.
        columns = max(self._width() - 1, 1)
        room = columns - len(start) - _columns(rest) - 5
        if room >= _SMALLEST_BAR:
            size = min(room, _LARGEST_BAR)
            start += f" [{'=' * int(share * size):<{size}}]"
        text = shorten(f"{start}  {rest}", columns)
        # One write a drawing, blanks over what is left of the one before: nothing flickers.
        padding = " " * max(min(self._drawn, columns) - _columns(text), 0)
        self._drawn = _columns(text)
        self._write(f"\r{text}{padding}")

    def _erase(self) -> None:
        if self._drawn:
            self._write("\r" + " " * min(self._drawn, max(self._width() - 1, 1)) + "\r")
        self._drawn = 0
        self._drawn_at = None

    def _write(self, text: str) -> None:
        if self._stream is None:
            return
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            self._stream.flush()
        except OSError:
            # Nobody reads any more. The run and its files matter more than its narration.
            self._stream = None


def duration(seconds: float) -> str:
    """Hours, minutes and seconds as 0:02:31."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def escape(text: str) -> str:
    """Text on one line: what is not printable (line ends, terminal sequences, marks of direction) as codes."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def shorten(text: str, columns: int, *, keep_end: bool = False) -> str:
    """Text cut to so many columns of a terminal, with `...` where something is left out."""
    if _columns(text) <= columns:
        return text
    room, kept = max(columns - 3, 0), 0
    taken: list[str] = []
    for char in reversed(text) if keep_end else text:
        kept += _columns(char)
        if kept > room:
            break
        taken.append(char)
    dots = "..."[: max(columns, 0)]
    return dots + "".join(reversed(taken)) if keep_end else "".join(taken) + dots


def _shown(sample: str | Sequence[int]) -> str:
    return escape(sample) if isinstance(sample, str) else " ".join(str(value) for value in sample)


def _columns(text: str) -> int:
    """How many columns a terminal uses: East Asian wide characters take two, combining marks none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def _megabytes(number: float) -> str:
    return f"{number / 1e6:,.1f}"
