"""Measures the cost of saving 1 GB of state: with and without checksums, in the background, and compared with other libraries.

Run it on a quiet machine: ``python benchmarks/checkpoint.py [--folder DIR] [--megabytes N] [--turns N] [--write]``. With ``--url``,
it saves in the background to an object store, which it starts, beside ``dcp.async_save`` with fsspec (and s3fs). The variants
run in alternating order and are compared within each turn, because the speed of a disk varies. Libraries that are not installed are
skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import io
import os
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from results import footer, publish

import echelon.checkpoint.tensor_file as tensor_file
from echelon.checkpoint.background_save import BackgroundSaver
from echelon.checkpoint.object_store import location
from echelon.checkpoint.read import open_verified
from echelon.checkpoint.save import Content, begin_save, save
from echelon.world.world import World

sys.path.append(str(Path(__file__).parents[1]))  # the tests have a store
from tests.object_server import VARIABLES, serving

TURNS = 7
TITLE = "## Saving a checkpoint"
TITLE_URL = "## Saving a checkpoint to an object store"
Times = dict[str, list[float]]


class _NoChecksum:
    """A replacement of xxh3, to measure the cost of everything else."""

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


class _Variants:
    """Each method runs one variant and records its seconds; all save the same tensors."""

    def __init__(self, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
        self.times: Times = {}
        self._folder, self._tensors = folder, tensors
        self._world, self._content = World.current(cpu=True), Content(tensors=tensors)
        self._saver = BackgroundSaver()
        self._buffers = {name: tensor.clone() for name, tensor in tensors.items()}
        self.all: list[Callable[[], None]] = [self._background, self._load, self._dcp, self._dcp_async]
        if importlib.util.find_spec("accelerate") is not None:
            from accelerate import Accelerator

            self._accelerator = Accelerator(cpu=True)
            model = torch.nn.Module()
            model.weights = torch.nn.ParameterList(tensors.values())  # type: ignore[assignment]
            self._accelerator.prepare(model)
            self.all.append(self._accelerate)

    def _note(self, name: str, seconds: float) -> None:
        self.times.setdefault(name, []).append(seconds)

    def _save(self) -> None:
        target = self._folder / "save"
        self._note("save", _seconds(lambda: save(target, self._content, world=self._world)))

    def _load(self) -> None:
        target = self._folder / "save"
        load = _seconds(lambda: open_verified(target, world=self._world).read_into(self._buffers))
        self._note("load, every file verified", load)

    def save_twice(self, turn: int) -> None:
        """Save with and without checksums, in alternating order."""
        for variant in (self._save, self._unchecked)[:: 1 if turn % 2 else -1]:
            variant()

    def _unchecked(self) -> None:
        with _without_checksums():
            target = self._folder / "unchecked"
            self._note("save without checksums", _seconds(lambda: save(target, self._content, world=self._world)))

    def _background(self) -> None:
        copy = lambda: [self._buffers[name].copy_(tensor) for name, tensor in self._tensors.items()]  # noqa: E731
        self._note("copy in memory", _seconds(copy))
        self._note("step alone", statistics.median(_seconds(_step) for _ in range(15)))
        target = self._folder / "background"
        begin = lambda: self._saver.start(begin_save(target, self._content, world=self._world))  # noqa: E731
        self._note("blocked by a background save", _seconds(begin))
        beside = []
        while self._saver.is_busy:
            beside.append(_seconds(_step))
        self._note("step during a save", statistics.median(beside))
        self._saver.wait()

    def _dcp(self) -> None:
        import torch.distributed.checkpoint as dcp

        target = self._folder / "dcp"
        self._note("dcp.save", _seconds(lambda: dcp.save(dict(self._tensors), checkpoint_id=target)))

    def _dcp_async(self) -> None:
        import torch.distributed.checkpoint as dcp

        pending: list[Any] = []
        target = self._folder / "dcp_async"
        start = lambda: pending.append(dcp.async_save(dict(self._tensors), checkpoint_id=target))  # noqa: E731
        self._note("blocked by dcp.async_save", _seconds(start))
        pending[0].result()

    def _accelerate(self) -> None:
        self._note("accelerate's save_state", _seconds(lambda: self._accelerator.save_state(self._folder / "acc")))


def measure(folder: Path, tensors: dict[str, torch.Tensor], turns: int, pairs: int) -> Times:
    """Return the seconds of each variant for each turn, after an additional first turn in which memory and files are new.

    Saves with and without checksums run ``pairs`` times on their own, because the disk varies much more than their difference.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            variants = _Variants(folder, tensors)
            for turn in range(pairs + 1):
                variants.save_twice(turn)
            for turn in range(turns + 1):
                for i in range(len(variants.all)):
                    # Forward and backward, so that no variant has a fixed position or predecessor.
                    position = (i + turn) % len(variants.all)
                    variants.all[position if turn % 2 else -position - 1]()
    finally:
        dist.destroy_process_group()
    return variants.times


def _ratio(times: Times, name: str, other: str) -> float:
    """Return the median over the turns of the ratio of variant ``name`` to ``other``."""
    return statistics.median(a / b for a, b in zip(times[name][1:], times[other][1:]))


def section(times: Times, tensors: dict[str, torch.Tensor], turns: int) -> str:
    """Return the measurement as a section of RESULTS.md."""
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    rows = [
        f"| {name} | {statistics.median(found[1:]):.3f} | {min(found[1:]):.3f} - {max(found[1:]):.3f} | {found[0]:.3f} |"
        for name, found in times.items()
    ]
    pairs = [a / b for a, b in zip(times["save"][1:], times["save without checksums"][1:])]
    low, checksums, high = (quartile - 1 for quartile in statistics.quantiles(pairs))
    blocked = _ratio(times, "blocked by a background save", "copy in memory")
    slower = _ratio(times, "step during a save", "step alone")
    return "\n".join(
        [
            TITLE,
            "",
            f"{size / 1e9:.2f} GB in {len(tensors)} tensors, one process. The values are seconds, medians of {turns} turns (saves "
            f"with and without",
            f"checksums: {len(pairs)} pairs) without the first turn, in which memory is allocated and files are new. The comparisons below are",
            "made within each turn.",
            "",
            "| | s | min - max | first |",
            "|---|---:|---:|---:|",
            *rows,
            "",
            f"- checksums lengthen a save by {100 * checksums:.1f} % (middle half of the pairs: {100 * low:+.1f} % to {100 * high:+.1f} %; target: at most 5 %, "
            f"{'met' if checksums <= 0.05 else 'missed'})",
            f"- a background save blocks for {blocked:.2f} times the duration of a copy in memory (target: 1.2, "
            f"{'met' if blocked <= 1.2 else 'missed'}), the first one for "
            f"{times['blocked by a background save'][0] / statistics.median(times['copy in memory'][1:]):.2f} times",
            f"- a training step takes {slower:.2f} times as long during the save",
            "",
            footer("checkpoint.py", "accelerate", needs_peers=True),
        ]
    )


class _PeakBytes:
    """The most host memory that this process uses inside the block beyond what it used at its beginning."""

    def __enter__(self) -> _PeakBytes:
        self.value, self._over, self._process = 0, threading.Event(), psutil.Process()
        before = self._process.memory_info().rss

        def sample() -> None:
            while not self._over.wait(0.005):
                self.value = max(self.value, self._process.memory_info().rss - before)

        self._thread = threading.Thread(target=sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def section_url(url: str, tensors: dict[str, torch.Tensor], turns: int) -> str:
    """Return a section on background saves to ``url``: the seconds blocked, those until the checkpoint is durable, memory."""
    saver, world = BackgroundSaver(), World.current(cpu=True)
    target = location(f"{url}/echelon")
    buffers = {name: tensor.clone() for name, tensor in tensors.items()}

    def own() -> Callable[[], Any]:
        saver.start(begin_save(target, Content(tensors=tensors), world=world))
        return saver.wait

    variants: dict[str, Callable[[], Callable[[], Any]]] = {"echelon": own}
    if importlib.util.find_spec("s3fs") is not None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        def other() -> Callable[[], Any]:
            pending: Any = dcp.async_save(dict(tensors), storage_writer=FsspecWriter(f"{url}/dcp"))
            return lambda: pending.result()

        variants["dcp.async_save"] = other
    found: dict[str, list[tuple[float, ...]]] = {}
    copies = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for _turn in range(turns + 1):
            copies.append(_seconds(lambda: [buffers[name].copy_(tensor) for name, tensor in tensors.items()]))
            for name, start in variants.items():
                with _PeakBytes() as peak:
                    began = time.perf_counter()
                    wait = start()
                    blocked = time.perf_counter() - began
                    wait()
                found.setdefault(name, []).append((blocked, time.perf_counter() - began, peak.value / 1e6))
    finally:
        dist.destroy_process_group()
    size = sum(tensor.nbytes for tensor in tensors.values())
    rows = []
    for name, values in found.items():
        blocked, durable, _ = (statistics.median(column) for column in zip(*values[1:]))
        megabytes = max(value[2] for value in values)  # of the first turn, which allocates what the others use again
        ratio = statistics.median(value[0] / copy for value, copy in zip(values[1:], copies[1:]))
        rows.append(f"| {name} | {blocked:.3f} | {ratio:.2f} | {durable:.2f} | {megabytes:,.0f} |")
    return "\n".join(
        [
            TITLE_URL,
            "",
            f"{size / 1e9:.2f} GB in {len(tensors)} tensors, one process, background saves to moto's server on the same machine, which computes in",
            f"Python. Medians of {turns} turns without the first; the memory is the most of all turns. A copy in memory takes",
            f"{statistics.median(copies[1:]):.3f} s.",
            "",
            "| | blocked, s | in copies | durable after, s | memory, MB |",
            "|---|---:|---:|---:|---:|",
            *rows,
            "",
            footer("checkpoint.py --url s3://bucket/saves", "obstore", "s3fs", "moto"),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", help="existing folder on the disk to measure")
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--pairs", type=int, default=60, help="number of pairs of saves with and without checksums")
    parser.add_argument("--write", action="store_true", help="replace the section in RESULTS.md")
    parser.add_argument(
        "--url", help="save to this URL of a store that the program starts, such as s3://bucket/saves, instead"
    )
    arguments = parser.parse_args()
    if arguments.url:
        with serving() as server:
            os.environ.update(VARIABLES, AWS_ENDPOINT_URL=server, AWS_TIMEOUT="60s")
            text = section_url(arguments.url, _tensors(arguments.megabytes), arguments.turns)
        publish(text, is_written=arguments.write)
        return
    tensors = _tensors(arguments.megabytes)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        times = measure(Path(scratch), tensors, arguments.turns, arguments.pairs)
    text = section(times, tensors, arguments.turns)
    publish(text, is_written=arguments.write)


if __name__ == "__main__":
    main()
