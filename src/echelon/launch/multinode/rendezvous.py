"""Rendezvous: for each generation of ranks a fresh store, on a fresh socket, on loopback only, on several machines too.

On several machines the store listens on loopback of one of them, and each other has a port on its own loopback from which
a proven connection leads there (``hub.py``). Torch's dynamic handler was looked at and left: it unpickles what it reads from an
open store, and compares the clocks of the machines.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import HashStore, PrefixStore
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from echelon.base.errors import LaunchError
from echelon.launch.multinode.hub import Tunnel
from echelon.launch.multinode.node import Node, NodeGeneration
from echelon.world.listening import store_on

__all__ = ["LOOPBACK", "LoopbackRendezvous", "LoopbackStore", "NodeRendezvous"]

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
            self.store = store_on(listener, timeout=_TIMEOUT)


class _Rendezvous(RendezvousHandler):
    """What is the same on one machine and on several."""

    def __init__(self) -> None:
        self._closed = False

    @property
    def use_agent_store(self) -> bool:
        """Ranks join the store as clients; without this rank 0 would listen itself, on every address."""
        return True

    def is_closed(self) -> bool:
        """Tell whether ``set_closed`` was called."""
        return self._closed

    def set_closed(self) -> None:
        """Note that no generation will follow."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Return 0: nobody joins a machine that is alone, and of several the conductor says when who has come is taken in."""
        return 0


class LoopbackRendezvous(_Rendezvous):
    """Torch's seam for "who takes part", for one machine: always this agent alone.

    A store that outlives a generation makes restarts fail: gloo finds the addresses of dead ranks in it. So each
    ``next_rendezvous`` makes a new one (and drops the old).
    """

    def __init__(self, *, run_id: str, port: int = 0) -> None:
        self._run_id = run_id
        self._port = port
        self._generation = -1
        self._store: LoopbackStore | None = None
        super().__init__()

    def get_backend(self) -> str:
        """Return a name for torch's event log."""
        return "echelon-loopback"

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the store of the next generation."""
        self._store = None  # closes the old socket first: the port may be a fixed one
        self._generation += 1
        self._store = LoopbackStore(self._port)
        return RendezvousInfo(
            PrefixStore(f"agent/{self._generation}", self._store.store),
            0,
            1,
            RendezvousStoreInfo(LOOPBACK, self._store.port),
        )

    def get_run_id(self) -> str:
        """Return the run's name."""
        return self._run_id

    def shutdown(self) -> bool:
        """Close the store."""
        self._store = None
        return True


class NodeRendezvous(_Rendezvous):
    """Torch's seam for "who takes part", for one of several machines: the conductor has decided.

    Args:
        node: this launcher's connection to it.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._tunnel: Tunnel | None = None
        self._round: NodeGeneration | None = None
        super().__init__()

    @property
    def round(self) -> NodeGeneration:
        """The node's place in the round that was begun last."""
        assert self._round is not None
        return self._round

    def get_backend(self) -> str:
        """Return a name for torch's event log."""
        return "echelon"

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round, and open the way to its store."""
        self.shutdown()
        self._round = found = self._node.next_round()
        if found.port:
            port = found.port
        else:
            self._tunnel = Tunnel(self._node.way_to_store)
            port = self._tunnel.port
        # The agents themselves need no store: ranks are numbered by the conductor, and ends are agreed through it.
        return RendezvousInfo(
            HashStore(), found.group_rank, found.group_world_size, RendezvousStoreInfo(LOOPBACK, port)
        )

    def get_run_id(self) -> str:
        """Return the run's name."""
        return self._node.info.run_id

    def shutdown(self) -> bool:
        """Close the way to the store."""
        if self._tunnel is not None:
            self._tunnel.close()
            self._tunnel = None
        return True
