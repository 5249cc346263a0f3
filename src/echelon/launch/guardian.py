"""A process that outlives a launcher which is killed, and ends what that has started: its ranks with all their children.

A rank asks the system to end with its parent (``worker.die_with``); its own children (loader workers, a shell's programs) have nobody
to ask for that, and a launcher that gets SIGKILL cannot end them. This process reads from a pipe which processes lead the sessions
of ranks. When the pipe closes without a word, the launcher is dead: the sessions' groups are killed.

Like the worker it is run by its path and imports the standard library only: ``python -I -S guardian.py PIPE``.
"""

from __future__ import annotations

import os
import signal
import sys

__all__ = ["BYE", "ENDED", "STARTED", "main"]

STARTED, ENDED, BYE = "+", "-", "bye"
"""``+PID START`` of a rank that was started, ``-PID`` of one that is over, and the end of a launcher that ends by itself."""


def main(argv: list[str]) -> None:
    """Read until the launcher ends."""
    leaders: dict[int, str] = {}
    with os.fdopen(int(argv[0]), encoding="ascii") as pipe:
        for line in pipe:
            word = line.strip()
            if word == BYE:
                return
            number, _, start = word[1:].partition(" ")
            if word[:1] == STARTED:
                leaders[int(number)] = start
            else:
                leaders.pop(int(number), None)
    for pid, start in leaders.items():
        if _start_of(pid) not in ("", start):
            continue  # its number has gone to somebody else, which it does when nobody is left in its group
        try:
            os.killpg(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue  # it has ended, and all its children


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
