"""A process that outlives a launcher which is killed, and ends what that has started: its ranks with all their children.

A rank asks the system to end with its parent (``worker.die_with``); its own children (loader workers, a shell's programs) have nobody
to ask for that, and a launcher that gets SIGKILL cannot end them. This process reads from a pipe which processes lead the sessions
of ranks. When the pipe closes without a word, the launcher is dead: the sessions' groups are killed. A rank that it was starting at
that moment, and of which it had not said anything yet, is found by the launcher's mark in its environment.

Like the worker it is run by its path and imports the standard library only: ``python -I -S guardian.py PIPE MARK``.
"""

from __future__ import annotations

import os
import signal
import sys
import time

__all__ = ["BYE", "ENDED", "LAUNCHER_VARIABLE", "STARTED", "STARTING", "main"]

STARTING, STARTED, ENDED, BYE = "?", "+", "-", "bye"
"""``?TICKS`` when a rank is about to be started, ``+PID START`` of one that was, ``-PID`` of one that is over, and the end of a
launcher that ends by itself. Ticks are those of ``worker.start_of``."""
LAUNCHER_VARIABLE = "ECHELON_LAUNCHER"
"""Whose ranks those are that have it in their environment."""
_LOOKS, _LOOK_EVERY_S = 10, 0.1


def main(argv: list[str]) -> None:
    """Read until the launcher ends."""
    leaders: dict[int, str] = {}
    begun = ""
    with os.fdopen(int(argv[0]), encoding="ascii") as pipe:
        for line in pipe:
            word = line.strip()
            if word == BYE:
                return
            number, _, start = word[1:].partition(" ")
            if word[:1] == STARTING:
                begun = number
            elif word[:1] == STARTED:
                leaders[int(number)], begun = start, ""
            else:
                leaders.pop(int(number), None)
    for pid, start in leaders.items():
        if _start_of(pid) not in ("", start):
            continue  # its number has gone to somebody else, which it does when nobody is left in its group
        try:
            os.killpg(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue  # it has ended, and all its children
    if begun:
        _end_unnamed(f"{LAUNCHER_VARIABLE}={argv[1]}".encode(), int(begun), set(leaders))


def _end_unnamed(mark: bytes, since: int, known: set[int]) -> None:
    """Kill what has ``mark`` in its environment, began after ``since``, and is in no session of ``known``."""
    for _ in range(_LOOKS):  # its environment is the launcher's until it has begun its program
        for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
            try:
                with open(f"/proc/{int(name)}/environ", "rb") as file:
                    is_marked = mark in file.read().split(b"\0")
                if is_marked and int(_start_of(int(name)) or -1) >= since and os.getsid(int(name)) not in known:
                    os.kill(int(name), signal.SIGKILL)
            except (ValueError, OSError):
                continue  # no process, over by now, or somebody else's
        time.sleep(_LOOK_EVERY_S)


def _start_of(pid: int) -> str:
    # worker.start_of: this file loads no other, so that it is there within milliseconds.
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()  # the name before it may hold anything
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)  # nothing is open; the interpreter's end takes longer than all of this
