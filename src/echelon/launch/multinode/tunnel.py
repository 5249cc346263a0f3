"""Tunnels to a store on another machine's loopback. One thread forwards the bytes of all connections."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import final

from echelon.base.errors import LaunchError
from echelon.base.messages.terminal import say
from echelon.launch.multinode.channel import ChannelError
from echelon.launch.multinode.network import listen

__all__ = ["CLOSE_S", "Tunnel", "TunnelPump"]

CLOSE_S = 2.0
"""Time limit for joining a thread in ``accept()``, because not every system wakes it when its socket is closed."""
_LOOPBACK = "127.0.0.1"

_CHUNK_BYTES = 1 << 16
_MAX_PENDING_BYTES = 1 << 22
"""Size limit of the buffer for a side that reads slowly; when it is full, the other side is not read."""


@dataclass(slots=True, eq=False)
class _End:
    sock: socket.socket
    pending: bytearray = field(default_factory=bytearray)
    """Bytes to write to this side."""
    is_over: bool = False
    """Whether this side has stopped sending."""
    other: _End | None = None


@final
class TunnelPump:
    """Forwards bytes between pairs of connections in one thread, until ``close``."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._new: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        self._wake, wake = socket.socketpair()
        wake.setblocking(False)
        self._selector.register(wake, selectors.EVENT_READ, None)
        self._woken = wake
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="echelon-tunnel-pump")
        self._thread.start()

    def add(self, one: socket.socket, other: socket.socket) -> None:
        """Forward bytes between two connections until one ends, and then close both."""
        with self._lock:
            if not self._is_closed:
                self._new.append((one, other))
                self._wake.send(b".")
                return
        for sock in (one, other):
            sock.close()

    def close(self) -> None:
        """Close all connections and stop the thread."""
        with self._lock:
            self._is_closed = True
            with suppress(OSError):
                self._wake.send(b".")
        self._thread.join()

    def _run(self) -> None:
        while not self._is_closed:
            for key, events in self._selector.select():
                if key.data is None:
                    self._add_new()
                else:
                    self._forward(key.data, events)
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        with self._lock:
            for pair in self._new:
                for sock in pair:
                    sock.close()
        self._selector.close()
        self._wake.close()

    def _add_new(self) -> None:
        self._woken.recv(_CHUNK_BYTES)
        with self._lock:
            new, self._new = self._new, []
        for one, other in new:
            ends = _End(one), _End(other)
            for end, its_other in zip(ends, reversed(ends)):
                end.other = its_other
            try:
                for end in ends:
                    end.sock.setblocking(False)
                    self._selector.register(end.sock, selectors.EVENT_READ, end)
            except (OSError, ValueError):
                self._drop(ends[0])  # the other side has closed it

    def _forward(self, end: _End, events: int) -> None:
        assert end.other is not None
        if end.sock.fileno() < 0:
            return  # closed by an earlier event of this select
        try:
            if events & selectors.EVENT_READ:
                data = end.sock.recv(_CHUNK_BYTES)
                end.is_over = not data
                end.other.pending += data
                self._write(end.other)
            if events & selectors.EVENT_WRITE:
                self._write(end)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(end)
            return
        if (end.is_over and not end.other.pending) or (end.other.is_over and not end.pending):
            # Stores never half-close a connection, so a side that stops sending has closed it.
            self._drop(end)
            return
        self._watch(end)
        self._watch(end.other)

    def _write(self, end: _End) -> None:
        while end.pending:
            try:
                num_sent = end.sock.send(end.pending[:_CHUNK_BYTES])
            except BlockingIOError:
                return
            del end.pending[:num_sent]

    def _watch(self, end: _End) -> None:
        assert end.other is not None
        reads = not end.is_over and len(end.other.pending) < _MAX_PENDING_BYTES
        events = (selectors.EVENT_READ if reads else 0) | (selectors.EVENT_WRITE if end.pending else 0)
        if not events:
            with suppress(KeyError):
                self._selector.unregister(end.sock)
            return
        try:
            self._selector.modify(end.sock, events, end)
        except KeyError:
            self._selector.register(end.sock, events, end)

    def _drop(self, end: _End) -> None:
        for one in (end, end.other):
            assert one is not None
            with suppress(KeyError, ValueError):
                self._selector.unregister(one.sock)
            one.sock.close()


@final
class Tunnel:
    """A port on this machine's loopback that forwards to the store on another machine. Ranks use it without a token.

    Args:
        connect: function that opens an authenticated connection to the store.
    """

    def __init__(self, connect: Callable[[], socket.socket]) -> None:
        try:
            self._listener = listen(_LOOPBACK, 0)
        except OSError as error:
            raise LaunchError(
                f"cannot listen on {_LOOPBACK}: {error}", do="check the limit on open files (ulimit -a)"
            ) from error
        self.port: int = self._listener.getsockname()[1]
        self._connect = connect
        self._pump = TunnelPump()
        self._is_closed = False
        self._thread = threading.Thread(target=self._accept, daemon=True, name="echelon-tunnel")
        self._thread.start()

    def close(self) -> None:
        """Close the port and all connections that go through it."""
        self._is_closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(CLOSE_S)
        self._pump.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                continue
            threading.Thread(target=self._forward, args=(sock,), daemon=True, name="echelon-tunnel-connect").start()

    def _forward(self, sock: socket.socket) -> None:
        try:
            store = self._connect()
        except (ChannelError, OSError) as error:
            say(f"cannot connect to the run's store: {error}", kind="error")
            sock.close()
            return
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._pump.add(sock, store)
