"""The part of a launcher in a run on several machines, from coming in to leaving: before torch is imported mistakes are told."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from echelon.launch.interrupts import Interrupted, Interrupts
from echelon.launch.local.goodput_recorder import GoodputReport
from echelon.launch.multinode.coordinator import Coordinator, CoordinatorRules
from echelon.launch.multinode.generation import RendezvousStore
from echelon.launch.multinode.machines import MultinodePlan
from echelon.launch.multinode.node import Node
from echelon.launch.supervisor import StallRules

__all__ = ["MultinodeSession", "rules_of", "together"]


@dataclass(slots=True)
class MultinodeSession:
    """What this launcher has in such a run."""

    node: Node
    books: GoodputReport | None = None
    """Of all machines, at the end, where the others met."""


def rules_of(
    machines: MultinodePlan,
    *,
    max_restarts: int,
    stall: StallRules,
    preemption_grace: timedelta,
    logs: str,
    directory: Path,
    began_ns: int,
) -> CoordinatorRules:
    """Return what the user asked for, for whoever leads the run."""
    return CoordinatorRules(
        min_nodes=machines.info.min_nodes,
        max_nodes=machines.info.max_nodes,
        join_timeout=machines.join_timeout,
        last_call=machines.last_call,
        beat=machines.beat,
        lost_after=machines.lost_after,
        max_restarts=max_restarts,
        stall=stall,
        preemption_grace=preemption_grace,
        logs=logs,
        directory=directory,
        began_ns=began_ns,
    )


@contextmanager
def together(machines: MultinodePlan, rules: CoordinatorRules, interrupts: Interrupts) -> Iterator[MultinodeSession]:
    """Meet the others, and take leave of them at the end of the ``with`` block, whatever has happened in it.

    Raises:
        Interrupted: a signal came.
        LaunchError: nobody answers, or this machine may not take part.
    """
    conductor = None
    if machines.listener is not None:
        conductor = Coordinator(
            machines.info, listener=machines.listener, token=machines.token, rules=rules, new_store=_new_store
        )
    part = MultinodeSession(machines.node(interrupts))
    reason, code = "its launcher has failed", 1
    try:
        part.node.come_in()
        yield part
        reason, code = "its launcher has ended", 1
        part.node.close()
    except Interrupted as stop:
        reason, code = f"interrupted by {signal.Signals(stop.number).name}", 128 + stop.number
        raise
    finally:
        part.node.leave(reason, code)
        if conductor is not None:
            part.books = conductor.close(reason, code)


def _new_store() -> RendezvousStore:
    from echelon.launch.multinode.rendezvous import LoopbackStore  # noqa: PLC0415 - imports torch: only when ranks are to start

    return LoopbackStore()
