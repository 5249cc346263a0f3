"""Each leak check sees a planted leak, and does not cry over what is none."""

from __future__ import annotations

import tempfile
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.leaks import Snapshot, leaks, settled_leaks


def test_a_leaked_variable_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Snapshot.take()
    monkeypatch.setenv("PLANTED", "secret")
    assert leaks(before, Snapshot.take()) == ["environment variable PLANTED was set"]


def test_a_changed_or_removed_variable_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED_A", "1")
    monkeypatch.setenv("PLANTED_B", "1")
    before = Snapshot.take()
    monkeypatch.setenv("PLANTED_A", "2")
    monkeypatch.delenv("PLANTED_B")
    assert leaks(before, Snapshot.take()) == [
        "environment variable PLANTED_A was changed",
        "environment variable PLANTED_B was removed",
    ]


def test_a_leaked_thread_is_detected() -> None:
    before = Snapshot.take()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="planted", daemon=True)
    thread.start()
    try:
        assert leaks(before, Snapshot.take()) == ["thread 'planted' is still running"]
    finally:
        stop.set()
        thread.join()
    assert leaks(before, Snapshot.take()) == []


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are listed through /proc")
def test_an_open_file_is_detected() -> None:
    before = Snapshot.take()
    with tempfile.NamedTemporaryFile() as file:
        assert leaks(before, Snapshot.take()) == [f"file descriptor {file.fileno()} is still open: {file.name}"]
    assert leaks(before, Snapshot.take()) == []


def test_a_leaked_process_group_is_detected(tmp_path: Path) -> None:
    before = Snapshot.take()
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=30))
    try:
        assert "the default process group still exists" in leaks(before, Snapshot.take())
    finally:
        dist.destroy_process_group()
    assert "the default process group still exists" not in leaks(before, Snapshot.take())


def test_an_ending_thread_is_not_a_leak() -> None:
    before = Snapshot.take()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="ending", daemon=True)
    thread.start()
    looks = []

    def take() -> Snapshot:
        looks.append(Snapshot.take())
        stop.set()
        return looks[-1]

    assert settled_leaks(before, take=take, patience_s=30) == []
    assert leaks(before, looks[0]) == ["thread 'ending' is still running"]
