"""Waits at exit until this process's other threads sleep, so that none asks for the GIL while the interpreter shuts down.

A gloo thread needs the GIL after a collective, to release the tensor. If the interpreter begins to shut down while the thread waits
for the GIL, Python (up to 3.13) ends the thread, through a C++ function that may not be left, and C++ aborts the process:
"terminate called without an active exception". The group may still have its threads then, also after destroy_process_group(), for
example because a DistributedDataParallel refers to it. The launcher's worker loads this file by path, so it uses only the standard
library.
"""

from __future__ import annotations

import os
import threading
import time

__all__ = ["wait_for_idle_threads"]

_TASKS = "/proc/self/task"
_PAUSE_S = 0.001
_PAUSE_WITHOUT_PROC_S = 0.05
_LIMIT_S = 1.0


def wait_for_idle_threads() -> None:
    """Return when no other thread of this process has run for a millisecond in which it could get the GIL, or after a second.

    Threads that sleep or wait for a message do not matter, but a thread that computes all the time takes the whole second. Without
    /proc it only gives up the GIL for a moment.
    """
    deadline = time.monotonic() + _LIMIT_S
    before: dict[str, bytes] | None = None
    while time.monotonic() < deadline:
        if not os.path.isdir(_TASKS):
            time.sleep(_PAUSE_WITHOUT_PROC_S)
            return
        # The kernel counts how often each thread began to run. A thread that waits for the GIL sleeps, too, but runs in the pause.
        now = _context_switches()
        if now is not None and now == before:
            return
        before = now
        time.sleep(_PAUSE_S)


def _context_switches() -> dict[str, bytes] | None:
    """Return the context switches of each other thread, or None if one is running."""
    own, found = str(threading.get_native_id()), {}
    for thread in os.listdir(_TASKS):
        if thread == own:
            continue
        try:
            with open(f"{_TASKS}/{thread}/status", "rb") as file:
                status = file.read()
        except OSError:  # the thread has just ended
            return None
        if b"\nState:\tR" in status:
            return None
        found[thread] = status.partition(b"\nvoluntary_ctxt_switches:")[2]
    return found
