"""The run folder: where each file of a run lies, who owns it, and run.json, which says how it stands.

Two runs never share a work_dir: the second one is refused with the first one's host and pid.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rwkv_spec.atomic import discard, write_json
from rwkv_spec.errors import CheckpointError
from rwkv_spec.lock import Lock, Locked, this_process

_NUMBERED = re.compile(r"rwkv-(?:step)?(\d+)")
# What a kill leaves of a file that a run was writing, under the names of atomic.temporary_sibling.
_LEFT_OVER = re.compile(
    r"\.(?:rwkv-.+|metrics\.jsonl|train_log\.txt|run\.json|spec\.yaml|resolved\.yaml)\.\d+-[0-9a-f]{8}\.tmp"
)


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run. Nothing is created before something is written."""

    work_dir: Path

    @property
    def run_file(self) -> Path:
        return self.work_dir / "run.json"

    @property
    def given_spec(self) -> Path:
        return self.work_dir / "configs" / "spec.yaml"

    @property
    def resolved_spec(self) -> Path:
        return self.work_dir / "configs" / "resolved.yaml"

    @property
    def data(self) -> Path:
        return self.work_dir / "data"

    @property
    def out(self) -> Path:
        return self.work_dir / "out"

    @property
    def metrics(self) -> Path:
        return self.out / "metrics.jsonl"

    @property
    def train_log(self) -> Path:
        return self.out / "train_log.txt"

    @property
    def trackers(self) -> Path:
        """Files of trackers that keep any: outside out/, whose bytes are the run's own."""
        return self.work_dir / "trackers"

    @property
    def states(self) -> Path:
        return self.work_dir / "state"

    def weights(self, stem: str, file_format: str) -> Path:
        """`stem` is rwkv-init, rwkv-best, rwkv-final, or a numbered save such as rwkv-0 or rwkv-step500."""
        return self.out / f"{stem}.{file_format}"

    def numbered_weights(self, file_format: str) -> list[Path]:
        """All numbered saves of this format, oldest first by their number."""
        found = [(int(match.group(1)), path) for path in self.out.glob(f"rwkv-*.{file_format}")
                 if (match := _NUMBERED.fullmatch(path.stem))]  # fmt: skip
        return [path for _, path in sorted(found)]

    def claim(self) -> Lock:
        """Take the folder for this process. Raises CheckpointError naming the run that has it."""
        try:
            return Lock(self.work_dir / "run.lock")
        except Locked as error:
            owner = error.owner
            raise CheckpointError(
                f"{self.work_dir}: process {owner.pid} on host {owner.host} trains here since {owner.since}; "
                "wait for it or stop it, or give this run another work_dir (if that host is gone for good, delete "
                f"{self.work_dir / 'run.lock'})"
            ) from error
        except OSError as error:
            raise CheckpointError(f"{self.work_dir}: cannot be used as work_dir: {error}; name another one") from error

    def remove_leftovers(self) -> None:
        """Delete what a kill left of half-written files. Only the process that has claimed the folder may call this."""
        for folder in (self.work_dir, self.given_spec.parent, self.out):
            for path in folder.glob(".*.tmp"):
                if _LEFT_OVER.fullmatch(path.name) and path.is_file():
                    discard(path)

    def write_status(self, status: str, *, step: int, total_steps: int, note: str = "") -> None:
        """status: running, done, stopped or failed. CheckpointError where the folder cannot be written to."""
        owner = this_process()
        record: dict[str, object] = {
            "status": status,
            "host": owner.host,
            "pid": owner.pid,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "step": step,
            "total_steps": total_steps,
        }
        if note:
            record["note"] = note
        try:
            write_json(self.run_file, record)
        except OSError as error:
            raise CheckpointError(
                f"{self.run_file}: cannot be written: {error}; free space or name another work_dir"
            ) from error

    @property
    def shown(self) -> str:
        """work_dir as a person would type it from here."""
        try:
            return str(self.work_dir.relative_to(Path.cwd()))
        except ValueError:
            return str(self.work_dir)

    def mark_failed(self, note: str) -> None:
        """Say in run.json that the run failed, keeping the step it had. A disk that is full may refuse even that.

        A run that is done or stopped stays so: what failed is an attempt to go on with it.
        """
        status = self.read_status()
        if status.get("status") in ("done", "stopped"):
            return
        step, total = status.get("step"), status.get("total_steps")
        with contextlib.suppress(CheckpointError):
            self.write_status(
                "failed",
                step=step if isinstance(step, int) else 0,
                total_steps=total if isinstance(total, int) else 0,
                note=note,
            )

    def read_status(self) -> Mapping[str, object]:
        """run.json as it stands, {} where there is none or it is not readable."""
        try:
            record = json.loads(self.run_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return record if isinstance(record, dict) else {}
