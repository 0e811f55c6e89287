"""A child process that encodes line ranges: jobs come as lines of JSON on its input, parts go out likewise.

It is started as a program of its own, so that a user's script is never run again and nothing is forked.
"""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import asdict

from rwkv_spec.data.part import Job, encode_range
from rwkv_spec.errors import UserError
from rwkv_spec.tokenizer.build import Recipe


def main() -> None:
    """Serve until the input ends, which it also does when the parent is gone."""
    # Ctrl-C goes to every process of a terminal; the parent decides what becomes of its children.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _serve()
    except BrokenPipeError:
        # Nobody is left to hear of it.
        return
    except (UserError, OSError) as error:
        _say({"error": str(error)})


def _serve() -> None:
    greeting = json.loads(sys.stdin.readline())
    recipe = Recipe(**greeting["recipe"])
    tokenizer = recipe.build()
    if tokenizer.fingerprint != greeting["fingerprint"]:
        raise UserError(f"{recipe.path}: the vocabulary was changed while data was being prepared; start again")
    for line in sys.stdin:
        part = encode_range(Job(**json.loads(line)), tokenizer, lambda count: _say({"bytes": count}))
        _say({"part": asdict(part)})


def _say(message: dict[str, object]) -> None:
    # Unbuffered: nothing is left to flush, and to fail, at the end.
    with open(1, "wb", buffering=0, closefd=False) as out:
        out.write(json.dumps(message).encode() + b"\n")
