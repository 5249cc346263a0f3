"""The launcher's end of the process that forks warm ranks (``warm_server.py``)."""

from __future__ import annotations

import json
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, final

from echelon.launch.local import warm_server
from echelon.launch.local.parents import own_identity

__all__ = ["Process", "WarmStarter"]

_STARTS_WITHIN_S = 30.0
_POLL_S = 0.01


class Process(Protocol):
    """What the launcher needs of a rank's process: a part of ``subprocess.Popen``."""

    @property
    def pid(self) -> int:
        """Its number; it leads the session of that number."""

    def poll(self) -> int | None:
        """Return its exit code; None: it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its exit code."""


@final
class WarmStarter:
    """Starts ranks by forking a process that has imported torch already.

    Nothing happens before ``prepare``. Whoever opens it closes it.
    """

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._lock = threading.Lock()
        self._imported: list[str] = []
        """Or asked to be."""
        self._num_importing = 0
        """Requests whose answer has not come."""
        self._is_able = False
        self._is_over = False
        self._codes: dict[int, int | None] = {}
        """Of the ranks forked so far."""
        self._born: list[int] = []

    def prepare(self, environment: Mapping[str, str], modules: Sequence[str]) -> None:
        """Begin to import what is not imported yet, in the background; no rank is started from it before that is done.

        Args:
            environment: of the ranks: some variables count when torch is imported (OMP_NUM_THREADS). The first call's is taken.
            modules: in their order.
        """
        self._open(environment)
        new = [name for name in modules if name not in self._imported]
        if not new or self._control is None or self._is_over:
            return
        self._imported += new
        with self._lock:
            self._num_importing += 1
        with suppress(OSError):  # it was killed: the next look sees that
            self._control.send(json.dumps({"import": new}).encode())

    def _open(self, environment: Mapping[str, str]) -> None:
        if self._server is not None or not hasattr(socket, "SOCK_SEQPACKET") or sys.platform != "linux":
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, warm_server.__file__, str(theirs.fileno()), own_identity()],
                # numpy begins its library's threads when it is imported, and no fork takes them along.
                env={**environment, "OPENBLAS_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            ours.setsockopt(socket.SOL_SOCKET, option, warm_server.MESSAGE_BYTES)
        self._control = ours

    @property
    def is_ready(self) -> bool:
        """Whether ranks can be started now: it has imported, and has one thread."""
        self.receive()
        return self._is_able and not self._num_importing and not self._is_over

    def start(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdout: int,
        stderr: int,
        check: Callable[[], None] = lambda: None,
    ) -> Process | None:
        """Start a rank; None: it did not work, start it another way.

        Args:
            argv: of the worker, without whom it ends with: that is the server.
            environment: the whole of it.
            stdout: where its output goes.
            stderr: where its errors go.
            check: called while this waits; it raises when the launcher is to stop.
        """
        assert self._control is not None
        request = json.dumps({"argv": list(argv), "environment": dict(environment)}).encode()
        try:
            socket.send_fds(self._control, [request], [stdout, stderr])
        except OSError:  # an environment that is larger than a message may be, or a server that was killed
            return None
        deadline = time.monotonic() + _STARTS_WITHIN_S
        while not self._born and not self._is_over and time.monotonic() < deadline:
            select.select([self._control], [], [], _POLL_S)
            self.receive()
            check()
        if self._born:
            return _Forked(self._born.pop(0), self)
        if self._server is not None and not self._is_over:
            # It stands still. A rank that it begins later would be one too many.
            self._server.kill()
            self._is_over = True
            self._end_all()
        return None

    def receive(self) -> None:
        """Read what the server has said."""
        with self._lock:  # a node of several machines answers for its ranks in other threads
            self._receive()

    def _receive(self) -> None:
        while self._control is not None and not self._is_over and select.select([self._control], [], [], 0)[0]:
            try:
                data = self._control.recv(warm_server.MESSAGE_BYTES)
            except ConnectionError:
                data = b""
            if not data:
                self._is_over = True
                self._end_all()
                return
            self._note(json.loads(data))

    def _end_all(self) -> None:
        """Its ranks have died with it."""
        self._codes.update({pid: -signal.SIGKILL for pid, code in self._codes.items() if code is None})

    def _note(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self._is_able = bool(message["ready"])
            self._num_importing -= 1
        elif "status" in message:
            self._codes[int(message["pid"])] = int(message["status"])
        else:
            self._codes.setdefault(int(message["pid"]), None)
            self._born.append(int(message["pid"]))

    def code_of(self, pid: int) -> int | None:
        """Return the exit code of a rank; None: it runs."""
        self.receive()
        return self._codes[pid]

    def close(self) -> None:
        """End the server, and with it what it has started."""
        if self._server is None:
            return
        assert self._control is not None
        self._control.close()
        self._control = None
        self._server.kill()
        self._server.wait()


@final
class _Forked:
    def __init__(self, pid: int, starter: WarmStarter) -> None:
        self.pid = pid
        self._starter = starter

    def poll(self) -> int | None:
        return self._starter.code_of(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"rank with process {self.pid}", timeout or 0.0)
            time.sleep(_POLL_S)
        return code
