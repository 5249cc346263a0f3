"""The coordinator of a run: admits machines, starts and ends generations, and decides on failures, stalls and preemption.

It runs in a thread of the launcher, on several machines of that on the rendezvous host. Each launcher, including that one, is a *node*
(``node.py``), so a run on one machine is a coordinator with one node in its own process. All messages from nodes pass through one
queue, so that they are handled one at a time. A *generation* is one start of all ranks on the nodes that are present at that time,
with its own store. It ends on all nodes at the same time, with "done", "restart", "stop" or "preempted".
"""

from __future__ import annotations

import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, final

from echelon.base.errors import LaunchError
from echelon.base.messages.terminal import say
from echelon.base.messages.translation import gettext as _, gettext_noop as N_
from echelon.diagnose.goodput import RankTimes
from echelon.diagnose.stall import Class, disagreement
from echelon.launch.failures.failure import (
    Cause,
    RankEnd,
    cause_of,
    exit_status,
    explain,
    explain_collectives,
    first_failure,
)
from echelon.launch.generation import ANSWER_S, Generation, NodeMember, RendezvousStore
from echelon.launch.interrupts import Interrupted, Interrupts
from echelon.launch.local.goodput_recorder import ALL_MACHINES_FILE, GoodputRecorder, GoodputReport, first_sign
from echelon.launch.multinode.channel import (
    START_S,
    ConnectionLost,
    InProcessPeer,
    OnMessage,
    OnRequest,
    Peer,
    Receiver,
    clock_offset_ns,
)
from echelon.launch.multinode.messages import decode
from echelon.launch.multinode.roster import (
    NodeInfo,
    RendezvousTimes,
    describe_missing,
    in_rank_order,
    join_names,
    name_of,
    node_range_text,
    refusal,
)
from echelon.launch.node import Node, RunRules, Then
from echelon.launch.preemption import stop_barrier_timeout
from echelon.launch.supervisor import STALLED, Supervisor
from echelon.status.stop_barrier import EXIT_CODE, BarrierCoordinator, BarrierOutcome

if TYPE_CHECKING:
    from echelon.launch.multinode.connections import ConnectionListener
    from echelon.launch.multinode.machines import MultinodePlan

_TICK_S = 0.02
_COMPARE_EVERY_S = 1.0
_MISSING_AFTER_S = 20.0
_JOINERS_WAIT_S = 2.0
"""How long to wait for more machines after a machine has joined a running generation."""
_GOODBYE_S = 5.0
_OVER = N_("the run is over")
_ONE_MACHINE = NodeInfo(
    uid="",
    host="localhost",
    address="127.0.0.1",
    machine_rank=0,
    num_processes=1,
    min_nodes=1,
    max_nodes=1,
    run_id="",
    versions={},
    settings={},
)
_TIMES_OF_ONE_MACHINE = RendezvousTimes(
    join_timeout=timedelta(days=1), last_call=timedelta(), heartbeat=timedelta(days=1), lost_after=timedelta(days=1)
)

_Event: TypeAlias = tuple[Literal["message", "lost", "new", "close"], Any, str, Mapping[str, Any]]


@contextmanager
def joined_run(
    plan: MultinodePlan | None, rules: RunRules, interrupts: Interrupts, *, num_processes: int, port: int
) -> Iterator[Node]:
    """Join the run, start its coordinator if it belongs here, and leave the run at the end of the ``with`` block.

    Args:
        plan: how this machine takes part in a run on several machines; None for a run on this machine alone.
        rules: the rules that the user set.
        interrupts: the signals that the launcher has received.
        num_processes: number of processes on this machine.
        port: port of the store of a run on one machine; 0 for any free port.

    Raises:
        Interrupted: the launcher received a signal.
        LaunchError: the connection failed, or the coordinator refused this machine.
    """
    info = replace(_ONE_MACHINE, num_processes=num_processes) if plan is None else plan.info
    own: Coordinator | None = None
    if plan is not None and plan.listener is None:
        from echelon.launch.multinode.remote_coordinator import RemoteCoordinator  # noqa: PLC0415 - imports asyncio

        node = Node(info, RemoteCoordinator(plan), interrupts, preemption_grace=rules.preemption_grace)
    else:
        from echelon.world.group import LoopbackStore  # noqa: PLC0415 - imports torch, and here the user sees if it is missing

        times = _TIMES_OF_ONE_MACHINE if plan is None else plan.times
        own = Coordinator(info, times=times, rules=rules, new_store=partial(LoopbackStore, port))
        if plan is not None and plan.listener is not None:
            own.listen(plan.listener, plan.token)
        node = Node(info, own, interrupts, preemption_grace=rules.preemption_grace)
    reason, code = _("its launcher failed"), 1
    try:
        node.join()
        yield node
        reason = _("its launcher has ended")
        node.close()
    except Interrupted as stop:
        reason, code = _("interrupted by {name}", name=signal.Signals(stop.number).name), 128 + stop.number
        raise
    finally:
        node.leave(reason, code)
        if own is not None:
            node.goodput = own.close(reason, code)


@final
class Coordinator:
    """Coordinates a run in its own thread until ``close``.

    Args:
        own: the launcher whose process the coordinator runs in; it joins as a node, like all other launchers.
        times: the rendezvous time limits.
        rules: the rules that the user set.
        new_store: function that opens a generation's store, which closes when it is garbage-collected.
    """

    def __init__(
        self, own: NodeInfo, *, times: RendezvousTimes, rules: RunRules, new_store: Callable[[], RendezvousStore]
    ) -> None:
        self.times = times
        self._own, self._rules, self._new_store = own, rules, new_store
        self._min_nodes, self._max_nodes = own.min_nodes, own.max_nodes
        self._is_alone = own.max_nodes == 1
        """Whether the run uses one machine, which its messages then do not mention."""
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
        self._goodput = None
        if not self._is_alone:
            self._goodput = GoodputRecorder(rules.directory / ALL_MACHINES_FILE, began_ns=rules.began_ns)
        self._connections: ConnectionListener | None = None
        self._receiver: Receiver | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="echelon-coordinator")
        self._thread.start()

    def listen(self, listener: socket.socket, token: bytes) -> None:
        """Let the launchers that know ``token`` join through ``listener``, a bound socket."""
        from echelon.launch.multinode.connections import ConnectionListener  # noqa: PLC0415 - imports asyncio

        self._receiver = Receiver(self.times.heartbeat.total_seconds())
        self._connections = ConnectionListener(listener, token, on_node=self._on_node, port_of=self._port_of)

    def close(self, reason: str, code: int) -> GoodputReport | None:
        """End the run for ``reason`` if it is still running, notify the nodes, and return the goodput of several machines."""
        self._events.put(("close", code, reason, {}))
        self._thread.join()
        if self._connections is not None and self._receiver is not None:
            self._connections.close()
            self._receiver.close()
        return None if self._goodput is None else replace(self._goodput.finish(), machines=self._machines)

    # Methods that other threads call.

    def connect(
        self,
        *,
        on_message: OnMessage,
        on_request: OnRequest,
        on_lost: Callable[[str], None],
        check: Callable[[], None],
        started: float,
    ) -> InProcessPeer:
        """Connect the node in this process, which cannot be lost."""
        member = NodeMember(InProcessPeer(on_message=on_message, on_request=on_request), "")
        self._events.put(("new", member, "", {}))

        def receive(kind: str, content: Mapping[str, Any]) -> None:
            if kind == "preempt":  # at once, because a failure that is being examined must not restart such a run
                member.requester = content["requester"]
            self._events.put(("message", member, kind, content))

        return InProcessPeer(on_message=receive)

    def open_store(self, number: int) -> socket.socket:
        """Raise an error, because the store is in this process."""
        raise AssertionError(_("the store is on this machine"))

    def _on_node(self, sock: socket.socket, address: str) -> None:
        member: list[NodeMember] = []
        peer = Peer(
            sock,
            on_message=lambda kind, content: self._events.put(("message", member[0], kind, content)),
            on_request=lambda kind, content: None,
            on_lost=lambda reason: self._events.put(("lost", member[0], reason, {})),
        )
        member.append(NodeMember(peer, address))
        self._events.put(("new", member[0], "", {}))
        assert self._receiver is not None
        self._receiver.add(peer)

    def _port_of(self, number: int) -> int | None:
        generation = self._generation
        return generation.store.port if generation is not None and generation.number == number else None

    # Methods that run in the coordinator's thread.

    def _run(self) -> None:
        try:
            self._handle_events()
        except BaseException as error:
            for member in self._members:  # the launchers must not wait for a dead coordinator
                member.peer.send(
                    "end", then="stop", code=1, error=_("the run's coordinator failed: {error!r}", error=error)
                )
            raise

    def _handle_events(self) -> None:
        polled_at = 0.0
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
                continue
            if not self._events.empty() and time.monotonic() - polled_at < _TICK_S:
                continue  # a poll looks at all machines; it must not follow each of a thousand messages
            polled_at = time.monotonic()
            if self._generation is None:
                self._poll_rendezvous()
            else:
                self._poll_generation(self._generation)
        for member in self._members:
            member.peer.close()

    def _close(self, reason: str, code: int) -> None:
        if self._end_of_run is None and self._generation is not None:
            times = self._request_times(self._generation)
            self._record_times(times(), failed_ns=None, noticed_ns=time.monotonic_ns())
        for member in [member for member in self._members if self._is_own(member)]:
            self._drop(member)  # it sends no more messages
        if self._end_of_run is None:
            self._tell(self._members, _("{own}: {reason}; the run ends", own=name_of(self._own), reason=reason))
            for member in self._members:
                member.peer.send("end", then="stop", code=code)
            self._finish()
        for member in [member for member in self._members if member.info is None]:
            self._drop(member)
        self._goodbye_deadline = time.monotonic() + _GOODBYE_S

    def _is_own(self, member: NodeMember) -> bool:
        return member.info is not None and member.info.uid == self._own.uid

    def _tell(self, members: Sequence[NodeMember], text: str) -> None:
        """Print ``text`` on the other machines."""
        for member in members:
            if not self._is_own(member):
                member.peer.send("log", text=text)

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
            what = _("protocol mismatch: unexpected message {kind!r}: {error}", kind=kind, error=error)
            do = _("install the same version of echelon on all machines")
            _print(LaunchError(what, where=member.name, do=do))
            member.peer.send("refused", what=what, where=member.name, do=do)
            if member.info is not None:
                self._on_lost(member, _("protocol mismatch"))
            return
        self._handle_message(member, kind, fields)

    def _handle_message(self, member: NodeMember, kind: str, content: Mapping[str, Any]) -> None:
        generation = self._generation
        if kind == "hello" and self._end_of_run is not None:
            self._tell_over(member, *self._end_of_run)
        elif kind == "hello":
            self._admit(member, content["info"])
        elif kind in ("leave", "bye") and member.info is None:
            self._drop(member)
        elif member.info is None:
            return  # it was refused, and disconnects after it has read the refusal
        elif kind == "join" and generation is not None and member in generation.members:
            # Under torchrun, a machine whose ranks failed leaves the generation without asking. A node that has just been told of
            # this generation had joined twice.
            if content["after"] == generation.number:
                member.is_waiting = True
                self._end("restart", failed_ns=time.monotonic_ns())
        elif kind == "join":
            member.is_waiting = member.has_joined = True
            # It has imported torch by now.
            member.peer.set_timeout(self.times.lost_after.total_seconds())
        elif kind == "codes" and generation is not None and content["generation"] == generation.number:
            member.codes = content["codes"]
            member.has_exits = any(code is not None for code in member.codes.values())
        elif kind == "preempt":
            member.requester = content["requester"]
        elif kind == "leave" and self._is_own(member):
            self._close(content["reason"], content["code"])
        elif kind == "leave":
            self._drop(member)
            if generation is not None and member in generation.members:
                reason = _("{member} has left the run: {reason}", member=member.name, reason=content["reason"])
                self._end_without(generation, member, reason, content["code"])
        elif kind == "bye":
            self._drop(member)

    def _admit(self, member: NodeMember, info: NodeInfo) -> None:
        for other in [other for other in self._members if other.info is not None]:
            assert other.info is not None
            has_same_rank = info.machine_rank is not None and other.info.machine_rank == info.machine_rank
            if other.info.uid == info.uid or (has_same_rank and other.has_joined and not _answers(other)):
                self._on_lost(other, _("it has reconnected"))
        error = refusal(info, [other.info for other in self._members if other.info is not None], self._own)
        if error is not None:
            _print(error)
            member.peer.send("refused", what=error.what, where=error.where, do=error.do)
            return
        member.info = info
        try:
            member.offset_ns = clock_offset_ns(member.peer, timeout_s=ANSWER_S)
        except (ConnectionLost, ValueError, TypeError):
            self._on_lost(member, _("no answer"))
            return
        member.peer.send("welcome")
        if not self._is_own(member):
            num_here = sum(other.info is not None for other in self._members)
            _print(
                _(
                    "{member} joined with {num_processes} process{es} ({num_here} of {own} machines)",
                    member=member.name,
                    num_processes=info.num_processes,
                    es="" if info.num_processes == 1 else "es",
                    num_here=num_here,
                    own=node_range_text(self._own),
                )
            )

    def _on_lost(self, member: NodeMember, reason: str) -> None:
        if member not in self._members:
            return  # it has left
        self._drop(member)
        if self._generation is not None and member in self._generation.members:
            self._end_without(
                self._generation,
                member,
                _("lost contact with {member}: {reason}", member=member.name, reason=reason),
                1,
            )
        elif member.info is not None and self._end_of_run is None:
            _print(_("{member} disconnected: {reason}", member=member.name, reason=reason))

    def _end_without(self, generation: Generation, member: NodeMember, what: str, code: int) -> None:
        """End the generation that ``member`` has left, and end the run if it cannot continue."""
        left = [other for other in generation.members if other in self._members]
        first, last = member.ranks[0], member.ranks[-1]
        ranks = _("rank {rank}", rank=first) if first == last else _("ranks {first} to {last}", first=first, last=last)
        is_elastic = len(left) >= self._min_nodes
        continues = is_elastic or self._num_restarts < self._rules.max_restarts
        then = _("waiting for it to rejoin") if continues else _("the run ends")
        then = _("the run continues without it") if is_elastic else then
        hint = _(
            "; with --nnodes MIN:MAX, a run continues on fewer machines; with --max_restarts, it waits for the machine"
        )
        _print(
            LaunchError(
                _("{what}; {then}", what=what, then=then),
                where=_(
                    "{ranks} of {world_size}; detected by {own}",
                    ranks=ranks,
                    world_size=generation.world_size,
                    own=name_of(self._own),
                ),
                do=_("check the lost machine and its network connection{hint}", hint="" if continues else hint),
            )
        )
        self._tell(left, _("{what}; {then}", what=what, then=then))
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
            if all_ready or now - self._enough_since >= self.times.last_call.total_seconds():
                self._start_generation(ready)
                return
        else:
            self._enough_since = None
        # Connected nodes that are not waiting yet are importing torch.
        here = [member.info for member in self._members if member.info is not None]
        limit_s = self.times.join_timeout.total_seconds() + (START_S if len(here) >= self._min_nodes else 0.0)
        if waited_s > limit_s:
            self._abandon_rendezvous(self._describe_missing(here), waited_s)
        elif waited_s > _MISSING_AFTER_S * (2**self._num_missing_reports) and len(here) < self._min_nodes:
            self._num_missing_reports += 1
            refused = 0 if self._connections is None else self._connections.num_refused
            hint = (
                _(
                    "; {refused} connection{s} failed token authentication",
                    refused=refused,
                    s="s" if refused > 1 else "",
                )
                if refused
                else ""
            )
            text = _(
                "still waiting after {waited_s:.0f} s: {missing}{hint}",
                waited_s=waited_s,
                missing=self._describe_missing(here),
                hint=hint,
            )
            _print(text)
            self._tell(self._members, text)

    def _describe_missing(self, here: Sequence[NodeInfo]) -> str:
        return describe_missing(here, min_nodes=self._min_nodes, max_nodes=self._max_nodes)

    def _abandon_rendezvous(self, missing: str, waited_s: float) -> None:
        timeout = f"--rdzv_conf join_timeout={self.times.join_timeout.total_seconds():g}"
        error = LaunchError(
            _("{missing}; waited {waited_s:.0f} s", missing=missing, waited_s=waited_s),
            where=f"{name_of(self._own)} ({timeout})",
            do=_("run the same command on the missing machines, and check the messages there"),
        )
        _print(error)
        self._tell(self._members, error.what)
        for member in self._members:
            member.peer.send("end", then="stop", code=1)
        self._finish()

    def _start_generation(self, ready: Sequence[NodeMember]) -> None:
        by_uid = {member.info.uid: member for member in ready if member.info is not None}
        infos = [member.info for member in ready if member.info is not None]
        infos = in_rank_order(infos, last_order=self._last_order, first=self._own.uid)
        self._last_order = [info.uid for info in infos]
        members = [by_uid[uid] for uid in self._last_order]
        number = self._num_generations
        self._num_generations += 1
        first_rank = 0
        for member, info in zip(members, infos):
            member.is_waiting, member.requester, member.codes, member.has_exits = False, "", {}, False
            member.ranks = range(first_rank, first_rank + info.num_processes)
            first_rank = member.ranks.stop
        if not self._is_alone:
            self._machines = {rank: member.name for member in members for rank in member.ranks}
        try:
            store = self._new_store()
        except LaunchError as error:  # for example a port in use
            for member in members:
                member.peer.send("refused", what=error.what, where=error.where, do=error.do)
            self._finish()
            return
        generation = self._generation = Generation(number, members, store)
        self._num_missing_reports, self._enough_since, self._joiners_since = 0, None, None
        stall = replace(self._rules.stall, max_restarts=self._rules.max_restarts - self._num_restarts)
        generation.supervisor = Supervisor(
            generation, directory=self._rules.directory, rules=stall, machines=self._machines
        )
        if self._goodput is not None:
            self._goodput.start_attempt()
        world_size = generation.world_size
        if not self._is_alone and (number or len(members) > 1):
            names = join_names([member.name for member in members])
            _print(
                _(
                    "generation {number}: {world_size} ranks on {num_members} machines: {names}",
                    number=number,
                    world_size=world_size,
                    num_members=len(members),
                    names=names,
                )
            )
        for group_rank, member in enumerate(members):
            member.peer.send(
                "generation",
                number=number,
                group_rank=group_rank,
                group_world_size=len(members),
                first_rank=member.ranks.start,
                world_size=world_size,
                port=store.port if self._is_own(member) else 0,
                num_restarts=self._num_restarts,
                may_restart=self._may_restart or not self._is_alone,
                run_name=self._rules.directory.name,
            )

    # Methods during a generation.

    @property
    def _may_restart(self) -> bool:
        return self._num_restarts < self._rules.max_restarts

    def _poll_generation(self, generation: Generation) -> None:
        # While all ranks run, this looks once at each machine, not at each rank.
        codes = [code for member in generation.members if member.has_exits for code in member.codes.values()]
        barrier = generation.barrier
        if any(code not in (None, 0) and not (barrier and code == EXIT_CODE) for code in codes):
            self._handle_failure(generation)
            return
        if self._rules.is_debug and self._end_if_collectives_differ(generation):
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
            if not self._is_alone:
                self._poll_stall(
                    generation
                )  # a machine may hang as it saves; one machine's last save takes as long as it takes
            return
        if any(member.requester for member in generation.members):
            member = next(member for member in generation.members if member.requester)
            reason = (
                member.requester
                if self._is_alone
                else _("{requester} on {member}", requester=member.requester, member=member.name)
            )
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
        if stall is None or not stall.is_alarm:
            return
        culprit = next(iter(stall.culprits or stall.ranks), None)
        report = {"what": stall.what, "where": "\n".join(stall.lines()), "do": stall.do}
        self._rules.record.event("stall", stall.what, rank=culprit, step=generation.last_step(), report=report)
        action = generation.supervisor.rules.action(stall)
        if action == "report":
            return
        failed_ns = time.monotonic_ns() - int(stall.waited_s * 1e9)
        if action == "restart" and not generation.is_exiting:
            self._restart(failed_ns=failed_ns)
        else:
            self._end("stop", code=STALLED, failed_ns=failed_ns)

    def _end_if_collectives_differ(self, generation: Generation) -> bool:
        """End the run if its ranks have called different collectives, even if none of them waits or has failed."""
        codes = [code for member in generation.members for code in member.codes.values()]
        is_over = len(codes) == generation.world_size and None not in codes
        if not is_over and time.monotonic() < generation.compare_at:
            return False
        generation.compare_at = time.monotonic() + _COMPARE_EVERY_S
        watches = [view.watch for view in generation.views()]
        if not is_over and not any(watch is not None and watch.num_collectives for watch in watches):
            return False  # ranks that are starting answer late
        found = disagreement(generation.request_stacks())
        if found is None or found.kind is Class.MISSING:
            return False
        logs, machines = self._rules.logs, self._machines
        what, where, do = explain_collectives(found, world_size=generation.world_size, logs=logs, machines=machines)
        rank = min(found.culprits or found.ranks)
        self._rules.record.event("failure", what, rank=rank, step=generation.last_step())
        self._end("stop", code=1, error=str(LaunchError(what, where=where, do=do)), failed_ns=time.monotonic_ns())
        return True

    def _admit_joiners(self, generation: Generation) -> None:
        names = " and ".join(member.name for member in self._members if member.is_waiting)
        if self._rules.preemption_grace and all(generation.read_positions()):
            self._start_barrier(generation, f"{names} joined", "restart")
            return
        _print(_("{names} joined; all ranks restart from the last checkpoint", names=names))
        self._end("restart", failed_ns=time.monotonic_ns())

    def _start_barrier(self, generation: Generation, reason: str, then: Then) -> None:
        grace_s = self._rules.preemption_grace.total_seconds()
        _print(
            _(
                "{reason}: all ranks save at the same step and exit (within {grace_s:g} s; a second signal stops "
                "them immediately)",
                reason=reason,
                grace_s=grace_s,
            )
            if self._is_alone
            else _(
                "{reason}: all ranks save at the same step and exit (within {grace_s:g} s)",
                reason=reason,
                grace_s=grace_s,
            )
        )
        self._rules.record.event("preemption", _("{reason}: all ranks save at the same step and exit", reason=reason))
        generation.barrier_reason, generation.then = reason, then
        generation.barrier = BarrierCoordinator(generation, grace_s)

    def _handle_late_ranks(self, generation: Generation) -> None:
        notes = {view.rank: view.note for view in generation.views()}
        positions = dict(enumerate(generation.read_positions()))
        grace = self._rules.preemption_grace
        error = stop_barrier_timeout(generation.barrier_reason, grace, positions, notes)
        self._end_at_barrier(generation, error=str(error))

    def _end_at_barrier(self, generation: Generation, *, error: str = "") -> None:
        """End a generation at the stop barrier. Preempted machines exit; the others continue if enough remain."""
        leaving = [member for member in generation.members if member.requester]
        num_staying = len(generation.members) - len(leaving)
        # The run cannot continue without the rendezvous host.
        host_stays = not any(self._is_own(member) for member in leaving)
        if host_stays and (generation.then == "restart" or (leaving and num_staying >= self._min_nodes)):
            self._end("restart", failed_ns=time.monotonic_ns(), leaving=leaving, error=error)
        else:
            self._end("preempted", code=EXIT_CODE, error=error)

    def _handle_failure(self, generation: Generation) -> None:
        noticed_ns = time.monotonic_ns()
        ends = generation.wait_for_verdict()
        first = first_failure(ends)
        if first is None:
            return  # the program succeeded, and only the interpreter's exit crashed
        if self._may_have_lost_a_node(generation, first, ends):
            return
        failed_ns = first_sign(ends)
        what, where, do = explain(ends, logs=self._rules.logs, machines=self._machines)
        self._rules.record.event(
            "failure",
            what,
            rank=first.rank,
            step=generation.last_step(),
            at_ns=noticed_ns if failed_ns is None else failed_ns,
            report={"what": what, "where": where, "do": do},
        )
        error = str(LaunchError(what, where=where, do=do))
        culprit = generation.member_of(first.rank)
        is_preempted = self._is_alone and any(member.requester for member in generation.members)
        if self._may_restart and not generation.is_exiting and not is_preempted:
            self._restart(error=error, culprit=culprit, failed_ns=failed_ns, noticed_ns=noticed_ns)
        else:
            note = "" if self._is_alone else _("the run ends")
            code = exit_status(ends)
            self._end(
                "stop", code=code, error=error, culprit=culprit, note=note, failed_ns=failed_ns, noticed_ns=noticed_ns
            )

    def _restart(self, **details: Any) -> None:
        self._num_restarts += 1
        self._end(
            "restart",
            note=_(
                "restart {num_restarts} of {max_restarts}",
                num_restarts=self._num_restarts,
                max_restarts=self._rules.max_restarts,
            ),
            **details,
        )

    def _may_have_lost_a_node(self, generation: Generation, first: RankEnd, ends: Sequence[RankEnd]) -> bool:
        """Return whether a machine may be lost; ranks that lost contact show this before the heartbeat times out."""
        if any(member.peer.is_lost for member in generation.members):
            return True  # the queue contains its "lost" event with the reason
        if cause_of(first, ends) is not Cause.COMMUNICATION:
            return False
        generation.lost_contact_since = generation.lost_contact_since or time.monotonic()
        waited_s = time.monotonic() - generation.lost_contact_since
        is_silent = not generation.is_answered_by_all(self.times.heartbeat.total_seconds())
        return is_silent and waited_s < self.times.lost_after.total_seconds() + ANSWER_S

    def _end(
        self,
        then: Then,
        *,
        code: int = 0,
        error: str = "",
        culprit: NodeMember | None = None,
        note: str = "",
        failed_ns: int | None = None,
        noticed_ns: int | None = None,
        leaving: Sequence[NodeMember] = (),
    ) -> None:
        """End the generation on all nodes.

        Args:
            then: what follows.
            code: exit code of the launchers, if the run ends.
            error: the report that the nodes print.
            culprit: the only node, besides this machine's, that prints the whole report; None for all.
            note: what the nodes print after it.
            failed_ns: time of the first sign of a failure; None if nothing failed.
            noticed_ns: time at which it was noticed; None for now.
            leaving: nodes that exit as preempted, even if the run continues.
        """
        generation = self._generation
        assert generation is not None
        noticed_ns = time.monotonic_ns() if noticed_ns is None else noticed_ns
        here = [member for member in generation.members if member in self._members]
        request_times = partial(self._request_times, replace(generation, members=here))
        # Machines that restart keep their status boards until they start their ranks again; others exit.
        read_times = request_times() if then != "restart" or leaving else None
        # Drop the references to the generation, so that its store closes now.
        generation.supervisor = generation.barrier = None
        self._generation = None
        self._rendezvous_since = time.monotonic()
        brief = error
        if culprit is not None:
            brief = _(
                "{headline} (on {culprit}, which has the full report)",
                headline=error.splitlines()[0],
                culprit=culprit.name,
            )
        for member in here:
            if member.is_waiting:
                continue  # it has left the generation already
            leaves = member in leaving
            member.peer.send(
                "end",
                then="preempted" if leaves else then,
                code=EXIT_CODE if leaves else code,
                error=error if member is culprit or self._is_own(member) else brief,
                note=note,
                failed_ns=None if failed_ns is None else failed_ns - member.offset_ns,
                noticed_ns=noticed_ns - member.offset_ns,
            )
        read_times = request_times() if read_times is None else read_times
        self._record_times(read_times(), failed_ns=failed_ns, noticed_ns=noticed_ns)
        if then != "restart":
            self._finish(then, code)

    def _request_times(self, generation: Generation) -> Callable[[], list[RankTimes]]:
        """Ask for the times of the ranks, for the goodput of several machines; return a function that reads the answers."""
        return list if self._goodput is None else generation.request_times()

    def _record_times(self, times: Sequence[RankTimes], *, failed_ns: int | None, noticed_ns: int) -> None:
        if self._goodput is not None and times:
            self._goodput.end_attempt(times, failed_ns=failed_ns, noticed_ns=noticed_ns)

    def _finish(self, then: Then = "stop", code: int = 1) -> None:
        self._generation, self._end_of_run = None, (then, code)
        for member in self._members:
            if member.is_waiting or member.info is None:
                self._tell_over(member, then, code)

    @staticmethod
    def _tell_over(member: NodeMember, then: Then, code: int) -> None:
        member.peer.send("log", text=_(_OVER))
        member.peer.send("end", then=then, code=code)


def _answers(member: NodeMember) -> bool:
    try:
        member.peer.request("clock")(2.0)
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
    if kind == "join":
        return {"after": int(content["after"])}
    if kind == "preempt":
        return {"requester": str(content["requester"])}
    if kind == "leave":
        return {"reason": str(content["reason"]), "code": int(content["code"])}
    return {}


def _print(text: str | LaunchError) -> None:
    with suppress(OSError):  # stderr is closed, which must not end the run
        say(text, kind="error" if isinstance(text, LaunchError) else "note")
