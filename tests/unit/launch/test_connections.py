"""Connections between launchers: those without the token are rejected, and bytes are forwarded in their generation only."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from echelon.launch.multinode import channel, connections
from echelon.launch.multinode.channel import ConnectionLost
from echelon.launch.multinode.connections import NODE, STORE, ConnectionListener, ConnectionRefused, Tunnel, connect
from echelon.launch.multinode.network import listen

TOKEN = b"sixteen bytes at least"


_LIMIT_S = 60.0


class Door:
    """A listener that records who has connected, and an echo service in the place of the store."""

    def __init__(self) -> None:
        listener = listen("127.0.0.1", 0)
        self.port: int = listener.getsockname()[1]
        self.came: list[tuple[socket.socket, str]] = []
        self.changed = threading.Condition()
        self._echo = listen("127.0.0.1", 0)
        threading.Thread(target=self._serve_echo, daemon=True).start()
        self.hub = ConnectionListener(listener, TOKEN, on_node=self._on_node, port_of=self._port_of)

    def _on_node(self, found: socket.socket, address: str) -> None:
        with self.changed:
            self.came.append((found, address))
            self.changed.notify_all()

    def _port_of(self, number: int) -> int | None:
        return int(self._echo.getsockname()[1]) if number == 3 else None

    def _serve_echo(self) -> None:
        while True:
            try:
                sock, _ = self._echo.accept()
            except OSError:
                return
            threading.Thread(target=self._echo_on, args=(sock,), daemon=True).start()

    @staticmethod
    def _echo_on(sock: socket.socket) -> None:
        with sock, suppress(OSError):
            while data := sock.recv(1 << 16):
                sock.sendall(data)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, _LIMIT_S)

    def close(self) -> None:
        self.hub.close()
        with suppress(OSError):
            self._echo.shutdown(socket.SHUT_RDWR)
        self._echo.close()
        for found, _ in self.came:
            found.close()


@pytest.fixture
def door() -> Iterator[Door]:
    found = Door()
    yield found
    found.close()


def raw(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=_LIMIT_S)
    sock.settimeout(_LIMIT_S)
    return sock


def received(sock: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    data = b""
    with suppress(ConnectionError):
        while chunk := sock.recv(1 << 16):
            data += chunk
    return data


def test_both_sides_prove_that_they_know_the_token(door: Door) -> None:
    with connect("127.0.0.1", door.port, TOKEN, purpose=NODE, timeout_s=_LIMIT_S) as sock:
        door.wait_for(lambda: bool(door.came))
        theirs, address = door.came[0]
        assert address == "127.0.0.1"
        theirs.sendall(b"hello")
        assert sock.recv(5) == b"hello"


def test_another_token_is_rejected_without_information(door: Door) -> None:
    with pytest.raises(ConnectionRefused, match="it has a different token"):
        connect("127.0.0.1", door.port, b"another token altogether", purpose=NODE, timeout_s=_LIMIT_S)
    with raw(door.port) as sock:
        sock.sendall(secrets.token_bytes(connections._CLAIM_BYTES))
        told = received(sock)
    assert len(told) == connections._HELLO_BYTES  # the nonce, and no word after a wrong answer
    assert not door.came


def test_a_server_without_the_token_is_rejected() -> None:
    def pretend(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock:
            sock.sendall(connections._MAGIC + secrets.token_bytes(32))
            sock.recv(1 << 16)
            sock.sendall(secrets.token_bytes(32))

    with listen("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=pretend, args=(listener,))
        thread.start()
        with pytest.raises(ConnectionRefused, match="does not know the token"):
            connect("127.0.0.1", listener.getsockname()[1], TOKEN, purpose=NODE, timeout_s=_LIMIT_S)
        thread.join()


def test_a_recorded_proof_opens_no_other_connection(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[bytes] = []
    code = connections._code
    monkeypatch.setattr(connections, "_code", lambda *given: (heard.append(given[3] + code(*given)), code(*given))[1])
    with connect("127.0.0.1", door.port, TOKEN, purpose=NODE, timeout_s=_LIMIT_S), raw(door.port) as again:
        door.wait_for(lambda: len(door.came) == 1)
        again.sendall(heard[0])  # what the client has sent
        assert len(received(again)) == connections._HELLO_BYTES
    assert len(door.came) == 1


def test_garbage_and_half_open_connections_do_not_lock_others_out(door: Door) -> None:
    open_ones = [raw(door.port) for _ in range(300)]  # more than are kept unproven
    for i in range(300):
        with raw(door.port) as sock:
            sock.sendall(secrets.token_bytes(i))
    with connect("127.0.0.1", door.port, TOKEN, purpose=NODE, timeout_s=_LIMIT_S):
        door.wait_for(lambda: bool(door.came))
    for half_open in open_ones:
        half_open.close()


def test_a_thousand_machines_may_connect_before_the_first_has_authenticated(door: Door) -> None:
    with raw(door.port) as first:
        others = [raw(door.port) for _ in range(1023)]
        hello = channel.receive_exactly(first, connections._HELLO_BYTES)
        nonce = hello[len(connections._MAGIC) :]
        claim = connections._MAGIC + secrets.token_bytes(32) + connections._PURPOSE.pack(NODE, 0)
        first.sendall(claim + connections._code(TOKEN, b"client", nonce, claim))
        assert channel.receive_exactly(first, connections._CODE_BYTES)
        for other in others:
            other.close()


def test_a_silent_client_is_disconnected(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_AUTHENTICATE_S", 0.05)
    with raw(door.port) as sock:
        assert len(received(sock)) == connections._HELLO_BYTES


def test_the_store_tunnel_forwards_bytes_both_ways_in_its_generation_only(door: Door) -> None:
    def way(number: int) -> Callable[[], socket.socket]:
        return lambda: connect("127.0.0.1", door.port, TOKEN, purpose=STORE, number=number, timeout_s=_LIMIT_S)

    tunnel, old = Tunnel(way(3)), Tunnel(way(2))
    data = secrets.token_bytes(3_000_000)
    with raw(tunnel.port) as sock:
        threading.Thread(target=sock.sendall, args=(data,)).start()
        back = b""
        while len(back) < len(data):
            back += sock.recv(1 << 16)
        assert back == data
    with raw(old.port) as sock:
        assert received(sock) == b""
    tunnel.close()
    old.close()


def test_a_slow_server_is_not_mistaken_for_one_with_another_token() -> None:
    with listen("127.0.0.1", 0) as listener:

        def answer_late() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(connections._MAGIC + secrets.token_bytes(32))
                sock.recv(1 << 16)
                is_over.wait(_LIMIT_S)

        is_over = threading.Event()
        thread = threading.Thread(target=answer_late)
        thread.start()
        with pytest.raises(ConnectionLost, match="no answer"):
            connect("127.0.0.1", listener.getsockname()[1], TOKEN, purpose=NODE, timeout_s=0.2)
        is_over.set()
        thread.join()
