"""`rwkv-spec generate`: its options, where its prompts and its tokenizer come from, and how its texts are written."""

from __future__ import annotations

import argparse
import codecs
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rwkv_spec.errors import UserError
from rwkv_spec.paths import expanded
from rwkv_spec.report.texts import write_json, write_pieces, write_texts
from rwkv_spec.tokenizer.protocol import shorten

if TYPE_CHECKING:
    from rwkv_spec.generation.text import TextStream
    from rwkv_spec.tokenizer.protocol import Tokenizer

# What stands behind the colon of --tokenizer, by type.
_TOKENIZER_VALUES = {
    "angle": None,
    "integer": "max_value",
    "vocab": "path",
    "world": "path",
    "bytes": None,
    "ids": "vocab_size",
}
_STANDARD_INPUT = "-"


def generate_options(parser: argparse.ArgumentParser) -> None:
    """Every option, as `generate -h` shows them."""
    add = parser.add_argument
    add("source", type=Path, metavar="RUN_DIR|FILE", help="a run folder, or a checkpoint")
    add(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="text or numbers to go on from; may be repeated; - reads it from standard input, without its last line "
        "end (default: an empty one)",
    )
    add(
        "--tokenizer",
        metavar="TYPE[:VALUE]",
        help="for a checkpoint outside a run folder: world, world:FILE, vocab:FILE, bytes, angle, integer:MAX_VALUE "
        "or ids:VOCAB_SIZE (default: the run's)",
    )
    add("--max-new-tokens", type=int, default=64, metavar="N", help="default 64")
    add("--temperature", type=float, default=1.0, metavar="X", help="0 takes the likeliest token (default 1)")
    add("--top-p", type=float, default=1.0, metavar="X", help="the likeliest tokens that reach this probability")
    add("--top-k", type=int, default=0, metavar="N", help="the N likeliest tokens; 0 is no limit (default)")
    add("--presence-penalty", type=float, default=0.0, metavar="X", help="off a logit once its token was generated")
    add("--frequency-penalty", type=float, default=0.0, metavar="X", help="off a logit each time it was generated")
    add("--penalty-decay", type=float, default=1.0, metavar="X", help="those times count less by this a token")
    add(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="divides the positive logits, multiplies the negative ones of tokens in the prompt and the text",
    )
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    add("--seed", type=int, default=0, metavar="N", help="prompt i draws with N + i (default 0)")
    add("--state", type=Path, metavar="FILE", help="go on from this state, saved with the same checkpoint")
    add("--save-state", type=Path, metavar="FILE", help="write the state at the end of the text to a new file")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--stream", action="store_true", help="print as it comes; the default for one prompt on a terminal"
    )
    how.add_argument("--json", action="store_true", help="print prompts, texts, ids, logprobs and stopped_by as JSON")


def generate(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Print the texts and return 0; UserError for what a person can put right."""
    if sys.stdout is None:
        raise UserError("standard output: is closed, so that no text can be shown; give it a file")
    prompts = None if arguments.prompt is None else _read_prompts(arguments.prompt)
    stops = [_typed(stop, option="--stop") for stop in arguments.stop]
    tokenizer = None if arguments.tokenizer is None else parse_tokenizer(arguments.tokenizer)
    stream = _text_stream(arguments, prompts, stops, tokenizer)
    if arguments.stream and stream.num_texts != 1:
        raise UserError(f"--stream shows one text as it comes, but there are {stream.num_texts}; leave it out")
    _write(arguments, stream, sys.stdout)
    return 0


def _text_stream(
    arguments: argparse.Namespace,
    prompts: Sequence[str] | None,
    stops: Sequence[str],
    tokenizer: Tokenizer | None,
) -> TextStream:
    from rwkv_spec import api
    from rwkv_spec.generation.sample import Sampling

    try:
        return api.text_stream(
            arguments.source,
            prompts,
            tokenizer=tokenizer,
            max_new_tokens=arguments.max_new_tokens,
            sampling=Sampling(
                temperature=arguments.temperature,
                top_k=arguments.top_k,
                top_p=arguments.top_p,
                presence_penalty=arguments.presence_penalty,
                frequency_penalty=arguments.frequency_penalty,
                penalty_decay=arguments.penalty_decay,
                repetition_penalty=arguments.repetition_penalty,
            ),
            stop_sequences=stops,
            seed=arguments.seed,
            state=arguments.state,
            save_state=arguments.save_state,
        )
    except ValueError as error:
        # To a caller in Python a wrong argument is a ValueError; here a person typed it.
        raise UserError(str(error)) from error


def _write(arguments: argparse.Namespace, stream: TextStream, output: TextIO) -> None:
    if arguments.json:
        write_json(output, [asdict(completion) for completion in stream.completions()])
    elif arguments.stream or (stream.num_texts == 1 and output.isatty()):
        write_pieces(output, (piece for _, piece in stream))
    else:
        write_texts(output, [completion.text for completion in stream.completions()])


def _read_prompts(given: list[str]) -> list[str]:
    """The prompts as given, with standard input in the place of its sign."""
    if _STANDARD_INPUT not in given:
        return [_typed(prompt, option="--prompt") for prompt in given]
    if given.count(_STANDARD_INPUT) > 1:
        raise UserError(f"--prompt {_STANDARD_INPUT} can be given once: standard input is one text")
    if sys.stdin is None:
        raise UserError(f"--prompt {_STANDARD_INPUT}: standard input is closed; give the prompt itself")
    try:
        # Some programs write a byte order mark in front of what they send.
        text = sys.stdin.buffer.read().removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"standard input: is not UTF-8 at byte {error.start}; convert the text first") from error
    except OSError as error:
        raise UserError(f"standard input: cannot be read: {error.strerror or error}") from error
    # echo and editors end a text with a line end that nobody means.
    text = text.removesuffix("\n").removesuffix("\r")
    return [text if prompt == _STANDARD_INPUT else _typed(prompt, option="--prompt") for prompt in given]


def _typed(word: str, *, option: str) -> str:
    """A word of the command line as UTF-8, also where the locale says nothing of it and Python kept the bytes apart."""
    try:
        word.encode("utf-8")
    except UnicodeEncodeError:
        try:
            return os.fsencode(word).decode("utf-8")
        except UnicodeError as error:
            raise UserError(f"{option} {shorten(repr(word))}: is not UTF-8; convert the text first") from error
    return word


def parse_tokenizer(text: str) -> Tokenizer:
    """The tokenizer that TYPE or TYPE:VALUE names; UserError where there is none, or its file cannot be used."""
    from rwkv_spec.tokenizer.build import build_tokenizer

    name, colon, value = text.partition(":")
    if name not in _TOKENIZER_VALUES:
        raise UserError(f"--tokenizer {text}: {name!r} is no type of tokenizer; it is {', '.join(_TOKENIZER_VALUES)}")
    key = _TOKENIZER_VALUES[name]
    if colon and (key is None or not value):
        raise UserError(f"--tokenizer {text}: {f'{name} takes no value' if key is None else 'the value is missing'}")
    try:
        if not colon or key == "path":
            return build_tokenizer(name, path=expanded(value) if colon else None)
        if not (value.isascii() and value.isdecimal()):
            raise UserError(f"--tokenizer {text}: {value!r} is no whole number")
        return build_tokenizer(name, **{str(key): int(value)})  # type: ignore[arg-type]
    except ValueError as error:
        raise UserError(f"--tokenizer {text}: {error}; write --tokenizer TYPE:VALUE, for instance integer:9") from error
