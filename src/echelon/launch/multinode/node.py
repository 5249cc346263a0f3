"""One machine in a multi-machine run: its connection to the coordinator, and the coordinator's requests to it."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, final

from echelon.base.errors import LaunchError
from echelon.base.messages.terminal import say
from echelon.diagnose.stall import RankView
from echelon.launch.interrupts import Interrupts
from echelon.launch.local.goodput_recorder import first_sign, times_on
from echelon.launch.local.ranks import LocalRanks
from echelon.launch.multinode.channel import (
    NODE,
    START_S,
    STORE,
    Channel,
    ChannelError,
    ConnectionRefused,
    Peer,
    connect,
)
from echelon.launch.multinode.messages import decode, encode
from echelon.launch.multinode.network import is_loopback
from echelon.launch.multinode.roster import NodeInfo
from echelon.launch.node import AttemptRanks, GenerationResult, Node, NodeGeneration, RunOver
from echelon.launch.preemption import PreemptionRequest, report_preempted

__all__ = ["MultinodeNode", "RendezvousTimes"]

_POLL_S = 0.02
_RETRY_S = 0.5
_CONNECT_S = 5.0
_WARN_AFTER_S = 20.0
_MAX_REFUSALS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousTimes:
    """Rendezvous time limits."""

    join_timeout: timedelta
    """How long to wait for all machines to join."""
    last_call: timedelta
    """How long to wait for more machines after the minimum number has joined."""
    heartbeat: timedelta
    """Interval between each side's heartbeats."""
    lost_after: timedelta
    """How long a side may be silent before it counts as lost."""


@final
class MultinodeNode(Node):
    """A node with a connection to the coordinator, which is reopened if it is lost.

    Args:
        info: facts about this launcher.
        host: the rendezvous host's address.
        port: the rendezvous host's port.
        where: where the address was set, for error messages.
        token: the secret that all launchers share.
        times: time limits.
        interrupts: the signals that the launcher has received, checked during waits.
        preemption_grace: how long the ranks may take to agree on a step; if zero, signals stop the ranks immediately.
    """

    def __init__(
        self,
        info: NodeInfo,
        *,
        host: str,
        port: int,
        where: str,
        token: bytes,
        times: RendezvousTimes,
        interrupts: Interrupts,
        preemption_grace: timedelta = timedelta(),
    ) -> None:
        self.info = info
        self._host, self._port, self._where, self._token = host, port, where, token
        self._times = times
        self._interrupts = interrupts
        self._preemption = PreemptionRequest(interrupts, preemption_grace, self.request_preemption)
        self._attempt: AttemptRanks | None = None
        self._service: LocalRanks | None = None
        self._peer: Peer | None = None
        self._inbox: queue.SimpleQueue[NodeGeneration | LaunchError | None] = queue.SimpleQueue()
        """Each item is a generation, a refusal, or None when this node has been admitted."""
        self._result: GenerationResult | None = None
        self._reported: tuple[int, Any] = (-1, None)
        self._number = -1
        self._num_connections = 0
        self._lock = threading.Lock()

    def join(self) -> None:
        """Connect to the coordinator and wait until it admits this node.

        Raises:
            Interrupted: the launcher received a signal.
            LaunchError: the connection failed, or the coordinator refused this node.
            RunOver: no generation follows.
        """
        started = time.monotonic()
        self._connect(started)
        while True:
            self._interrupts.check()
            try:
                self._raise_refusal(self._inbox.get(timeout=_POLL_S))
                return
            except queue.Empty:
                result = self.result()
                if result is None or not self._inbox.empty():
                    continue
                if result.then != "lost":
                    raise RunOver(result) from None
                time.sleep(_RETRY_S)
                self._connect(started)

    @staticmethod
    def _raise_refusal(message: NodeGeneration | LaunchError | None) -> NodeGeneration | None:
        if isinstance(message, LaunchError):
            raise message
        return message

    def next_generation(self) -> NodeGeneration:
        """Rejoin if the connection has been lost, and wait for the next generation."""
        with self._lock:
            # Keep other results: the end of the run may have arrived while this launcher imported torch.
            if self._result is not None and self._result.then in ("restart", "lost"):
                self._result = None
        if self._peer is None or self._peer.is_lost:
            self.join()
        assert self._peer is not None
        self._peer.send("join")
        while True:
            self._interrupts.check()
            try:
                found = self._raise_refusal(self._inbox.get(timeout=_POLL_S))
            except queue.Empty:
                result = self.result()
                if not self._inbox.empty():
                    continue
                if result is not None and result.then == "lost":
                    return self.next_generation()  # the connection was lost during the wait
                if result is not None:
                    raise RunOver(result) from None
                continue
            if found is not None:
                self._number = found.number
                return found

    def _connect(self, started: float) -> None:
        with self._lock:
            self._result = None
        warned_s = 0.0
        num_refused = 0
        while True:
            self._interrupts.check()
            try:
                sock, key = connect(self._host, self._port, self._token, purpose=NODE, timeout_s=_CONNECT_S)
                break
            except (OSError, ChannelError) as error:
                waited_s = time.monotonic() - started
                # One refusal is not final, because a coordinator that is shutting down also closes connections.
                num_refused += isinstance(error, ConnectionRefused)
                if num_refused >= _MAX_REFUSALS or waited_s > self._times.join_timeout.total_seconds():
                    raise self._connect_error(error, waited_s) from error
                if waited_s > warned_s + _WARN_AFTER_S:
                    warned_s = waited_s
                    say(f"{self._connect_error(error, waited_s)}\n  still retrying", kind="warning")
            time.sleep(_RETRY_S)
        sock.settimeout(START_S)
        self._num_connections += 1
        peer = Peer(
            Channel(sock, key, is_server=False),
            on_message=self._on_message,
            on_request=self._on_request,
            on_lost=partial(self._on_lost, number=self._num_connections),
            heartbeat_s=self._times.heartbeat.total_seconds(),
        )
        self._peer = peer
        peer.start()
        peer.send("hello", info=encode(self.info))

    def _connect_error(self, error: Exception, waited_s: float) -> LaunchError:
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
        do = "check that the launcher with machine rank 0 is running and that no firewall blocks its port"
        if isinstance(error, ConnectionRefused):
            do = "use the same token on all machines: ECHELON_TOKEN, ECHELON_TOKEN_FILE, or the file that `echelon token` writes"
        elif is_loopback(self._host):
            do = (
                "use the address at which the other machines reach the machine with rank 0; a loopback address always refers to "
                "the local machine"
            )
        return LaunchError(
            f"cannot connect to {self._host}:{self._port}: {text}"
            + (f" (retried for {waited_s:.0f} s)" if waited_s > 1 else ""),
            where=f"{self.info.host} ({self.info.address}); {self._where}",
            do=do,
        )

    def connect_to_store(self) -> socket.socket:
        """Open a connection to this generation's store.

        Raises:
            OSError, ChannelError: the store cannot be reached.
        """
        sock, _ = connect(self._host, self._port, self._token, purpose=STORE, number=self._number, timeout_s=_CONNECT_S)
        return sock

    def watch(self, ranks: AttemptRanks | None) -> None:
        """Watch the ranks in a new attempt, and answer the coordinator's requests about them."""
        self._preemption.watch(None if ranks is None else ranks.board)
        # Its check does nothing, because it runs in threads of the connection, and the main thread handles signals.
        self._attempt, self._service = ranks, None
        if ranks is not None:
            running = ranks.workers.running
            self._service = LocalRanks(ranks.board, directory=ranks.directory, running=running, check=lambda: None)

    @property
    def may_restart(self) -> bool:
        """Always True, because the coordinator decides."""
        return True

    @property
    def is_preempting(self) -> bool:
        """Whether this machine has requested to save and exit."""
        return self._preemption.is_pending

    def poll(self) -> GenerationResult | None:
        """Report this machine's exit codes; return how the generation ended, or None if it is still running."""
        attempt = self._attempt
        assert attempt is not None
        self._preemption.check()
        self.report(dict(zip(attempt.numbers, attempt.workers.exit_codes())))
        result = self.result()
        if result is None or result.then == "done":
            return result
        return replace(result, failed_ns=first_sign(attempt.workers.ends()))

    def result(self) -> GenerationResult | None:
        """Return how the generation ended, or None if it is still running."""
        with self._lock:
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
        """Return the launcher's exit code; print a line only for a preemption (the coordinator reports the rest)."""
        result = self.result()
        if result is not None and result.then == "preempted":
            return report_preempted(self._preemption.requester)
        return 0 if result is None else result.code

    def _on_message(self, kind: str, content: Mapping[str, Any]) -> None:
        if kind == "generation":
            if self._peer is not None:
                # The coordinator has imported torch by now.
                self._peer.set_timeout(self._times.lost_after.total_seconds())
            self._inbox.put(NodeGeneration(**content))
        elif kind == "welcome":
            self._inbox.put(None)
        elif kind == "refused":
            self._inbox.put(LaunchError(content["what"], where=content["where"], do=content["do"]))
        elif kind == "log":
            _log(content["text"])
        elif kind == "save_report":
            if self._service is not None:
                with suppress(OSError):  # for example a full disk; the report has been printed
                    self._service.save_report(content["report"])
        elif kind == "end":
            with self._lock:
                self._result = GenerationResult(then=content["then"], code=content["code"])
            if content["text"]:
                _log(content["text"])

    def _on_request(self, kind: str, content: Mapping[str, Any]) -> Any:
        """Answer a request from the coordinator, in one of the connection's threads."""
        if kind == "clock":
            return time.monotonic_ns()
        attempt, ranks = self._attempt, self._service
        if attempt is None or ranks is None:
            raise LaunchError("no rank is running")
        if kind == "views":
            return encode(ranks.views())
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

    def _on_lost(self, reason: str, number: int) -> None:
        with self._lock:
            if self._result is not None or number != self._num_connections:
                return
            self._result = GenerationResult(then="lost")
        _log(f"lost contact with {self._host}:{self._port}: {reason}; stopping the ranks on this machine")


def _log(text: str) -> None:
    with suppress(OSError):  # stderr is closed, which must not end the run
        say(text)
