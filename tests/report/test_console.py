"""A terminal gets one line that is drawn over, a file gets plain lines, and nothing shown can break either."""

from __future__ import annotations

import io

from rwkv_spec.errors import Problem, SpecError
from rwkv_spec.report.console import Console, Continuation, Summary, duration, escape, shorten
from rwkv_spec.report.metrics import Row


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal:
    """What a person would see: knows carriage returns and line ends."""

    def __init__(self, width: int) -> None:
        self.stream, self.clock, self.width = io.StringIO(), Clock(), width
        self.console = Console(self.stream, is_terminal=True, clock=self.clock, width=lambda: self.width)

    def screen(self) -> list[str]:
        lines = []
        for line in self.stream.getvalue().split("\n"):
            cells: list[str] = []
            for part in line.split("\r"):
                cells[: len(part)] = part
            lines.append("".join(cells).rstrip())
        return lines


def plain() -> tuple[io.StringIO, Clock, Console]:
    stream, clock = io.StringIO(), Clock()
    return stream, clock, Console(stream, is_terminal=False, clock=clock)


def train(console: Console, clock: Clock, *, steps: int, seconds: float, total: int = 100, every: int = 10) -> None:
    for step in range(1, steps + 1):
        console.step(step, total, loss=2.5, lr=6e-4, tokens_per_s=18234.4, is_log_row=step % every == 0)
        clock.now += seconds


def test_a_terminal_shows_progress_on_one_line() -> None:
    terminal = Terminal(100)
    train(terminal.console, terminal.clock, steps=51, seconds=1.0)
    (line,) = terminal.screen()
    assert line.startswith("train  51% [=====")
    assert line.endswith("51/100  loss 2.5000  lr 6.00e-04  18,234 tokens/s  ETA 0:00:49")
    terminal.console.lines("saved")
    assert terminal.screen() == ["saved", ""]
    terminal.console.close()
    assert terminal.screen() == ["saved", ""]


def test_a_terminal_is_drawn_at_most_ten_times_a_second() -> None:
    terminal = Terminal(100)
    train(terminal.console, terminal.clock, steps=1000, seconds=0.001, total=2000)
    assert terminal.stream.getvalue().count("\r") <= 11
    # The last step is always shown.
    terminal.console.step(2000, 2000, loss=2.5, lr=6e-4, tokens_per_s=1.0, is_log_row=True)
    assert terminal.screen()[-1].startswith("train 100%")


def test_every_drawing_fits_the_terminal_even_one_that_shrinks() -> None:
    for width in (1, 5, 20, 40, 61, 80, 200):
        terminal = Terminal(width)
        train(terminal.console, terminal.clock, steps=3, seconds=1.0)
        assert all(len(part) < max(width, 2) for part in terminal.stream.getvalue().split("\r"))
    terminal = Terminal(200)
    train(terminal.console, terminal.clock, steps=1, seconds=1.0)
    terminal.width = 50
    shown = len(terminal.stream.getvalue())
    train(terminal.console, terminal.clock, steps=1, seconds=1.0)
    assert all(len(part) < 50 for part in terminal.stream.getvalue()[shown:].split("\r"))


def test_a_shorter_drawing_leaves_nothing_of_a_longer_one() -> None:
    terminal = Terminal(200)
    terminal.console.step(1, 10**9, loss=2.5, lr=6e-4, tokens_per_s=1e9, is_log_row=False)
    terminal.clock.now += 1
    terminal.console.step(2, 10, loss=2.5, lr=6e-4, tokens_per_s=1.0, is_log_row=False)
    assert "\x1b" not in terminal.stream.getvalue()
    assert terminal.screen()[-1].endswith("  2/10  loss 2.5000  lr 6.00e-04  1 tokens/s  ETA 0:00:08")
    terminal.console.lines("x")
    assert terminal.screen() == ["x", ""]


def test_a_file_gets_a_line_for_each_log_row() -> None:
    stream, clock, console = plain()
    train(console, clock, steps=20, seconds=1.0)
    assert stream.getvalue().splitlines() == [
        "train  10%  10/100  loss 2.5000  lr 6.00e-04  18,234 tokens/s  ETA 0:01:30",
        "train  20%  20/100  loss 2.5000  lr 6.00e-04  18,234 tokens/s  ETA 0:01:20",
    ]


def test_preparation_shows_bytes_speed_and_rest() -> None:
    terminal = Terminal(100)
    for done in range(101):
        terminal.console.preparing("data/a.jsonl", done * 1_000_000, 200_000_000)
        terminal.clock.now += 0.125
    (line,) = terminal.screen()
    assert line.startswith("prepare  50% [=====")
    assert line.endswith("100.0/200.0 MB  data/a.jsonl  8.0 MB/s  ETA 0:00:12")
    terminal.console.prepared("3 documents")
    assert terminal.screen() == ["3 documents", ""]


def test_a_long_preparation_tells_a_file_every_ten_seconds_and_a_short_one_nothing() -> None:
    stream, clock, console = plain()
    for done in range(250):
        console.preparing("a.jsonl", done, 1000)
        clock.now += 0.1
    assert len(stream.getvalue().splitlines()) == 2
    console.prepared("done")
    console.preparing("b.jsonl", 0, 0)
    console.prepared("done again")
    assert stream.getvalue().splitlines()[2:] == ["done", "done again"]


def test_an_evaluation_shows_continuations_escaped_and_cut() -> None:
    terminal = Terminal(60)
    terminal.console.evaluation(
        step=120,
        eval_loss=2.01234,
        is_best=True,
        continuations=[
            Continuation(prompt=[350, 349], continuation=[351] * 100),
            Continuation(prompt="one\ntwo", continuation="\x1b[2Jé\u202e" + "世" * 100),
            Continuation(prompt="x" * 100 + "end", continuation=""),
        ],
    )
    lines = terminal.screen()
    assert lines[0] == "eval at step 120: 2.0123 nats a token (best so far)"
    assert lines[1].startswith("  350 349 -> 351 351 351") and lines[1].endswith("...")
    assert lines[2].startswith("  one\\ntwo -> \\x1b[2Jé\\u202e世世") and lines[2].endswith("...")
    assert lines[3] == "  ...xxxxxxxxxxxxxend ->"
    assert all(len(line) + line.count("世") < 60 for line in lines)


def test_the_summary_says_what_where_and_what_next() -> None:
    stream, _, console = plain()
    console.summary(
        Summary(
            outcome="Done",
            steps=1000,
            tokens=8_192_000,
            seconds=151,
            last_row=Row(step=1000, epoch=20.0, tokens=8_192_000, loss=2.0, lr=6e-5, grad_norm=1.0, tokens_per_s=1.0),
            best_eval=(1.98767, 900),
            final_eval=(1.9923, 1000),
            paths={"final": "runs/angles/out/rwkv-final.pth", "log": "runs/angles/out/train_log.txt"},
            commands=["rwkv-spec generate runs/angles --prompt '350 349'"],
        )
    )
    assert stream.getvalue().splitlines() == [
        "Done: 1,000 steps, 8,192,000 tokens in 0:02:31, 54,252 tokens/s",
        "  train loss       2.0000 (step 1000)",
        "  best eval loss   1.9877 (step 900)",
        "  final eval loss  1.9923 (step 1000)",
        "  final            runs/angles/out/rwkv-final.pth",
        "  log              runs/angles/out/train_log.txt",
        "Next:",
        "  rwkv-spec generate runs/angles --prompt '350 349'",
    ]


def test_a_summary_without_figures_is_one_line() -> None:
    stream, _, console = plain()
    console.summary(Summary(outcome="Stopped", steps=1, tokens=0, seconds=0))
    assert stream.getvalue() == "Stopped: 1 step, 0 tokens in 0:00:00\n"


def test_every_problem_has_a_line() -> None:
    stream, _, console = plain()
    console.problems(
        SpecError(
            [
                Problem("a.yaml", 9, 3, "train.lr", "is negative", "give a positive number"),
                Problem("a.yaml", 4, 3, "model.n_embd", "700 is not a multiple of 64"),
            ]
        )
    )
    assert stream.getvalue().splitlines() == [
        "a.yaml:4:3: model.n_embd: 700 is not a multiple of 64",
        "a.yaml:9:3: train.lr: is negative; give a positive number",
        "2 problems; nothing was run",
    ]


def test_a_narrow_encoding_breaks_nothing() -> None:
    raw = io.BytesIO()
    console = Console(io.TextIOWrapper(raw, encoding="ascii"), is_terminal=False)
    console.lines("≈ 3 → 4, \ud800")
    assert raw.getvalue() == b"\\u2248 3 \\u2192 4, \\ud800\n"


def test_a_reader_that_goes_away_stops_nothing() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    console = Console(Gone(), is_terminal=True, width=lambda: 80)
    console.lines("one")
    console.step(1, 2, loss=2.5, lr=6e-4, tokens_per_s=1.0, is_log_row=True)
    console.close()


def test_texts_are_cut_to_columns_not_letters() -> None:
    assert shorten("abcdef", 6) == "abcdef"
    assert shorten("abcdefg", 6) == "abc..."
    assert shorten("abcdefg", 6, keep_end=True) == "...efg"
    assert shorten("世界世界", 7) == "世界..."
    assert shorten("abc", 2) == ".."
    assert shorten("abc", 0) == shorten("abc", -5) == ""
    assert escape("a\tb\\") == "a\\tb\\"
    assert (duration(59.6), duration(360000)) == ("0:01:00", "100:00:00")
