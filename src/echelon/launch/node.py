"""One machine's part of a run: it joins the coordinator, tells it how the ranks here are, and learns when all start and end.

The coordinator (``coordinator.py``) decides; it runs in this process, or on another machine.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, final

from echelon.base.errors import LaunchError
from echelon.base.messages.terminal import say
from echelon.base.messages.translation import gettext as _
from echelon.diagnose.stall import RankView
from echelon.launch.interrupts import Interrupts
from echelon.launch.local.goodput_recorder import GoodputReport, times_on
from echelon.launch.local.processes import Workers
from echelon.launch.local.ranks import LocalRanks
from echelon.launch.multinode.channel import ConnectionLost, InProcessPeer, OnMessage, OnRequest, Peer
from echelon.launch.multinode.messages import decode, encode
from echelon.launch.multinode.roster import NodeInfo, RendezvousTimes
from echelon.launch.preemption import PreemptionRequest, report_preempted
from echelon.launch.supervisor import StallRules
from echelon.status.board import Board
from echelon.status.run_recorder import RunRecorder

Then: TypeAlias = Literal["done", "restart", "stop", "preempted", "lost"]
"""What follows a generation. ``lost`` means that this node has lost the coordinator and is trying to rejoin."""

_POLL_S = 0.02
_RETRY_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRules:
    """The rules that the user sets for a run, on one machine or several."""

    max_restarts: int
    stall: StallRules
    preemption_grace: timedelta
    """How long preempted ranks may take to agree on a step; if zero, they are stopped immediately."""
    logs: str
    """For reports: where the logs are, or how to get them."""
    directory: Path
    """Directory for records and logs, with a subdirectory for each attempt and rank."""
    began_ns: int
    """``time.monotonic_ns()`` when the launcher started."""
    record: RunRecorder
    """The launcher's record of the run."""
    is_debug: bool = False
    """Whether to compare the collectives of the ranks while they run (``--debug``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGeneration:
    """One start of all ranks, as seen by one node."""

    number: int
    group_rank: int
    group_world_size: int
    first_rank: int
    world_size: int
    port: int
    """The store's port if the store is on this machine, otherwise 0."""
    num_restarts: int
    may_restart: bool
    """Whether another generation may follow this one."""
    run_name: str
    """The name that all machines record for the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """How a generation ended."""

    then: Then
    code: int = 0
    """The launcher's exit code if the run ends."""
    failed_ns: int | None = field(default=None, compare=False)
    """``time.monotonic_ns()`` at the first sign of a failure; None if nothing failed."""
    noticed_ns: int | None = field(default=None, compare=False)
    """``time.monotonic_ns()`` when the failure was detected; None for the current time."""
    error: str = field(default="", compare=False)
    """The report to print once the ranks have been stopped, so that their output does not follow it."""
    note: str = field(default="", compare=False)
    """What to print after ``error``: what follows."""


class RunOver(BaseException):  # not an Exception, because it is not a failure
    """Raised if the run ends while this node waits for a generation; ``result`` says how it ended."""

    def __init__(self, result: GenerationResult) -> None:
        super().__init__(result)
        self.result = result


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRanks:
    """One attempt's running ranks on this machine."""

    board: Board
    workers: Workers
    directory: Path
    numbers: list[int]
    """Global ranks, in the order of the board's slots."""


class _CoordinatorAddress(Protocol):
    """The coordinator in this process, or the address of one on another machine."""

    @property
    def times(self) -> RendezvousTimes: ...

    def connect(
        self,
        *,
        on_message: OnMessage,
        on_request: OnRequest,
        on_lost: Callable[[str], None],
        check: Callable[[], None],
        started: float,
    ) -> Peer | InProcessPeer: ...

    def open_store(self, number: int) -> socket.socket: ...


@final
class Node:
    """A machine in a run. Its connection to the coordinator is reopened if it is lost.

    Args:
        info: facts about this launcher.
        coordinator: where to connect.
        interrupts: the signals that the launcher has received, checked during waits.
        preemption_grace: how long the ranks may take to agree on a step; if zero, signals stop the ranks immediately.
    """

    def __init__(
        self,
        info: NodeInfo,
        coordinator: _CoordinatorAddress,
        interrupts: Interrupts,
        *,
        preemption_grace: timedelta = timedelta(),
    ) -> None:
        self.info = info
        self.goodput: GoodputReport | None = None
        """Goodput of all machines, set on the rendezvous host at the end of a run on several machines."""
        self._coordinator = coordinator
        self._interrupts = interrupts
        self._preemption = PreemptionRequest(interrupts, preemption_grace, self.request_preemption)
        self._attempt: AttemptRanks | None = None
        self._ranks: LocalRanks | None = None
        self._peer: Peer | InProcessPeer | None = None
        self._inbox: queue.SimpleQueue[NodeGeneration | LaunchError | None] = queue.SimpleQueue()
        """Each item is a generation, a refusal, or None when this node has been admitted."""
        self._result: GenerationResult | None = None
        self._changed = threading.Condition()
        """Guards ``_result``, and is notified when it is set."""
        self._reported: tuple[int, Any] = (-1, None)
        self._number = -1
        self._num_connections = 0

    def join(self) -> None:
        """Connect to the coordinator and wait until it admits this node.

        Raises:
            Interrupted: the launcher received a signal.
            LaunchError: the connection failed, or the coordinator refused this node.
            RunOver: no generation follows.
        """
        started = time.monotonic()
        while True:
            with self._changed:
                self._result = None
            self._num_connections += 1
            self._peer = self._coordinator.connect(
                on_message=self._on_message,
                on_request=self._on_request,
                on_lost=partial(self._on_lost, number=self._num_connections),
                check=self._interrupts.check,
                started=started,
            )
            self._peer.send("hello", info=encode(self.info))
            try:
                self._receive()
                return
            except ConnectionLost:
                time.sleep(_RETRY_S)

    def _receive(self) -> NodeGeneration | None:
        """Wait for a generation, or for None if this node has been admitted.

        Raises:
            ConnectionLost: the connection was lost during the wait.
        """
        while True:
            self._interrupts.check()
            try:
                message = self._inbox.get(timeout=_POLL_S)
            except queue.Empty:
                result = self.result()
                if result is None or not self._inbox.empty():
                    continue
                if result.then == "lost":
                    raise ConnectionLost from None
                raise RunOver(result) from None
            if isinstance(message, LaunchError):
                raise message
            return message

    def next_generation(self) -> NodeGeneration:
        """Rejoin if the connection has been lost, and wait for the next generation.

        Raises:
            Interrupted: the launcher received a signal.
            LaunchError: this node cannot join the run, or its store cannot be opened.
            RunOver: no generation follows.
        """
        with self._changed:
            # Keep other results: the end of the run may have arrived while this launcher imported torch.
            before = self._result if self._result is not None and self._result.then in ("restart", "lost") else None
            if before is not None:
                self._result = None
        if before is not None:
            _print_report(before)
        if self._peer is None or self._peer.is_lost:
            self.join()
        assert self._peer is not None
        self._peer.send("join", after=self._number)
        try:
            while (generation := self._receive()) is None:
                pass
        except ConnectionLost:
            return self.next_generation()
        self._number = generation.number
        return generation

    def open_store(self) -> socket.socket:
        """Open a connection to this generation's store, which is on another machine.

        Raises:
            OSError, ChannelError: the store cannot be reached.
        """
        return self._coordinator.open_store(self._number)

    def watch(self, ranks: AttemptRanks | None) -> None:
        """Watch the ranks in a new attempt; None stops watching the last attempt, whose board is being closed."""
        self._preemption.watch(None if ranks is None else ranks.board)
        self._attempt = ranks
        self._ranks = None
        if ranks is not None:
            self._ranks = LocalRanks(ranks.board, directory=ranks.directory, running=ranks.workers.running)

    @property
    def is_preempting(self) -> bool:
        """Whether this machine has requested to save and exit."""
        return self._preemption.is_pending

    def poll(self, timeout: timedelta = timedelta()) -> GenerationResult | None:
        """Report the exit codes of the ranks here; return how the generation ended, or None if it still runs after ``timeout``.

        Raises:
            Interrupted: a signal stopped the run.
        """
        assert self._attempt is not None
        self._preemption.check()
        self.report(dict(zip(self._attempt.numbers, self._attempt.workers.exit_codes())))
        with self._changed:
            self._changed.wait_for(lambda: self._result is not None, timeout.total_seconds())
            return self._result

    def result(self) -> GenerationResult | None:
        """Return how the generation ended, or None if it is still running."""
        with self._changed:
            return self._result

    def report(self, codes: Mapping[int, int | None]) -> None:
        """Send this node's exit codes to the coordinator if they have changed."""
        report = (self._number, tuple(codes.items()))
        if report != self._reported and self._peer is not None:
            self._reported = report
            self._peer.send("codes", generation=self._number, codes=list(codes.items()))

    def request_preemption(self, requester: str) -> None:
        """Notify the coordinator that this node must save and exit."""
        if self._peer is not None:
            self._peer.send("preempt", requester=requester)

    def leave(self, reason: str, code: int) -> None:
        """Leave the run before it ends. Does nothing if this node has already left."""
        if self._peer is not None and not self._peer.is_lost:
            self._peer.send("leave", reason=reason, code=code)
            self._peer.close()

    def close(self) -> None:
        """Disconnect at the end of the run."""
        if self._peer is not None:
            self._peer.send("bye")
            self._peer.close()

    def report_end(self) -> int:
        """Print how the run ended, unless nothing failed, and return the launcher's exit code."""
        result = self.result()
        if result is None:
            return 0
        if result.then == "preempted" and not result.error:
            return report_preempted(self._preemption.requester)
        _print_report(result)
        return result.code

    def _on_message(self, kind: str, content: Mapping[str, Any]) -> None:
        if kind == "generation":
            if self._peer is not None:
                # The coordinator has imported torch by now.
                self._peer.set_timeout(self._coordinator.times.lost_after.total_seconds())
            with self._changed:
                if self._result is not None and self._result.then == "restart":
                    self._result = None  # the end of the generation before, which this node had left already
            self._inbox.put(NodeGeneration(**content))
        elif kind == "welcome":
            self._inbox.put(None)
        elif kind == "refused":
            self._inbox.put(LaunchError(content["what"], where=content["where"], do=content["do"]))
        elif kind == "log":
            _log(content["text"])
        elif kind == "save_report":
            if self._ranks is not None:
                with suppress(OSError):  # for example a full disk; the report has been printed
                    self._ranks.save_report(content["report"])
        elif kind == "end":
            self._set_result(GenerationResult(**content))

    def _set_result(self, result: GenerationResult) -> None:
        with self._changed:
            self._result = result
            self._changed.notify_all()

    def _on_request(self, kind: str, content: Mapping[str, Any]) -> Any:
        """Answer a request from the coordinator, in its thread or in one of the connection's threads."""
        if kind == "clock":
            return time.monotonic_ns()
        attempt, ranks = self._attempt, self._ranks
        if attempt is None or ranks is None:
            raise LaunchError(_("no rank is running"))
        if kind == "views":
            return encode(ranks.views())
        if kind == "steps":
            notes = [attempt.board.note(index) for index in range(len(attempt.numbers))]
            return [note.step for note in notes if note is not None]
        if kind == "stacks":
            return encode(ranks.request_stacks())
        if kind == "stack":
            return encode(ranks.stack_of(decode(RankView, content["view"])))
        if kind == "ends":
            return encode(attempt.workers.ends())
        if kind == "times":
            return encode(times_on(attempt.board, attempt.numbers))
        if kind == "command":
            attempt.board.write_command(int(content["command"]))
            return True
        if kind == "positions":
            return list(zip(attempt.numbers, attempt.board.read_positions()))
        raise LaunchError(f"unknown request {kind!r}")

    def _on_lost(self, what: str, number: int) -> None:
        with self._changed:
            if self._result is not None or number != self._num_connections:
                return
            self._set_result(GenerationResult(then="lost"))
        _log(_("{what}; stopping the ranks on this machine", what=what))


def _print_report(result: GenerationResult) -> None:
    with suppress(OSError):  # stderr is closed, which must not end the run
        if result.error:
            say(result.error, kind="error")
        if result.note:
            say(result.note)


def _log(text: str) -> None:
    with suppress(OSError):  # stderr is closed, which must not end the run
        say(text)
