"""A key-value store for the ranks of one machine, which listens only on loopback. Imports torch."""

from __future__ import annotations

import socket
from datetime import timedelta

from echelon.base.errors import LaunchError
from echelon.world.group import serve_store

__all__ = ["LOOPBACK", "LoopbackStore"]

LOOPBACK = "127.0.0.1"
_BACKLOG = 512
_TIMEOUT = timedelta(minutes=5)


class LoopbackStore:
    """A ``TCPStore`` that listens only on loopback. It has no password, so any user on this machine can reach it.

    The store receives a socket that is already bound. torch itself would listen on all addresses, and another process
    could take a free port between its lookup and its use.

    Args:
        port: port to listen on; 0 for any free port.

    Raises:
        LaunchError: the port is in use.
    """

    def __init__(self, port: int = 0) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((LOOPBACK, port))
            except (OSError, OverflowError) as error:
                raise LaunchError(
                    f"cannot listen on {LOOPBACK}:{port}: {error}",
                    do="use another --main_process_port, or 0 for any free port",
                ) from error
            listener.listen(_BACKLOG)
            self.port: int = listener.getsockname()[1]
            self.store = serve_store(listener, timeout=_TIMEOUT)
