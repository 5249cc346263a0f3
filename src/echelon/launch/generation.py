"""One generation (one start of all ranks): its members, and what they know about their ranks, asked of all of them at once.

Each node reports times on its own clock; ``Generation`` converts them to this machine's clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar, final

from echelon.diagnose.goodput import RankTimes
from echelon.diagnose.stall import Answer, RankView
from echelon.launch.failures.failure import RankEnd, is_settled, lost_each_other
from echelon.launch.multinode.channel import ConnectionLost, InProcessPeer, Peer
from echelon.launch.multinode.messages import decode, encode
from echelon.launch.multinode.roster import NodeInfo, name_of
from echelon.launch.node import Then
from echelon.launch.supervisor import Supervisor
from echelon.status.stop_barrier import BarrierCoordinator

T = TypeVar("T")

ANSWER_S = 5.0
"""Time limit for a node's answer."""
# The exit of a failed rank becomes visible up to 1.7 s later, after the errors that it causes on other ranks.
_STRAGGLERS_S = 1.5
_SETTLE_POLL_S = 0.02


class RendezvousStore(Protocol):
    """A generation's store, on this machine's loopback, which closes when it is garbage-collected."""

    port: int


@dataclass(slots=True, eq=False)
class NodeMember:
    """A launcher that is connected to the coordinator."""

    peer: Peer | InProcessPeer
    address: str
    info: NodeInfo | None = None
    is_waiting: bool = False
    """Whether this member is waiting for the next generation."""
    has_joined: bool = False
    """Whether this member has ever waited for a generation; until then, it may be silent while it imports torch."""
    offset_ns: int = 0
    """Offset from this member's clock to ours."""
    ranks: range = range(0)
    """This member's ranks in this generation."""
    codes: dict[int, int | None] = field(default_factory=dict)
    """Exit codes of this member's ranks in this generation."""
    has_exits: bool = False
    """Whether one of them has exited."""
    requester: str = ""
    """Description of the requester if this member must save and exit, otherwise empty."""

    @property
    def name(self) -> str:
        return self.address if self.info is None else name_of(self.info)


@final
@dataclass(slots=True, eq=False)
class Generation:
    """One start of all ranks, on the members that were present at that time, in the order of their ranks.

    It is what a supervisor watches (``supervisor.Ranks``), and what a stop barrier's coordinator writes to (``SharedCommands``).
    """

    number: int
    members: list[NodeMember]
    store: RendezvousStore
    supervisor: Supervisor | None = None
    barrier: BarrierCoordinator | None = None
    """The stop barrier, if the ranks must save."""
    barrier_reason: str = ""
    then: Then = "preempted"
    """What happens after all ranks have stopped at the barrier."""
    compare_at: float = 0.0
    """``time.monotonic()`` of the next comparison of the ranks' collectives, if the run is in debug mode."""
    lost_contact_since: float = 0.0
    """``time.monotonic()`` when ranks were first seen to have lost contact; 0 if never."""

    @property
    def is_exiting(self) -> bool:
        """Whether the ranks are asked to save, and the run then ends."""
        return self.barrier is not None and self.then != "restart"

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.members[-1].ranks.stop

    def member_of(self, rank: int) -> NodeMember:
        """Return the member that runs ``rank``."""
        return next(member for member in self.members if rank in member.ranks)

    def ends(self) -> list[RankEnd]:
        """Return how each rank has ended. The ranks of a node that does not answer count as running."""
        found: dict[int, RankEnd] = {}
        for member, ends in self._request("ends", partial(decode, list[RankEnd])):
            for end in ends:
                record = end.record and replace(end.record, time_ns=end.record.time_ns + member.offset_ns)
                found[end.rank] = replace(end, record=record, ended_ns=_shifted(end.ended_ns, member))
        return [found.get(rank, RankEnd(rank=rank, exit_code=None)) for rank in range(self.world_size)]

    def wait_for_verdict(self) -> list[RankEnd]:
        """Wait until it is certain which rank failed first, and return how all ranks ended."""
        deadline = time.monotonic() + _STRAGGLERS_S
        while not is_settled(ends := self.ends()) and time.monotonic() < deadline:
            time.sleep(_SETTLE_POLL_S)
        running = [end.rank for end in ends if end.exit_code is None and end.record is None]
        if not running or not lost_each_other(ends):
            return ends
        # No rank is known to have failed by itself, so request the stacks of the running ranks.
        answers = self.request_stacks()
        # A rank may have failed meanwhile instead of answering, and has recorded the same.
        return [replace(end, last_words=answers.get(end.rank, end.last_words)) for end in self.ends()]

    def request_times(self) -> Callable[[], list[RankTimes]]:
        """Ask all nodes for the times of their ranks, and return a function that reads the answers.

        The ranks may be stopped once this has returned. Reading takes longer than asking where there are thousands of ranks.
        """
        answers = self._request("times", list)

        def read() -> list[RankTimes]:
            found = []
            for member, data in answers:
                with suppress(ValueError):
                    found += [_on_this_clock(one, member) for one in decode(list[RankTimes], data)]
            return sorted(found, key=lambda one: one.rank)

        return read

    def is_answered_by_all(self, timeout_s: float) -> bool:
        """Return whether all members answer within ``timeout_s``."""
        return len(self._request("clock", int, timeout_s=timeout_s)) == len(self.members)

    def views(self) -> list[RankView]:
        """Return each rank's current state."""
        found = []
        for member, views in self._request("views", partial(decode, list[RankView])):
            for view in views:
                watch, note = view.watch, view.note
                watch = None if watch is None else watch.shifted(member.offset_ns)
                note = None if note is None else note.shifted(member.offset_ns)
                found.append(replace(view, watch=watch, note=note))
        return sorted(found, key=lambda view: view.rank)

    def last_step(self) -> int | None:
        """Return the last optimizer step that a rank has finished, or None if no rank has recorded one."""
        answers = self._request("steps", partial(decode, list[int]))
        return max((step for _, steps in answers for step in steps), default=None)

    def request_stacks(self) -> dict[int, Answer]:
        """Ask the running ranks for their stacks."""
        found: dict[int, Answer] = {}
        for _, answers in self._request("stacks", partial(decode, dict[int, Answer]), timeout_s=2 * ANSWER_S):
            found.update(answers)
        return found

    def stack_of(self, view: RankView) -> Answer:
        """Return the call site of a running rank that does not respond."""
        try:
            answer = self.member_of(view.rank).peer.request("stack", view=encode(view))(ANSWER_S)
            return decode(Answer, answer)
        except (ConnectionLost, ValueError):
            return Answer()

    def save_report(self, report: str) -> None:
        """Save ``report`` next to the stacks, on every machine."""
        for member in self.members:
            member.peer.send("save_report", report=report)

    def write_command(self, command: int) -> None:
        """Write ``command`` to the boards on all nodes, and wait until they have received it."""
        self._request("command", bool, command=command)

    def read_positions(self) -> Sequence[int]:
        """Return each rank's position in the stop barrier, read after the last command; 0 if its node does not answer."""
        found = [0] * self.world_size
        for _, positions in self._request("positions", partial(decode, list[tuple[int, int]])):
            for rank, position in positions:
                found[rank] = position
        return found

    def _request(
        self, kind: str, read: Callable[[Any], T], *, timeout_s: float = ANSWER_S, **content: Any
    ) -> list[tuple[NodeMember, T]]:
        """Send a request to all nodes concurrently, and return the answers that arrive in time and are valid."""
        waits = [(member, member.peer.request(kind, **content)) for member in self.members]
        deadline = time.monotonic() + timeout_s
        answers = []
        for member, wait in waits:
            try:
                answers.append((member, read(wait(max(0.0, deadline - time.monotonic())))))
            except (ConnectionLost, ValueError, TypeError):
                continue  # on_lost reports a lost connection
        return answers


def _on_this_clock(one: RankTimes, member: NodeMember) -> RankTimes:
    times = one.times
    if times is not None and times.begun_ns:
        times = times.shifted(member.offset_ns)
    return replace(one, times=times, ended_ns=_shifted(one.ended_ns, member))


def _shifted(time_ns: int | None, member: NodeMember) -> int | None:
    return None if time_ns is None else time_ns + member.offset_ns
