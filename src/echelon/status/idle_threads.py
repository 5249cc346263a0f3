"""Waits at exit until this process's other threads sleep, so that none asks for the GIL while the interpreter shuts down.

A gloo thread needs the GIL after a collective, to release the tensor. If the interpreter begins to shut down while the thread waits
for the GIL, Python (up to 3.13) ends the thread, through a C++ function that may not be left, and C++ aborts the process:
"terminate called without an active exception". The group may still have its threads then, also after destroy_process_group(), for
example because a DistributedDataParallel refers to it. The launcher's worker loads this file by path, so it uses only the standard
library.
"""

from __future__ import annotations

import os
import sys
import threading
import time

_TASKS = "/proc/self/task"
_PAUSE_S = 0.001
_PAUSE_WITHOUT_PROC_S = 0.05
_CPU_LIMIT_S = 1.0
_LIMIT_S = 30.0
_DAEMON_LIMIT_S = 0.25


def wait_for_idle_threads() -> None:
    """Return when no other thread of this process has run for a millisecond in which it could get the GIL.

    It gives up after a second of CPU time, which a thread takes that computes all the time; on a busy machine, others may wait for the
    CPU much longer. Threads that sleep or wait for a message do not matter. Without /proc it only gives up the GIL for a moment.
    """
    if sys.version_info < (3, 14):  # later versions let such a thread wait instead of ending it
        _end_daemon_threads()
    deadline, cpu_limit_s = time.monotonic() + _LIMIT_S, time.process_time() + _CPU_LIMIT_S
    before: dict[str, bytes] | None = None
    while time.monotonic() < deadline and time.process_time() < cpu_limit_s:
        if not os.path.isdir(_TASKS):
            time.sleep(_PAUSE_WITHOUT_PROC_S)
            return
        # The kernel counts how often each thread began to run. A thread that waits for the GIL sleeps, too, but runs in the pause.
        now = _context_switches()
        if now is not None and now == before:
            return
        before = now
        time.sleep(_PAUSE_S)


def _end_daemon_threads() -> None:
    """End the program's daemon threads here, not in the middle of a call to native code (a store's, for example).

    Python ends them anyway, a moment later. Those that wait for a lock or an event do no harm, and are not disturbed.
    """
    import ctypes  # noqa: PLC0415 - takes a few milliseconds

    frames = sys._current_frames()
    running = [
        thread
        for thread in threading.enumerate()
        if thread.daemon
        and thread is not threading.current_thread()
        and (frame := frames.get(thread.ident or 0)) is not None
        and frame.f_code.co_filename != threading.__file__
    ]
    for thread in running:
        # The thread raises it when it next runs Python code, and ends without a message.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
    deadline = time.monotonic() + _DAEMON_LIMIT_S
    for thread in running:
        thread.join(max(0.0, deadline - time.monotonic()))


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
