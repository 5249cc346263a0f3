"""The head of a run on several machines: it lets launchers in, begins rounds, watches all ranks, and says how a round ends.

It runs in a thread of the launcher at which the others meet; every launcher, that one too, is a *node* to it (``node.py``). All
that nodes send comes through one queue, so that no two things happen at once. A *round* is one start of all ranks, on the nodes
that are there then, with a store of its own. It ends for all nodes at once, by an order: "done", "restart", "stop", "preempted".
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeAlias, final

from echelon.base.errors import LaunchError
from echelon.base.printable import printable
from echelon.launch.failures.failure import Cause, RankEnd, cause_of, exit_status, explain, first_failure
from echelon.launch.local.goodput_recorder import ALL_MACHINES_FILE, GoodputRecorder, GoodputReport, first_sign
from echelon.launch.local.ranks import settled
from echelon.launch.multinode.channel import START_S, Channel, ConnectionLost, Peer, clock_offset_ns
from echelon.launch.multinode.generation import (
    ANSWER_S,
    Generation,
    NodeCommands,
    NodeMember,
    RanksOfAllNodes,
    RendezvousStore,
    Then,
    ends_of,
    silent_members,
    times_of,
)
from echelon.launch.multinode.hub import Hub
from echelon.launch.multinode.messages import decode
from echelon.launch.multinode.roster import NodeInfo, name_of, places_of, refusal, seats, who_is_missing
from echelon.launch.supervisor import StallRules, Supervisor
from echelon.status.stop_barrier import EXIT_CODE, BarrierCoordinator, BarrierOutcome, RankState, state_of

__all__ = ["Coordinator", "CoordinatorRules"]

_TICK_S = 0.02
_MISSING_AFTER_S = 20.0
_JOINERS_WAIT_S = 2.0
"""Machines that come while a round runs: so long it goes on, for others that come with them."""
_GOODBYE_S = 5.0
STALLED_CODE = 124


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorRules:
    """What the user asked for."""

    min_nodes: int
    max_nodes: int
    join_timeout: timedelta
    """So long a round is waited for."""
    last_call: timedelta
    """When the least number of machines is there, so long others may come."""
    beat: timedelta
    lost_after: timedelta
    max_restarts: int
    stall: StallRules
    preemption_grace: timedelta
    logs: str
    directory: Path
    began_ns: int


_Event: TypeAlias = tuple[Literal["told", "lost", "new", "close"], Any, str, Mapping[str, Any]]


@final
class Coordinator:
    """Serves ``listener`` in threads of its own until ``close``.

    Args:
        own: the launcher in whose process this is; it comes in as a node, as all others.
        listener: bound.
        token: that all launchers know.
        rules: what the user asked for.
        new_store: opens the store of a round; it is closed when it is dropped.
    """

    def __init__(
        self,
        own: NodeInfo,
        *,
        listener: Any,
        token: bytes,
        rules: CoordinatorRules,
        new_store: Callable[[], RendezvousStore],
    ) -> None:
        self._own, self._rules, self._new_store = own, rules, new_store
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._members: list[NodeMember] = []
        self._round: Generation | None = None
        self._order: list[str] = []
        self._places: dict[int, str] = {}
        self._num_rounds = self._num_restarts = 0
        self._meeting_since = time.monotonic()
        self._enough_since: float | None = None
        self._told_missing = 0
        self._joined_since: float | None = None
        self._is_over = False
        self._goodbye = 0.0
        self._accounts = GoodputRecorder(rules.directory / ALL_MACHINES_FILE, began_ns=rules.began_ns)
        self._hub = Hub(
            listener,
            token,
            on_node=self._on_node,
            port_of=self._port_of,
        )
        self._thread = threading.Thread(target=self._run, daemon=True, name="echelon-conductor")
        self._thread.start()

    def close(self, reason: str, code: int) -> GoodputReport:
        """End the run, if it has not ended, because of ``reason``; wait until the nodes know; return the books of all machines."""
        self._events.put(("close", code, reason, {}))
        self._thread.join()
        self._hub.close()
        return replace(self._accounts.finish(), places=self._places)

    # What comes from other threads.

    def _on_node(self, channel: Channel, address: str) -> None:
        member: list[NodeMember] = []
        peer = Peer(
            channel,
            on_told=lambda kind, content: self._events.put(("told", member[0], kind, content)),
            on_asked=lambda kind, content: None,
            on_lost=lambda reason: self._events.put(("lost", member[0], reason, {})),
            beat_s=self._rules.beat.total_seconds(),
        )
        member.append(NodeMember(peer, address))
        self._events.put(("new", member[0], "", {}))
        peer.start()

    def _port_of(self, number: int) -> int | None:
        now = self._round
        return now.store.port if now is not None and now.number == number else None

    # The one thread.

    def _run(self) -> None:
        try:
            self._lead()
        except BaseException as error:
            # The launchers must not wait for one that has gone.
            for member in self._members:
                member.peer.tell("end", then="stop", code=1, text=f"the head of the run has failed: {error!r}")
            raise

    def _lead(self) -> None:
        while True:
            try:
                what, who, text, content = self._events.get(timeout=_TICK_S)
            except queue.Empty:
                pass
            else:
                if what == "close":
                    self._close(text, who)
                elif what == "new":
                    self._members.append(who)
                elif what == "lost":
                    self._on_lost(who, text)
                else:
                    self._hear(who, text, content)
            if self._is_over:
                if not self._members or time.monotonic() > self._goodbye:
                    break
            elif self._round is None:
                self._meet()
            else:
                self._watch(self._round)
        for member in self._members:
            member.peer.close()

    def _close(self, reason: str, code: int) -> None:
        if not self._is_over:
            others = [member for member in self._members if not self._is_own(member)]
            for member in others:
                member.peer.tell("end", then="stop", code=code, text=f"{name_of(self._own)}: {reason}; the run ends")
            self._finish()
        # Nothing more comes for this launcher's own node.
        for member in [member for member in self._members if self._is_own(member) or member.info is None]:
            self._drop(member)
        self._goodbye = time.monotonic() + _GOODBYE_S

    def _is_own(self, member: NodeMember) -> bool:
        return member.info is not None and member.info.uid == self._own.uid

    def _drop(self, member: NodeMember) -> None:
        member.peer.close()
        if member in self._members:
            self._members.remove(member)

    def _hear(self, member: NodeMember, kind: str, content: Mapping[str, Any]) -> None:
        if member not in self._members:
            return
        try:
            read = _read(kind, content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"it does not speak as the launcher here does: {kind}: {error}"
            do = "install the same version of echelon on all machines"
            print(f"echelon: {LaunchError(what, where=member.name, do=do)}", file=sys.stderr, flush=True)
            member.peer.tell("refused", what=what, where=member.name, do=do)
            if member.info is not None:
                self._on_lost(member, "it does not speak as it should")
            return
        self._on_told(member, kind, read)

    def _on_told(self, member: NodeMember, kind: str, content: Mapping[str, Any]) -> None:
        if kind == "hello":
            self._admit(member, content["info"])
        elif kind in ("leave", "bye") and member.info is None:
            self._drop(member)
        elif member.info is None:
            return  # it was refused, and goes by itself when it has read that
        elif kind == "join":
            member.waits = member.has_joined = True
            # Before, it imported torch.
            member.peer.wait_at_most(self._rules.lost_after.total_seconds())
        elif kind == "codes" and self._round is not None and content["round"] == self._round.number:
            member.codes = content["codes"]
        elif kind == "asked":
            member.asked = content["who"]
        elif kind == "leave":
            self._on_leave(member, content["reason"], content["code"])
        elif kind == "bye":
            self._drop(member)

    def _admit(self, member: NodeMember, info: NodeInfo) -> None:
        here = [other for other in self._members if other.info is not None]
        for other in here:
            assert other.info is not None
            is_same_seat = info.machine_rank is not None and other.info.machine_rank == info.machine_rank
            if other.info.uid == info.uid or (is_same_seat and other.has_joined and not self._answers(other)):
                self._on_lost(other, "it has come again")
        here = [other for other in here if other in self._members]
        error = refusal(info, [other.info for other in here if other.info is not None], self._own)
        if error is not None:
            print(f"echelon: {error}", file=sys.stderr, flush=True)
            member.peer.tell("refused", what=error.what, where=error.where, do=error.do)
            return
        member.info = info
        try:
            member.offset_ns = clock_offset_ns(member.peer, timeout_s=ANSWER_S)
        except (ConnectionLost, ValueError, TypeError):
            self._on_lost(member, "it does not answer")
            return
        member.peer.tell("welcome")
        if not self._is_own(member):
            num_here = sum(other.info is not None for other in self._members)
            self._say(
                f"{member.name} has come, with {info.num_processes} processes ({num_here} of {_range(self._rules)} machines)"
            )

    @staticmethod
    def _answers(member: NodeMember) -> bool:
        try:
            member.peer.ask("clock", timeout_s=2.0)
        except ConnectionLost:
            return False
        return True

    def _on_leave(self, member: NodeMember, reason: str, code: int) -> None:
        """A launcher ends by itself: somebody has interrupted it, or it cannot go on."""
        self._drop(member)
        if self._round is not None and member in self._round.members:
            self._end_without(member, f"{member.name} has left the run: {reason}", code)

    def _on_lost(self, member: NodeMember, reason: str) -> None:
        if member not in self._members:
            return  # it had said that it goes
        self._drop(member)
        if self._round is not None and member in self._round.members:
            self._end_without(member, f"lost contact with {member.name}: {reason}", 1)
        elif member.info is not None and not self._is_over:
            self._say(f"{member.name} has gone: {reason}")

    def _end_without(self, member: NodeMember, what: str, code: int) -> None:
        now = self._round
        assert now is not None
        left = [other for other in now.members if other in self._members]
        ranks = [seat for seat in now.seats if member.info is not None and seat.uid == member.info.uid]
        first, last = ranks[0].first_rank, ranks[0].first_rank + ranks[0].num_processes - 1
        which = f"rank {first}" if first == last else f"ranks {first} to {last}"
        is_elastic = len(left) >= self._rules.min_nodes
        goes_on = is_elastic or self._num_restarts < self._rules.max_restarts
        then = "the others go on without it" if is_elastic else "the run waits for it" if goes_on else "the run ends"
        error = LaunchError(
            f"{what}; {then}",
            where=f"{which} of {now.world_size}; seen by {name_of(self._own)}",
            do="see whether that machine runs, and the network between the two"
            + (
                ""
                if goes_on
                else "; --nnodes MIN:MAX lets a run go on with fewer machines, --max_restarts lets it wait"
            ),
        )
        print(f"echelon: {error}", file=sys.stderr, flush=True)
        for other in left:
            if not self._is_own(other):
                other.peer.tell("say", text=f"{what}; {then}")
        if goes_on:
            self._num_restarts += 0 if is_elastic else 1
            self._end("restart", failed_ns=time.monotonic_ns())
        else:
            self._end("stop", code=code, failed_ns=time.monotonic_ns())

    # Between rounds.

    def _meet(self) -> None:
        rules, now = self._rules, time.monotonic()
        ready = [member for member in self._members if member.waits]
        waited_s = now - self._meeting_since
        if len(ready) >= rules.max_nodes:
            self._begin(ready[: rules.max_nodes])
            return
        if len(ready) >= rules.min_nodes:
            self._enough_since = self._enough_since or now
            # After a round it is known who is there: those that are connected.
            all_are_ready = self._num_rounds > 0 and all(m.waits for m in self._members if m.info is not None)
            if all_are_ready or now - self._enough_since >= rules.last_call.total_seconds():
                self._begin(ready)
                return
        else:
            self._enough_since = None
        # Those that are connected and do not wait yet import torch: they are there.
        here = [member.info for member in self._members if member.info is not None]
        limit_s = rules.join_timeout.total_seconds() + (START_S if len(here) >= rules.min_nodes else 0.0)
        if waited_s > limit_s:
            self._give_up(here, waited_s)
        elif waited_s > _MISSING_AFTER_S * (2**self._told_missing) and len(here) < rules.min_nodes:
            self._told_missing += 1
            text = who_is_missing(here, min_nodes=rules.min_nodes, max_nodes=rules.max_nodes)
            turned = self._hub.num_turned_away
            hint = f"; {turned} connections could not prove that they know the token" if turned else ""
            text = f"waiting since {waited_s:.0f} s: {text}{hint}"
            self._say(text)
            for member in self._members:
                if not self._is_own(member):
                    member.peer.tell("say", text=text)

    def _give_up(self, here: Sequence[NodeInfo], waited_s: float) -> None:
        rules = self._rules
        missing = who_is_missing(here, min_nodes=rules.min_nodes, max_nodes=rules.max_nodes)
        error = LaunchError(
            f"{missing}; waited {waited_s:.0f} s",
            where=f"{name_of(self._own)} (--rdzv_conf join_timeout={rules.join_timeout.total_seconds():g})",
            do="start the others with the same command, and see their own messages",
        )
        print(f"echelon: {error}", file=sys.stderr, flush=True)
        for member in self._members:
            member.peer.tell("end", then="stop", code=1, text="" if self._is_own(member) else error.what)
        self._finish()

    def _begin(self, ready: Sequence[NodeMember]) -> None:
        infos = {member.info.uid: member.info for member in ready if member.info is not None}
        placed = seats(list(infos.values()), before=self._order, first=self._own.uid)
        by_uid = {member.info.uid: member for member in ready if member.info is not None}
        members = [by_uid[seat.uid] for seat in placed]
        number = self._num_rounds
        self._num_rounds += 1
        self._order = [seat.uid for seat in placed]
        places = self._places = places_of(infos, placed)
        self._round = Generation(number, placed, members, places, self._new_store())
        self._told_missing, self._enough_since, self._joined_since = 0, None, None
        # The folder is made by the node of this process when it starts its ranks.
        self._round.supervisor = Supervisor(
            RanksOfAllNodes(self._round), directory=self._rules.directory, rules=self._rules.stall, places=places
        )
        self._accounts.open()
        world_size = self._round.world_size
        if number or len(placed) > 1:
            names = ", ".join(f"{name_of(infos[seat.uid])}" for seat in placed)
            self._say(f"round {number}: {world_size} ranks on {len(placed)} machines: {names}")
        for seat, member in zip(placed, members):
            member.waits, member.asked = False, ""
            member.codes = {}
            member.peer.tell(
                "round",
                number=number,
                group_rank=seat.group_rank,
                group_world_size=len(placed),
                first_rank=seat.first_rank,
                world_size=world_size,
                port=self._round.store.port if self._is_own(member) else 0,
                num_restarts=self._num_restarts,
            )

    # While a round runs.

    def _watch(self, now: Generation) -> None:
        codes = [code for member in now.members for code in member.codes.values()]
        if any(code not in (None, 0) and not (now.coordinator and code == EXIT_CODE) for code in codes):
            self._after_failure(now)
            return
        if len(codes) == now.world_size and None not in codes:
            self._after_all(now, codes)
            return
        if now.coordinator is not None and (outcome := now.coordinator.look()) is not BarrierOutcome.MET:
            if outcome is BarrierOutcome.LATE:
                self._after_late(now)
            return
        if now.coordinator is not None:
            self._supervise(now)  # they save, which may stand still, too
            return
        if any(member.asked for member in now.members):
            self._hold(now, next(f"{m.asked} on {m.name}" for m in now.members if m.asked), "preempted")
            return
        if len(now.members) < self._rules.max_nodes and any(member.waits for member in self._members):
            self._joined_since = self._joined_since or time.monotonic()
            if time.monotonic() - self._joined_since >= _JOINERS_WAIT_S:
                self._take_joiners(now)
                return
        self._supervise(now)

    def _supervise(self, now: Generation) -> None:
        assert now.supervisor is not None
        stall = now.supervisor.look()
        if stall is not None and stall.is_alarm and self._rules.stall.on_stall != "report":
            failed_ns = time.monotonic_ns() - int(stall.waited_s * 1e9)
            if self._rules.stall.on_stall == "restart" and self._num_restarts < self._rules.max_restarts:
                self._num_restarts += 1
                self._end("restart", failed_ns=failed_ns)
            else:
                self._end("stop", code=STALLED_CODE, failed_ns=failed_ns)

    def _take_joiners(self, now: Generation) -> None:
        names = " and ".join(member.name for member in self._members if member.waits)
        desk = NodeCommands(now)
        if self._rules.preemption_grace and all(desk.read_stands()):
            self._hold(now, f"{names} joins", "restart")
            return
        self._say(f"{names} joins: all ranks start again, from the last checkpoint")
        self._end("restart", failed_ns=time.monotonic_ns())

    def _hold(self, now: Generation, why: str, then: Then) -> None:
        grace_s = self._rules.preemption_grace.total_seconds()
        self._say(f"{why}: all ranks save at one step and end (within {grace_s:g} s)")
        now.held_for, now.then = why, then
        now.coordinator = BarrierCoordinator(NodeCommands(now), grace_s)

    def _after_late(self, now: Generation) -> None:
        where: dict[str, list[int]] = {}
        notes = {view.rank: view.note for view in RanksOfAllNodes(now).views()}
        for rank, stand in NodeCommands(now).stands().items():
            note = notes.get(rank)
            step = "no step yet" if note is None else f"step {note.step}, {note.phase or 'elsewhere'}"
            where.setdefault(step + (" (has come)" if state_of(stand) is RankState.STOPPED else ""), []).append(rank)
        texts = "; ".join(f"ranks {', '.join(map(str, ranks))}: {text}" for text, ranks in where.items())
        error = LaunchError(
            f"{now.held_for}: the ranks did not come to one step within "
            f"{self._rules.preemption_grace.total_seconds():g} s, and were stopped",
            where=texts,
            do="what follows goes on from the last checkpoint; --preemption_grace gives more time",
        )
        print(f"echelon: {error}", file=sys.stderr, flush=True)
        self._part(now)

    def _after_all(self, now: Generation, codes: Sequence[int | None]) -> None:
        """Every rank has ended well, or as it was asked to."""
        is_held = now.coordinator is not None
        if is_held and (EXIT_CODE in codes or (now.coordinator and now.coordinator.look() is BarrierOutcome.MET)):
            self._part(now)
        else:
            self._end("done")

    def _part(self, now: Generation) -> None:
        """After a hold: who was asked to end ends, and when enough remain, they go on."""
        leaving = [member for member in now.members if member.asked]
        staying = [member for member in now.members if not member.asked]
        # Without the launcher at which the others meet there is no run to go on.
        head_stays = not any(self._is_own(member) for member in leaving)
        if head_stays and (now.then == "restart" or (leaving and len(staying) >= self._rules.min_nodes)):
            self._end("restart", failed_ns=time.monotonic_ns(), leaving=leaving)
        else:
            self._end("preempted", code=EXIT_CODE)

    def _after_failure(self, now: Generation) -> None:
        ends = settled(lambda: ends_of(now), RanksOfAllNodes(now))
        if first_failure(ends) is None:
            return  # it had finished when its interpreter's end failed
        if self._waits_for_a_silent_one(now, ends):
            return
        is_ending = now.coordinator is not None and now.then != "restart"
        goes_on = self._num_restarts < self._rules.max_restarts and not is_ending
        what, where, do = explain(ends, logs=self._rules.logs, places=now.places)
        error = LaunchError(what, where=where, do=do)
        first = first_failure(ends)
        assert first is not None
        culprit = now.places[first.rank]
        then = f"restart {self._num_restarts + 1} of {self._rules.max_restarts}" if goes_on else "the run ends"
        for member in now.members:
            is_told_all = self._is_own(member) or member.name == culprit
            text = str(error) if is_told_all else f"{what.splitlines()[0]} (on {culprit}; the report is there)"
            member.peer.tell("say", text=f"{text}\nechelon: {then}" if is_told_all else f"{text}; {then}")
        if goes_on:
            self._num_restarts += 1
            self._end("restart", failed_ns=first_sign(ends))
        else:
            self._end("stop", code=exit_status(ends), failed_ns=first_sign(ends))

    def _waits_for_a_silent_one(self, now: Generation, ends: Sequence[RankEnd]) -> bool:
        """Tell whether a machine may have gone: ranks that lost contact show that before its silence does."""
        if any(member.peer.is_lost for member in now.members):
            return True  # that is in the queue, and says what has happened
        first = first_failure(ends)
        assert first is not None
        if cause_of(first, ends) is not Cause.COMMUNICATION:
            return False
        now.lost_contact_since = now.lost_contact_since or time.monotonic()
        waited_s = time.monotonic() - now.lost_contact_since
        is_silent = bool(silent_members(now, self._rules.beat.total_seconds()))
        return is_silent and waited_s < self._rules.lost_after.total_seconds() + ANSWER_S

    def _end(
        self, then: Then, *, code: int = 0, failed_ns: int | None = None, leaving: Sequence[NodeMember] = ()
    ) -> None:
        now = self._round
        assert now is not None
        noticed_ns = time.monotonic_ns()
        here = [member for member in now.members if member in self._members]
        times = times_of(replace(now, members=here))
        if times:
            self._accounts.close(times, failed_ns=failed_ns, noticed_ns=noticed_ns)
        now.supervisor = now.coordinator = (
            None  # they know the round: so its store closes here, and not some time later
        )
        self._round = None
        self._meeting_since = time.monotonic()
        for member in here:
            order: Then = "preempted" if member in leaving else then
            member.peer.tell("end", then=order, code=EXIT_CODE if member in leaving else code, text="")
        if then != "restart":
            self._finish(then, code)

    def _finish(self, then: Then = "stop", code: int = 1) -> None:
        self._round, self._is_over = None, True
        self._goodbye = time.monotonic() + _GOODBYE_S
        for member in [member for member in self._members if member.waits or member.info is None]:
            member.peer.tell("end", then=then, code=code, text="the run is over")

    def _say(self, text: str) -> None:
        print(f"echelon: {printable(text)}", file=sys.stderr, flush=True)


def _read(kind: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a node has told, with the types that it must have.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: it has others.
    """
    if kind == "hello":
        return {"info": decode(NodeInfo, content["info"])}
    if kind == "codes":
        codes = {int(rank): None if code is None else int(code) for rank, code in content["codes"]}
        return {"round": int(content["round"]), "codes": codes}
    if kind == "asked":
        return {"who": str(content["who"])}
    if kind == "leave":
        return {"reason": str(content["reason"]), "code": int(content["code"])}
    return {}


def _range(rules: CoordinatorRules) -> str:
    return f"{rules.min_nodes}" if rules.min_nodes == rules.max_nodes else f"{rules.min_nodes} to {rules.max_nodes}"
