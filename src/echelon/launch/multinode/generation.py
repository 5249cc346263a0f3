"""One start of all ranks on several machines: who is in it, and what is asked of all its nodes at once.

Every node says times on its own clock; what is returned here is on this machine's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, final

from echelon.diagnose.goodput import RankTimes
from echelon.diagnose.stall import Answer, RankView
from echelon.launch.failures.failure import RankEnd
from echelon.launch.multinode.channel import ConnectionLost, Peer
from echelon.launch.multinode.messages import decode, encode
from echelon.launch.multinode.roster import MachineSlot, NodeInfo, name_of
from echelon.launch.supervisor import Supervisor
from echelon.status.stop_barrier import BarrierCoordinator

__all__ = [
    "ANSWER_S",
    "RanksOfAllNodes",
    "NodeCommands",
    "NodeMember",
    "Generation",
    "RendezvousStore",
    "Then",
    "ends_of",
    "silent_members",
    "times_of",
]

T = TypeVar("T")
Then: TypeAlias = Literal["done", "restart", "stop", "preempted"]

ANSWER_S = 5.0


class RendezvousStore(Protocol):
    """The store of a round, on this machine's loopback."""

    port: int


@dataclass(slots=True, eq=False)
class NodeMember:
    """A launcher that takes part, or would."""

    peer: Peer
    address: str
    info: NodeInfo | None = None
    waits: bool = False
    """For the next round."""
    has_joined: bool = False
    """It has waited once: it has imported torch, and is not silent because of that."""
    offset_ns: int = 0
    codes: dict[int, int | None] = field(default_factory=dict)
    """Of its ranks in this round."""
    asked: str = ""
    """Who has asked it to save and end, in words."""

    @property
    def name(self) -> str:
        return self.address if self.info is None else name_of(self.info)


@dataclass(slots=True)
class Generation:
    """All ranks of one start, on the members that were there then."""

    number: int
    seats: list[MachineSlot]
    members: list[NodeMember]
    places: dict[int, str]
    store: RendezvousStore
    supervisor: Supervisor | None = None
    coordinator: BarrierCoordinator | None = None
    held_for: str = ""
    """Why the ranks are led to one step, in words."""
    then: Then = "preempted"
    """What follows when they have come there."""
    lost_contact_since: float = 0.0
    """When it was first seen that ranks have lost each other, on ``time.monotonic``; 0: they have not."""

    @property
    def world_size(self) -> int:
        return sum(seat.num_processes for seat in self.seats)


def ends_of(now: Generation) -> list[RankEnd]:
    """Return how each rank has ended, or that it runs; of one whose node does not answer, that it runs."""
    found: dict[int, RankEnd] = {}
    for member, ends in _ask_all(now, "ends", partial(decode, list[RankEnd]), timeout_s=ANSWER_S):
        for end in ends:
            record = end.record and replace(end.record, time_ns=end.record.time_ns + member.offset_ns)
            ended_ns = None if end.ended_ns is None else end.ended_ns + member.offset_ns
            found[end.rank] = replace(end, record=record, ended_ns=ended_ns)
    return [found.get(rank, RankEnd(rank=rank, exit_code=None)) for rank in range(now.world_size)]


def times_of(now: Generation) -> list[RankTimes]:
    """Return where the time of each rank went, by rank, of the nodes that answer."""
    found = [
        _moved(one, member.offset_ns)
        for member, times in _ask_all(now, "times", partial(decode, list[RankTimes]), timeout_s=ANSWER_S)
        for one in times
    ]
    return sorted(found, key=lambda one: one.rank)


def silent_members(now: Generation, timeout_s: float) -> list[NodeMember]:
    """Return those that do not answer within ``timeout_s``."""
    answering = {member for member, _ in _ask_all(now, "views", bool, timeout_s=timeout_s)}
    return [member for member in now.members if member not in answering]


@final
class RanksOfAllNodes:
    """Those of a round, as a supervisor sees them."""

    def __init__(self, now: Generation) -> None:
        self._now = now

    def views(self) -> list[RankView]:
        """Return how each rank is now."""
        found: dict[int, RankView] = {}
        for member, views in _ask_all(self._now, "views", partial(decode, list[RankView]), timeout_s=ANSWER_S):
            for view in views:
                watch, note = view.watch, view.note
                if watch is not None:
                    watch = watch._replace(time_ns=watch.time_ns + member.offset_ns)
                if note is not None:
                    note = note._replace(time_ns=note.time_ns + member.offset_ns)
                found[view.rank] = replace(view, watch=watch, note=note)
        return [found[rank] for rank in sorted(found)]

    def ask(self) -> dict[int, Answer]:
        """Return what the running ranks say of where they are."""
        found: dict[int, Answer] = {}
        for _, answers in _ask_all(self._now, "ask", partial(decode, dict[int, Answer]), timeout_s=2 * ANSWER_S):
            found.update(answers)
        return found

    def stack_of(self, view: RankView) -> Answer:
        """Return where a rank is that runs and does not answer."""
        seat = next(
            i for i, seat in enumerate(self._now.seats) if 0 <= view.rank - seat.first_rank < seat.num_processes
        )
        try:
            return decode(Answer, self._now.members[seat].peer.ask("stack", timeout_s=ANSWER_S, view=encode(view)))
        except (ConnectionLost, ValueError):
            return Answer()

    def keep(self, report: str) -> None:
        """Put ``report`` beside the stacks, on every machine."""
        for member in self._now.members:
            member.peer.tell("keep", report=report)


@final
class NodeCommands:
    """The words of all ranks (``stop_barrier.py``), on the boards of all nodes."""

    def __init__(self, now: Generation) -> None:
        self._now = now

    def write_command(self, command: int) -> None:
        """Give ``command`` to every rank; return when all boards have it."""
        _ask_all(self._now, "command", bool, timeout_s=ANSWER_S, word=command)

    def read_stands(self) -> list[int]:
        """Return every rank's stand as it is after the last command."""
        return list(self.stands().values())

    def stands(self) -> dict[int, int]:
        """Return the stand of each rank; of one whose node does not answer, 0: it has not come."""
        found = dict.fromkeys(range(self._now.world_size), 0)
        for _, stands in _ask_all(self._now, "stands", partial(decode, list[tuple[int, int]]), timeout_s=ANSWER_S):
            found.update(stands)
        return found


def _ask_all(
    now: Generation, kind: str, read: Callable[[Any], T], *, timeout_s: float, **content: Any
) -> list[tuple[NodeMember, T]]:
    """Ask every node at once; return the answers of those that gave one that can be read."""
    waits = [(member, member.peer.ask_later(kind, **content)) for member in now.members]
    deadline = time.monotonic() + timeout_s
    answers = []
    for member, wait in waits:
        try:
            answers.append((member, read(wait(max(0.0, deadline - time.monotonic())))))
        except (ConnectionLost, ValueError, TypeError):
            continue  # that it is gone is an event of its own
    return answers


def _moved(one: RankTimes, offset_ns: int) -> RankTimes:
    """Return what a node said on this machine's clock."""
    times = one.times
    if times is not None and times.begun_ns:
        times = times._replace(begun_ns=times.begun_ns + offset_ns, since_ns=times.since_ns + offset_ns)
    ended_ns = None if one.ended_ns is None else one.ended_ns + offset_ns
    return replace(one, times=times, ended_ns=ended_ns)
