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
from echelon.checkpoint import object_store
from echelon.checkpoint.object_store import Location, ObjectPath
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

    def __init__(self, path: Location) -> None:
        self._path = path
        self._me = Owner.current()
        self._file: _LockFile | _LockObjects = _LockObjects(path) if isinstance(path, ObjectPath) else _LockFile(path)
        if not self._file.create(self._me):
            self._take_over()
        over = threading.Event()
        self._end_heartbeats = weakref.finalize(self, over.set)
        beat = threading.Thread(
            target=_write_heartbeats, args=(self._file, self._me, over), name=f"lock {path.parent.name}", daemon=True
        )
        beat.start()

    def require(self) -> None:
        """Write a heartbeat.

        Raises:
            CheckpointError: another attempt has acquired the lock, so this process may no longer write to the folder.
        """
        owner = self._file.read()
        if owner is None or owner.token != self._me.token:
            now = "nobody" if owner is None else _described(owner)
            raise CheckpointError(
                f"this process may no longer write checkpoints to {self._path.parent}: it acquired the lock "
                f"{self._path.name} at {self._me.since}, but {now} holds it now",
                do="stop this process; a later attempt or another run has taken its place",
            )
        self._file.touch(self._me)

    def release(self) -> None:
        """Release the lock, if this process still holds it."""
        self._end_heartbeats()
        owner = self._file.read()
        if owner is not None and owner.token == self._me.token:
            self._file.remove()

    def _take_over(self) -> None:
        owner = self._file.read()
        if owner is not None:
            silent_for = self._file.silent_for()
            lives = bool(owner.started) and _start_of(owner.pid) == owner.started
            if not is_over(owner, self._me, silent_for=silent_for, owner_lives=lives):
                raise CheckpointError(
                    f"{self._path.parent} is locked by another run: {_described(owner)}, last seen "
                    f"{silent_for.total_seconds():.0f} s ago",
                    where=str(self._path),
                    do="use a different folder for this run, or stop the other run; if that run has ended and its "
                    "machine no longer exists, delete the lock file",
                )
        self._file.replace(self._me)
        self.require()  # if two processes take over at the same time, one of them wins


class _LockFile:
    """A lock in a folder. Its modification time is the last heartbeat."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def create(self, me: Owner) -> bool:
        """Create the complete lock file atomically. Return False if one already exists."""
        own = self._write_temporary(me)
        try:
            os.link(own, self._path)
        except FileExistsError:
            return False
        finally:
            own.unlink()
        return True

    def replace(self, me: Owner) -> None:
        """Make ``me`` the owner. The last one who does so wins."""
        self._write_temporary(me).replace(self._path)

    def read(self) -> Owner | None:
        """Return the lock's owner, or None if the file does not exist or is not a lock file."""
        try:
            with self._path.open("rb") as file:
                return _owner_in(file.read(_MAX_BYTES))
        except FileNotFoundError:
            return None

    def touch(self, me: Owner) -> None:
        """Write a heartbeat of ``me``, which owns the lock."""
        os.utime(self._path)

    def silent_for(self) -> timedelta:
        """Return the time since the last heartbeat."""
        return timedelta(seconds=max(time.time() - self._path.stat().st_mtime, 0))

    def remove(self) -> None:
        """Remove the lock."""
        self._path.unlink(missing_ok=True)

    def _write_temporary(self, me: Owner) -> Path:
        own = self._path.with_name(f"{self._path.name}.{me.token}")
        own.write_text(json.dumps(asdict(me)), encoding="utf-8")
        return own


class _LockObjects:
    """A lock in an object store: numbered objects, each of which only one process creates. The highest one is the lock.

    An owner writes its object again as a heartbeat. Whoever takes over creates the next number, so no object is ever replaced by
    another process, which would need conditional writes with a version.
    """

    def __init__(self, folder: ObjectPath) -> None:
        self._folder = folder
        self._number = 0
        """The highest number when the lock was last read."""

    def create(self, me: Owner) -> bool:
        """Create the first object. Return False if there is a lock."""
        return self.read() is None and self._number == 0 and self._create(me)

    def replace(self, me: Owner) -> None:
        """Create the object after the one that was read last, unless another process has just done so."""
        if self._create(me):
            for name in self._numbers():
                if int(name) < self._number:
                    object_store.delete(self._folder / name)

    def _create(self, me: Owner) -> bool:
        number = self._number + 1
        if not object_store.create_object(self._folder / f"{number:08}", _as_json(me)):
            return False
        self._number = number
        return True

    def read(self) -> Owner | None:
        """Return the lock's owner, or None if there is no lock."""
        numbers = self._numbers()
        self._number = int(numbers[-1]) if numbers else 0
        try:
            return _owner_in(object_store.read_object(self._folder / numbers[-1])) if numbers else None
        except FileNotFoundError:  # it was released in the meantime
            return None

    def touch(self, me: Owner) -> None:
        """Write a heartbeat of ``me``, which owns the lock."""
        object_store.write_object(self._folder / f"{self._number:08}", _as_json(me))

    def silent_for(self) -> timedelta:
        """Return the time since the last heartbeat, by the store's clock."""
        now = object_store.now_of(self._folder)
        written = object_store.objects_in(self._folder).get(f"{self._number:08}")
        return timedelta(seconds=max(now - written["last_modified"].timestamp(), 0)) if written else timedelta.max

    def remove(self) -> None:
        """Remove the lock."""
        object_store.delete(self._folder / f"{self._number:08}")

    def _numbers(self) -> list[str]:
        return sorted(name for name in object_store.objects_in(self._folder) if name.isdigit())


def _write_heartbeats(file: _LockFile | _LockObjects, me: Owner, over: threading.Event) -> None:
    """Write heartbeats for ``me`` until ``over`` is set or another process holds the lock."""
    while not over.wait(_BEAT_S):
        try:
            owner = file.read()
            if owner is None or owner.token != me.token:
                return
            file.touch(me)
        except OSError:
            continue  # a network file system, or a store, may respond again in a minute


def _as_json(owner: Owner) -> bytes:
    return json.dumps(asdict(owner)).encode()


def _owner_in(text: bytes) -> Owner | None:
    """Return the owner that a lock file names, or None if this is not a lock file."""
    try:
        content = json.loads(text)
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
