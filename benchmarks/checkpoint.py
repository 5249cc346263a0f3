"""What saving costs: 1 GB of state, with and without checksums, in the background, and beside what others offer.

Run it on a quiet machine: ``python benchmarks/checkpoint.py [folder] [megabytes]``. Peers that are not installed are left out.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import echelon.checkpoint.tensor_file as tensor_file
from echelon.checkpoint.background import BackgroundSaver
from echelon.checkpoint.reading import open_verified
from echelon.checkpoint.save import Content, begin_save, save
from echelon.world.world import World

REPEATS = 5


class _NoChecksum:
    """In the place of xxh3: what the rest costs."""

    def update(self, data: Any) -> None:
        pass

    def hexdigest(self) -> str:
        return "0" * 32


@contextlib.contextmanager
def _without_checksums() -> Iterator[None]:
    before = tensor_file.xxhash.xxh3_128
    tensor_file.xxhash.xxh3_128 = _NoChecksum
    try:
        yield
    finally:
        tensor_file.xxhash.xxh3_128 = before


def _seconds(action: Callable[[], Any]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _tensors(megabytes: int) -> dict[str, torch.Tensor]:
    return {f"layer.{i}.weight": torch.randn(2048, 2048) for i in range(max(megabytes // 16, 1))}


def _step() -> None:
    x = torch.randn(256, 256)
    for _ in range(20):
        x = (x @ x).tanh()


def _own(folder: Path, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, list[float]]]:
    world, content = World.current(cpu=True), Content(tensors=tensors)
    times: dict[str, list[float]] = {"save": [], "save without checksums": [], "load, verified": []}
    for turn in range(2 * REPEATS):  # by turns, and first by turns: the disk has its moods, and what came before counts
        for checked in (turn % 2 == 0, turn % 2 == 1):
            with contextlib.nullcontext() if checked else _without_checksums():
                name = "save" if checked else "save without checksums"
                times[name].append(_seconds(lambda to=folder / name: save(to, content, world=world)))
    for _ in range(REPEATS):
        times["load, verified"].append(_seconds(lambda: open_verified(folder / "save", world=world).read_into(tensors)))
    yield from times.items()


def _background(folder: Path, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, list[float]]]:
    world, content, saver = World.current(cpu=True), Content(tensors=tensors), BackgroundSaver()
    buffers = {name: torch.empty_like(tensor).copy_(tensor) for name, tensor in tensors.items()}
    copies, blocked, alone, beside = [], [], [], []
    for _ in range(REPEATS + 1):
        copies.append(_seconds(lambda: [buffers[name].copy_(tensor) for name, tensor in tensors.items()]))
        alone += [_seconds(_step) for _ in range(10)]
        blocked.append(_seconds(lambda: saver.start(begin_save(folder / "async", content, world=world))))
        while saver.is_busy:
            beside.append(_seconds(_step))
        saver.wait()
    yield "copy in memory", copies[1:]
    yield "blocked by a save in the background, first", blocked[:1]
    yield "blocked by a save in the background", blocked[1:]
    yield "a step of training alone", alone
    yield "a step of training beside the writing", beside


def _others(folder: Path, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, list[float]]]:
    import torch.distributed.checkpoint as dcp

    if importlib.util.find_spec("accelerate") is not None:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        model = torch.nn.Module()
        model.weights = torch.nn.ParameterList(tensors.values())  # type: ignore[assignment]
        accelerator.prepare(model)
        yield (
            "accelerate's save_state",
            [_seconds(lambda: accelerator.save_state(folder / "acc")) for _ in range(REPEATS)],
        )
    made = not dist.is_initialized()
    if made:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def dcp_save() -> None:
        dcp.save(dict(tensors), checkpoint_id=folder / "dcp")

    yield "dcp.save", [_seconds(dcp_save) for _ in range(REPEATS)]
    blocked = []
    for _ in range(REPEATS):
        pending: list[Any] = []
        blocked.append(
            _seconds(
                lambda into=pending: into.append(dcp.async_save(dict(tensors), checkpoint_id=folder / "dcp_async"))
            )
        )
        pending[0].result()
    yield "blocked by dcp.async_save", blocked
    if made:
        dist.destroy_process_group()


def main(folder: Path, megabytes: int) -> None:
    """Print seconds: the median, the least, the most."""
    tensors = _tensors(megabytes)
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    print(
        f"{size / 1e9:.2f} GB in {len(tensors)} tensors, {folder}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}"
    )
    found: dict[str, float] = {}
    for part in (_own, _background, _others):
        scratch = folder / part.__name__
        scratch.mkdir()
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            for name, times in part(scratch, tensors):
                found[name] = statistics.median(times)
                print(f"{name:44} {found[name]:8.4f}   {min(times):8.4f} .. {max(times):8.4f}", flush=True)
        shutil.rmtree(scratch)
    checksums = found["save"] / found["save without checksums"] - 1
    print(f"checksums cost {checksums:+.1%} of a save (goal: at most 5 %)")
    ratio = found["blocked by a save in the background"] / found["copy in memory"]
    print(f"a save in the background blocks for {ratio:.2f} copies in memory (goal: at most 1.2)")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as scratch:
        main(Path(scratch), int(sys.argv[2]) if len(sys.argv) > 2 else 1000)
