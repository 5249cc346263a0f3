"""Forked processes that never start, on the versions of Python in which a fork beside another thread can hang."""

from __future__ import annotations

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

__all__ = ["repair_fork"]

logger = get_logger(__name__)

_REPAIRED = {(3, 10): (3, 10, 15), (3, 11): (3, 11, 8)}
# A fork takes milliseconds. One that is slow on a busy machine is only forked again: nothing has run in it.
_PATIENCE_S = (1, 2, 4, 8, 16, 32)


def repair_fork() -> None:
    """Let multiprocessing fork a process again that hangs in the fork, where Python's own fork can; harmless when repeated.

    After a collective, gloo's thread enters the interpreter to release the tensors. A loader worker that is forked while this
    thread holds the list of threads hangs in ``os.fork``, one in about 1,700 forks, and the loader and all ranks with it:
    https://github.com/python/cpython/issues/112275, in Python 3.10 before 3.10.15 and 3.11 before 3.11.8.
    """
    is_affected = hasattr(os, "fork") and sys.version_info[:3] < _REPAIRED.get(sys.version_info[:2], (0,))
    if is_affected and context.ForkProcess._Popen is not _fork:
        os.register_at_fork(after_in_child=_Started.report)
        context.ForkProcess._Popen = staticmethod(_fork)  # type: ignore[method-assign]


class _Started:
    """Tells the parent that a fork has ended in the child."""

    forking: ClassVar = threading.local()
    """``pipe``: ends to read and to write, while this thread forks a process of multiprocessing."""

    @classmethod
    def report(cls) -> None:
        pipe = cls.forking.__dict__.pop("pipe", None)
        if pipe is not None:
            os.write(pipe[1], b".")
            os.close(pipe[0])
            os.close(pipe[1])


class _Popen(popen_fork.Popen):
    """Forks again until the child has started.

    Raises:
        SetupError: it never did.
    """

    def _launch(self, process_obj: process.BaseProcess) -> None:
        for patience in _PATIENCE_S:
            if self._has_started(process_obj, patience):
                return
            logger.warning(
                "process %d hung in its fork (python/cpython#112275): it is forked again", self.pid, all_ranks=True
            )
        raise SetupError(
            f"the process {process_obj.name} could not be started: {len(_PATIENCE_S)} forks hung or died",
            where=f"Python {sys.version.split()[0]}, python/cpython#112275",
            do="update Python to 3.10.15, 3.11.8 or later",
        )

    def _has_started(self, process_obj: process.BaseProcess, patience: float) -> bool:
        read, write = _Started.forking.pipe = os.pipe()
        try:
            super()._launch(process_obj)  # type: ignore[misc]
        finally:
            del _Started.forking.pipe
            os.close(write)
        try:
            # An empty answer is the end of the pipe: the child has died in its fork.
            if multiprocessing.connection.wait([read], patience) and os.read(read, 1):
                return True
        finally:
            os.close(read)
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        self.close()
        return False


def _fork(process_obj: process.BaseProcess) -> popen_fork.Popen:
    return _Popen(process_obj)
