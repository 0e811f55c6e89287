"""A lock file that outlives no process: created exclusively, naming host, pid and the process's start.

Staleness is never judged by the clock, which may jump, but by whether that very process still lives on this host. A
lock from another host cannot be judged from here: it is reported, with what to do.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rwkv_spec.errors import UserError


@dataclass(frozen=True)
class Owner:
    """Who holds a lock. `birth` is the system's own mark of the process's start ('' where there is none)."""

    host: str
    pid: int
    birth: str
    since: str


class Locked(UserError):
    """Somebody else holds the lock."""

    def __init__(self, path: Path, owner: Owner) -> None:
        super().__init__(
            f"{path}: held by process {owner.pid} on host {owner.host} since {owner.since}; wait for it to end or stop "
            f"it; if that host is gone for good, delete {path}"
        )
        self.owner = owner


def this_process() -> Owner:
    pid = os.getpid()
    return Owner(socket.gethostname(), pid, _birth(pid), time.strftime("%Y-%m-%dT%H:%M:%S%z"))


def alive(owner: Owner) -> bool:
    """False only if `owner` is known to be gone: same host, and no such process, or another one under its number."""
    if owner.host != socket.gethostname():
        return True
    if not _exists(owner.pid):
        return False
    return not owner.birth or _birth(owner.pid) == owner.birth


class Lock:
    """Hold `path` until `release()`. Raises Locked when a living process has it; a dead one's lock is taken over."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._record = json.dumps(asdict(this_process()))
        while not self._create():
            found = _read_settled(path)
            if found is None:
                continue
            owner = _parse(found)
            if owner is not None and alive(owner):
                raise Locked(path, owner)
            _discard(path, found)

    def _create(self) -> bool:
        try:
            descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(self._record)
        return True

    def release(self) -> None:
        """Give the lock back; another process's lock in the same place is left alone."""
        if _read(self.path) == self._record:
            self.path.unlink(missing_ok=True)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, PermissionError):
        return None


def _read_settled(path: Path) -> str | None:
    """The lock's text; a file still empty after two seconds was left by a process killed while creating it."""
    for _ in range(40):
        text = _read(path)
        if text is None or text:
            return text
        time.sleep(0.05)
    return ""


def _parse(text: str) -> Owner | None:
    try:
        fields = json.loads(text)
        return Owner(str(fields["host"]), int(fields["pid"]), str(fields["birth"]), str(fields["since"]))
    except (ValueError, KeyError, TypeError):
        return None


def _discard(path: Path, stale: str) -> None:
    """Remove the stale lock, and only it: between reading and renaming, another process may have taken its place."""
    grave = path.with_name(f"{path.name}.stale-{os.getpid()}")
    try:
        os.replace(path, grave)
    except FileNotFoundError:
        return
    if _read(grave) == stale:
        grave.unlink(missing_ok=True)
        return
    with contextlib.suppress(OSError):
        os.rename(grave, path)


def _exists(pid: int) -> bool:
    if sys.platform == "win32":
        import ctypes

        # PROCESS_QUERY_LIMITED_INFORMATION: os.kill(pid, 0) would end the process on Windows.
        handle = ctypes.windll.kernel32.OpenProcess(0x1000, False, pid)
        if not handle:
            return False
        ctypes.windll.kernel32.CloseHandle(handle)
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _birth(pid: int) -> str:
    """Linux: boot id and start tick, which no later process with the same number shares. Elsewhere ''."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        # The command name in parentheses may contain spaces: count fields after its end. Start time is field 22.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return f"{boot}:{fields[19]}"
