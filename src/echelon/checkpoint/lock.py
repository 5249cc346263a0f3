"""The lock of a folder of checkpoints: one run writes there, and a stale process of an earlier attempt is kept out.

The lock is a small file that identifies its owner. It is read again right before a checkpoint is renamed into place, so that a
process of an earlier attempt that was thought dead cannot replace what the later attempt has saved.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import threading
import time
import weakref
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

from echelon.base import environ
from echelon.base.errors import CheckpointError

__all__ = ["STALE_AFTER", "Owner", "RunLock", "is_over"]

STALE_AFTER = timedelta(minutes=10)
"""A run on another machine is considered over after this time without a heartbeat."""
_BEAT_S = STALE_AFTER.total_seconds() / 10

_MAX_BYTES = 4096
# The launcher's variables for the run's name and its attempt; a later attempt supersedes an earlier one.
_RUNS = (
    ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The identity of a process, unique across machines and reboots."""

    token: str
    """Of this lock."""
    host: str
    machine: str
    """The boot id of the kernel; empty where unknown."""
    processes: str
    """The PID namespace: a container does not see the processes of another."""
    pid: int
    started: str
    """When the process was started, in the kernel's units; empty where unknown."""
    run: str
    """The launcher's name for the run, with the launcher's kind; empty without one."""
    attempt: int
    since: str
    """UTC, ISO 8601."""

    @staticmethod
    def current() -> Owner:
        """Return this process, with a new token."""
        run, attempt = "", 0
        for variable, count in _RUNS:
            name = environ.get(variable)
            if name is not None and name != "none":  # torchrun's name for a run that was not given one
                text = environ.get(count) or "0"
                run, attempt = f"{variable}={name}", int(text) if text.isdigit() else 0
                break
        return Owner(
            token=secrets.token_hex(8),
            host=socket.gethostname(),
            machine=_machine(),
            processes=_processes(),
            pid=os.getpid(),
            started=_start_of(os.getpid()) or "",
            run=run,
            attempt=attempt,
            since=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )


def is_over(owner: Owner, me: Owner, *, silent_for: timedelta, owner_lives: bool) -> bool:
    """Whether ``me`` may take the lock of ``owner``.

    Args:
        owner: its holder.
        me: this process.
        silent_for: since the last heartbeat of ``owner``.
        owner_lives: whether its process exists; relevant on the same machine only.
    """
    if replace(owner, token="", since="", attempt=0) == replace(me, token="", since="", attempt=0):
        return True  # two objects of one process do not exclude each other
    if owner.run and owner.run == me.run and owner.attempt < me.attempt:
        return True  # the launcher started this attempt because that one is over
    if owner.machine and owner.machine == me.machine:
        if owner.processes == me.processes:
            return not owner_lives
        if owner.host == me.host:
            return True  # a restarted container: no two have the same name at a time
    return silent_for > STALE_AFTER


class RunLock:
    """The right to write checkpoints into a folder; held until it is released, or this process ends.

    Only one process of a run takes it. A thread writes a heartbeat every minute, however long the run computes between two
    saves.

    Raises:
        CheckpointError: another run holds it; the error names it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._me = Owner.current()
        path.parent.mkdir(parents=True, exist_ok=True)
        if not self._create():
            self._take_over()
        over = threading.Event()
        self._end_heartbeats = weakref.finalize(self, over.set)
        beat = threading.Thread(
            target=_write_heartbeats, args=(path, self._me, over), name=f"lock {path.parent.name}", daemon=True
        )
        beat.start()

    def require(self) -> None:
        """Write a heartbeat.

        Raises:
            CheckpointError: another attempt has taken the lock since; this process may not write here any more.
        """
        owner = _read(self._path)
        if owner is None or owner.token != self._me.token:
            now = "nobody" if owner is None else _described(owner)
            raise CheckpointError(
                f"this process may not write checkpoints to {self._path.parent} any more: it held the lock {self._path.name} "
                f"since {self._me.since}, and now {now} holds it",
                do="end this process: a later attempt of the run, or another run, has replaced it",
            )
        os.utime(self._path)

    def release(self) -> None:
        """Release the lock, if this process still holds it."""
        self._end_heartbeats()
        owner = _read(self._path)
        if owner is not None and owner.token == self._me.token:
            self._path.unlink(missing_ok=True)

    def _create(self) -> bool:
        """Create the complete lock atomically; False when one exists."""
        own = self._write_temporary()
        try:
            os.link(own, self._path)
        except FileExistsError:
            return False
        finally:
            own.unlink()
        return True

    def _take_over(self) -> None:
        owner = _read(self._path)
        if owner is not None:
            silent_for = timedelta(seconds=max(time.time() - self._path.stat().st_mtime, 0))
            lives = bool(owner.started) and _start_of(owner.pid) == owner.started
            if not is_over(owner, self._me, silent_for=silent_for, owner_lives=lives):
                raise CheckpointError(
                    f"{self._path.parent} is locked by another run: {_described(owner)}, last seen "
                    f"{silent_for.total_seconds():.0f} s ago",
                    where=str(self._path),
                    do="give this run another folder, or end the other run (if it is over and its machine is gone, delete the lock "
                    "file)",
                )
        self._write_temporary().replace(self._path)
        self.require()  # of two that take over at once, the later one wins

    def _write_temporary(self) -> Path:
        own = self._path.with_name(f"{self._path.name}.{self._me.token}")
        own.write_text(json.dumps(asdict(self._me)), encoding="utf-8")
        return own


def _write_heartbeats(path: Path, me: Owner, over: threading.Event) -> None:
    """Write heartbeats for ``me`` until it is ``over``, or another owner holds the lock."""
    while not over.wait(_BEAT_S):
        try:
            owner = _read(path)
            if owner is None or owner.token != me.token:
                return
            os.utime(path)
        except OSError:
            continue  # a network file system may answer again in a minute


def _read(path: Path) -> Owner | None:
    """Return the owner of the lock; None when there is none, or the file is not a lock."""
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_MAX_BYTES))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        return None
    names = {field.name: field.type for field in fields(Owner)}
    if not isinstance(content, dict) or set(content) != set(names):
        return None
    if not all(type(value).__name__ == names[name] for name, value in content.items()):
        return None
    return Owner(**content)


def _described(owner: Owner) -> str:
    run = f", {owner.run}, attempt {owner.attempt}" if owner.run else ""
    return f"process {owner.pid} on {owner.host} since {owner.since}{run}"


def _machine() -> str:
    if sys.platform != "linux":
        return socket.gethostname()
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _processes() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _start_of(pid: int) -> str | None:
    """Return when the process was started, as the kernel counts it; None when there is no such process."""
    if sys.platform != "linux":
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            return "unknown"
        return "unknown"
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    after_name = text.rpartition(")")[2].split()
    return None if after_name[0] == "Z" else after_name[19]
