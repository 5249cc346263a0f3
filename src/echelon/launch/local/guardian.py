"""The guardian: a process that outlives a killed launcher and kills its ranks with all their children.

The kernel kills a rank when its parent dies (``worker.die_with``), but not the rank's children (loader workers,
programs started by a shell), and a launcher that receives SIGKILL cannot stop them. The guardian reads the pids of the
ranks, which are session leaders, from a pipe. If the pipe closes without ``bye``, the launcher was killed, and the
guardian kills the process groups in these sessions. If a rank was just being started, its pid is not known yet; the
guardian finds it by the launcher's mark in its environment.

Like the worker, it is run by its path and imports only the standard library: ``python -I -S guardian.py PIPE MARK``.
"""

from __future__ import annotations

import os
import signal
import sys
import time

STARTING, STARTED, ENDED, BYE = "?", "+", "-", "bye"
"""Messages: ``?TICKS`` before a rank starts, ``+PID START`` once it has started, ``-PID`` once it has ended, and
``bye`` when the launcher exits normally. TICKS is the current time and START the rank's start time, both in clock ticks
since boot, the unit of ``worker.start_of``."""
LAUNCHER_VARIABLE = "ECHELON_LAUNCHER"
"""Environment variable that identifies the launcher to which a rank belongs."""
_NUM_SCANS, _SCAN_EVERY_S = 10, 0.1


def main(argv: list[str]) -> None:
    """Read the pipe until the launcher ends, and kill its ranks if the launcher was killed."""
    leaders: dict[int, str] = {}
    starting = ""
    with os.fdopen(int(argv[0]), encoding="ascii") as pipe:
        for line in pipe:
            message = line.strip()
            if message == BYE:
                return
            number, _, start = message[1:].partition(" ")
            if message[:1] == STARTING:
                starting = number
            elif message[:1] == STARTED:
                leaders[int(number)], starting = start, ""
            else:
                leaders.pop(int(number), None)
    for pid, start in leaders.items():
        if _start_of(pid) not in ("", start):
            continue  # its pid was reused, so that its process group is empty
        try:
            os.killpg(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue  # the rank and its children have ended
    if starting:
        _kill_marked(f"{LAUNCHER_VARIABLE}={argv[1]}".encode(), int(starting), set(leaders))


def _kill_marked(mark: bytes, since: int, known: set[int]) -> None:
    """Kill processes with ``mark`` in their environment that started after ``since``, outside ``known`` sessions."""
    for _ in range(_NUM_SCANS):  # before exec, a new rank still has the launcher's environment
        for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
            try:
                with open(f"/proc/{int(name)}/environ", "rb") as file:
                    is_marked = mark in file.read().split(b"\0")
                if is_marked and int(_start_of(int(name)) or -1) >= since and os.getsid(int(name)) not in known:
                    os.kill(int(name), signal.SIGKILL)
            except (ValueError, OSError):
                continue  # not a process, ended, or owned by another user
        time.sleep(_SCAN_EVERY_S)


def _start_of(pid: int) -> str:
    # A copy of worker.start_of, because without imports the guardian starts within milliseconds.
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()  # the process name before it may contain anything
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]


if __name__ == "__main__":
    main(sys.argv[1:])
