"""The messages and requests of two launchers that are connected."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from echelon.launch.multinode import channel
from echelon.launch.multinode.channel import ConnectionLost, Peer, Receiver, clock_offset_ns

_LIMIT_S = 60.0


def peers(on_message: Callable[[str, Mapping[str, Any]], None], silent_s: float) -> tuple[Peer, Peer, list[str]]:
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
            )
        )
    return found[0], found[1], lost


def serve(*peers: Peer) -> None:
    receiver = Receiver(0.05)
    for peer in peers:
        receiver.add(peer)
    receiver.close()


def test_a_peer_receives_messages_and_requests_and_reports_failures() -> None:
    told: list[tuple[str, Mapping[str, Any]]] = []
    came = threading.Event()
    one, other, lost = peers(lambda kind, content: (told.append((kind, content)), came.set())[0], _LIMIT_S)
    serve(one)
    serve(other)
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
    one, other, lost = peers(lambda kind, content: None, _LIMIT_S)
    serve(one)  # the other does not receive, so that it does not notice
    wait = one.request("say")
    one.close()
    one.close()
    one.set_timeout(1.0)  # the coordinator may do so before it knows of the loss
    with pytest.raises(ConnectionLost):
        wait(_LIMIT_S)
    assert not lost
    other.close()
    serve(other)  # closes its socket


def test_a_flood_of_requests_does_not_start_a_thread_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    may_answer = threading.Event()
    num_begun = 0

    def answer(kind: str, content: Mapping[str, Any]) -> bool:
        nonlocal num_begun
        num_begun += 1
        assert may_answer.wait(_LIMIT_S)
        return True

    one, other, _ = peers(lambda kind, content: None, _LIMIT_S)
    monkeypatch.setattr(other, "_on_request", answer)
    serve(one)
    serve(other)
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
    one, other, lost = peers(lambda kind, content: None, 0.3)
    serve(one)  # the other never beats
    deadline = time.monotonic() + _LIMIT_S
    while not lost:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert lost == ["no answer"]
    with pytest.raises(ConnectionLost):
        one.request("clock")(0.1)
    other.close()
    serve(other)  # closes its socket


def test_a_failing_listener_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(kind: str, content: Mapping[str, Any]) -> None:
        raise BrokenPipeError("nobody reads stderr")

    one, other, lost = peers(fail, _LIMIT_S)
    serve(one)
    serve(other)
    one.send("say", text="hello")
    deadline = time.monotonic() + _LIMIT_S
    while len(lost) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "nobody reads stderr" in lost
    assert one.is_lost
    assert other.is_lost
