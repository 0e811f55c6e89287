"""A process that measures one program and ends: its peak of memory is that program's alone, and nothing is warm."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rwkv_spec.benchmark.workload import Workload
from rwkv_spec.errors import UserError
from rwkv_spec.process import wait_briefly


def main(request_path: str) -> None:
    """Measure what the request says and write the times, or the error that a user can fix, to the file it names."""
    wait_briefly()
    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    try:
        result = _measure(request)
    except UserError as error:
        result = {"error": str(error)}
    Path(request["result"]).write_text(json.dumps(result), encoding="utf-8")


def _measure(request: dict[str, object]) -> dict[str, object]:
    values = request["workload"]
    assert isinstance(values, dict)
    workload, num_steps = Workload.from_dict(values), int(str(request["num_steps"]))
    # Each program imports what it needs and no more, for its memory is measured.
    if request["program"] == "split":
        sizes = request["sizes"]
        assert isinstance(sizes, list)
        from rwkv_spec.benchmark.own import find_split

        return asdict(find_split(workload, tuple(sizes)))
    if request["program"] == "own":
        from rwkv_spec.benchmark.own import measure_own

        return measure_own(workload, num_steps=num_steps, detailed=bool(request["detailed"])).as_dict()
    from rwkv_spec.benchmark.peers import measure_compiled, measure_gpt

    measure = {"gpt": measure_gpt, "compile": measure_compiled}[str(request["program"])]
    return measure(workload, num_steps=num_steps).as_dict()
