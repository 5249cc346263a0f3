"""What a run's launchers say to each other: messages, requests and heartbeats in JSON, over TCP or within one process.

Each frame is the length of its JSON text, and the text. The token opens the connection (``connections.py``); frames are neither
signed nor encrypted, because whoever can change them on their way can also change what the ranks send each other (SECURITY.md).
"""

from __future__ import annotations

import json
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError, TimeoutError as NoAnswer
from contextlib import suppress
from typing import Any, TypeAlias, final

from echelon.base.messages.translation import gettext as _

OnMessage: TypeAlias = Callable[[str, Mapping[str, Any]], None]
OnRequest: TypeAlias = Callable[[str, Mapping[str, Any]], Any]

START_S = 180.0
"""How long a side may be silent while it imports torch from a slow disk (the import holds the GIL)."""
_SIZE = struct.Struct(">I")
_MAX_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20
_CHECK_S = 0.1
"""Interval at which silent connections are looked for."""
_MAX_ANSWERING = 32
"""Maximum number of requests that are answered concurrently, so that a flood of requests does not create a thread for each."""


class ChannelError(Exception):
    """Raised if the other side violates the protocol or does not respond."""


class ConnectionLost(ChannelError):
    """Raised if the connection is lost or closed, or a request is not answered."""


def receive_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    """Return the next bytes.

    Raises:
        ConnectionLost: the other side closed the connection, or exceeded the timeout of ``sock``.
    """
    data = bytearray()
    while len(data) < num_bytes:
        try:
            chunk = sock.recv(min(num_bytes - len(data), 1 << 20))
        except OSError as error:
            raise ConnectionLost(_("no answer") if isinstance(error, TimeoutError) else str(error)) from error
        if not chunk:
            raise ConnectionLost(_("the other side closed the connection"))
        data += chunk
    return bytes(data)


@final
class Peer:
    """The other side of a connection, which a ``Receiver`` serves.

    Args:
        sock: a connected socket, whose timeout is how long the other side may be silent before it counts as lost.
        on_message: called in the receiving thread with a message's kind and content.
        on_request: called in a separate thread with a request's kind and content; returns the answer.
        on_lost: called once with the reason when the connection is lost.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        on_message: OnMessage,
        on_request: OnRequest,
        on_lost: Callable[[str], None],
    ) -> None:
        self.sock = sock
        self._on_message, self._on_request, self._on_lost = on_message, on_request, on_lost
        self._lock = threading.Lock()
        self._received = bytearray()
        """The beginning of the next message."""
        self._received_at = time.monotonic()
        self._answers: dict[int, Future[Any]] = {}
        self._num_requests = 0
        self._is_closed = threading.Event()
        self._answering = threading.Semaphore(_MAX_ANSWERING)

    @property
    def is_lost(self) -> bool:
        """Whether the connection is lost or closed."""
        return self._is_closed.is_set()

    def set_timeout(self, seconds: float) -> None:
        """Set how many seconds of silence count as a lost connection, starting with the next message."""
        with suppress(OSError):  # the receiving thread has closed the connection, and reports it
            self.sock.settimeout(seconds)

    def send(self, kind: str, **content: Any) -> None:
        """Send a message; does nothing if the connection is lost, because ``on_lost`` reports it."""
        self._send({"kind": kind, "content": content})

    def request(self, kind: str, **content: Any) -> Callable[[float], Any]:
        """Send a request; return a function that takes a timeout in seconds, waits for the answer and returns it.

        The function raises ``ConnectionLost`` if no answer arrives in time, or the other side fails to answer.
        """
        answer: Future[Any] = Future()
        with self._lock:
            self._num_requests += 1
            number = self._num_requests
            self._answers[number] = answer
        self._send({"kind": kind, "content": content, "request": number})
        if self.is_lost:
            self._fail_requests()

        def wait(timeout_s: float) -> Any:
            try:
                found = answer.result(timeout_s)
            except NoAnswer:
                found = {"failed": ""}
            finally:
                self._answers.pop(number, None)
            if "failed" in found:
                raise ConnectionLost(f"no answer to {kind!r}" + (f": {found['failed']}" if found["failed"] else ""))
            return found["answer"]

        return wait

    def _send(self, message: Any) -> None:
        frame = _framed(message)
        with self._lock, suppress(OSError):  # the receiving thread detects a lost connection
            self.sock.sendall(frame)

    def send_heartbeat(self) -> None:
        """Show that this side is alive. While a message is sent, that one shows it."""
        if self._lock.acquire(blocking=False):
            try:
                with suppress(OSError):  # the receiving thread detects a lost connection
                    self.sock.sendall(_HEARTBEAT)
            finally:
                self._lock.release()

    def close(self) -> None:
        """Close the connection without calling ``on_lost``."""
        self._is_closed.set()
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)  # wakes the receiving thread, which closes the socket
        self._fail_requests()

    def _fail_requests(self) -> None:
        for answer in list(self._answers.values()):
            with suppress(InvalidStateError):  # it has been answered, or another thread closes the connection, too
                answer.set_result({"failed": ""})

    def receive(self) -> None:
        """Handle what has arrived."""
        try:
            data = self.sock.recv(_CHUNK_BYTES)
            if not data:
                raise ConnectionLost("the other side closed the connection")
            self._received_at = time.monotonic()
            self._received += data
            while len(self._received) >= _SIZE.size:
                (size,) = _SIZE.unpack_from(self._received)
                if size > _MAX_BYTES:
                    raise ChannelError(_("received a message of {size} bytes, above the limit", size=size))
                end = _SIZE.size + size
                if len(self._received) < end:
                    break
                text = bytes(self._received[_SIZE.size : end])
                del self._received[:end]
                self._handle(json.loads(text))
        except Exception as error:  # noqa: BLE001 - after any error the connection is lost, and on_lost must be called
            self._lose(str(error))

    def check_silence(self) -> None:
        """Close the connection if the other side has been silent for too long."""
        timeout_s = self.sock.gettimeout()
        if timeout_s is not None and time.monotonic() - self._received_at > timeout_s:
            self._lose(_("no answer"))

    def _lose(self, reason: str) -> None:
        was_closed = self.is_lost
        self.close()
        if not was_closed:
            self._on_lost(reason)

    def _handle(self, message: Mapping[str, Any]) -> None:
        kind, content = str(message["kind"]), message.get("content", {})
        if kind == "answer":
            answer = self._answers.get(message["request"])
            if answer is not None:
                with suppress(InvalidStateError):  # another thread has closed the connection
                    answer.set_result(message)
        elif "request" not in message:
            if kind != "heartbeat":
                self._on_message(kind, content)
        elif self._answering.acquire(blocking=False):
            work = (message["request"], kind, content)
            threading.Thread(target=self._answer, args=work, daemon=True, name=f"echelon-{kind}").start()
        else:
            failed = _("{max_answering} earlier requests are still being answered", max_answering=_MAX_ANSWERING)
            self._send({"kind": "answer", "request": message["request"], "failed": failed})

    def _answer(self, request: int, kind: str, content: Mapping[str, Any]) -> None:
        message: dict[str, Any] = {"kind": "answer", "request": request}
        try:
            message["answer"] = self._on_request(kind, content)
        except Exception as error:  # noqa: BLE001 - reported to the side that sent the request
            message["failed"] = f"{type(error).__name__}: {error}"
        finally:
            self._answering.release()
        self._send(message)


@final
class Receiver:
    """Two threads that serve all connections of a process: one receives their messages, the other sends their heartbeats.

    Args:
        heartbeat_s: seconds between this side's heartbeats.
    """

    def __init__(self, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._selector = selectors.DefaultSelector()
        self._peers: dict[Peer, None] = {}
        self._is_closing = False
        self._has_ended = threading.Event()
        for work in (self._receive, self._send_heartbeats):
            threading.Thread(target=work, daemon=True, name=f"echelon-peers{work.__name__}").start()

    def add(self, peer: Peer) -> None:
        """Serve ``peer`` until its connection is lost or closed."""
        self._peers[peer] = None
        self._selector.register(peer.sock, selectors.EVENT_READ, peer)

    def close(self) -> None:
        """Serve no more connections, and end the threads when those that are left have been closed."""
        self._is_closing = True

    def _receive(self) -> None:
        checked_at = time.monotonic()
        while self._peers or not self._is_closing:
            for key, _events in self._selector.select(_CHECK_S):
                key.data.receive()
                if key.data.is_lost:
                    self._remove(key.data)
            if time.monotonic() - checked_at >= _CHECK_S:
                checked_at = time.monotonic()
                # After a pause of this process, what has arrived during it is not read yet.
                arrived = {key.data for key, _ in self._selector.select(0)}
                for peer in self._peers.keys() - arrived:
                    peer.check_silence()
        self._has_ended.set()
        self._selector.close()

    def _remove(self, peer: Peer) -> None:
        del self._peers[peer]
        self._selector.unregister(peer.sock)
        peer.sock.close()

    def _send_heartbeats(self) -> None:
        while not self._has_ended.wait(self._heartbeat_s):
            for peer in list(self._peers):
                peer.send_heartbeat()


def _framed(message: Any) -> bytes:
    text = json.dumps(message, separators=(",", ":")).encode()
    return _SIZE.pack(len(text)) + text


_HEARTBEAT = _framed({"kind": "heartbeat"})


@final
class InProcessPeer:
    """The other side within this process, with the interface of ``Peer``: calls take the place of messages."""

    def __init__(self, *, on_message: OnMessage, on_request: OnRequest = lambda kind, content: None) -> None:
        self._on_message, self._on_request = on_message, on_request
        self.is_lost = False

    def set_timeout(self, seconds: float) -> None:
        """Do nothing, because this process cannot lose itself."""

    def send(self, kind: str, **content: Any) -> None:
        """Deliver a message."""
        if not self.is_lost:
            self._on_message(kind, content)

    def request(self, kind: str, **content: Any) -> Callable[[float], Any]:
        """Return a function that returns the answer to a request, or raises ``ConnectionLost`` if that fails."""

        def answer(timeout_s: float) -> Any:
            try:
                return self._on_request(kind, content)
            except Exception as error:
                raise ConnectionLost(f"no answer to {kind!r}: {type(error).__name__}: {error}") from error

        return answer

    def close(self) -> None:
        """Deliver no more messages."""
        self.is_lost = True


def clock_offset_ns(peer: Peer | InProcessPeer, *, timeout_s: float, num_tries: int = 3) -> int:
    """Return the offset from the other side's ``time.monotonic_ns`` to ours; its error is at most half a round trip.

    Source: RFC 5905 (NTP), section 8. The answer with the shortest round trip is used.
    """
    if isinstance(peer, InProcessPeer):
        return 0
    tries = []
    for _time in range(num_tries):
        started = time.monotonic_ns()
        theirs = int(peer.request("clock")(timeout_s))
        took = time.monotonic_ns() - started
        tries.append((took, started + took // 2 - theirs))
    return min(tries)[1]
