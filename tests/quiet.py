"""Distinguishes a process that waits for others from one that works, or that is not scheduled on a busy machine."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")


class QuietTime:
    """Measures for how long processes and their children have only been waiting.

    On a busy machine processes may spend a fixed time limit in the run queue. This time only passes while all processes sleep
    and their main threads are not woken. A process that computes, polls, reads from a disk or is in the run queue counts as
    working. Without /proc (macOS) it is the time since the first call.
    """

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._seen: dict[int, list[str]] = {}
        self._at_work: set[int] = set()

    def look(self, pids: Iterable[int]) -> float:
        """Return the seconds since the last activity of ``pids``."""
        now, moved = time.monotonic(), False
        if _PROC.exists():
            seen = {pid: _switches(pid) for pid in with_children(pids)}
            at_work = {thread for pid in seen for thread in _at_work(pid)}
            # gloo's threads poll a hundred times a second, and may be active at this moment.
            stays = at_work & (self._at_work | seen.keys())
            moved = seen != self._seen or bool(stays)
            self._seen, self._at_work = seen, at_work
        if moved:
            self._since = now
        return now - self._since


def wait_until_quiet(pid: int, *, for_s: float = 0.03, within_s: float = 60.0) -> None:
    """Wait until the process ``pid`` has only been waiting for ``for_s`` seconds."""
    quiet, deadline = QuietTime(), time.monotonic() + within_s
    while quiet.look([pid]) < for_s:
        assert time.monotonic() < deadline, f"process {pid} is still working"
        time.sleep(for_s / 3)


def with_children(pids: Iterable[int]) -> Iterator[int]:
    """Yield ``pids``, each followed by its descendants; without /proc only ``pids``."""
    for pid in pids:
        yield pid
        for task in (_PROC / str(pid) / "task").glob("*"):
            with suppress(OSError):
                yield from with_children(map(int, (task / "children").read_text().split()))


def _switches(pid: int) -> list[str]:
    """Return the numbers of voluntary and involuntary context switches of the main thread."""
    with suppress(OSError):
        text = (_PROC / str(pid) / "status").read_text()
        return [line for line in text.splitlines() if "ctxt_switches" in line]
    return []


def _at_work(pid: int) -> Iterator[int]:
    """Yield the threads that run, or wait for a processor or a disk."""
    for task in (_PROC / str(pid) / "task").glob("*"):
        with suppress(OSError):
            if (task / "stat").read_text().rpartition(")")[2].split()[0] in "RD":
                yield int(task.name)
