"""Carry bytes between pairs of connections, all of them in one thread: the way to a store that listens on loopback only."""

from __future__ import annotations

import selectors
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import final

__all__ = ["TunnelPump"]

_CHUNK_BYTES = 1 << 16
_MOST_WAITING_BYTES = 1 << 22
"""Of a side that reads slowly so much is kept; then the other side is not read."""


@dataclass(slots=True, eq=False)
class _End:
    sock: socket.socket
    waiting: bytearray = field(default_factory=bytearray)
    """To be written to it."""
    is_over: bool = False
    """It will send no more."""
    other: _End | None = None


@final
class TunnelPump:
    """Its thread runs until ``close``."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._new: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        self._wake, wake = socket.socketpair()
        wake.setblocking(False)
        self._selector.register(wake, selectors.EVENT_READ, None)
        self._woken = wake
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="echelon-pump")
        self._thread.start()

    def join(self, one: socket.socket, other: socket.socket) -> None:
        """Carry what comes on either connection to the other, until one ends; both are closed then."""
        with self._lock:
            if not self._is_closed:
                self._new.append((one, other))
                self._wake.send(b".")
                return
        for sock in (one, other):
            sock.close()

    def close(self) -> None:
        """Close all connections, and end."""
        with self._lock:
            self._is_closed = True
            with suppress(OSError):
                self._wake.send(b".")
        self._thread.join()

    def _run(self) -> None:
        while not self._is_closed:
            for key, events in self._selector.select():
                if key.data is None:
                    self._take_new()
                else:
                    self._serve(key.data, events)
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        with self._lock:
            for pair in self._new:
                for sock in pair:
                    sock.close()
        self._selector.close()
        self._wake.close()

    def _take_new(self) -> None:
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
                self._drop(ends[0])  # closed by its other side's end meanwhile

    def _serve(self, end: _End, events: int) -> None:
        assert end.other is not None
        if end.sock.fileno() < 0:
            return  # closed by what came before it in this round
        try:
            if events & selectors.EVENT_READ:
                data = end.sock.recv(_CHUNK_BYTES)
                end.is_over = not data
                end.other.waiting += data
                self._write(end.other)
            if events & selectors.EVENT_WRITE:
                self._write(end)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(end)
            return
        if (end.is_over and not end.other.waiting) or (end.other.is_over and not end.waiting):
            # Neither side of a store's connection is closed for writing alone: who has ended has gone.
            self._drop(end)
            return
        self._watch(end)
        self._watch(end.other)

    def _write(self, end: _End) -> None:
        while end.waiting:
            try:
                num_sent = end.sock.send(end.waiting[:_CHUNK_BYTES])
            except BlockingIOError:
                return
            del end.waiting[:num_sent]

    def _watch(self, end: _End) -> None:
        assert end.other is not None
        reads = not end.is_over and len(end.other.waiting) < _MOST_WAITING_BYTES
        events = (selectors.EVENT_READ if reads else 0) | (selectors.EVENT_WRITE if end.waiting else 0)
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
