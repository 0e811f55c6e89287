"""The command line: `rwkv-spec`, the same program as `python -m rwkv_spec`. It parses, calls api, and gives a status.

Exit status: 0 done, 2 something the user can fix, 1 a fault of ours (with its traceback), 75 stopped by a signal with a
complete state saved.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rwkv_spec.errors import SpecError, UserError
from rwkv_spec.generate_verb import generate, generate_options
from rwkv_spec.process import wait_briefly

STATUS_DONE, STATUS_FAULT, STATUS_USER, STATUS_STOPPED = 0, 1, 2, 75
SPEC_SUFFIXES = (".yaml", ".yml", ".json")
# Importing torch on a busy machine takes process 0 some seconds.
_SECONDS_FOR_PROCESS_0 = 20.0


@dataclass(frozen=True)
class Verb:
    """One verb: what it takes, what it says of itself, and what it does."""

    takes: str
    help: str
    options: Callable[[argparse.ArgumentParser], None]
    action: Callable[[argparse.Namespace, list[str]], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    status = _status(list(sys.argv[1:] if argv is None else argv))
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        # What could not be written is let go: Python would stumble over it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # A reader that has gone (`| head`) needs no more, and other faults were told where the status says so.
        if status == STATUS_DONE and not isinstance(error, BrokenPipeError):
            _tell(f"rwkv-spec: standard output: cannot be written: {error.strerror or error}")
            return STATUS_USER
    return status


def _status(words: list[str]) -> int:
    wait_briefly()
    try:
        return _dispatch(words)
    except SpecError as error:
        count = len(error.problems)
        _tell(f"{error}\n{count} problem{'s' if count > 1 else ''} in the spec; nothing was started.")
        return STATUS_USER
    except UserError as error:
        _tell(f"rwkv-spec: {error}")
        return STATUS_USER
    except BrokenPipeError:
        return STATUS_DONE
    except KeyboardInterrupt:
        if _rank() == "0":
            print("\nrwkv-spec: interrupted", file=sys.stderr)
        return 130


def _tell(text: str) -> None:
    """Print an error once, whichever process of a launch meets it first.

    A launcher ends all processes when one of them ends. So the others leave it to process 0 to say what all of them
    met, and end after it: by its launcher, or by themselves if they turn out to be alone with the error.
    """
    if _rank() != "0":
        time.sleep(_SECONDS_FOR_PROCESS_0)
        text = f"process {_rank()} alone: {text}"
    print(text, file=sys.stderr)


def _rank() -> str:
    return os.environ.get("RANK", "0")


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return STATUS_DONE if words else STATUS_USER
    if words[0] == "--version":
        from rwkv_spec import __version__

        print(__version__)
        return STATUS_DONE
    name = words[0]
    if name in VERBS:
        rest = words[1:]
    elif name.lower().endswith(SPEC_SUFFIXES):
        name, rest = "run", words
    else:
        raise UserError(_did_you_mean(name))
    verb = VERBS[name]
    plain, overrides = split_overrides(rest) if verb.takes == "SPEC" else (rest, [])
    parser = argparse.ArgumentParser(prog=f"rwkv-spec {name}", description=verb.help, allow_abbrev=False)
    if verb.takes == "SPEC":
        parser.usage = f"rwkv-spec {name} SPEC [options] [key=value ...] [--section.key value ...]"
        parser.add_argument("spec", metavar="SPEC", type=Path, help="a spec: .yaml, .yml or .json")
    verb.options(parser)
    try:
        arguments = parser.parse_args(plain)
    except SystemExit as error:
        return int(error.code or 0)
    return verb.action(arguments, overrides)


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate `key=value`, `--section.key value` and `--section.key=value` from all other words."""
    plain: list[str] = []
    overrides: list[str] = []
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        key = word[2:].partition("=")[0] if word.startswith("--") else ""
        if "." in key:
            if "=" in word:
                overrides.append(word[2:])
            elif position < len(words):
                overrides.append(f"{key}={words[position]}")
                position += 1
            else:
                raise UserError(f"command line: {word}: a value is missing; write {word} VALUE or {key}=VALUE")
        elif "=" in word and not word.startswith("-") and not word.lower().endswith(SPEC_SUFFIXES):
            overrides.append(word)
        elif "=" in word and not word.startswith("-") and plain:
            # A second word that ends like a spec is a value, such as data.train=points.json.
            overrides.append(word)
        else:
            plain.append(word)
    return plain, overrides


def _did_you_mean(word: str) -> str:
    files = sorted(str(path) for path in [*Path().glob("*"), *Path().glob("specs/*")] if path.suffix in SPEC_SUFFIXES)
    close = difflib.get_close_matches(word, [*VERBS, *files], n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"verbs are {', '.join(VERBS)}"
    return f"command line: {word} is neither a verb nor a spec (.yaml, .yml, .json); {hint}"


def _overview() -> str:
    lines = [
        "usage: rwkv-spec SPEC [key=value ...]        train what the spec says",
        "       rwkv-spec VERB ...                    VERB -h tells more",
        "       accelerate launch -m rwkv_spec SPEC   the same, on many processes",
        "",
    ]
    lines += [f"  {name:<11} {verb.help}" for name, verb in VERBS.items()]
    return "\n".join(lines)


def _no_options(parser: argparse.ArgumentParser) -> None:
    pass


def _run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--resume",
        choices=("auto", "never", "must"),
        default="auto",
        help="auto: go on from the newest state, if any; never: refuse a folder with one; must: refuse one without",
    )


def _run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from rwkv_spec import api

    run = api.run(arguments.spec, overrides=overrides, resume=arguments.resume)
    return STATUS_STOPPED if run.stopped else STATUS_DONE


def _check(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from rwkv_spec import api

    spec = api.check(arguments.spec, overrides)
    print(f"{arguments.spec}: nothing wrong found (run name {spec.name}, work_dir {spec.work_dir})")
    return STATUS_DONE


def _plan_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, default=1, help="plan for this many processes (default 1)")
    parser.add_argument("--engine", choices=("single", "ddp"), default=None, help="how the processes work together")


def _plan(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from rwkv_spec import api

    print(api.planned(arguments.spec, overrides=overrides, num_processes=arguments.processes, engine=arguments.engine))
    return STATUS_DONE


def _prepare_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--verify", action="store_true", help="hash every source, also those whose size and time match")


def _prepare(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from rwkv_spec import api

    store = api.prepare(arguments.spec, overrides=overrides, verify=arguments.verify)
    print(f"{store.train.num_tokens:,} tokens to train on, {store.manifest.eval_tokens:,} held out: {store.dir}")
    return STATUS_DONE


def _initialize(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from rwkv_spec import api

    print(api.initialize(arguments.spec, overrides=overrides))
    return STATUS_DONE


def _bench_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=12, help="timed steps a round (default 12, after 3 of warm-up)")
    parser.add_argument("--rounds", type=int, default=None, help="rounds (default 1; 3 where programs take turns)")
    parser.add_argument(
        "--against",
        metavar="PEERS",
        default="",
        help="time these in turn with ours: rwkv-trainer, gpt, compile, with commas, or all that can run here",
    )
    parser.add_argument("--beside-busy", action="store_true", help="also beside a process that keeps one core busy")
    parser.add_argument("--peer-python", type=Path, default=None, help="the python that has rwkv-trainer installed")
    parser.add_argument("--peer-limit", type=float, default=600.0, help="seconds for one peer's round (default 600)")
    parser.add_argument("--json", action="store_true", help="print all figures as one JSON object")


def _bench(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from rwkv_spec import api

    report = api.bench(
        arguments.spec,
        overrides=overrides,
        num_steps=arguments.steps,
        num_rounds=arguments.rounds,
        against=[name.strip() for name in arguments.against.split(",") if name.strip()],
        beside_busy=arguments.beside_busy,
        peer_python=arguments.peer_python,
        peer_limit_seconds=arguments.peer_limit,
    )
    print(json.dumps(report.as_dict(), indent=2) if arguments.json else report)
    return STATUS_DONE


def _new_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", type=Path, help="where to write (default: print)")


def _new(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from rwkv_spec.spec.schema import schema_path
    from rwkv_spec.spec.starter import starter

    text = starter(schema_path())
    if arguments.file is None:
        print(text, end="")
        return STATUS_DONE
    try:
        # "x": a file that is already there may be somebody's work.
        with arguments.file.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UserError(f"{arguments.file}: is there already and was left alone; name another file") from error
    except OSError as error:
        raise UserError(f"{arguments.file}: cannot be written: {error}") from error
    print(f"{arguments.file} written; edit it, then: rwkv-spec check {arguments.file}")
    return STATUS_DONE


def _inspect_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="a checkpoint: .pth, .safetensors, or a Hugging Face folder")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _inspect(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from rwkv_spec import api

    info = api.inspect(arguments.file)
    print(json.dumps(info.as_dict(), indent=2) if arguments.json else info)
    return STATUS_DONE


def _convert_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="IN", help="a checkpoint: a file, a Hugging Face folder or a run")
    parser.add_argument(
        "target", type=Path, metavar="OUT", help="NAME.pth, NAME.safetensors, or a folder for the Hugging Face layout"
    )
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default=None, help="default: as in the file")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _convert(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from rwkv_spec import api

    converted = api.convert(arguments.source, arguments.target, dtype=arguments.dtype)
    print(json.dumps(converted.as_dict(), indent=2) if arguments.json else converted)
    return STATUS_DONE


def _schema(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from rwkv_spec.spec.schema import schema_path

    print(schema_path().read_text(encoding="utf-8"), end="")
    return STATUS_DONE


VERBS: dict[str, Verb] = {
    "run": Verb("SPEC", "check, plan, prepare and train", _run_options, _run),
    "check": Verb("SPEC", "say all that is wrong with a spec and its files", _no_options, _check),
    "plan": Verb("SPEC", "say what a run would do, take and write", _plan_options, _plan),
    "prepare": Verb("SPEC", "turn the data into a token store and stop", _prepare_options, _prepare),
    "initialize": Verb("SPEC", "write the initial weights and stop", _no_options, _initialize),
    "bench": Verb("SPEC", "time training steps of a spec on this machine", _bench_options, _bench),
    "new": Verb("FILE", "write a commented starter spec", _new_options, _new),
    "inspect": Verb("FILE", "say what a checkpoint holds", _inspect_options, _inspect),
    "convert": Verb("FILE", "write a checkpoint in another form or dtype, and check it", _convert_options, _convert),
    "generate": Verb("FILE", "continue prompts with a trained model", generate_options, generate),
    "schema": Verb("NONE", "print the JSON schema of specs", _no_options, _schema),
}
