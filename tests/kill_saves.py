"""A program for tests/unit/checkpoint/test_save_killed.py: saves on several ranks, one of which is killed at a file operation.

The ranks are forked from this process, which has imported but not used torch, and communicate through pipes. Like a launcher, this
process kills the remaining ranks when one has died.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
import traceback
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch

from echelon.accelerator.checkpoint.folders import newest_whole
from echelon.checkpoint import storage
from echelon.checkpoint.commit import clean
from echelon.checkpoint.read import Checkpoint
from echelon.checkpoint.rotation import remove_oldest
from echelon.checkpoint.save import save
from tests.checkpoint_ranks import content_of, world_of_threads
from tests.toy_storage import CHANGES

WORLD_SIZE = 4


def _kill_at(at: int) -> None:
    """Make this process kill itself at the ``at``-th modifying operation; 0: never."""
    left = itertools.count(at - 1, -1)

    def counted(name: str) -> Any:
        real = getattr(storage, name)

        def operation(*arguments: Any) -> Any:
            if next(left) == 0:
                if name == "write":  # in the middle of the write
                    real(arguments[0], memoryview(arguments[1])[: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments)

        return operation

    for name in CHANGES:
        setattr(storage, name, counted(name))


def _rank(rank: int, hub: Connection, scenario: str, folder: Path, at: int) -> None:
    def gather(payload: bytes) -> list[bytes]:
        hub.send_bytes(payload)
        return [hub.recv_bytes() for _ in range(WORLD_SIZE)]

    _kill_at(at)
    world = world_of_threads(rank, WORLD_SIZE)
    target = folder / ("checkpoint_1" if scenario == "rotate" else "checkpoint_0")
    save(target, content_of(1 if scenario == "first" else 2, rank), world=world, gather=gather)
    if scenario == "rotate" and rank == 0:
        remove_oldest(folder, prefix="checkpoint_", limit=1)


def _run(scenario: str, folder: Path, victim: int, at: int) -> bool:
    """Fork the ranks; return whether the victim died."""
    hubs, pids = [], []
    for rank in range(WORLD_SIZE):
        ours, theirs = Pipe()
        pid = os.fork()
        if pid == 0:
            ours.close()
            for hub in hubs:
                hub.close()
            code = 1
            try:
                _rank(rank, theirs, scenario, folder, at if rank == victim else 0)
                code = 0
            except BaseException:  # noqa: BLE001 - the process exits here
                traceback.print_exc()
            finally:
                os._exit(code)
        theirs.close()
        hubs.append(ours)
        pids.append(pid)
    try:
        while True:
            told = [hub.recv_bytes() for hub in hubs]
            for hub in hubs:
                for each in told:
                    hub.send_bytes(each)
    except (EOFError, ConnectionResetError, BrokenPipeError):
        pass
    status = os.waitpid(pids[victim], 0)[1] if at else 0
    for pid in pids:
        if at and pid == pids[victim]:
            continue
        if status:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for hub in hubs:
        hub.close()
    return os.WIFSIGNALED(status)


def _found(folder: Path) -> int | None:
    found, _ = newest_whole(world_of_threads(0, 1), folder, prefix="checkpoint_")
    if found is None:
        return None
    checkpoint = Checkpoint(found)
    step: int = checkpoint.objects()["step"]
    assert torch.equal(checkpoint.read("w"), torch.full((3,), float(step)))
    return step


def main(scratch: Path, every: int) -> None:
    """Kill each of two ranks at each ``every``-th operation; print the number of kills, and fail if no checkpoint can be loaded."""
    template = scratch / "template"
    template.mkdir()
    _run("first", template, 0, 0)
    assert _found(template) == 1
    kills = 0
    for scenario, victim in itertools.product(("again", "rotate"), (0, 1)):
        at = 1
        while True:
            folder = scratch / "run"
            shutil.copytree(template, folder)
            died = _run(scenario, folder, victim, at)
            step = _found(folder)
            assert step in ((1, 2) if died else (2,)), (scenario, victim, at, os.listdir(folder))
            clean(folder, belongs=lambda name: True)
            assert _found(folder) == step, (scenario, victim, at, "cleaned", os.listdir(folder))
            assert not [name for name in os.listdir(folder) if ".tmp-" in name or ".old-" in name]
            shutil.rmtree(folder)
            if not died:
                break
            kills += 1
            at += every
    print(kills)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
