"""echelon's rendezvous under plain torchrun: ``torchrun --rdzv-backend echelon``.

torchrun starts, watches and restarts the ranks; the coordinator (``launch/coordinator.py``) decides which machines belong to a
generation, authenticates them with the token, and names the missing ones. A machine counts as one process there, because torchrun does
not say how many it starts.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import final

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from echelon.base.errors import LaunchError
from echelon.config.resolve import resolve
from echelon.config.schema import RunConfig
from echelon.config.sources import from_flags
from echelon.launch.coordinator import joined_run
from echelon.launch.interrupts import Interrupts
from echelon.launch.multinode.connections import Tunnel
from echelon.launch.multinode.machines import CliOverrides, MultinodePlan, make_plan
from echelon.launch.node import Node, NodeGeneration, RunOver, RunRules
from echelon.launch.supervisor import StallRules
from echelon.status.run_recorder import RunRecorder

_LOOPBACK = "127.0.0.1"
_GOODBYE_S = 5.0
"""How long to wait at the end for the other machines, which still use the store of the rendezvous host."""


def build_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Return the handler for torchrun's parameters.

    Raises:
        ConfigError: a setting is missing or invalid.
        LaunchError: the port is in use.
    """
    overrides = CliOverrides(
        nnodes=f"{params.min_nodes}:{params.max_nodes}",
        rdzv_endpoint=params.endpoint or None,
        rdzv_id=params.run_id,
        rdzv_conf=",".join(f"{name}={value}" for name, value in params.config.items()),
        local_addr=params.local_addr,
        typed={"rdzv_endpoint": "--rdzv-endpoint", "rdzv_conf": "--rdzv-conf", "local_addr": "--local-addr"},
    )
    resolved = resolve(RunConfig, [from_flags({"num_machines": (params.max_nodes, "--nnodes")})])
    return _Handler(make_plan(resolved, overrides, num_processes=1, step=None))


@final
class _Handler(RendezvousHandler):
    """The rendezvous of this machine, from torchrun's first generation to its end."""

    def __init__(self, plan: MultinodePlan) -> None:
        self._plan = plan
        self._stack = ExitStack()
        self._node: Node | None = None
        self._generation: NodeGeneration | None = None
        self._tunnel: Tunnel | None = None

    def get_backend(self) -> str:
        return "echelon"

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_run_id(self) -> str:
        return self._plan.info.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until the machines of the next generation have joined; the one before ends on all of them.

        Raises:
            RendezvousClosedError: the run is over, for example because machines are missing.
            RendezvousConnectionError: the coordinator cannot be reached, or refuses this machine.
        """
        try:
            node = self._node = self._node or self._join()
            generation = self._generation = _next_generation(node)
        except LaunchError as error:
            raise RendezvousConnectionError(str(error)) from error
        except RunOver as over:
            reason = over.result.error or "the reason is above"
            raise RendezvousClosedError(f"the run is over: {reason}") from None
        port = generation.port
        if self._tunnel is not None:
            self._tunnel.close()
            self._tunnel = None
        if not port:
            self._tunnel = Tunnel(node.open_store)
            port = self._tunnel.port
        store = PrefixStore("torchrun", TCPStore(_LOOPBACK, port, is_master=False))
        ranks = generation.group_rank, generation.group_world_size
        return RendezvousInfo(store, *ranks, RendezvousStoreInfo(_LOOPBACK, port))

    def _join(self) -> Node:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        began_ns = time.monotonic_ns()
        rules = RunRules(
            max_restarts=0,  # torchrun counts the restarts
            stall=StallRules(timeout=timedelta(), on_stall="report"),
            preemption_grace=timedelta(),
            logs="",
            directory=folder,
            began_ns=began_ns,
            record=RunRecorder(None, began_ns=began_ns),
        )
        return self._stack.enter_context(joined_run(self._plan, rules, Interrupts(), num_processes=1, port=0))

    def is_closed(self) -> bool:
        result = None if self._node is None else self._node.result()
        return result is not None and result.then not in ("restart", "lost")

    def num_nodes_waiting(self) -> int:
        """Return 1 if the generation has ended, so that torchrun stops the ranks and comes to ``next_rendezvous``."""
        result = None if self._node is None else self._node.result()
        return int(result is not None and result.then != "done")

    def set_closed(self) -> None:
        if self._node is not None:
            self._node.leave("torchrun has closed the rendezvous", 1)

    def shutdown(self) -> bool:
        """Leave the run: torchrun calls this while it raises its error, or when all machines have come to the end."""
        error = sys.exc_info()[1]
        node, generation = self._node, self._generation
        if node is not None and error is not None:
            node.leave(f"torchrun has failed: {type(error).__name__}", 1)
        elif node is not None and generation is not None:
            node.report({generation.first_rank: 0})
            deadline = time.monotonic() + _GOODBYE_S
            while node.result() is None and time.monotonic() < deadline:
                time.sleep(0.02)
        if self._tunnel is not None:
            self._tunnel.close()
        self._stack.close()
        return True


def _next_generation(node: Node) -> NodeGeneration:
    while True:
        try:
            return node.next_generation()
        except RunOver as over:  # another machine's ranks failed while this one left the generation, too
            if over.result.then != "restart":
                raise
