"""TCP connections that a run's token opens: to the coordinator, or through it to the store of a generation.

The server sends a nonce. The client sends its own nonce, its purpose, and a MAC (HMAC-SHA256 under the token) of all of these. The
server answers with a MAC of the same data under a different label. Neither side reveals the token. Recorded traffic cannot open
another connection, because the server's nonce is new each time, and the client accepts only a server that knows the token.

Clients without the token are disconnected after one short message. They cannot lock out others, because the number of connections
without a proof is limited and the oldest one is dropped. Each listener has one thread, which serves all its connections.
"""

from __future__ import annotations

import asyncio
import hmac
import resource
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, final

from echelon.base.errors import LaunchError
from echelon.base.messages.terminal import say
from echelon.base.messages.translation import gettext as _
from echelon.launch.multinode.channel import START_S, ChannelError, ConnectionLost, receive_exactly
from echelon.launch.multinode.network import listen

NODE, STORE = b"N", b"S"
"""A client's purpose: to join as a node, or to reach a generation's store."""

_MAGIC = b"ECHELON2"
_NONCE_BYTES = _CODE_BYTES = 32
_PURPOSE = struct.Struct(">cI")
_HELLO_BYTES = len(_MAGIC) + _NONCE_BYTES
_CLAIM_BYTES = len(_MAGIC) + _NONCE_BYTES + _PURPOSE.size + _CODE_BYTES
_MAX_PENDING = 8192
"""Maximum number of connections that have not authenticated yet; all ranks of a large run connect to the store at once."""
_MAX_FILES = 65536
_AUTHENTICATE_S = 10.0
_RETRY_S = 0.05
_CHUNK_BYTES = 1 << 16
_LOOPBACK = "127.0.0.1"


class ConnectionRefused(ChannelError):
    """Raised if the other side does not know the token or is a different program."""


def _code(token: bytes, side: bytes, nonce: bytes, claim: bytes) -> bytes:
    return hmac.digest(token, side + nonce + claim, "sha256")  # all parts but the last have fixed lengths


def connect(host: str, port: int, token: bytes, *, purpose: bytes, number: int = 0, timeout_s: float) -> socket.socket:
    """Connect to a server that knows ``token``, to join as a node or to reach the store of generation ``number``.

    Raises:
        OSError: no server is listening there.
        ConnectionRefused: a different program is listening there, or the server has a different token.
        ConnectionLost: the server disconnected.
    """
    sock = socket.create_connection((host, port), timeout=timeout_s)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = receive_exactly(sock, _HELLO_BYTES)
        if not hello.startswith(_MAGIC):
            raise ConnectionRefused(_("another program is listening there"))
        nonce, claim = hello[len(_MAGIC) :], _MAGIC + secrets.token_bytes(_NONCE_BYTES) + _PURPOSE.pack(purpose, number)
        with suppress(OSError):  # shown by the answer
            sock.sendall(claim + _code(token, b"client", nonce, claim))
        try:
            answer = receive_exactly(sock, _CODE_BYTES)
        except ConnectionLost as error:
            if isinstance(error.__cause__, TimeoutError):
                raise  # a timeout is not a refusal
            raise ConnectionRefused(_("the server closed the connection because it has a different token")) from error
        if not hmac.compare_digest(answer, _code(token, b"server", nonce, claim)):
            raise ConnectionRefused(_("the server does not know the token"))
        return sock
    except BaseException:
        sock.close()
        raise


async def _accept(sock: socket.socket, token: bytes) -> tuple[bytes, int] | None:
    """Authenticate both sides of ``sock``; return the client's purpose and generation, or None if it does not know the token."""
    loop = asyncio.get_running_loop()
    nonce = secrets.token_bytes(_NONCE_BYTES)
    await loop.sock_sendall(sock, _MAGIC + nonce)
    data = b""
    while len(data) < _CLAIM_BYTES:
        chunk = await loop.sock_recv(sock, _CLAIM_BYTES - len(data))
        if not chunk:
            return None
        data += chunk
    claim, code = data[:-_CODE_BYTES], data[-_CODE_BYTES:]
    if not claim.startswith(_MAGIC) or not hmac.compare_digest(code, _code(token, b"client", nonce, claim)):
        return None
    await loop.sock_sendall(sock, _code(token, b"server", nonce, claim))
    purpose, number = _PURPOSE.unpack(claim[-_PURPOSE.size :])
    return purpose, number


class _Server:
    """Runs ``serve(sock)`` for each connection to ``listener``, all in one thread, until ``close``."""

    def __init__(self, listener: socket.socket, serve: Callable[[socket.socket], Coroutine[Any, Any, None]]) -> None:
        listener.setblocking(False)
        self._listener, self._serve_one = listener, serve
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._main = self._loop.create_task(self._accept_all())
        self._thread = threading.Thread(target=self._run, daemon=True, name="echelon-connections")
        self._thread.start()

    def close(self) -> None:
        """Close the listener and all connections."""
        with suppress(RuntimeError):  # closed before
            self._loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join()

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._main)
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    async def _accept_all(self) -> None:
        try:
            while True:
                try:
                    sock, _ = await self._loop.sock_accept(self._listener)
                except OSError:  # too many open files
                    await asyncio.sleep(_RETRY_S)
                    continue
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                task = self._loop.create_task(self._serve(sock))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        finally:
            self._listener.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, sock: socket.socket) -> None:
        try:
            await self._serve_one(sock)
        except (OSError, asyncio.CancelledError):
            sock.close()


async def _forward(one: socket.socket, other: socket.socket) -> None:
    """Copy bytes in both directions until one side closes its connection, and then close both."""

    async def copy(source: socket.socket, target: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(source, _CHUNK_BYTES):
            await loop.sock_sendall(target, data)

    copies = [asyncio.ensure_future(copy(*pair)) for pair in ((one, other), (other, one))]
    try:
        # Stores never half-close a connection, so a side that stops sending has closed it.
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in copies:
            task.cancel()
        await asyncio.gather(*copies, return_exceptions=True)
        one.close()
        other.close()


@final
class ConnectionListener:
    """Accepts and authenticates connections until ``close``.

    Args:
        listener: a bound socket, which ``close`` closes.
        token: the secret that clients must know.
        on_node: called with a new node's connection and address.
        port_of: returns the loopback port of a generation's store, or None if that generation is not running.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: bytes,
        *,
        on_node: Callable[[socket.socket, str], None],
        port_of: Callable[[int], int | None],
    ) -> None:
        self._token, self._on_node, self._port_of = token, on_node, port_of
        self._max_pending = min(_MAX_PENDING, _raise_limit_on_files() // 4)
        self._pending: dict[asyncio.Task[Any], None] = {}
        self.num_refused = 0
        """Number of connections that have failed to authenticate."""
        self._server = _Server(listener, self._serve)

    def close(self) -> None:
        """Stop accepting connections, and close the connections to the store."""
        self._server.close()

    async def _serve(self, sock: socket.socket) -> None:
        proof = asyncio.ensure_future(_accept(sock, self._token))
        self._pending[proof] = None
        if len(self._pending) > self._max_pending:
            next(iter(self._pending)).cancel()
        try:
            claim = await asyncio.wait_for(proof, _AUTHENTICATE_S)
        except (OSError, asyncio.TimeoutError, asyncio.CancelledError):
            claim = None
        finally:
            del self._pending[proof]
        if claim is None:
            self.num_refused += 1
            sock.close()
            return
        purpose, number = claim
        if purpose == NODE:
            sock.settimeout(START_S)
            self._on_node(sock, sock.getpeername()[0])
        elif purpose == STORE and (port := self._port_of(number)) is not None:
            await self._forward_to_store(sock, port)
        else:
            sock.close()

    async def _forward_to_store(self, sock: socket.socket, port: int) -> None:
        store = socket.socket()
        store.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(store, (_LOOPBACK, port))
        except OSError:  # the generation has just ended
            store.close()
            raise
        store.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await _forward(sock, store)


def _raise_limit_on_files() -> int:
    """Let this process open as many files as its user may, up to ``_MAX_FILES``, and return how many.

    The rendezvous host has a connection to each machine and two for each rank that uses the store; the usual limit is 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        with suppress(OSError, ValueError):  # macOS has a lower limit that is not told here
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
            soft = allowed
    return allowed if soft == resource.RLIM_INFINITY else soft


@final
class Tunnel:
    """A port on this machine's loopback that forwards to the store on another machine. Ranks use it without a token.

    Args:
        open_store: function that opens an authenticated connection to the store.
    """

    def __init__(self, open_store: Callable[[], socket.socket]) -> None:
        try:
            listener = listen(_LOOPBACK, 0)
        except OSError as error:
            raise LaunchError(
                _("cannot listen on {loopback}: {error}", loopback=_LOOPBACK, error=error),
                do=_("check the limit on open files (ulimit -a)"),
            ) from error
        self.port: int = listener.getsockname()[1]
        self._open_store = open_store
        self._server = _Server(listener, self._serve)

    def close(self) -> None:
        """Close the port and all connections that go through it."""
        self._server.close()

    async def _serve(self, sock: socket.socket) -> None:
        try:
            store = await asyncio.to_thread(self._open_store)
        except (ChannelError, OSError) as error:
            say(_("cannot connect to the run's store: {error}", error=error), kind="error")
            sock.close()
            return
        store.setblocking(False)
        await _forward(sock, store)
