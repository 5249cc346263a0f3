"""What the launchers of one run speak over: TCP, opened by a proof on both sides that they know the token; then signed JSON.

The proof. The server sends a nonce; the client a nonce of its own, what it wants, and a code (HMAC-SHA256 under the token) over
all of it; the server a code over the same under another label. So neither side tells the token, what was heard on the wire
opens no second connection (the server's nonce is new each time), and nobody who does not know the token can play the server.

Frames. Length, code, JSON. The code is over the direction, the number of the frame and its text, under a key of this
connection: frames cannot be changed, repeated, left out or sent back. They are not encrypted. Standard library only.
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
_WANT = struct.Struct(">cI")
_HELLO_BYTES = len(_MAGIC) + _NONCE_BYTES
_CLAIM_BYTES = len(_MAGIC) + _NONCE_BYTES + _WANT.size + _CODE_BYTES
_HEAD = struct.Struct(f">I{_CODE_BYTES}s")
_MOST_BYTES = 64 << 20
_MOST_ANSWERING = 32
"""Questions at a time: a conductor has a handful open, and a peer that floods us shall not have a thread for each."""

START_S = 180.0
"""A side that imports torch from a slow disk may be silent for so long: Python's lock is held while a library is loaded."""
NODE, STORE = b"N", b"S"
"""What a client wants: to take part as a node, or a connection to the store of a round."""


class ChannelError(Exception):
    """The other side does not speak as it should, or not at all."""


class ConnectionRefused(ChannelError):
    """The other side does not know the token, or is something else."""


class ConnectionLost(ChannelError):
    """The connection is over."""


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
            raise ConnectionLost("the other side has closed the connection")
        data += chunk
    return bytes(data)


def accept(sock: socket.socket, token: bytes) -> tuple[bytes, int, bytes]:
    """Let the client on ``sock`` prove itself, and prove ourselves; return what it wants, of which round, and the key.

    Raises:
        ConnectionRefused: it could not.
        ConnectionLost: it went, or was slower than the timeout of ``sock``.
    """
    ours = secrets.token_bytes(_NONCE_BYTES)
    _send(sock, _MAGIC + ours)
    claim = _receive(sock, _CLAIM_BYTES)
    body, code = claim[:-_CODE_BYTES], claim[-_CODE_BYTES:]
    if not body.startswith(_MAGIC) or not hmac.compare_digest(code, _code(token, b"client", ours, body)):
        raise ConnectionRefused("it does not know the token")
    _send(sock, _code(token, b"server", ours, body))
    want, number = _WANT.unpack(body[-_WANT.size :])
    return want, number, _code(token, b"session", ours, body)


def connect(
    host: str, port: int, token: bytes, *, want: bytes, number: int = 0, timeout_s: float
) -> tuple[socket.socket, bytes]:
    """Open a connection to a server that knows ``token``; return it, with the key of its frames.

    Raises:
        OSError: nobody answers there.
        ConnectionRefused: somebody else does, or with another token.
        ConnectionLost: it went.
    """
    sock = socket.create_connection((host, port), timeout=timeout_s)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = _receive(sock, _HELLO_BYTES)
        if not hello.startswith(_MAGIC):
            raise ConnectionRefused("something else listens there")
        theirs = hello[len(_MAGIC) :]
        body = _MAGIC + secrets.token_bytes(_NONCE_BYTES) + _WANT.pack(want, number)
        _send(sock, body + _code(token, b"client", theirs, body))
        try:
            answer = _receive(sock, _CODE_BYTES)
        except ConnectionLost as error:
            if isinstance(error.__cause__, TimeoutError):
                raise  # it is slow: no refusal
            raise ConnectionRefused("it closed the connection: its token is another one") from error
        if not hmac.compare_digest(answer, _code(token, b"server", theirs, body)):
            raise ConnectionRefused("it does not know the token")
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
    """Signed frames of JSON on an open connection; any thread may send, one receives.

    Args:
        sock: with a timeout, after which a silent other side is lost.
        key: of this connection.
        is_server: which side we are.
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
            ConnectionLost: the connection is over.
        """
        payload = json.dumps(message, separators=(",", ":")).encode()
        with self._lock:
            code = _code(self._key, self._out, struct.pack(">Q", self._num_sent), payload)
            self._num_sent += 1
            _send(self._sock, _HEAD.pack(len(payload), code) + payload)

    def receive(self) -> Any:
        """Return the next message.

        Raises:
            ChannelError: it is not one of the other side's, or the connection is over.
        """
        size, code = _HEAD.unpack(_receive(self._sock, _HEAD.size))
        if size > _MOST_BYTES:
            raise ChannelError(f"a message of {size} bytes")
        payload = _receive(self._sock, size)
        if not hmac.compare_digest(code, _code(self._key, self._in, struct.pack(">Q", self._num_received), payload)):
            raise ChannelError("a message that was changed on its way")
        self._num_received += 1
        return json.loads(payload)

    def wait_at_most(self, seconds: float) -> None:
        """From its next message on, take the other side for lost when it is silent for so long."""
        self._sock.settimeout(seconds)

    def close(self) -> None:
        """Close it; whoever receives on it sees that."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


@final
class Peer:
    """The other side of a channel: it is told things, asked things, and known to be there by a beat.

    Args:
        channel: open.
        on_told: called with the kind and the content of what it tells, in the receiving thread.
        on_asked: called with the same, in a thread of its own; what it returns is the answer.
        on_lost: called once, with the reason, when it is gone.
        beat_s: so often each side says that it is there.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        on_told: Callable[[str, Mapping[str, Any]], None],
        on_asked: Callable[[str, Mapping[str, Any]], Any],
        on_lost: Callable[[str], None],
        beat_s: float,
    ) -> None:
        self._channel = channel
        self._on_told, self._on_asked, self._on_lost = on_told, on_asked, on_lost
        self._beat_s = beat_s
        self._asked: set[int] = set()
        self._answers: dict[int, Any] = {}
        self._changed = threading.Condition()
        self._number = 0
        self._is_closed = threading.Event()
        self._answering = threading.Semaphore(_MOST_ANSWERING)

    def start(self) -> None:
        """Begin to receive, and to beat."""
        for work in (self._receive, self._beat):
            threading.Thread(target=work, daemon=True, name=f"echelon-peer{work.__name__}").start()

    @property
    def is_lost(self) -> bool:
        """Is it gone, or closed?"""
        return self._is_closed.is_set()

    def wait_at_most(self, seconds: float) -> None:
        """From its next message on, take the other side for lost when it is silent for so long."""
        with suppress(OSError):  # closed
            self._channel.wait_at_most(seconds)

    def tell(self, kind: str, **content: Any) -> None:
        """Send ``content``; nothing happens when the other side is gone: ``on_lost`` says that."""
        with suppress(ConnectionLost):
            self._channel.send({"kind": kind, "content": content})

    def ask(self, kind: str, *, timeout_s: float, **content: Any) -> Any:
        """Return the answer to a question.

        Raises:
            ConnectionLost: there was none within ``timeout_s``, or the other side could not give one.
        """
        return self.ask_later(kind, **content)(timeout_s)

    def ask_later(self, kind: str, **content: Any) -> Callable[[float], Any]:
        """Ask now; return the function that waits for the answer so many seconds, and returns it."""
        with self._changed:
            self._number += 1
            number = self._number
            self._asked.add(number)
        self._channel_send({"kind": kind, "content": content, "question": number})

        def wait(timeout_s: float) -> Any:
            with self._changed:
                self._changed.wait_for(lambda: number in self._answers or self.is_lost, timeout_s)
                found = self._answers.pop(number, None)
                self._asked.discard(number)
            if found is None or "failed" in found:
                raise ConnectionLost(f"no answer to {kind!r}" + (f": {found['failed']}" if found else ""))
            return found["answer"]

        return wait

    def _channel_send(self, message: Any) -> None:
        with suppress(ConnectionLost):
            self._channel.send(message)

    def close(self) -> None:
        """End the connection; ``on_lost`` is not called for it."""
        self._is_closed.set()
        self._channel.close()
        with self._changed:
            self._changed.notify_all()

    def _beat(self) -> None:
        while not self._is_closed.wait(self._beat_s):
            self._channel_send({"kind": "beat"})

    def _receive(self) -> None:
        try:
            while True:
                message = self._channel.receive()
                kind, content = str(message["kind"]), message.get("content", {})
                if kind == "answer":
                    with self._changed:
                        if message["question"] in self._asked:
                            self._answers[message["question"]] = message
                            self._changed.notify_all()
                elif "question" in message:
                    self._begin_to_answer(message["question"], kind, content)
                elif kind != "beat":
                    self._on_told(kind, content)
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody receives any more: it must not pass in silence
            was_closed = self.is_lost
            self.close()
            if not was_closed:
                self._on_lost(str(error))

    def _begin_to_answer(self, question: int, kind: str, content: Mapping[str, Any]) -> None:
        if not self._answering.acquire(blocking=False):
            failed = f"{_MOST_ANSWERING} earlier questions are being answered"
            self._channel_send({"kind": "answer", "question": question, "failed": failed})
            return
        threading.Thread(
            target=self._answer, args=(question, kind, content), daemon=True, name=f"echelon-{kind}"
        ).start()

    def _answer(self, question: int, kind: str, content: Mapping[str, Any]) -> None:
        message: dict[str, Any] = {"kind": "answer", "question": question}
        try:
            message["answer"] = self._on_asked(kind, content)
        except Exception as error:  # noqa: BLE001 - the asking side says what to make of it
            message["failed"] = f"{type(error).__name__}: {error}"
        finally:
            self._answering.release()
        self._channel_send(message)


def clock_offset_ns(peer: Peer, *, timeout_s: float, num_tries: int = 3) -> int:
    """Return what is to be added to the other side's ``time.monotonic_ns`` to get ours, to half the time of an answer.

    Source: RFC 5905 (NTP), section 8, by the quickest of several answers.
    """
    best: tuple[int, int] | None = None
    for _ in range(num_tries):
        begun = time.monotonic_ns()
        theirs = int(peer.ask("clock", timeout_s=timeout_s))
        took = time.monotonic_ns() - begun
        if best is None or took < best[0]:
            best = took, begun + took // 2 - theirs
    assert best is not None
    return best[1]
