"""Finds deadlocked ranks: they wait in collectives that need a rank which has ended, has called another one, or waits in vain itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set as AbstractSet
from dataclasses import dataclass

from echelon.diagnose.collectives import CollectiveCall, History


@dataclass(frozen=True, slots=True, kw_only=True)
class _Missing:
    """The ranks that have not joined a call."""

    never: frozenset[int]
    """Ranks that have ended or made another call in its place."""
    late: frozenset[int]
    """Ranks that are running and may still join it."""


def find_deadlocked_ranks(
    waiting: Collection[int],
    *,
    at_barrier: AbstractSet[int],
    ended: AbstractSet[int],
    histories: Mapping[int, Mapping[str, History]],
) -> dict[int, frozenset[int]]:
    """Return the ranks that wait in a call that can never complete, each with the ranks that never join it.

    Args:
        waiting: running ranks whose main thread waits for other ranks.
        at_barrier: those of them that wait in an operation of echelon that needs all ranks of the run.
        ended: ranks whose program has ended with success. One without a history has recorded nothing, and counts as not having
            joined the calls that are pending.
        histories: the collectives of waiting and ended ranks, by rank and group.
    """
    barrier = _Missing(never=frozenset(ended), late=frozenset(waiting) - at_barrier)
    known: dict[tuple[str, CollectiveCall], _Missing] = {}
    calls: dict[int, list[_Missing]] = {}
    for rank in waiting:
        if rank in at_barrier:
            calls[rank] = [barrier]
            continue
        calls[rank] = []
        for name, group in histories.get(rank, {}).items():
            for call in group.started:
                if call.is_over:
                    continue
                if (name, call) not in known:  # with thousands of ranks, most are in the same call
                    known[name, call] = _missing_from(call, name, group, ended, histories)
                calls[rank].append(known[name, call])
    stuck = set(calls)
    while moving := {rank for rank in stuck if not any(one.never or one.late & stuck for one in calls[rank])}:
        stuck -= moving
    return {rank: frozenset().union(*(one.never | (one.late & stuck) for one in calls[rank])) for rank in stuck}


def _missing_from(
    call: CollectiveCall,
    name: str,
    group: History,
    ended: AbstractSet[int],
    histories: Mapping[int, Mapping[str, History]],
) -> _Missing:
    never: set[int] = set()
    late: set[int] = set()
    for rank in group.ranks:
        history = histories.get(rank, {}).get(name)
        if history is None or history.number < call.number:
            (never if rank in ended else late).add(rank)
        elif any(other.number == call.number and not call.matches(other) for other in history.started):
            never.add(rank)
    return _Missing(never=frozenset(never), late=frozenset(late))
