"""A store on a socket that is bound already: torch alone would listen on every address of the machine."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore

__all__ = ["store_on"]


def store_on(listener: socket.socket, *, world_size: int | None = None, timeout: timedelta) -> TCPStore:
    """Serve a store on ``listener``, and return this process's connection to it.

    Args:
        listener: bound, and listening; it is taken over.
        world_size: how many processes will connect; None: nobody knows.
        timeout: of waiting for keys.
    """
    host, port = listener.getsockname()[:2]
    # The newer server takes such a socket from torch 2.8 on (pytorch/pytorch#150215), when stores learnt to clone themselves, too.
    return TCPStore(
        host,
        port,
        world_size,
        True,
        timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=hasattr(TCPStore, "clone"),
    )
