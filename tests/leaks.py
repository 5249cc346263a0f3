"""Detects leaks of a test: environment variables, threads, open files, a default process group."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests import harness

# Set by the test runner, or by a library on first use, and therefore not a leak of the first test.
ENVIRON_OF_OTHERS = frozenset({"PYTEST_CURRENT_TEST", "PYTEST_VERSION", "TORCHINDUCTOR_CACHE_DIR"})
_THREADS_OF_OTHERS = frozenset({"TMonitor"})  # tqdm keeps one thread for the whole process
_FILES_OF_OTHERS = frozenset({"/dev/urandom", "/dev/null"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state that is compared before and after a test."""

    environ: dict[str, str]
    threads: frozenset[threading.Thread]
    files: frozenset[tuple[int, str]]
    has_group: bool

    @classmethod
    def take(cls) -> Snapshot:
        return cls(
            environ={name: value for name, value in os.environ.items() if name not in ENVIRON_OF_OTHERS},
            threads=frozenset(t for t in threading.enumerate() if type(t).__name__ not in _THREADS_OF_OTHERS),
            files=_open_files(),
            has_group=_has_default_group(),
        )


def leaks(before: Snapshot, after: Snapshot) -> list[str]:
    """Return one line for each item in ``after`` that is not in ``before``."""
    found = []
    for name in sorted(before.environ.keys() | after.environ.keys()):
        old, new = before.environ.get(name), after.environ.get(name)
        if old != new:
            # Names only: values may be secrets.
            change = "set" if old is None else "removed" if new is None else "changed"
            found.append(f"environment variable {name} was {change}")
    found += sorted(f"thread {thread.name!r} is still running" for thread in after.threads - before.threads)
    found += sorted(f"file descriptor {fd} is still open: {target}" for fd, target in after.files - before.files)
    if after.has_group and not before.has_group:
        found.append("the default process group still exists")
    return found


def settled_leaks(
    before: Snapshot, *, take: Callable[[], Snapshot] = Snapshot.take, patience_s: float = 30.0
) -> list[str]:
    """Return the leaks that remain after waiting for ending threads and collecting reference cycles."""
    deadline = time.monotonic() + patience_s
    found = leaks(before, take())
    pause_s = 0.01
    while found and time.monotonic() < deadline:
        gc.collect()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.5)  # a collection takes much longer than a look
        found = leaks(before, take())
    return found


def _open_files() -> frozenset[tuple[int, str]]:
    folder = Path("/proc/self/fd")
    if not folder.exists():  # macOS: the same tests detect the leak on Linux
        return frozenset()
    ours = harness.open_files() | _resource_tracker_file()
    found = set()
    for entry in folder.iterdir():
        fd = int(entry.name)
        try:
            target = os.readlink(entry)
        except OSError:
            continue  # the descriptor of this listing
        if fd not in ours and target not in _FILES_OF_OTHERS and not target.startswith(_others_files()):
            found.add((fd, target))
    return frozenset(found)


def _others_files() -> tuple[str, ...]:
    """Return how the names of files begin that a library keeps open: this listing, and the driver of a device."""
    return (f"/proc/{os.getpid()}/fd", "/dev/nvidia")


def _resource_tracker_file() -> set[int]:
    """Return the pipe to the resource tracker, which multiprocessing starts once and keeps until the interpreter exits."""
    module = sys.modules.get("multiprocessing.resource_tracker")
    fd = module._resource_tracker._fd if module is not None else None
    return {fd} if fd is not None else set()


def _has_default_group() -> bool:
    distributed = sys.modules.get("torch.distributed")  # if it is not imported, there is no group
    return distributed is not None and distributed.is_available() and distributed.is_initialized()
