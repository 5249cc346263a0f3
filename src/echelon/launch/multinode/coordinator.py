"""The coordinator of a multi-machine run: admits launchers, starts and ends generations, and monitors all ranks.

It runs in a thread of the launcher on the rendezvous host. Each launcher, including that one, is a *node*
(``node.py``). All messages from nodes pass through one queue, so that they are handled one at a time. A *generation* is
one start of all ranks on the nodes that are present at that time, with its own store. It ends on all nodes at the same
time, with "done", "restart", "stop" or "preempted".
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias, final

from echelon.base.errors import LaunchError
from echelon.base.messages.terminal import say
from echelon.launch.failures.failure import Cause, RankEnd, cause_of, exit_status, explain, first_failure
from echelon.launch.local.goodput_recorder import ALL_MACHINES_FILE, GoodputRecorder, GoodputReport, first_sign
from echelon.launch.local.ranks import wait_for_verdict
from echelon.launch.multinode.channel import START_S, Channel, ConnectionLost, Peer, clock_offset_ns
from echelon.launch.multinode.connection_listener import ConnectionListener
from echelon.launch.multinode.generation import (
    ANSWER_S,
    Generation,
    NodeCommands,
    NodeMember,
    RanksOfAllNodes,
    RendezvousStore,
    ends_of,
    silent_members,
    times_of,
)
from echelon.launch.multinode.messages import decode
from echelon.launch.multinode.node import RendezvousTimes
from echelon.launch.multinode.roster import (
    NodeInfo,
    assign_slots,
    describe_missing,
    machine_of_each_rank,
    name_of,
    node_range_text,
    refusal,
)
from echelon.launch.node import RunRules, Then
from echelon.launch.preemption import stop_barrier_timeout
from echelon.launch.supervisor import STALLED, Supervisor
from echelon.status.stop_barrier import EXIT_CODE, BarrierCoordinator, BarrierOutcome

__all__ = ["Coordinator"]

_TICK_S = 0.02
_MISSING_AFTER_S = 20.0
_JOINERS_WAIT_S = 2.0
"""How long to wait for more machines after a machine has joined a running generation."""
_GOODBYE_S = 5.0
_OVER = "the run is over"

_Event: TypeAlias = tuple[Literal["message", "lost", "new", "close"], Any, str, Mapping[str, Any]]


@final
class Coordinator:
    """Serves ``listener`` in its own threads until ``close``.

    Args:
        own: the launcher whose process the coordinator runs in; it joins as a node, like all other launchers.
        listener: bound socket.
        token: the secret that all launchers share.
        times: the rendezvous time limits.
        rules: the rules that the user set.
        new_store: function that opens a generation's store, which closes when it is garbage-collected.
    """

    def __init__(
        self,
        own: NodeInfo,
        *,
        listener: Any,
        token: bytes,
        times: RendezvousTimes,
        rules: RunRules,
        new_store: Callable[[], RendezvousStore],
    ) -> None:
        self._own, self._times, self._rules, self._new_store = own, times, rules, new_store
        self._min_nodes, self._max_nodes = own.min_nodes, own.max_nodes
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._members: list[NodeMember] = []
        self._generation: Generation | None = None
        self._last_order: list[str] = []
        self._machines: dict[int, str] = {}
        self._num_generations = self._num_restarts = 0
        self._rendezvous_since = time.monotonic()
        self._enough_since: float | None = None
        self._num_missing_reports = 0
        self._joiners_since: float | None = None
        self._end_of_run: tuple[Then, int] | None = None
        self._goodbye_deadline: float | None = None
        """When to stop waiting for nodes to disconnect at the end of the run."""
        self._goodput = GoodputRecorder(rules.directory / ALL_MACHINES_FILE, began_ns=rules.began_ns)
        self._connections = ConnectionListener(listener, token, on_node=self._on_node, port_of=self._port_of)
        self._thread = threading.Thread(target=self._run, daemon=True, name="echelon-coordinator")
        self._thread.start()

    def close(self, reason: str, code: int) -> GoodputReport:
        """End the run for ``reason`` if it is still running, notify the nodes, and return all machines' goodput."""
        self._events.put(("close", code, reason, {}))
        self._thread.join()
        self._connections.close()
        return replace(self._goodput.finish(), machines=self._machines)

    # Methods that other threads call.

    def _on_node(self, channel: Channel, address: str) -> None:
        member: list[NodeMember] = []
        peer = Peer(
            channel,
            on_message=lambda kind, content: self._events.put(("message", member[0], kind, content)),
            on_request=lambda kind, content: None,
            on_lost=lambda reason: self._events.put(("lost", member[0], reason, {})),
            heartbeat_s=self._times.heartbeat.total_seconds(),
        )
        member.append(NodeMember(peer, address))
        self._events.put(("new", member[0], "", {}))
        peer.start()

    def _port_of(self, number: int) -> int | None:
        generation = self._generation
        return generation.store.port if generation is not None and generation.number == number else None

    # Methods that run in the coordinator's thread.

    def _run(self) -> None:
        try:
            self._handle_events()
        except BaseException as error:
            for member in self._members:  # the launchers must not wait for a dead coordinator
                member.peer.send("end", then="stop", code=1, text=f"the run's coordinator failed: {error!r}")
            raise

    def _handle_events(self) -> None:
        while True:
            try:
                event, subject, text, content = self._events.get(timeout=_TICK_S)
            except queue.Empty:
                pass
            else:
                if event == "close":
                    self._close(text, subject)
                elif event == "new":
                    self._members.append(subject)
                elif event == "lost":
                    self._on_lost(subject, text)
                else:
                    self._on_message(subject, text, content)
            if self._end_of_run is not None:  # until close(): a launcher that connects now must learn it, too
                deadline = self._goodbye_deadline
                if deadline is not None and (not self._members or time.monotonic() > deadline):
                    break
            elif self._generation is None:
                self._poll_rendezvous()
            else:
                self._poll_generation(self._generation)
        for member in self._members:
            member.peer.close()

    def _close(self, reason: str, code: int) -> None:
        if self._end_of_run is None:
            for member in self._members:
                if not self._is_own(member):
                    text = f"{name_of(self._own)}: {reason}; the run ends"
                    member.peer.send("end", then="stop", code=code, text=text)
            self._finish()
        # This launcher's own node sends no more messages.
        for member in [member for member in self._members if self._is_own(member) or member.info is None]:
            self._drop(member)
        self._goodbye_deadline = time.monotonic() + _GOODBYE_S

    def _is_own(self, member: NodeMember) -> bool:
        return member.info is not None and member.info.uid == self._own.uid

    def _drop(self, member: NodeMember) -> None:
        member.peer.close()
        if member in self._members:
            self._members.remove(member)

    def _on_message(self, member: NodeMember, kind: str, content: Mapping[str, Any]) -> None:
        if member not in self._members:
            return
        try:
            fields = _read_message(kind, content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"protocol mismatch: unexpected message {kind!r}: {error}"
            do = "install the same version of echelon on all machines"
            _print(LaunchError(what, where=member.name, do=do))
            member.peer.send("refused", what=what, where=member.name, do=do)
            if member.info is not None:
                self._on_lost(member, "protocol mismatch")
            return
        self._handle_message(member, kind, fields)

    def _handle_message(self, member: NodeMember, kind: str, content: Mapping[str, Any]) -> None:
        generation = self._generation
        if kind == "hello" and self._end_of_run is not None:
            then, code = self._end_of_run
            member.peer.send("end", then=then, code=code, text=_OVER)
        elif kind == "hello":
            self._admit(member, content["info"])
        elif kind in ("leave", "bye") and member.info is None:
            self._drop(member)
        elif member.info is None:
            return  # it was refused, and disconnects after it has read the refusal
        elif kind == "join":
            member.is_waiting = member.has_joined = True
            # It has imported torch by now.
            member.peer.set_timeout(self._times.lost_after.total_seconds())
        elif kind == "codes" and generation is not None and content["generation"] == generation.number:
            member.codes = content["codes"]
        elif kind == "preempt":
            member.requester = content["requester"]
        elif kind == "leave":
            self._drop(member)
            if generation is not None and member in generation.members:
                reason = f"{member.name} has left the run: {content['reason']}"
                self._end_without(generation, member, reason, content["code"])
        elif kind == "bye":
            self._drop(member)

    def _admit(self, member: NodeMember, info: NodeInfo) -> None:
        for other in [other for other in self._members if other.info is not None]:
            assert other.info is not None
            has_same_rank = info.machine_rank is not None and other.info.machine_rank == info.machine_rank
            if other.info.uid == info.uid or (has_same_rank and other.has_joined and not _answers(other)):
                self._on_lost(other, "it has reconnected")
        error = refusal(info, [other.info for other in self._members if other.info is not None], self._own)
        if error is not None:
            _print(error)
            member.peer.send("refused", what=error.what, where=error.where, do=error.do)
            return
        member.info = info
        try:
            member.offset_ns = clock_offset_ns(member.peer, timeout_s=ANSWER_S)
        except (ConnectionLost, ValueError, TypeError):
            self._on_lost(member, "no answer")
            return
        member.peer.send("welcome")
        if not self._is_own(member):
            num_here = sum(other.info is not None for other in self._members)
            _print(
                f"{member.name} joined with {info.num_processes} process{'' if info.num_processes == 1 else 'es'} "
                f"({num_here} of {node_range_text(self._own)} machines)"
            )

    def _on_lost(self, member: NodeMember, reason: str) -> None:
        if member not in self._members:
            return  # it has left
        self._drop(member)
        if self._generation is not None and member in self._generation.members:
            self._end_without(self._generation, member, f"lost contact with {member.name}: {reason}", 1)
        elif member.info is not None and self._end_of_run is None:
            _print(f"{member.name} disconnected: {reason}")

    def _end_without(self, generation: Generation, member: NodeMember, what: str, code: int) -> None:
        """End the generation that ``member`` has left, and end the run if it cannot continue."""
        left = [other for other in generation.members if other in self._members]
        slot = next(slot for slot in generation.slots if member.info is not None and slot.uid == member.info.uid)
        first, last = slot.first_rank, slot.first_rank + slot.num_processes - 1
        ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
        is_elastic = len(left) >= self._min_nodes
        continues = is_elastic or self._num_restarts < self._rules.max_restarts
        then = (
            "the run continues without it"
            if is_elastic
            else "waiting for it to rejoin"
            if continues
            else "the run ends"
        )
        hint = (
            "; with --nnodes MIN:MAX, a run continues on fewer machines; with --max_restarts, it waits for the machine"
        )
        _print(
            LaunchError(
                f"{what}; {then}",
                where=f"{ranks} of {generation.world_size}; detected by {name_of(self._own)}",
                do=f"check the lost machine and its network connection{'' if continues else hint}",
            )
        )
        for other in left:
            if not self._is_own(other):
                other.peer.send("log", text=f"{what}; {then}")
        if continues:
            self._num_restarts += 0 if is_elastic else 1
            self._end("restart", failed_ns=time.monotonic_ns())
        else:
            self._end("stop", code=code, failed_ns=time.monotonic_ns())

    # Methods between generations.

    def _poll_rendezvous(self) -> None:
        now = time.monotonic()
        ready = [member for member in self._members if member.is_waiting]
        waited_s = now - self._rendezvous_since
        if len(ready) >= self._max_nodes:
            self._start_generation(ready[: self._max_nodes])
            return
        if len(ready) >= self._min_nodes:
            self._enough_since = self._enough_since or now
            # After the first generation, only connected launchers are expected.
            all_ready = self._num_generations > 0 and all(m.is_waiting for m in self._members if m.info is not None)
            if all_ready or now - self._enough_since >= self._times.last_call.total_seconds():
                self._start_generation(ready)
                return
        else:
            self._enough_since = None
        # Connected nodes that are not waiting yet are importing torch.
        here = [member.info for member in self._members if member.info is not None]
        limit_s = self._times.join_timeout.total_seconds() + (START_S if len(here) >= self._min_nodes else 0.0)
        missing = describe_missing(here, min_nodes=self._min_nodes, max_nodes=self._max_nodes)
        if waited_s > limit_s:
            self._abandon_rendezvous(missing, waited_s)
        elif waited_s > _MISSING_AFTER_S * (2**self._num_missing_reports) and len(here) < self._min_nodes:
            self._num_missing_reports += 1
            refused = self._connections.num_refused
            hint = f"; {refused} connection{'s' if refused > 1 else ''} failed token authentication" if refused else ""
            text = f"still waiting after {waited_s:.0f} s: {missing}{hint}"
            _print(text)
            for member in self._members:
                if not self._is_own(member):
                    member.peer.send("log", text=text)

    def _abandon_rendezvous(self, missing: str, waited_s: float) -> None:
        timeout = f"--rdzv_conf join_timeout={self._times.join_timeout.total_seconds():g}"
        error = LaunchError(
            f"{missing}; waited {waited_s:.0f} s",
            where=f"{name_of(self._own)} ({timeout})",
            do="run the same command on the missing machines, and check the messages there",
        )
        _print(error)
        for member in self._members:
            member.peer.send("end", then="stop", code=1, text="" if self._is_own(member) else error.what)
        self._finish()

    def _start_generation(self, ready: Sequence[NodeMember]) -> None:
        by_uid = {member.info.uid: member for member in ready if member.info is not None}
        infos = {member.info.uid: member.info for member in ready if member.info is not None}
        slots = assign_slots(list(infos.values()), last_order=self._last_order, first=self._own.uid)
        members = [by_uid[slot.uid] for slot in slots]
        number = self._num_generations
        self._num_generations += 1
        self._last_order = [slot.uid for slot in slots]
        machines = self._machines = machine_of_each_rank(infos, slots)
        generation = self._generation = Generation(number, slots, members, machines, self._new_store())
        self._num_missing_reports, self._enough_since, self._joiners_since = 0, None, None
        generation.supervisor = Supervisor(
            RanksOfAllNodes(generation),
            directory=self._rules.directory,
            rules=self._rules.stall,
            machines=machines,
        )
        self._goodput.start_attempt()
        world_size = generation.world_size
        if number or len(slots) > 1:
            names = ", ".join(name_of(infos[slot.uid]) for slot in slots)
            _print(f"generation {number}: {world_size} ranks on {len(slots)} machines: {names}")
        for slot, member in zip(slots, members):
            member.is_waiting, member.requester, member.codes = False, "", {}
            member.peer.send(
                "generation",
                number=number,
                group_rank=slot.group_rank,
                group_world_size=len(slots),
                first_rank=slot.first_rank,
                world_size=world_size,
                port=generation.store.port if self._is_own(member) else 0,
                num_restarts=self._num_restarts,
                run_name=self._rules.directory.name,
            )

    # Methods during a generation.

    def _poll_generation(self, generation: Generation) -> None:
        codes = [code for member in generation.members for code in member.codes.values()]
        barrier = generation.barrier
        if any(code not in (None, 0) and not (barrier and code == EXIT_CODE) for code in codes):
            self._handle_failure(generation)
            return
        if len(codes) == generation.world_size and None not in codes:
            if barrier is not None and (EXIT_CODE in codes or barrier.poll() is BarrierOutcome.MET):
                self._end_at_barrier(generation)
            else:
                self._end("done")
            return
        if barrier is not None and (outcome := barrier.poll()) is not BarrierOutcome.MET:
            if outcome is BarrierOutcome.LATE:
                self._handle_late_ranks(generation)
            return
        if barrier is not None:
            self._poll_stall(generation)  # saving may stall
            return
        if any(member.requester for member in generation.members):
            reason = next(f"{m.requester} on {m.name}" for m in generation.members if m.requester)
            self._start_barrier(generation, reason, "preempted")
            return
        if len(generation.members) < self._max_nodes and any(member.is_waiting for member in self._members):
            self._joiners_since = self._joiners_since or time.monotonic()
            if time.monotonic() - self._joiners_since >= _JOINERS_WAIT_S:
                self._admit_joiners(generation)
                return
        self._poll_stall(generation)

    def _poll_stall(self, generation: Generation) -> None:
        assert generation.supervisor is not None
        stall = generation.supervisor.poll()
        if stall is not None and stall.is_alarm:
            self._rules.record.event("stall", stall.what, rank=next(iter(stall.culprits or stall.ranks), None))
        if stall is None or not stall.is_alarm or self._rules.stall.on_stall == "report":
            return
        failed_ns = time.monotonic_ns() - int(stall.waited_s * 1e9)
        if self._rules.stall.on_stall == "restart" and self._num_restarts < self._rules.max_restarts:
            self._num_restarts += 1
            self._end("restart", failed_ns=failed_ns)
        else:
            self._end("stop", code=STALLED, failed_ns=failed_ns)

    def _admit_joiners(self, generation: Generation) -> None:
        names = " and ".join(member.name for member in self._members if member.is_waiting)
        if self._rules.preemption_grace and all(NodeCommands(generation).read_positions()):
            self._start_barrier(generation, f"{names} joined", "restart")
            return
        _print(f"{names} joined; all ranks restart from the last checkpoint")
        self._end("restart", failed_ns=time.monotonic_ns())

    def _start_barrier(self, generation: Generation, reason: str, then: Then) -> None:
        grace_s = self._rules.preemption_grace.total_seconds()
        _print(f"{reason}: all ranks save at the same step and exit (within {grace_s:g} s)")
        self._rules.record.event("preemption", f"{reason}: all ranks save at the same step and exit")
        generation.barrier_reason, generation.then = reason, then
        generation.barrier = BarrierCoordinator(NodeCommands(generation), grace_s)

    def _handle_late_ranks(self, generation: Generation) -> None:
        notes = {view.rank: view.note for view in RanksOfAllNodes(generation).views()}
        positions = NodeCommands(generation).positions()
        grace = self._rules.preemption_grace
        _print(stop_barrier_timeout(generation.barrier_reason, grace, positions, notes))
        self._end_at_barrier(generation)

    def _end_at_barrier(self, generation: Generation) -> None:
        """End a generation at the stop barrier. Preempted machines exit; the others continue if enough remain."""
        leaving = [member for member in generation.members if member.requester]
        num_staying = len(generation.members) - len(leaving)
        # The run cannot continue without the rendezvous host.
        host_stays = not any(self._is_own(member) for member in leaving)
        if host_stays and (generation.then == "restart" or (leaving and num_staying >= self._min_nodes)):
            self._end("restart", failed_ns=time.monotonic_ns(), leaving=leaving)
        else:
            self._end("preempted", code=EXIT_CODE)

    def _handle_failure(self, generation: Generation) -> None:
        ends = wait_for_verdict(lambda: ends_of(generation), RanksOfAllNodes(generation))
        first = first_failure(ends)
        if first is None:
            return  # the program succeeded, and only the interpreter's exit crashed
        if self._may_have_lost_a_node(generation, first, ends):
            return
        is_exiting = generation.barrier is not None and generation.then != "restart"
        restarts = self._num_restarts < self._rules.max_restarts and not is_exiting
        what, where, do = explain(ends, logs=self._rules.logs, machines=generation.machines)
        error = LaunchError(what, where=where, do=do)
        self._rules.record.event("failure", what.splitlines()[0], rank=first.rank, at_ns=first_sign(ends))
        culprit = generation.machines[first.rank]
        then = f"restart {self._num_restarts + 1} of {self._rules.max_restarts}" if restarts else "the run ends"
        for member in generation.members:
            if self._is_own(member) or member.name == culprit:
                text = f"{error}\nechelon: {then}"
            else:
                text = f"{what.splitlines()[0]} (on {culprit}, which has the full report); {then}"
            member.peer.send("log", text=text)
        if restarts:
            self._num_restarts += 1
            self._end("restart", failed_ns=first_sign(ends))
        else:
            self._end("stop", code=exit_status(ends), failed_ns=first_sign(ends))

    def _may_have_lost_a_node(self, generation: Generation, first: RankEnd, ends: Sequence[RankEnd]) -> bool:
        """Return whether a machine may be lost; ranks that lost contact show this before the heartbeat times out."""
        if any(member.peer.is_lost for member in generation.members):
            return True  # the queue contains its "lost" event with the reason
        if cause_of(first, ends) is not Cause.COMMUNICATION:
            return False
        generation.lost_contact_since = generation.lost_contact_since or time.monotonic()
        waited_s = time.monotonic() - generation.lost_contact_since
        is_silent = bool(silent_members(generation, self._times.heartbeat.total_seconds()))
        return is_silent and waited_s < self._times.lost_after.total_seconds() + ANSWER_S

    def _end(
        self, then: Then, *, code: int = 0, failed_ns: int | None = None, leaving: Sequence[NodeMember] = ()
    ) -> None:
        generation = self._generation
        assert generation is not None
        noticed_ns = time.monotonic_ns()
        here = [member for member in generation.members if member in self._members]
        times = times_of(replace(generation, members=here))
        if times:
            self._goodput.end_attempt(times, failed_ns=failed_ns, noticed_ns=noticed_ns)
        # Drop the references to the generation, so that its store closes now.
        generation.supervisor = generation.barrier = None
        self._generation = None
        self._rendezvous_since = time.monotonic()
        for member in here:
            leaves = member in leaving
            member.peer.send("end", then="preempted" if leaves else then, code=EXIT_CODE if leaves else code, text="")
        if then != "restart":
            self._finish(then, code)

    def _finish(self, then: Then = "stop", code: int = 1) -> None:
        self._generation, self._end_of_run = None, (then, code)
        for member in self._members:
            if member.is_waiting or member.info is None:
                member.peer.send("end", then=then, code=code, text=_OVER)


def _answers(member: NodeMember) -> bool:
    try:
        member.peer.request("clock", timeout_s=2.0)
    except ConnectionLost:
        return False
    return True


def _read_message(kind: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a node's message after checking their types.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: the message is invalid.
    """
    if kind == "hello":
        return {"info": decode(NodeInfo, content["info"])}
    if kind == "codes":
        codes = {int(rank): None if code is None else int(code) for rank, code in content["codes"]}
        return {"generation": int(content["generation"]), "codes": codes}
    if kind == "preempt":
        return {"requester": str(content["requester"])}
    if kind == "leave":
        return {"reason": str(content["reason"]), "code": int(content["code"])}
    return {}


def _print(text: str | LaunchError) -> None:
    say(text, kind="error" if isinstance(text, LaunchError) else "note")
