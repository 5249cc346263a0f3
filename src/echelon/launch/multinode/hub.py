"""The one listener of a run on several machines: who knows the token comes in, as a node or on its way to the ranks' store.

Everybody else is turned away after one short message, and cannot keep those out who belong here: of connections that have not
proved themselves only so many are kept, the oldest goes first. Standard library only.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import final

from echelon.base.errors import LaunchError
from echelon.base.printable import printable
from echelon.launch.multinode.channel import NODE, START_S, STORE, Channel, ChannelError, accept
from echelon.launch.multinode.tunnel import TunnelPump

__all__ = ["Hub", "Tunnel", "listen"]

_BACKLOG = 1024
_MOST_UNPROVEN = 256
_PROOF_WITHIN_S = 10.0
_NAP_S = 0.05
_ENDS_WITHIN_S = 2.0
_LOOPBACK = "127.0.0.1"


def listen(address: str, port: int) -> socket.socket:
    """Listen on one address of this machine.

    Raises:
        OSError: the port is in use, or it is no address of this machine.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


@final
class Hub:
    """Serves a listener until ``close``.

    Args:
        listener: bound; the hub closes it.
        token: what who comes in must know.
        on_node: gets the channel and the address of a new node, in a thread of its own.
        port_of: gives the loopback port of the store of a round; None: that round is not.
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
        self._unproven: OrderedDict[int, socket.socket] = OrderedDict()
        self._lock = threading.Lock()
        self._num_turned_away = 0
        self._thread = threading.Thread(target=self._accept, daemon=True, name="echelon-hub")
        self._thread.start()

    @property
    def num_turned_away(self) -> int:
        """How many connections could not prove themselves so far."""
        return self._num_turned_away

    def close(self) -> None:
        """Let nobody in any more, and cut the ways to the store."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends accept()
        self._listener.close()
        self._thread.join(_ENDS_WITHIN_S)  # not every system wakes accept() for a close
        with self._lock:
            for sock in self._unproven.values():
                sock.close()
        self._pump.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                if self._is_shut():
                    return
                time.sleep(_NAP_S)  # too many open files: those that wait go on when others end
                continue
            with self._lock:
                self._unproven[id(sock)] = sock
                oldest = self._unproven.popitem(last=False)[1] if len(self._unproven) > _MOST_UNPROVEN else None
            if oldest is not None:
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
            try:
                threading.Thread(target=self._serve, args=(sock, address[0]), daemon=True, name="echelon-proof").start()
            except RuntimeError:  # no more threads: as above
                sock.close()

    def _is_shut(self) -> bool:
        try:
            return not self._listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        except OSError:
            return True

    def _serve(self, sock: socket.socket, address: str) -> None:
        try:
            sock.settimeout(_PROOF_WITHIN_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            want, number, key = accept(sock, self._token)
        except (ChannelError, OSError):
            self._num_turned_away += 1
            sock.close()
            return
        finally:
            with self._lock:
                self._unproven.pop(id(sock), None)
        sock.settimeout(START_S)
        if want == NODE:
            self._on_node(Channel(sock, key, is_server=True), address)
        elif want == STORE and (port := self._port_of(number)) is not None:
            self._to_store(sock, port)
        else:
            sock.close()

    def _to_store(self, sock: socket.socket, port: int) -> None:
        try:
            store = socket.create_connection((_LOOPBACK, port), timeout=_PROOF_WITHIN_S)
        except OSError:  # the round has just ended
            sock.close()
            return
        store.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._pump.join(sock, store)


@final
class Tunnel:
    """A port on this machine's loopback that leads to the store on another: the ranks here need no token, and know of nothing.

    Args:
        open_way: opens a proven connection to the store's machine.
    """

    def __init__(self, open_way: Callable[[], socket.socket]) -> None:
        try:
            self._listener = listen(_LOOPBACK, 0)
        except OSError as error:
            raise LaunchError(
                f"cannot listen on {_LOOPBACK}: {error}", do="see the limits of this machine (ulimit -a)"
            ) from error
        self.port: int = self._listener.getsockname()[1]
        self._open_way = open_way
        self._pump = TunnelPump()
        self._is_closed = False
        self._thread = threading.Thread(target=self._accept, daemon=True, name="echelon-tunnel")
        self._thread.start()

    def close(self) -> None:
        """Close the port and all that goes through it."""
        self._is_closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(_ENDS_WITHIN_S)  # not every system wakes accept() for a close
        self._pump.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                continue
            threading.Thread(target=self._lead, args=(sock,), daemon=True, name="echelon-way").start()

    def _lead(self, sock: socket.socket) -> None:
        try:
            way = self._open_way()
        except (ChannelError, OSError) as error:
            print(f"echelon: no way to the store of the run: {printable(str(error))}", file=sys.stderr)
            sock.close()
            return
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._pump.join(sock, way)
