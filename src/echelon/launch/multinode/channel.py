"""Connections between a run's launchers: TCP, mutual authentication by a shared token, then signed JSON frames.

Authentication: The server sends a nonce. The client sends its own nonce, its purpose, and a MAC (HMAC-SHA256 under the
token) of all of these. The server answers with a MAC of the same data under a different label. Neither side reveals
the token. Recorded traffic cannot open another connection, because the server's nonce is new each time, and the client
accepts only a server that knows the token.

Frames: Each frame consists of its length, a MAC and JSON. The MAC covers the direction, the frame number and the
text, under a key that is unique to this connection, so that frames cannot be changed, replayed, dropped or reflected.
They are not encrypted. This module uses only the standard library.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, final

__all__ = [
    "NODE",
    "START_S",
    "STORE",
    "Channel",
    "ChannelError",
    "ConnectionLost",
    "Peer",
    "ConnectionRefused",
    "accept",
    "clock_offset_ns",
    "connect",
]

_MAGIC = b"ECHELON1"
_NONCE_BYTES = 32
_CODE_BYTES = 32
_PURPOSE = struct.Struct(">cI")
_HELLO_BYTES = len(_MAGIC) + _NONCE_BYTES
_CLAIM_BYTES = len(_MAGIC) + _NONCE_BYTES + _PURPOSE.size + _CODE_BYTES
_HEAD = struct.Struct(f">I{_CODE_BYTES}s")
_MAX_BYTES = 64 << 20
_MAX_ANSWERING = 32
"""Maximum number of requests that are answered concurrently, so that a flood of requests does not create a thread for each."""

START_S = 180.0
"""How long a side may be silent while it imports torch from a slow disk (the import holds the GIL)."""
NODE, STORE = b"N", b"S"
"""A client's purpose: to join as a node, or to reach a generation's store."""


class ChannelError(Exception):
    """Raised if the other side violates the protocol or does not respond."""


class ConnectionRefused(ChannelError):
    """Raised if the other side does not know the token or is a different program."""


class ConnectionLost(ChannelError):
    """Raised if the connection is lost or closed."""


def _code(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(struct.pack(">I", len(part)) + part for part in parts), "sha256")


def _receive(sock: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        try:
            chunk = sock.recv(min(num_bytes - len(data), 1 << 20))
        except OSError as error:
            raise ConnectionLost("no answer" if isinstance(error, TimeoutError) else str(error)) from error
        if not chunk:
            raise ConnectionLost("the other side closed the connection")
        data += chunk
    return bytes(data)


def accept(sock: socket.socket, token: bytes) -> tuple[bytes, int, bytes]:
    """Authenticate both sides of ``sock`` as the server; return the client's purpose and generation, and the frame key.

    Raises:
        ConnectionRefused: the client does not know the token.
        ConnectionLost: the client disconnected or exceeded the timeout of ``sock``.
    """
    ours = secrets.token_bytes(_NONCE_BYTES)
    _send(sock, _MAGIC + ours)
    claim = _receive(sock, _CLAIM_BYTES)
    body, code = claim[:-_CODE_BYTES], claim[-_CODE_BYTES:]
    if not body.startswith(_MAGIC) or not hmac.compare_digest(code, _code(token, b"client", ours, body)):
        raise ConnectionRefused("the client does not know the token")
    _send(sock, _code(token, b"server", ours, body))
    purpose, number = _PURPOSE.unpack(body[-_PURPOSE.size :])
    return purpose, number, _code(token, b"session", ours, body)


def connect(
    host: str, port: int, token: bytes, *, purpose: bytes, number: int = 0, timeout_s: float
) -> tuple[socket.socket, bytes]:
    """Connect to a server that knows ``token``; return the socket and the frame key.

    Raises:
        OSError: no server is listening there.
        ConnectionRefused: a different program is listening there, or the server has a different token.
        ConnectionLost: the server disconnected.
    """
    sock = socket.create_connection((host, port), timeout=timeout_s)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = _receive(sock, _HELLO_BYTES)
        if not hello.startswith(_MAGIC):
            raise ConnectionRefused("another program is listening there")
        theirs = hello[len(_MAGIC) :]
        body = _MAGIC + secrets.token_bytes(_NONCE_BYTES) + _PURPOSE.pack(purpose, number)
        _send(sock, body + _code(token, b"client", theirs, body))
        try:
            answer = _receive(sock, _CODE_BYTES)
        except ConnectionLost as error:
            if isinstance(error.__cause__, TimeoutError):
                raise  # a timeout is not a refusal
            raise ConnectionRefused("the server closed the connection because it has a different token") from error
        if not hmac.compare_digest(answer, _code(token, b"server", theirs, body)):
            raise ConnectionRefused("the server does not know the token")
        return sock, _code(token, b"session", theirs, body)
    except BaseException:
        sock.close()
        raise


def _send(sock: socket.socket, data: bytes) -> None:
    try:
        sock.sendall(data)
    except OSError as error:
        raise ConnectionLost("no answer" if isinstance(error, TimeoutError) else str(error)) from error


@final
class Channel:
    """Signed JSON frames on an open connection. Any thread may send; one thread receives.

    Args:
        sock: a socket whose timeout is how long the other side may be silent before it counts as lost.
        key: this connection's key.
        is_server: whether this is the server's side.
    """

    def __init__(self, sock: socket.socket, key: bytes, *, is_server: bool) -> None:
        self._sock = sock
        self._key = key
        self._out, self._in = (b"s", b"c") if is_server else (b"c", b"s")
        self._num_sent = self._num_received = 0
        self._lock = threading.Lock()

    def send(self, message: Any) -> None:
        """Send ``message``.

        Raises:
            ConnectionLost: the connection is lost or closed.
        """
        payload = json.dumps(message, separators=(",", ":")).encode()
        with self._lock:
            code = _code(self._key, self._out, struct.pack(">Q", self._num_sent), payload)
            self._num_sent += 1
            _send(self._sock, _HEAD.pack(len(payload), code) + payload)

    def receive(self) -> Any:
        """Return the next message.

        Raises:
            ChannelError: the frame is invalid, or the connection is lost or closed.
        """
        size, code = _HEAD.unpack(_receive(self._sock, _HEAD.size))
        if size > _MAX_BYTES:
            raise ChannelError(f"received a message of {size} bytes, above the limit")
        payload = _receive(self._sock, size)
        if not hmac.compare_digest(code, _code(self._key, self._in, struct.pack(">Q", self._num_received), payload)):
            raise ChannelError("received a message with an invalid signature")
        self._num_received += 1
        return json.loads(payload)

    def set_timeout(self, seconds: float) -> None:
        """Set how many seconds of silence count as a lost connection, starting with the next message."""
        self._sock.settimeout(seconds)

    def close(self) -> None:
        """Close the connection, which makes a pending ``receive`` fail."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


@final
class Peer:
    """The other side of a channel, with which this side exchanges messages, requests and heartbeats.

    Args:
        channel: open channel.
        on_message: called in the receiving thread with a message's kind and content.
        on_request: called in a separate thread with a request's kind and content; returns the answer.
        on_lost: called once with the reason when the connection is lost.
        heartbeat_s: seconds between each side's heartbeats.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        on_message: Callable[[str, Mapping[str, Any]], None],
        on_request: Callable[[str, Mapping[str, Any]], Any],
        on_lost: Callable[[str], None],
        heartbeat_s: float,
    ) -> None:
        self._channel = channel
        self._on_message, self._on_request, self._on_lost = on_message, on_request, on_lost
        self._heartbeat_s = heartbeat_s
        self._open_requests: set[int] = set()
        self._answers: dict[int, Any] = {}
        self._changed = threading.Condition()
        self._number = 0
        self._is_closed = threading.Event()
        self._answering = threading.Semaphore(_MAX_ANSWERING)

    def start(self) -> None:
        """Start the threads that receive messages and send heartbeats."""
        for work in (self._receive, self._send_heartbeats):
            threading.Thread(target=work, daemon=True, name=f"echelon-peer{work.__name__}").start()

    @property
    def is_lost(self) -> bool:
        """Whether the connection is lost or closed."""
        return self._is_closed.is_set()

    def set_timeout(self, seconds: float) -> None:
        """Set how many seconds of silence count as a lost connection, starting with the next message."""
        with suppress(OSError):  # the connection is closed
            self._channel.set_timeout(seconds)

    def send(self, kind: str, **content: Any) -> None:
        """Send a message. Does nothing if the connection is lost, because ``on_lost`` reports that."""
        self._send({"kind": kind, "content": content})

    def request(self, kind: str, *, timeout_s: float, **content: Any) -> Any:
        """Send a request and return the answer.

        Raises:
            ConnectionLost: no answer arrived within ``timeout_s``, or the other side failed to answer.
        """
        return self.start_request(kind, **content)(timeout_s)

    def start_request(self, kind: str, **content: Any) -> Callable[[float], Any]:
        """Send a request; return a function that takes a timeout in seconds, waits for the answer and returns it."""
        with self._changed:
            self._number += 1
            number = self._number
            self._open_requests.add(number)
        self._send({"kind": kind, "content": content, "request": number})

        def wait(timeout_s: float) -> Any:
            with self._changed:
                self._changed.wait_for(lambda: number in self._answers or self.is_lost, timeout_s)
                found = self._answers.pop(number, None)
                self._open_requests.discard(number)
            if found is None or "failed" in found:
                raise ConnectionLost(f"no answer to {kind!r}" + (f": {found['failed']}" if found else ""))
            return found["answer"]

        return wait

    def _send(self, message: Any) -> None:
        with suppress(ConnectionLost):
            self._channel.send(message)

    def close(self) -> None:
        """Close the connection without calling ``on_lost``."""
        self._is_closed.set()
        self._channel.close()
        with self._changed:
            self._changed.notify_all()

    def _send_heartbeats(self) -> None:
        while not self._is_closed.wait(self._heartbeat_s):
            self._send({"kind": "heartbeat"})

    def _receive(self) -> None:
        try:
            while True:
                message = self._channel.receive()
                kind, content = str(message["kind"]), message.get("content", {})
                if kind == "answer":
                    with self._changed:
                        if message["request"] in self._open_requests:
                            self._answers[message["request"]] = message
                            self._changed.notify_all()
                elif "request" in message:
                    self._start_answer(message["request"], kind, content)
                elif kind != "heartbeat":
                    self._on_message(kind, content)
        except Exception as error:  # noqa: BLE001 - after any error this thread ends, and on_lost must be called
            was_closed = self.is_lost
            self.close()
            if not was_closed:
                self._on_lost(str(error))

    def _start_answer(self, request: int, kind: str, content: Mapping[str, Any]) -> None:
        if not self._answering.acquire(blocking=False):
            failed = f"{_MAX_ANSWERING} earlier requests are still being answered"
            self._send({"kind": "answer", "request": request, "failed": failed})
            return
        threading.Thread(
            target=self._answer, args=(request, kind, content), daemon=True, name=f"echelon-{kind}"
        ).start()

    def _answer(self, request: int, kind: str, content: Mapping[str, Any]) -> None:
        message: dict[str, Any] = {"kind": "answer", "request": request}
        try:
            message["answer"] = self._on_request(kind, content)
        except Exception as error:  # noqa: BLE001 - reported to the side that sent the request
            message["failed"] = f"{type(error).__name__}: {error}"
        finally:
            self._answering.release()
        self._send(message)


def clock_offset_ns(peer: Peer, *, timeout_s: float, num_tries: int = 3) -> int:
    """Return the offset from the other side's ``time.monotonic_ns`` to ours; its error is at most half a round trip.

    Source: RFC 5905 (NTP), section 8. The answer with the shortest round trip is used.
    """
    best: tuple[int, int] | None = None
    for _ in range(num_tries):
        started = time.monotonic_ns()
        theirs = int(peer.request("clock", timeout_s=timeout_s))
        took = time.monotonic_ns() - started
        if best is None or took < best[0]:
            best = took, started + took // 2 - theirs
    assert best is not None
    return best[1]
