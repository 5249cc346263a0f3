"""The launcher's side of the warm server, which forks ranks (``warm_server.py``)."""

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

from echelon.base import environ
from echelon.base.messages.translation import gettext as _
from echelon.launch.local import warm_server
from echelon.launch.local.parents import own_identity

WARM_VARIABLE = "ECHELON_WARM_SERVER"
"""File descriptor of the socket of ``WarmStarter.lend``, for a launcher; its ranks do not see it."""

_START_S = 30.0
_POLL_S = 0.01


def own_warm_server() -> str | None:
    """Return the file number of the server that forks this launcher's ranks, if the program that started it has one."""
    return environ.get(WARM_VARIABLE)


class Process(Protocol):
    """The part of the ``subprocess.Popen`` interface that the launcher uses."""

    @property
    def pid(self) -> int:
        """Process id, which is also the session id."""

    def poll(self) -> int | None:
        """Return the exit code, or None if the process is still running."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process to end and return its exit code."""


@final
class WarmStarter:
    """Starts ranks by forking them from the warm server, which ``prepare`` starts.

    Args:
        server: file descriptor of a socket of a server that another program has started and that has imported all modules (``lend``).
    """

    def __init__(self, server: int | None = None) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._control = None if server is None else socket.socket(fileno=server)
        self._lock = threading.Lock()
        self._imported: list[str] = []
        """Modules that the server has been asked to import."""
        self._num_importing = 0
        """Number of import requests that the server has not answered yet."""
        self._can_fork = server is not None
        self._is_over = False
        self._codes: dict[int, int | None] = {}
        """Maps each forked rank's process id to its exit code."""
        self._new_pids: list[int] = []

    def prepare(self, environment: Mapping[str, str], modules: Sequence[str]) -> None:
        """Import modules in the background. No rank is forked until all imports are done.

        Args:
            environment: the ranks' environment, because torch reads some variables on import (OMP_NUM_THREADS). Only
                the first call uses it.
            modules: module names, in import order.
        """
        self._open(environment)
        new = [name for name in modules if name not in self._imported]
        if not new or self._control is None or self._is_over:
            return
        self._imported += new
        with self._lock:
            self._num_importing += 1
        with suppress(OSError):  # the server was killed, which the next ``receive`` detects
            self._control.send(json.dumps({"import": new}).encode())

    def _open(self, environment: Mapping[str, str]) -> None:
        if self._control is not None or not hasattr(socket, "SOCK_SEQPACKET") or sys.platform != "linux":
            return
        ours, theirs = _socket_pair()
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, warm_server.__file__, str(theirs.fileno()), own_identity()],
                # OpenBLAS would start threads when numpy is imported, which a fork does not copy.
                env={**environment, "OPENBLAS_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._control = ours

    @property
    def is_ready(self) -> bool:
        """Whether ranks can be forked: True if all imports are done and the server has only one thread."""
        self.receive()
        return self._can_fork and not self._num_importing and not self._is_over

    def wait_until_ready(self, timeout: float, *, check: Callable[[], None] = lambda: None) -> bool:
        """Wait for the imports, and return whether ranks can be forked. ``check`` raises an exception if the launcher must stop."""
        deadline = time.monotonic() + timeout
        while self._control is not None and self._num_importing and not self._is_over and time.monotonic() < deadline:
            check()
            time.sleep(_POLL_S)
            self.receive()
        return self._control is not None and self.is_ready

    def lend(self) -> socket.socket | None:
        """Return a socket for a launcher that this program starts, of a server of its own with the same modules; None if that fails.

        The launcher gets it as ``WarmStarter(server)``. The server and its ranks end when the launcher has closed the socket.
        """
        assert self._control is not None
        ours, theirs = _socket_pair()
        with theirs:
            try:
                socket.send_fds(self._control, [json.dumps({"serve": True}).encode()], [theirs.fileno()])
            except OSError:  # the server was killed
                ours.close()
                return None
        return ours

    def start(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdout: int,
        stderr: int,
        check: Callable[[], None] = lambda: None,
    ) -> Process | None:
        """Fork a rank and return its process, or None if it must be started as a new program instead.

        Args:
            argv: the worker's arguments except PARENT, which is the server.
            environment: the rank's complete environment.
            stdout: file descriptor.
            stderr: file descriptor.
            check: called during the wait; raises an exception if the launcher must stop.
        """
        assert self._control is not None
        request = json.dumps({"argv": list(argv), "environment": dict(environment)}).encode()
        try:
            socket.send_fds(self._control, [request], [stdout, stderr])
        except OSError:  # the environment exceeds the message size, or the server was killed
            return None
        deadline = time.monotonic() + _START_S
        while not self._new_pids and not self._is_over and time.monotonic() < deadline:
            select.select([self._control], [], [], _POLL_S)
            self.receive()
            check()
        if self._new_pids:
            return _Forked(self._new_pids.pop(0), self)
        if not self._is_over:
            # The server hangs. End it, because a rank that it forks later would be a duplicate.
            if self._server is not None:
                self._server.kill()
            self._control.close()
            self._control = None
            self._is_over = True
            self._mark_all_dead()
        return None

    def receive(self) -> None:
        """Read the server's answers."""
        with self._lock:  # on several machines, threads of the connection also call this method
            self._receive()

    def _receive(self) -> None:
        while self._control is not None and not self._is_over and select.select([self._control], [], [], 0)[0]:
            try:
                data = self._control.recv(warm_server.MESSAGE_BYTES)
            except ConnectionError:
                data = b""
            if not data:
                self._is_over = True
                self._mark_all_dead()
                return
            self._handle(json.loads(data))

    def _mark_all_dead(self) -> None:
        """Record that the running ranks have died with the server."""
        self._codes.update({pid: -signal.SIGKILL for pid, code in self._codes.items() if code is None})

    def _handle(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self._can_fork = bool(message["ready"])
            self._num_importing -= 1
        elif "status" in message:
            self._codes[int(message["pid"])] = int(message["status"])
        else:
            self._codes.setdefault(int(message["pid"]), None)
            self._new_pids.append(int(message["pid"]))

    def code_of(self, pid: int) -> int | None:
        """Return a rank's exit code, or None while it is running."""
        self.receive()
        return self._codes[pid]

    def close(self) -> None:
        """Kill the server and its ranks."""
        if self._control is not None:
            self._control.close()  # a server that another program has started ends
            self._control = None
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two ends, of which the first can send and receive long messages."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        ours.setsockopt(socket.SOL_SOCKET, option, warm_server.MESSAGE_BYTES)
    return ours, theirs


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
                raise subprocess.TimeoutExpired(_("rank with process {pid}", pid=self.pid), timeout or 0.0)
            time.sleep(_POLL_S)
        return code
