"""A launcher's part in a run on several machines: it comes in, hears of rounds and orders, and answers for its ranks."""

from __future__ import annotations

import queue
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias, final

from echelon.base.errors import LaunchError
from echelon.base.printable import printable
from echelon.launch.interrupts import Interrupts
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
from echelon.launch.multinode.messages import encode
from echelon.launch.multinode.network import is_loopback
from echelon.launch.multinode.roster import NodeInfo

__all__ = ["Node", "GenerationResult", "NodeGeneration", "RunOver", "NodeService"]

Then: TypeAlias = Literal["done", "restart", "stop", "preempted", "lost"]

_POLL_S = 0.02
_TRY_EVERY_S = 0.5
_TRY_S = 5.0
_SAY_AFTER_S = 20.0
_REFUSALS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGeneration:
    """The place of one node in a round."""

    number: int
    group_rank: int
    group_world_size: int
    first_rank: int
    world_size: int
    port: int
    """Of the store, when it is on this machine; else 0."""
    num_restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """How the round ends."""

    then: Then
    code: int = 0
    """Of the launcher, when it ends."""


class RunOver(BaseException):  # no failure: nobody on the way up may take it for one
    """The run ended while this node waited for a round; ``order`` says how."""

    def __init__(self, order: GenerationResult) -> None:
        super().__init__(order)
        self.order = order


class NodeService(Protocol):
    """What a node answers for its ranks in a round; called in threads of the connection."""

    def answer(self, kind: str, content: Mapping[str, Any]) -> Any:
        """Return the answer to a question, as JSON has it."""

    def keep(self, report: str) -> None:
        """Put a report beside the stacks of the ranks."""


@final
class Node:
    """The connection to the conductor of a run, opened again when it was cut.

    Args:
        info: what this launcher says of itself.
        host: where the others meet, an address.
        port: there.
        where: which setting says so.
        token: that all launchers know.
        join_timeout: so long a connection is tried.
        beat: so often each side says that it is there.
        lost_after: the other side is gone when it is silent for so long.
        interrupts: looked at while this waits.
    """

    def __init__(
        self,
        info: NodeInfo,
        *,
        host: str,
        port: int,
        where: str,
        token: bytes,
        join_timeout: timedelta,
        beat: timedelta,
        lost_after: timedelta,
        interrupts: Interrupts,
    ) -> None:
        self.info = info
        self.served: NodeService | None = None
        self._host, self._port, self._where, self._token = host, port, where, token
        self._join_timeout_s = join_timeout.total_seconds()
        self._beat_s, self._lost_after_s = beat.total_seconds(), lost_after.total_seconds()
        self._interrupts = interrupts
        self._peer: Peer | None = None
        self._letters: queue.SimpleQueue[NodeGeneration | LaunchError | None] = queue.SimpleQueue()
        """A round, a refusal, or that this node was let in."""
        self._order: GenerationResult | None = None
        self._reported: tuple[int, Any] = (-1, None)
        self._number = -1
        self._num_connections = 0
        self._lock = threading.Lock()

    def come_in(self) -> None:
        """Go to where the others meet, and be let in.

        Raises:
            Interrupted: a signal came.
            LaunchError: nobody answers, or this node may not take part.
            RunOver: no round will follow.
        """
        begun = time.monotonic()
        self._connect(begun)
        while True:
            self._interrupts.check()
            try:
                self._take(self._letters.get(timeout=_POLL_S))
                return
            except queue.Empty:
                order = self.order()
                if order is None or not self._letters.empty():
                    continue
                if order.then != "lost":
                    raise RunOver(order) from None
                time.sleep(_TRY_EVERY_S)
                self._connect(begun)  # it went between

    @staticmethod
    def _take(letter: NodeGeneration | LaunchError | None) -> NodeGeneration | None:
        if isinstance(letter, LaunchError):
            raise letter
        return letter

    def next_round(self) -> NodeGeneration:
        """Come in, if this node is not there any more, and wait for the next round.

        Raises:
            Interrupted: a signal came.
            LaunchError: nobody answers, or this node may not take part.
            RunOver: no round will follow.
        """
        with self._lock:
            # What ends the run may have come while this launcher imported torch: it is looked at below.
            if self._order is not None and self._order.then in ("restart", "lost"):
                self._order = None
        if self._peer is None or self._peer.is_lost:
            self.come_in()
        assert self._peer is not None
        self._peer.tell("join")
        while True:
            self._interrupts.check()
            try:
                found = self._take(self._letters.get(timeout=_POLL_S))
            except queue.Empty:
                order = self.order()
                if not self._letters.empty():
                    continue
                if order is not None and order.then == "lost":
                    return self.next_round()  # it went while we waited
                if order is not None:
                    raise RunOver(order) from None
                continue
            if found is not None:
                self._number = found.number
                return found

    def _connect(self, begun: float) -> None:
        with self._lock:
            self._order = None
        told_s = 0.0
        num_refused = 0
        while True:
            self._interrupts.check()
            try:
                sock, key = connect(self._host, self._port, self._token, want=NODE, timeout_s=_TRY_S)
                break
            except (OSError, ChannelError) as error:
                waited_s = time.monotonic() - begun
                num_refused += isinstance(error, ConnectionRefused)  # also what goes down just now closes connections
                if num_refused >= _REFUSALS or waited_s > self._join_timeout_s:
                    raise self._no_way(error, waited_s) from error
                if waited_s > told_s + _SAY_AFTER_S:
                    told_s = waited_s
                    print(f"echelon: {self._no_way(error, waited_s)}\n  it is tried on", file=sys.stderr, flush=True)
            time.sleep(_TRY_EVERY_S)
        sock.settimeout(START_S)
        self._num_connections += 1
        peer = Peer(
            Channel(sock, key, is_server=False),
            on_told=self._on_told,
            on_asked=self._on_asked,
            on_lost=partial(self._on_lost, number=self._num_connections),
            beat_s=self._beat_s,
        )
        self._peer = peer
        peer.start()
        peer.tell("hello", info=encode(self.info))

    def _no_way(self, error: Exception, waited_s: float) -> LaunchError:
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
        do = "see that the launcher with machine rank 0 runs there, and that no firewall is between (its port must be open)"
        if isinstance(error, ConnectionRefused):
            do = "give the same token to all machines: ECHELON_TOKEN, the file in ECHELON_TOKEN_FILE, or `echelon token`'s"
        elif is_loopback(self._host):
            do = (
                "a loopback address means the machine that uses it: give the address of the machine with rank 0, "
                "as the others see it"
            )
        return LaunchError(
            f"cannot come to {self._host}:{self._port}: {text}"
            + (f" (tried for {waited_s:.0f} s)" if waited_s > 1 else ""),
            where=f"{self.info.host} ({self.info.address}); {self._where}",
            do=do,
        )

    def way_to_store(self) -> socket.socket:
        """Open a connection that leads to the store of this round.

        Raises:
            OSError, ChannelError: there is none.
        """
        sock, _ = connect(self._host, self._port, self._token, want=STORE, number=self._number, timeout_s=_TRY_S)
        return sock

    def order(self) -> GenerationResult | None:
        """Return how the round ends; None: it goes on."""
        with self._lock:
            return self._order

    def report(self, codes: Mapping[int, int | None]) -> None:
        """Tell the exit codes of this node's ranks so far."""
        now = (self._number, tuple(codes.items()))
        if now != self._reported and self._peer is not None:
            self._reported = now
            self._peer.tell("codes", round=self._number, codes=list(codes.items()))

    def ask_to_end(self, who: str) -> None:
        """Tell that this node is to save and end: ``who`` has asked, in words."""
        if self._peer is not None:
            self._peer.tell("asked", who=who)

    def leave(self, reason: str, code: int) -> None:
        """Go, and say why; nothing happens when this node has gone."""
        if self._peer is not None and not self._peer.is_lost:
            self._peer.tell("leave", reason=reason, code=code)
            self._peer.close()

    def close(self) -> None:
        """Go, at the end of a run."""
        if self._peer is not None:
            self._peer.tell("bye")
            self._peer.close()

    def _on_told(self, kind: str, content: Mapping[str, Any]) -> None:
        if kind == "round":
            if self._peer is not None:
                self._peer.wait_at_most(self._lost_after_s)  # it has begun to start ranks, too
            self._letters.put(NodeGeneration(**content))
        elif kind == "welcome":
            self._letters.put(None)
        elif kind == "refused":
            self._letters.put(LaunchError(content["what"], where=content["where"], do=content["do"]))
        elif kind == "say":
            _say(content["text"])
        elif kind == "keep":
            if self.served is not None:
                with suppress(OSError):  # a full disk: the report has been told
                    self.served.keep(content["report"])
        elif kind == "end":
            with self._lock:
                self._order = GenerationResult(then=content["then"], code=content["code"])
            if content["text"]:
                _say(content["text"])

    def _on_asked(self, kind: str, content: Mapping[str, Any]) -> Any:
        if kind == "clock":
            return time.monotonic_ns()
        served = self.served
        if served is None:
            raise LaunchError("no rank is running")
        return served.answer(kind, content)

    def _on_lost(self, reason: str, number: int) -> None:
        with self._lock:
            if self._order is not None or number != self._num_connections:
                return
            self._order = GenerationResult(then="lost")
        _say(f"lost contact with {self._host}:{self._port}: {reason}; the ranks here are stopped")


def _say(text: str) -> None:
    with suppress(OSError):  # nobody reads it any more: the run goes on
        print(f"echelon: {printable(text)}", file=sys.stderr, flush=True)
