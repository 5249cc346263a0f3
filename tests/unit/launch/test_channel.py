"""Connections between launchers: those without the token are rejected, and the others exchange messages and bytes."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import pytest

from echelon.launch.multinode import channel, connections
from echelon.launch.multinode.channel import ConnectionLost, Peer, clock_offset_ns
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


def peers(
    on_message: Callable[[str, Mapping[str, Any]], None], heartbeat_s: float, silent_s: float
) -> tuple[Peer, Peer, list[str]]:
    one, other = socket.socketpair()
    lost: list[str] = []
    found = []
    for sock in (one, other):
        sock.settimeout(silent_s)
        found.append(
            Peer(
                sock,
                on_message=on_message,
                on_request=lambda kind, content: (
                    time.monotonic_ns() + 10**9 if kind == "clock" else 1 // content["zero"]
                ),
                on_lost=lost.append,
                heartbeat_s=heartbeat_s,
            )
        )
    return found[0], found[1], lost


def test_a_peer_receives_messages_and_requests_and_reports_failures() -> None:
    told: list[tuple[str, Mapping[str, Any]]] = []
    came = threading.Event()
    one, other, lost = peers(lambda kind, content: (told.append((kind, content)), came.set())[0], 0.05, _LIMIT_S)
    one.start()
    other.start()
    one.send("say", text="hello")
    assert came.wait(_LIMIT_S)
    assert told == [("say", {"text": "hello"})]
    offset = clock_offset_ns(one, timeout_s=_LIMIT_S)
    assert abs(offset + 10**9) < 5 * 10**8  # the other clock is a second ahead
    with pytest.raises(ConnectionLost, match="ZeroDivisionError"):
        one.request("divide", zero=0)(_LIMIT_S)
    assert not lost
    one.close()
    other.close()


def test_a_closed_peer_is_left_alone() -> None:
    one, other, lost = peers(lambda kind, content: None, 0.05, _LIMIT_S)
    wait = one.request("say")
    one.close()
    one.close()
    one.set_timeout(1.0)  # the coordinator may do so before it knows of the loss
    with pytest.raises(ConnectionLost):
        wait(_LIMIT_S)
    assert not lost
    other.close()


def test_a_flood_of_requests_does_not_start_a_thread_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    may_answer = threading.Event()
    num_begun = 0

    def answer(kind: str, content: Mapping[str, Any]) -> bool:
        nonlocal num_begun
        num_begun += 1
        assert may_answer.wait(_LIMIT_S)
        return True

    one, other, _ = peers(lambda kind, content: None, 0.05, _LIMIT_S)
    monkeypatch.setattr(other, "_on_request", answer)
    one.start()
    other.start()
    waits = [one.request("slow") for _ in range(channel._MAX_ANSWERING + 100)]
    for wait in waits[channel._MAX_ANSWERING :]:
        with pytest.raises(ConnectionLost, match="earlier requests are still being answered"):
            wait(_LIMIT_S)
    assert num_begun == channel._MAX_ANSWERING
    may_answer.set()
    assert all(wait(_LIMIT_S) for wait in waits[: channel._MAX_ANSWERING])
    assert one.request("slow")(_LIMIT_S)  # and there is room again
    one.close()
    other.close()


def test_a_silent_peer_is_reported_as_lost_with_the_reason() -> None:
    one, other, lost = peers(lambda kind, content: None, 0.05, 0.3)
    one.start()  # the other never beats
    deadline = time.monotonic() + _LIMIT_S
    while not lost:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert lost == ["no answer"]
    with pytest.raises(ConnectionLost):
        one.request("clock")(0.1)
    other.close()


def test_a_failing_listener_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(kind: str, content: Mapping[str, Any]) -> None:
        raise BrokenPipeError("nobody reads stderr")

    one, other, lost = peers(fail, 0.05, _LIMIT_S)
    one.start()
    other.start()
    one.send("say", text="hello")
    deadline = time.monotonic() + _LIMIT_S
    while len(lost) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "nobody reads stderr" in lost
    assert one.is_lost
    assert other.is_lost


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
