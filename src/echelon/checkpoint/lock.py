"""A lock that allows only one run to write checkpoints to a folder, and keeps out stale processes from earlier attempts.

The lock is a small file that identifies its owner. It is read again just before a checkpoint is renamed into place.
Therefore, a process from an earlier attempt that was presumed dead cannot replace a checkpoint from a later attempt.
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

from echelon.base.errors import CheckpointError
from echelon.world.launch_variables import run_identity

STALE_AFTER = timedelta(minutes=10)
"""A run on another machine is considered dead after this time without a heartbeat."""
_BEAT_S = STALE_AFTER.total_seconds() / 10

_MAX_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The identity of a process, unique across machines and reboots."""

    token: str
    """Random token that identifies this lock."""
    host: str
    machine: str
    """Boot ID of the kernel; empty if unknown."""
    processes: str
    """PID namespace, because a container cannot see another container's processes."""
    pid: int
    started: str
    """Time at which the process started, in the kernel's units; empty if unknown."""
    run: str
    """Environment variable and value that identify the run; empty if no launcher was used."""
    attempt: int
    since: str
    """Time at which the lock was acquired (UTC, ISO 8601)."""

    @staticmethod
    def current() -> Owner:
        """Return the identity of this process, with a new token."""
        run, attempt = run_identity()
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
    """Return whether ``me`` may take the lock from ``owner``.

    Args:
        silent_for: time since the last heartbeat of ``owner``.
        owner_lives: whether the owner's process still exists; used only if both processes run on the same machine.
    """
    if replace(owner, token="", since="", attempt=0) == replace(me, token="", since="", attempt=0):
        return True  # two objects of one process do not exclude each other
    if owner.run and owner.run == me.run and owner.attempt < me.attempt:
        return True  # the launcher started this attempt because the earlier one ended
    if owner.machine and owner.machine == me.machine:
        if owner.processes == me.processes:
            return not owner_lives
        if owner.host == me.host:
            return True  # a restarted container: container names are unique at any time
    return silent_for > STALE_AFTER


class RunLock:
    """The exclusive right to write checkpoints to a folder, held until ``release`` is called or the process ends.

    One process per run acquires the lock. A thread writes a heartbeat every minute, regardless of how often checkpoints are
    saved.

    Raises:
        CheckpointError: another run, which the error names, holds the lock.
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
            CheckpointError: another attempt has acquired the lock, so this process may no longer write to the folder.
        """
        owner = _read(self._path)
        if owner is None or owner.token != self._me.token:
            now = "nobody" if owner is None else _described(owner)
            raise CheckpointError(
                f"this process may no longer write checkpoints to {self._path.parent}: it acquired the lock "
                f"{self._path.name} at {self._me.since}, but {now} holds it now",
                do="stop this process; a later attempt or another run has taken its place",
            )
        os.utime(self._path)

    def release(self) -> None:
        """Release the lock, if this process still holds it."""
        self._end_heartbeats()
        owner = _read(self._path)
        if owner is not None and owner.token == self._me.token:
            self._path.unlink(missing_ok=True)

    def _create(self) -> bool:
        """Create the complete lock file atomically. Return False if one already exists."""
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
                    do="use a different folder for this run, or stop the other run; if that run has ended and its "
                    "machine no longer exists, delete the lock file",
                )
        self._write_temporary().replace(self._path)
        self.require()  # if two processes take over at the same time, the later one wins

    def _write_temporary(self) -> Path:
        own = self._path.with_name(f"{self._path.name}.{self._me.token}")
        own.write_text(json.dumps(asdict(self._me)), encoding="utf-8")
        return own


def _write_heartbeats(path: Path, me: Owner, over: threading.Event) -> None:
    """Write heartbeats for ``me`` until ``over`` is set or another process holds the lock."""
    while not over.wait(_BEAT_S):
        try:
            owner = _read(path)
            if owner is None or owner.token != me.token:
                return
            os.utime(path)
        except OSError:
            continue  # a network file system may respond again in a minute


def _read(path: Path) -> Owner | None:
    """Return the lock's owner, or None if the file does not exist or is not a lock file."""
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
    """Return a process's start time in the kernel's units, or None if the process does not exist."""
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
