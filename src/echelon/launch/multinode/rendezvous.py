"""Rendezvous: every generation gets a fresh store on a fresh socket, on loopback only, also on several machines.

On several machines the store listens on loopback of one of them, and each other machine has a port on its own loopback from
which an authenticated connection leads there (``tunnel.py``). Torch's dynamic rendezvous is not used: it unpickles what it
reads from an open store, and compares the clocks of the machines.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from echelon.base.errors import LaunchError
from echelon.launch.multinode.tunnel import Tunnel
from echelon.launch.node import Node, NodeGeneration
from echelon.world.group import serve_store

__all__ = ["LOOPBACK", "LoopbackStore", "NodeRendezvous"]

LOOPBACK = "127.0.0.1"
_BACKLOG = 512
_TIMEOUT = timedelta(minutes=5)


class LoopbackStore:
    """A ``TCPStore`` that only this machine can reach (any user of it, though: torch's store asks for no password).

    The socket is bound before the store gets it: torch alone would listen on every address, and a port that is looked
    up first can be taken in between.

    Args:
        port: to listen on; 0: a free one.

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
                    f"cannot listen on {LOOPBACK}:{port}: {error}", do="give another port, or 0 for a free one"
                ) from error
            listener.listen(_BACKLOG)
            self.port: int = listener.getsockname()[1]
            self.store = serve_store(listener, timeout=_TIMEOUT)


class NodeRendezvous(RendezvousHandler):
    """Torch's interface for "who takes part", answered by a node.

    Args:
        node: this machine's part in the run.
        run_id: for torch's event log.
    """

    def __init__(self, node: Node, run_id: str) -> None:
        self._node, self._run_id = node, run_id
        self._tunnel: Tunnel | None = None
        self._generation: NodeGeneration | None = None
        self._closed = False

    @property
    def generation(self) -> NodeGeneration:
        """The last generation that was started."""
        assert self._generation is not None
        return self._generation

    @property
    def use_agent_store(self) -> bool:
        """Ranks join the store as clients; without this rank 0 would listen itself, on every address."""
        return True

    def get_backend(self) -> str:
        """Return a name for torch's event log."""
        return "echelon"

    def get_run_id(self) -> str:
        """Return the run's name."""
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next generation, and make its store reachable."""
        self.shutdown()
        generation = self._generation = self._node.next_generation()
        port = generation.port
        if not port:
            self._tunnel = Tunnel(self._node.connect_to_store)
            port = self._tunnel.port
        # The agents need no store: the node numbers the ranks, and agrees on how a generation ends.
        return RendezvousInfo(
            HashStore(), generation.group_rank, generation.group_world_size, RendezvousStoreInfo(LOOPBACK, port)
        )

    def num_nodes_waiting(self) -> int:
        """Return 0: the node decides when machines that join are admitted."""
        return 0

    def is_closed(self) -> bool:
        """Tell whether ``set_closed`` was called."""
        return self._closed

    def set_closed(self) -> None:
        """Remember that no generation will follow."""
        self._closed = True

    def shutdown(self) -> bool:
        """Close the tunnel to the store."""
        if self._tunnel is not None:
            self._tunnel.close()
            self._tunnel = None
        return True
