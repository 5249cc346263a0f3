"""What makes the processes of a run end with the launcher, whatever ends it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import final

from echelon.launch.local import guardian, worker

__all__ = ["Guardian", "own_identity"]

_ENDS_WITHIN_S = 1.0
_HAS_BOOT_TIME = hasattr(time, "CLOCK_BOOTTIME")


def own_identity() -> str:
    """Return what tells this process from a later one of its number: to be handed to a process that is to end with it."""
    return f"{os.getpid()}:{worker.start_of(os.getpid())}"


@final
class Guardian:
    """The launcher's end of the pipe to ``guardian.py``. Nothing happens before the first rank is told; whoever opens it closes it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = -1
        self._lock = threading.Lock()

    def open(self) -> None:
        """Start it, if it does not run."""
        if self._process is not None or not hasattr(os, "killpg"):
            return
        read_end, self._pipe = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", guardian.__file__, str(read_end), own_identity()],
                pass_fds=[read_end],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's Ctrl-C, and kill -9 of the launcher's group, pass it by
            )
        finally:
            os.close(read_end)

    def note_starting(self) -> None:
        """Tell that a rank is about to be started: if this process is killed before ``note_started``, it is looked for."""
        ticks = int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK")) if _HAS_BOOT_TIME else 0
        self._write(f"{guardian.STARTING}{ticks}")

    def note_started(self, pid: int) -> None:
        """Tell that the process ``pid`` leads the session of a rank."""
        self._write(f"{guardian.STARTED}{pid} {worker.start_of(pid)}")

    def note_ended(self, pid: int) -> None:
        """Tell that a rank is over, and all its children: its number may go to somebody else."""
        self._write(f"{guardian.ENDED}{pid}")

    def close(self) -> None:
        """End it: the launcher has ended its ranks itself."""
        if self._process is None:
            return
        self._write(guardian.BYE)
        os.close(self._pipe)
        with suppress(subprocess.TimeoutExpired):  # it ends when it comes to that
            self._process.wait(timeout=_ENDS_WITHIN_S)
        self._process = None

    def _write(self, line: str) -> None:
        if self._process is None:
            return
        with (
            self._lock,
            suppress(BrokenPipeError),
        ):  # somebody has killed it: the launcher ends its ranks without it, too
            os.write(self._pipe, f"{line}\n".encode("ascii"))
