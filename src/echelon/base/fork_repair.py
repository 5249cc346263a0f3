"""Makes forking safe in a process with threads and process groups, for example to start DataLoader workers."""

from __future__ import annotations

import functools
import gc
import multiprocessing.connection
import os
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing import context, popen_fork, process
from typing import ClassVar

from echelon.base.errors import SetupError
from echelon.base.logging import get_logger

logger = get_logger(__name__)

_REPAIRED = {(3, 10): (3, 10, 15), (3, 11): (3, 11, 8)}
# A fork takes milliseconds. Repeating one that is only slow on a busy machine is harmless, because nothing has run in it.
_TIMEOUTS_S = (1, 2, 4, 8, 16, 32)


def repair_fork() -> None:
    """Keep forked processes from hanging or aborting. Calling this function again has no effect.

    A forked process never garbage-collects its parent's objects. The destructor of a process group or store joins threads
    that do not exist in the child, so a garbage collection would make a DataLoader worker hang or abort.

    On affected versions of Python, multiprocessing retries a fork that hangs. After a collective, gloo's thread enters the
    interpreter to release the tensors. A DataLoader worker forked while this thread holds the lock on the thread list hangs
    in ``os.fork`` (in about one of 1,700 forks), and with it the DataLoader and all ranks. Python 3.10 before 3.10.15 and
    3.11 before 3.11.8 are affected: https://github.com/python/cpython/issues/112275.
    """
    _freeze_garbage_in_children()
    is_affected = hasattr(os, "fork") and sys.version_info[:3] < _REPAIRED.get(sys.version_info[:2], (0,))
    if is_affected and context.ForkProcess._Popen is not _Popen:
        os.register_at_fork(after_in_child=_Started.report)
        context.ForkProcess._Popen = staticmethod(_Popen)  # type: ignore[method-assign]


@functools.cache
def _freeze_garbage_in_children() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=gc.freeze)


class _Started:
    """Tells the parent process that the fork has completed in the child."""

    forking: ClassVar = threading.local()
    """``pipe``: the read and write ends of a pipe, set while this thread forks a multiprocessing process."""

    @classmethod
    def report(cls) -> None:
        pipe = cls.forking.__dict__.pop("pipe", None)
        if pipe is not None:
            os.write(pipe[1], b".")
            os.close(pipe[0])
            os.close(pipe[1])


class _Popen(popen_fork.Popen):
    """Retries the fork until the child has started.

    Raises:
        SetupError: no attempt succeeded.
    """

    def _launch(self, process_obj: process.BaseProcess) -> None:
        for timeout in _TIMEOUTS_S:
            if self._has_started(process_obj, timeout):
                return
            logger.warning("process %d hung while forking (python/cpython#112275); retrying", self.pid, all_ranks=True)
        raise SetupError(
            f"cannot start process {process_obj.name}: {len(_TIMEOUTS_S)} forks hung or crashed",
            where=f"Python {sys.version.split()[0]}, python/cpython#112275",
            do="upgrade Python to 3.10.15, 3.11.8 or later",
        )

    def _has_started(self, process_obj: process.BaseProcess, timeout: float) -> bool:
        read, write = _Started.forking.pipe = os.pipe()
        try:
            super()._launch(process_obj)  # type: ignore[misc]
        finally:
            del _Started.forking.pipe
            os.close(write)
        try:
            # An empty read is the end of the pipe: the child has died in its fork.
            if multiprocessing.connection.wait([read], timeout) and os.read(read, 1):
                return True
        finally:
            os.close(read)
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        self.close()
        return False
