"""One generation (one start of all ranks) on several machines: its members, and concurrent requests to all of them.

Each node reports times on its own clock; the functions in this module convert them to this machine's clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar, final

from echelon.diagnose.goodput import RankTimes
from echelon.diagnose.stall import Answer, RankView
from echelon.launch.failures.failure import RankEnd
from echelon.launch.multinode.channel import ConnectionLost, Peer
from echelon.launch.multinode.messages import decode, encode
from echelon.launch.multinode.roster import MachineSlot, NodeInfo, name_of
from echelon.launch.node import Then
from echelon.launch.supervisor import Supervisor
from echelon.status.stop_barrier import BarrierCoordinator

__all__ = [
    "ANSWER_S",
    "Generation",
    "NodeCommands",
    "NodeMember",
    "RanksOfAllNodes",
    "RendezvousStore",
    "ends_of",
    "silent_members",
    "times_of",
]

T = TypeVar("T")

ANSWER_S = 5.0
"""Time limit for a node's answer."""


class RendezvousStore(Protocol):
    """A generation's store, on this machine's loopback."""

    port: int


@dataclass(slots=True, eq=False)
class NodeMember:
    """A launcher that is connected to the coordinator."""

    peer: Peer
    address: str
    info: NodeInfo | None = None
    is_waiting: bool = False
    """Whether this member is waiting for the next generation."""
    has_joined: bool = False
    """Whether this member has ever waited for a generation; until then, it may be silent while it imports torch."""
    offset_ns: int = 0
    """Offset from this member's clock to ours."""
    codes: dict[int, int | None] = field(default_factory=dict)
    """Exit codes of this member's ranks in this generation."""
    requester: str = ""
    """Description of the requester if this member must save and exit, otherwise empty."""

    @property
    def name(self) -> str:
        return self.address if self.info is None else name_of(self.info)


@dataclass(slots=True)
class Generation:
    """One start of all ranks, on the members that were present at that time."""

    number: int
    slots: list[MachineSlot]
    members: list[NodeMember]
    machines: dict[int, str]
    """Maps each rank to its machine's name."""
    store: RendezvousStore
    supervisor: Supervisor | None = None
    barrier: BarrierCoordinator | None = None
    """The stop barrier, if the ranks must save."""
    barrier_reason: str = ""
    then: Then = "preempted"
    """What happens after all ranks have stopped at the barrier."""
    lost_contact_since: float = 0.0
    """``time.monotonic()`` when ranks were first seen to have lost contact; 0 if never."""

    @property
    def world_size(self) -> int:
        return sum(slot.num_processes for slot in self.slots)


def ends_of(generation: Generation) -> list[RankEnd]:
    """Return how each rank has ended. The ranks of a node that does not answer count as running."""
    found: dict[int, RankEnd] = {}
    for member, ends in _request_all(generation, "ends", partial(decode, list[RankEnd])):
        for end in ends:
            record = end.record and replace(end.record, time_ns=end.record.time_ns + member.offset_ns)
            found[end.rank] = replace(end, record=record, ended_ns=_shifted(end.ended_ns, member))
    return [found.get(rank, RankEnd(rank=rank, exit_code=None)) for rank in range(generation.world_size)]


def times_of(generation: Generation) -> list[RankTimes]:
    """Return the times for the ranks on all nodes that answer, sorted by rank."""
    found = []
    for member, times_of_ranks in _request_all(generation, "times", partial(decode, list[RankTimes])):
        for one in times_of_ranks:
            times = one.times
            if times is not None and times.begun_ns:
                times = times.shifted(member.offset_ns)
            found.append(replace(one, times=times, ended_ns=_shifted(one.ended_ns, member)))
    return sorted(found, key=lambda one: one.rank)


def silent_members(generation: Generation, timeout_s: float) -> list[NodeMember]:
    """Return the members that do not answer within ``timeout_s``."""
    answering = {member for member, _ in _request_all(generation, "views", bool, timeout_s=timeout_s)}
    return [member for member in generation.members if member not in answering]


@final
class RanksOfAllNodes:
    """Implements ``Ranks`` for a generation's ranks on all machines."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    def views(self) -> list[RankView]:
        """Return each rank's current state."""
        found: dict[int, RankView] = {}
        for member, views in _request_all(self._generation, "views", partial(decode, list[RankView])):
            for view in views:
                watch, note = view.watch, view.note
                found[view.rank] = replace(
                    view,
                    watch=None if watch is None else watch.shifted(member.offset_ns),
                    note=None if note is None else note.shifted(member.offset_ns),
                )
        return [found[rank] for rank in sorted(found)]

    def request_stacks(self) -> dict[int, Answer]:
        """Ask the running ranks for their stacks."""
        found: dict[int, Answer] = {}
        read = partial(decode, dict[int, Answer])
        for _, answers in _request_all(self._generation, "stacks", read, timeout_s=2 * ANSWER_S):
            found.update(answers)
        return found

    def stack_of(self, view: RankView) -> Answer:
        """Return the call site of a running rank that does not respond."""
        slots = self._generation.slots
        index = next(i for i, slot in enumerate(slots) if 0 <= view.rank - slot.first_rank < slot.num_processes)
        peer = self._generation.members[index].peer
        try:
            return decode(Answer, peer.request("stack", timeout_s=ANSWER_S, view=encode(view)))
        except (ConnectionLost, ValueError):
            return Answer()

    def save_report(self, report: str) -> None:
        """Save ``report`` next to the stacks, on every machine."""
        for member in self._generation.members:
            member.peer.send("save_report", report=report)


@final
class NodeCommands:
    """Implements the stop barrier's ``SharedCommands`` through the boards on all nodes."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    def write_command(self, command: int) -> None:
        """Write ``command`` to the boards on all nodes, and wait until they have received it."""
        _request_all(self._generation, "command", bool, command=command)

    def read_positions(self) -> Sequence[int]:
        """Return each rank's position, read after the last command."""
        return list(self.positions().values())

    def positions(self) -> dict[int, int]:
        """Return each rank's position, or 0 if its node does not answer."""
        found = dict.fromkeys(range(self._generation.world_size), 0)
        for _, positions in _request_all(self._generation, "positions", partial(decode, list[tuple[int, int]])):
            found.update(positions)
        return found


def _request_all(
    generation: Generation, kind: str, read: Callable[[Any], T], *, timeout_s: float = ANSWER_S, **content: Any
) -> list[tuple[NodeMember, T]]:
    """Send a request to all nodes concurrently, and return the answers that arrive in time and are valid."""
    waits = [(member, member.peer.start_request(kind, **content)) for member in generation.members]
    deadline = time.monotonic() + timeout_s
    answers = []
    for member, wait in waits:
        try:
            answers.append((member, read(wait(max(0.0, deadline - time.monotonic())))))
        except (ConnectionLost, ValueError, TypeError):
            continue  # on_lost reports a lost connection
    return answers


def _shifted(time_ns: int | None, member: NodeMember) -> int | None:
    return None if time_ns is None else time_ns + member.offset_ns
