"""The listener for a multi-machine run. Clients that know the token connect as a node or to the ranks' store.

Other clients are disconnected after one short message. They cannot lock out legitimate clients, because the number of
unauthenticated connections is limited and the oldest one is dropped. This module uses only the standard library.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import final

from echelon.launch.multinode.channel import NODE, START_S, STORE, Channel, ChannelError, accept
from echelon.launch.multinode.tunnel import CLOSE_S, TunnelPump

__all__ = ["ConnectionListener"]

_MAX_PENDING = 256
_AUTHENTICATE_S = 10.0
_RETRY_S = 0.05
_LOOPBACK = "127.0.0.1"


@final
class ConnectionListener:
    """Accepts and authenticates connections until ``close``.

    Args:
        listener: a bound socket, which ``close`` closes.
        token: the secret that clients must know.
        on_node: called in a separate thread with a new node's channel and address.
        port_of: returns the loopback port of a generation's store, or None if that generation is not running.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: bytes,
        *,
        on_node: Callable[[Channel, str], None],
        port_of: Callable[[int], int | None],
    ) -> None:
        self._listener = listener
        self._token = token
        self._on_node, self._port_of = on_node, port_of
        self._pump = TunnelPump()
        self._pending: OrderedDict[int, socket.socket] = OrderedDict()
        self._lock = threading.Lock()
        self._num_refused = 0
        self._thread = threading.Thread(target=self._accept, daemon=True, name="echelon-connections")
        self._thread.start()

    @property
    def num_refused(self) -> int:
        """Number of connections that have failed to authenticate."""
        return self._num_refused

    def close(self) -> None:
        """Stop accepting connections, and close the connections to the store."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends accept()
        self._listener.close()
        self._thread.join(CLOSE_S)
        with self._lock:
            for sock in self._pending.values():
                sock.close()
        self._pump.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0 or self._is_shut_down():
                    return
                time.sleep(_RETRY_S)  # too many open files
                continue
            with self._lock:
                self._pending[id(sock)] = sock
                oldest = self._pending.popitem(last=False)[1] if len(self._pending) > _MAX_PENDING else None
            if oldest is not None:
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
            try:
                threading.Thread(
                    target=self._serve, args=(sock, address[0]), daemon=True, name="echelon-authenticate"
                ).start()
            except RuntimeError:  # too many threads; the client retries
                sock.close()

    def _is_shut_down(self) -> bool:
        try:
            return not self._listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        except OSError:
            return True

    def _serve(self, sock: socket.socket, address: str) -> None:
        try:
            sock.settimeout(_AUTHENTICATE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            purpose, number, key = accept(sock, self._token)
        except (ChannelError, OSError):
            self._num_refused += 1
            sock.close()
            return
        finally:
            with self._lock:
                self._pending.pop(id(sock), None)
        sock.settimeout(START_S)
        if purpose == NODE:
            self._on_node(Channel(sock, key, is_server=True), address)
        elif purpose == STORE and (port := self._port_of(number)) is not None:
            self._forward_to_store(sock, port)
        else:
            sock.close()

    def _forward_to_store(self, sock: socket.socket, port: int) -> None:
        try:
            store = socket.create_connection((_LOOPBACK, port), timeout=_AUTHENTICATE_S)
        except OSError:  # the generation has just ended
            sock.close()
            return
        store.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._pump.add(sock, store)
