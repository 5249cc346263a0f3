"""Simulates the ranks of a checkpoint by threads, and checks that loading runs no code and opens no other files."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from echelon.checkpoint.plan import Gather
from echelon.checkpoint.save import Content, save
from echelon.world.world import World

_WATCHED: list[Callable[[str, tuple[Any, ...]], None]] = []
_INSTALLED: list[bool] = []


def world_of_threads(rank: int, world_size: int) -> World:
    return World(
        rank=rank,
        local_rank=rank,
        world_size=world_size,
        local_world_size=world_size,
        node_rank=0,
        device=torch.device("cpu"),
        backend="gloo",
    )


def gathers(world_size: int) -> list[Gather]:
    """Return a ``gather`` function for each rank, for ranks that are threads."""
    barrier = threading.Barrier(world_size, timeout=120)
    told: list[bytes] = [b""] * world_size

    def of(rank: int) -> Gather:
        def gather(payload: bytes) -> list[bytes]:
            told[rank] = payload
            barrier.wait()
            result = list(told)
            barrier.wait()
            return result

        return gather

    return [of(rank) for rank in range(world_size)]


def on_threads(run: Callable[[World, Gather], Any], world_size: int) -> list[Any]:
    """Call ``run`` on each rank and return the results. Raises the first error."""
    results: list[Any] = [None] * world_size
    errors: dict[int, BaseException] = {}

    def one(rank: int, gather: Gather) -> None:
        try:
            results[rank] = run(world_of_threads(rank, world_size), gather)
        except BaseException as error:  # noqa: BLE001 - raised below, in the thread of the test
            errors[rank] = error

    threads = [
        threading.Thread(target=one, args=(rank, gather), name=f"rank {rank}")
        for rank, gather in enumerate(gathers(world_size))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return results


def content_of(step: int, rank: int) -> Content:
    """Return a small state that identifies its step and rank."""
    return Content(
        tensors={"w": torch.full((3,), float(step)), f"of_rank_{rank}": torch.full((2,), float(step))},
        objects={"step": step},
        rank_objects={"mine": (step, rank)},
        progress={"step": step},
    )


def save_on_threads(target: Path, step: int, *, world_size: int = 2) -> None:
    on_threads(lambda world, gather: save(target, content_of(step, world.rank), world=world, gather=gather), world_size)


@contextmanager
def no_code_and_no_other_files(folder: Path) -> Iterator[None]:
    """Fail if the block unpickles a name, starts a process, or opens a file outside ``folder``."""
    touched: list[str] = []
    allowed = (str(folder), sys.prefix, sys.base_prefix, "/proc/self/", str(Path(__file__).parent.parent / "src"))

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("pickle.find_class", "os.system", "subprocess.Popen", "os.exec"):
            touched.append(f"{event} {arguments}")
            raise RuntimeError(f"{event} {arguments}")
        if event == "open" and isinstance(arguments[0], (str, bytes)):
            path = arguments[0].decode() if isinstance(arguments[0], bytes) else arguments[0]
            if not path.startswith(allowed):
                touched.append(f"open {path}")

    if not _INSTALLED:  # an audit hook cannot be removed
        sys.addaudithook(lambda event, arguments: [each(event, arguments) for each in list(_WATCHED)] and None)
        _INSTALLED.append(True)
    _WATCHED.append(watch)
    try:
        yield
    finally:
        _WATCHED.remove(watch)
    assert not touched, touched
