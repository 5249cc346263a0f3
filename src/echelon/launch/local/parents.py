"""The launcher's side of the guardian, which kills a run's processes if the launcher is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import final

from echelon.launch.local import guardian, worker

_EXIT_S = 1.0
_HAS_BOOT_TIME = hasattr(time, "CLOCK_BOOTTIME")


def own_identity() -> str:
    """Return this process's pid and start time, for processes that must die with it; a pid alone may be reused."""
    return f"{os.getpid()}:{worker.start_of(os.getpid())}"


@final
class Guardian:
    """The launcher's end of the pipe to ``guardian.py``."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = -1
        self._lock = threading.Lock()

    def open(self) -> None:
        """Start the guardian if it is not running."""
        if self._process is not None or not hasattr(os, "killpg"):
            return
        read_end, self._pipe = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", guardian.__file__, str(read_end), own_identity()],
                pass_fds=[read_end],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # not affected by Ctrl-C and by kill -9 of the launcher's group
            )
        finally:
            os.close(read_end)

    def announce_start(self) -> None:
        """Announce a new rank, so that the guardian searches for it if this process is killed before ``add_rank``."""
        ticks = int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK")) if _HAS_BOOT_TIME else 0
        self._write(f"{guardian.STARTING}{ticks}")

    def add_rank(self, pid: int) -> None:
        """Add a rank's process ``pid``, which is a session leader."""
        self._write(f"{guardian.STARTED}{pid} {worker.start_of(pid)}")

    def remove_rank(self, pid: int) -> None:
        """Remove a rank once it and all its children have ended, because its pid may be reused."""
        self._write(f"{guardian.ENDED}{pid}")

    def close(self) -> None:
        """Stop the guardian after the launcher has stopped its ranks."""
        if self._process is None:
            return
        self._write(guardian.BYE)
        os.close(self._pipe)
        with suppress(subprocess.TimeoutExpired):  # it exits later
            self._process.wait(timeout=_EXIT_S)
        self._process = None

    def _write(self, line: str) -> None:
        if self._process is None:
            return
        # The guardian may have been killed. The launcher can stop its ranks without it.
        with self._lock, suppress(BrokenPipeError):
            os.write(self._pipe, f"{line}\n".encode("ascii"))
