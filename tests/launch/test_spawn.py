"""``spawn``: ranks with a complete environment, a store on loopback, and the first error in words."""

from __future__ import annotations

import multiprocessing.util
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from echelon.base.errors import LaunchError, UsageError
from echelon.distributed import cleanup, setup
from echelon.launch.spawn import spawn


def set_up(rank: int, ways: list[str], directory: str) -> None:
    for way in ways:
        set_up_once(rank, way, directory)


def set_up_once(rank: int, way: str, directory: str) -> None:
    assert os.environ["LOCAL_RANK"] == str(rank)
    assert (os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"]) == ("2", "2")
    limit = timedelta(seconds=30)
    if way == "setup":
        setup(timeout=limit)
    elif way == "setup with a rank":
        setup(rank, 2, timeout=limit)
    else:
        dist.init_process_group("gloo", rank=rank, world_size=2, timeout=limit)
    x = torch.tensor([rank + 1.0])
    dist.all_reduce(x)
    Path(directory, f"{way} {rank} {int(x.item())}").touch()
    cleanup()


def fail_on_one(rank: int, manner: str) -> None:
    setup()
    dist.barrier()
    if rank == 1:
        if manner == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("bad sample 17")
    dist.barrier()


def note(rank: int, directory: str) -> None:
    Path(directory, str(rank)).touch()


@pytest.mark.slow
def test_every_way_to_set_up_works(tmp_path: Path) -> None:
    ways = ["plain torch", "setup", "setup with a rank"]  # one after the other in the same processes
    assert spawn(set_up, args=(ways, str(tmp_path)), nprocs=2) is None
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"{way} {rank} 3" for way in ways for rank in (0, 1)]
    assert "RANK" not in os.environ  # the parent's environment is left alone


@pytest.mark.slow
@pytest.mark.parametrize(
    ("manner", "text"),
    [("raise", "ValueError: bad sample 17"), pytest.param("kill", "killed by SIGKILL", marks=pytest.mark.soak)],
)
def test_failure_names_the_rank_that_began(manner: str, text: str) -> None:
    with pytest.raises(LaunchError) as caught:
        spawn(fail_on_one, (manner,), nprocs=2)
    message = str(caught.value)
    assert f"rank 1 failed first: {text}" in message
    assert "rank 1 of 2" in message
    assert ("do: " in message) is (manner == "kill")  # an exception of the program has no advice
    if manner == "raise":
        assert "in fail_on_one" in message
        assert "Traceback (most recent call last):" in message


@pytest.mark.soak
def test_context_is_joined_later(tmp_path: Path) -> None:
    context = spawn(set_up, (["plain torch"], str(tmp_path)), nprocs=2, join=False)
    assert context is not None
    assert len(context.pids()) == 2
    while not context.join():
        pass
    assert context.join()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plain torch 0 3", "plain torch 1 3"]


def test_no_process_is_an_error() -> None:
    with pytest.raises(UsageError, match="starts no process"):
        spawn(note, nprocs=0)


def fail_after_the_victim_is_gone(rank: int, directory: str) -> None:
    note = Path(directory, "victim")
    if rank == 0:
        Path(directory, "tmp").write_text(str(os.getpid()))
        Path(directory, "tmp").rename(note)
        raise RuntimeError("Connection closed by peer [127.0.0.1]:4015")
    while not note.exists() or psutil.pid_exists(int(note.read_text())):  # until the parent has seen it end
        time.sleep(0.01)
    raise ValueError("bad sample 17")


def linger(file: str) -> None:
    Path(file).touch()
    time.sleep(60)


def fail_and_be_slow_to_end(rank: int, directory: str) -> None:
    ending = Path(directory, "ending")
    if rank == 1:
        multiprocessing.util.Finalize(None, linger, args=(str(ending),), exitpriority=0)
        raise ValueError("bad sample 17")
    while not ending.exists():
        time.sleep(0.01)
    raise RuntimeError("Connection closed by peer [127.0.0.1]:4015")


@pytest.mark.slow
def test_a_culprit_that_torch_stopped_at_its_end_is_told_by_its_exception(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="rank 1 failed first: ValueError: bad sample 17"):
        spawn(fail_and_be_slow_to_end, (str(tmp_path),), nprocs=2)


@pytest.mark.slow
def test_victim_seen_first_does_not_hide_the_culprit(tmp_path: Path) -> None:
    context = spawn(fail_after_the_victim_is_gone, (str(tmp_path),), nprocs=2, join=False)
    assert context is not None
    assert len(context.pids()) == 2
    with pytest.raises(LaunchError, match="rank 1 failed first: ValueError: bad sample 17"):
        context.join(grace_period=30.0)  # one second is little beside other work
