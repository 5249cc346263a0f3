"""A launcher's session in a multi-machine run, from joining the run to leaving it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from echelon.launch.interrupts import Interrupted, Interrupts
from echelon.launch.multinode.coordinator import Coordinator
from echelon.launch.multinode.generation import RendezvousStore
from echelon.launch.multinode.machines import MultinodePlan
from echelon.launch.multinode.node import MultinodeNode
from echelon.launch.node import RunRules

__all__ = ["multinode_session"]


@contextmanager
def multinode_session(plan: MultinodePlan, rules: RunRules, interrupts: Interrupts) -> Iterator[MultinodeNode]:
    """Join the run and leave it at the end of the ``with`` block.

    Raises:
        Interrupted: the launcher received a signal.
        LaunchError: the connection failed, or the coordinator refused this machine.
    """
    coordinator = None
    if plan.listener is not None:
        coordinator = Coordinator(
            plan.info, listener=plan.listener, token=plan.token, times=plan.times, rules=rules, new_store=_new_store
        )
    node = MultinodeNode(
        plan.info,
        host=plan.host,
        port=plan.port,
        where=plan.where,
        token=plan.token,
        times=plan.times,
        interrupts=interrupts,
        preemption_grace=rules.preemption_grace,
    )
    reason, code = "its launcher failed", 1
    try:
        node.join()
        yield node
        reason, code = "its launcher has ended", 1
        node.close()
    except Interrupted as stop:
        reason, code = f"interrupted by {signal.Signals(stop.number).name}", 128 + stop.number
        raise
    finally:
        node.leave(reason, code)
        if coordinator is not None:
            node.goodput = coordinator.close(reason, code)


def _new_store() -> RendezvousStore:
    from echelon.launch.loopback_store import LoopbackStore  # noqa: PLC0415 - imports torch

    return LoopbackStore()
