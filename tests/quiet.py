"""Tell a process that waits for others from one that is at work, or that a busy machine has not let run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["QuietTime", "wait_until_quiet", "with_children"]

_PROC = Path("/proc")


class QuietTime:
    """For how long processes, and their children, have done nothing but wait.

    A fixed time that the others get "to answer" is spent in the run queue where the machine is busy. This one runs only while
    all of them sleep, and their main threads are not even woken: whoever computes, polls, reads a disk or stands in the queue
    is at work. Where there is no /proc (macOS) it is the time since the first look.
    """

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._seen: dict[int, list[str]] = {}
        self._at_work: set[int] = set()

    def look(self, pids: Iterable[int]) -> float:
        """Look at ``pids``, and return the seconds since something last moved there."""
        now, moved = time.monotonic(), False
        if _PROC.exists():
            seen = {pid: _switches(pid) for pid in with_children(pids)}
            at_work = {thread for pid in seen for thread in _at_work(pid)}
            # Other threads than the main one, gloo's, look around a hundred times a second, and may be seen at it.
            stays = at_work & (self._at_work | seen.keys())
            moved = seen != self._seen or bool(stays)
            self._seen, self._at_work = seen, at_work
        if moved:
            self._since = now
        return now - self._since


def wait_until_quiet(pid: int, *, for_s: float = 0.03, within_s: float = 60.0) -> None:
    """Wait until the process ``pid`` waits for something: has done nothing else for ``for_s``."""
    quiet, deadline = QuietTime(), time.monotonic() + within_s
    while quiet.look([pid]) < for_s:
        assert time.monotonic() < deadline, f"process {pid} is still at work"
        time.sleep(for_s / 3)


def with_children(pids: Iterable[int]) -> Iterator[int]:
    """Yield ``pids``, each followed by its children and theirs; without /proc only ``pids``."""
    for pid in pids:
        yield pid
        for task in (_PROC / str(pid) / "task").glob("*"):
            with suppress(OSError):
                yield from with_children(map(int, (task / "children").read_text().split()))


def _switches(pid: int) -> list[str]:
    """Return how often the main thread has gone to sleep, and was pushed aside."""
    with suppress(OSError):
        text = (_PROC / str(pid) / "status").read_text()
        return [line for line in text.splitlines() if "ctxt_switches" in line]
    return []


def _at_work(pid: int) -> Iterator[int]:
    """Give the threads that run, wait for a processor, or wait for a disk."""
    for task in (_PROC / str(pid) / "task").glob("*"):
        with suppress(OSError):
            if (task / "stat").read_text().rpartition(")")[2].split()[0] in "RD":
                yield int(task.name)
