"""The process from which the rank workers of ``run_on_ranks`` are forked, so that torch is imported only once."""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, final

from tests import rank_worker
from tests.garbage import freeze_new_modules

ROOT = Path(__file__).resolve().parent.parent
_MESSAGE_BYTES = 1 << 20
_POLL_S = 0.002


@final
class Forked:
    """A process forked by a ``Nursery``, with the interface of ``subprocess.Popen``."""

    def __init__(self, pid: int, end: Path) -> None:
        self.pid = pid
        self._end = end  # the nursery writes its exit code there
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code (negative for a signal), or None if it is running."""
        if self._code is None:
            with suppress(FileNotFoundError):
                self._code = int(self._end.read_text())
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit, and return the exit code. Raises: subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a rank worker", timeout or 0.0)
            time.sleep(_POLL_S)  # only its parent can wait for it
        return code

    def send_signal(self, number: int) -> None:
        """Send the signal ``number``, if the process is running."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process, if it is running."""
        self.send_signal(signal.SIGKILL)


@final
class Nursery:
    """Forks workers from a process that has imported the modules they need."""

    def __init__(self, environ: dict[str, str]) -> None:
        self._control, theirs = socket.socketpair()
        start = (
            "import sys; sys.path.insert(0, sys.argv[1]); from tests.rank_nursery import main; main(int(sys.argv[2]))"
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", start, str(ROOT), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environ,
                cwd=ROOT,
            )

    def fileno(self) -> int:
        """Return the descriptor that stays open in this process."""
        return self._control.fileno()

    def start(self, *, connection: int, output: int, stacks: Path, end: Path, modules: Iterable[str] = ()) -> Forked:
        """Fork a worker.

        Args:
            connection: the connection on which it receives calls.
            output: file for its output.
            stacks: file for its stack dumps.
            end: file for its exit code.
            modules: modules to import first, for this worker and all later ones.
        """
        request = json.dumps({"stacks": str(stacks), "end": str(end), "modules": sorted(modules)}).encode()
        socket.send_fds(self._control, [request], [connection, output])
        answer = self._control.recv(_MESSAGE_BYTES)
        if not answer:
            raise RuntimeError(f"the process that forks rank workers has ended with code {self._process.wait()}")
        return Forked(json.loads(answer)["pid"], end)

    def close(self) -> None:
        """Terminate the process and all its workers."""
        self._process.kill()
        self._process.wait()
        self._control.close()


def main(control_fd: int) -> None:
    """Fork a worker for each request and record its exit code, until the parent closes the socket."""
    rank_worker.die_with_parent()
    rank_worker.import_heavy()
    _check_one_thread()
    control = socket.socket(fileno=control_fd)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    sources: list[Any] = [control, woken]
    ends: dict[int, str] = {}
    while True:
        readable, _, _ = select.select(sources, [], [])
        if woken in readable:
            os.read(woken, 4096)
            _note_ends(ends)
        if control in readable:
            data, files, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 2)
            if not data:
                return
            request = json.loads(data)
            _import(request["modules"])
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for file in (woken, wake, control.detach()):
                    os.close(file)
                _be_worker(files[0], files[1], request["stacks"])
            ends[pid] = request["end"]
            for file in files:
                os.close(file)
            control.send(json.dumps({"pid": pid}).encode())


def _check_one_thread() -> None:
    tasks = Path("/proc/self/task")
    assert not tasks.exists() or len(list(tasks.iterdir())) == 1, "a fork takes no other thread with it"


def _import(modules: list[str]) -> None:
    new = [name for name in modules if name not in sys.modules]
    for name in new:
        importlib.import_module(name)
    if new:
        freeze_new_modules()
        _check_one_thread()


def _note_ends(ends: dict[int, str]) -> None:
    while ends:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        end = Path(ends.pop(pid))
        if end.parent.exists():  # otherwise the result is no longer needed
            new = end.with_suffix(".new")
            new.write_text(str(os.waitstatus_to_exitcode(status)))
            new.rename(end)


def _be_worker(connection: int, output: int, stacks: str) -> NoReturn:
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()  # as in a new process; `random` reseeds itself after a fork
    rank_worker.main(connection, stacks)
    sys.exit(0)
