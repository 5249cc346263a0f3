"""Rendezvous: each generation gets a new store on a new socket, which listens only on loopback.

In a multi-machine run, one machine hosts the store, and each other machine has a loopback port that is connected to the
store through an authenticated connection (``tunnel.py``). torch's dynamic rendezvous is not used, because it unpickles
data from an unprotected store and compares the machines' clocks.
"""

from __future__ import annotations

from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from echelon.launch.loopback_store import LOOPBACK
from echelon.launch.multinode.tunnel import Tunnel
from echelon.launch.node import Node, NodeGeneration

__all__ = ["NodeRendezvous"]


class NodeRendezvous(RendezvousHandler):
    """torch's rendezvous interface, implemented by a node.

    Args:
        node: the interface to the run.
        run_id: the run's name in torch's event log.
    """

    def __init__(self, node: Node, run_id: str) -> None:
        self._node, self._run_id = node, run_id
        self._tunnel: Tunnel | None = None
        self._generation: NodeGeneration | None = None
        self._closed = False

    @property
    def generation(self) -> NodeGeneration:
        """The most recently started generation."""
        assert self._generation is not None
        return self._generation

    @property
    def use_agent_store(self) -> bool:
        """Always True, so that ranks join the store as clients; otherwise, rank 0 would listen on all addresses."""
        return True

    def get_backend(self) -> str:
        """Return the backend's name for torch's event log."""
        return "echelon"

    def get_run_id(self) -> str:
        """Return the run's name."""
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next generation and open a tunnel to its store if necessary."""
        self.shutdown()
        generation = self._generation = self._node.next_generation()
        port = generation.port
        if not port:
            self._tunnel = Tunnel(self._node.connect_to_store)
            port = self._tunnel.port
        # The agents need no store, because the nodes number the ranks and agree on how a generation ends.
        return RendezvousInfo(
            HashStore(), generation.group_rank, generation.group_world_size, RendezvousStoreInfo(LOOPBACK, port)
        )

    def num_nodes_waiting(self) -> int:
        """Return 0, because the coordinator decides when to admit machines."""
        return 0

    def is_closed(self) -> bool:
        """Return whether ``set_closed`` has been called."""
        return self._closed

    def set_closed(self) -> None:
        """Record that no more generations follow."""
        self._closed = True

    def shutdown(self) -> bool:
        """Close the tunnel to the store."""
        if self._tunnel is not None:
            self._tunnel.close()
            self._tunnel = None
        return True
