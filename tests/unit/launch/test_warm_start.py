"""The process that ranks are forked from: what it has imported, what it tells, and that it leaves no rank nobody knows of."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from echelon.launch.local import warm_start as warm
from echelon.launch.local.warm_start import Process, WarmStarter

_LIMIT_S = 60.0
PROGRAM = """
import gc, json, os, sys
found = [name for name in ("json.tool", "timeit", "ray") if name in sys.modules]
collects = [gc.isenabled(), gc.get_freeze_count() > 1000]  # what was imported ahead is not examined
json.dump([found, os.environ.get("RANK"), sys.path[0], collects], open(sys.argv[1] + ".new", "w"))
os.rename(sys.argv[1] + ".new", sys.argv[1])
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def starter() -> Iterator[WarmStarter]:
    made = WarmStarter()
    yield made
    made.close()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def start(starter: WarmStarter, folder: Path, name: str, code: int) -> Process | None:
    (folder / "program.py").write_text(PROGRAM)
    (folder / f"of_{name}").mkdir()
    argv = [
        str(folder / f"of_{name}"),
        "-",
        "default",
        "script",
        str(folder / "program.py"),
        str(folder / name),
        str(code),
    ]
    return starter.start(argv, {**os.environ, "RANK": name}, stdout=1, stderr=2)


def start_one_that_waits(starter: WarmStarter, folder: Path) -> Process:
    starter.prepare(os.environ, ["json.tool"])
    wait_for(lambda: starter.is_ready)
    (folder / "program.py").write_text("import signal\nsignal.pause()\n")
    argv = [str(folder), "-", "default", "script", str(folder / "program.py")]
    running = starter.start(argv, os.environ, stdout=1, stderr=2)
    assert running is not None
    return running


def test_ranks_inherit_the_imported_modules(starter: WarmStarter, tmp_path: Path) -> None:
    assert not starter.is_ready
    starter.prepare(os.environ, ["json.tool"])
    wait_for(lambda: starter.is_ready)
    first = start(starter, tmp_path, "a", 3)
    assert first is not None
    assert first.wait(_LIMIT_S) == 3
    assert starter._server is not None
    server = psutil.Process(starter._server.pid)
    server.suspend()  # it cannot be done before we look
    starter.prepare(os.environ, ["json.tool", "timeit"])
    assert not starter.is_ready
    server.resume()
    wait_for(lambda: starter.is_ready)
    starter.prepare(os.environ, ["json.tool", "timeit"])
    assert starter.is_ready  # nothing is new
    second = start(starter, tmp_path, "b", 0)
    assert second is not None
    assert second.wait(_LIMIT_S) == 0
    assert json.loads((tmp_path / "a").read_text()) == [["json.tool"], "a", str(tmp_path), [True, True]]
    assert json.loads((tmp_path / "b").read_text()) == [["json.tool", "timeit"], "b", str(tmp_path), [True, True]]


@pytest.mark.slow
def test_forked_ranks_draw_different_numbers_as_new_programs_do(starter: WarmStarter, tmp_path: Path) -> None:
    """Without a seed, each process has random generators of its own; equal ones would give all ranks the same dropout masks."""
    starter.prepare(os.environ, ["numpy", "torch"])
    assert starter.wait_until_ready(_LIMIT_S)
    program = tmp_path / "program.py"
    program.write_text(
        "import json, random, sys, numpy, torch\n"
        "draws = torch.rand(1).item(), numpy.random.rand(), random.random()\n"
        "json.dump(draws, open(sys.argv[1], 'w'))\n"
    )
    draws = []
    for name in ("a", "b"):
        (tmp_path / f"of_{name}").mkdir()
        argv = [str(tmp_path / f"of_{name}"), "-", "default", "script", str(program), str(tmp_path / name)]
        rank = starter.start(argv, os.environ, stdout=1, stderr=2)
        assert rank is not None
        assert rank.wait(_LIMIT_S) == 0
        draws.append(json.loads((tmp_path / name).read_text()))
    assert [name for name, a, b in zip(("torch", "numpy", "random"), *draws, strict=True) if a == b] == []


def test_a_failing_import_does_not_affect_running_ranks(starter: WarmStarter, tmp_path: Path) -> None:
    running = start_one_that_waits(starter, tmp_path)
    # A file of echelon.launch has this name: what lies beside the server's file is not what it imports.
    starter.prepare(os.environ, ["warm_server"])
    wait_for(lambda: running.poll() is None and not starter._num_importing)
    assert not starter.is_ready
    assert running.poll() is None
    os.kill(running.pid, signal.SIGKILL)
    assert running.wait(_LIMIT_S) == -signal.SIGKILL


@pytest.mark.slow
def test_a_stopped_process_starts_no_rank_later(
    starter: WarmStarter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start_one_that_waits(starter, tmp_path)
    assert starter._server is not None
    server = psutil.Process(starter._server.pid)
    server.suspend()
    monkeypatch.setattr(warm, "_START_S", 0.2)
    assert start(starter, tmp_path, "late", 0) is None
    assert not starter.is_ready
    assert running.poll() == -signal.SIGKILL
    starter._server.wait(_LIMIT_S)
    wait_for(lambda: not psutil.pid_exists(running.pid))
    assert not (tmp_path / "late").exists()
