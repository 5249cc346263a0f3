"""Measures the cost of an order of samples: time to the first batch, to a batch in the middle of the epoch, per index, and memory.

Each variant yields lists of 32 indices; no sample is read. Each measurement uses a new process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from results import footer, installed, publish
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from echelon.data.exact.permutation import ExplicitPermutation, FeistelPermutation, Permutation

BATCH = 32
BLOCK = 4096  # positions that are computed at once
NEXT = 8192  # batches over which the steady cost is measured
REPLICAS = 8
SIZE, LARGE = 10**7, 10**8
BEYOND = (2**24 + 1, 10**12, 2**48)
FEISTEL = "echelon, feistel"

Batches = Iterator[list[int]]


class Numbers:
    """A dataset of which only the length is used."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


class From:
    def __init__(self, order: Permutation, n: int, start: int) -> None:
        self.order = order
        self.n = n
        self.start = start

    def __iter__(self) -> Iterator[int]:
        for begin in range(self.start, self.n, BLOCK):
            yield from self.order.indices(range(begin, min(begin + BLOCK, self.n))).tolist()


def feistel(n: int, start: int) -> Batches:
    return iter(BatchSampler(From(FeistelPermutation(n, 1), n, start), BATCH, False))


def explicit(n: int, start: int) -> Batches:
    return iter(BatchSampler(From(ExplicitPermutation(n, 1), n, start), BATCH, False))


def random_sampler(n: int, start: int) -> Batches:
    sampler = RandomSampler(Numbers(n), generator=torch.Generator().manual_seed(1))
    return islice(BatchSampler(sampler, BATCH, False), start // BATCH, None)


def distributed_sampler(n: int, start: int) -> Batches:
    """``start`` counts the samples of all ranks."""
    sampler = DistributedSampler(Numbers(n), num_replicas=REPLICAS, rank=0, seed=1)
    return islice(BatchSampler(sampler, BATCH, False), start // REPLICAS // BATCH, None)


def accelerate(n: int, start: int) -> Batches:
    from accelerate import PartialState, skip_first_batches

    PartialState(cpu=True)
    loader = DataLoader(Numbers(n), BATCH, shuffle=True, generator=torch.Generator().manual_seed(1))
    return iter(skip_first_batches(loader, start // BATCH).batch_sampler)


def torchdata(n: int, start: int) -> Batches:
    """The samplers with which ``StatefulDataLoader`` resumes."""
    from torchdata.stateful_dataloader.sampler import BatchSampler as StatefulBatches, RandomSampler as StatefulSampler

    sampler = StatefulSampler(Numbers(n), generator=torch.Generator().manual_seed(1))
    batches = iter(StatefulBatches(sampler, BATCH, False))
    if start:
        state = iter(
            StatefulBatches(StatefulSampler(Numbers(1), generator=sampler.generator), BATCH, False)
        ).state_dict()
        # Construct the state of that position, because iterating to it would be measured as well.
        state["samples_yielded"] = state["sampler_iter_state"]["yielded"] = start
        batches.load_state_dict(state)
    return batches


CONTENDERS: dict[str, tuple[str | None, Callable[[int, int], Batches]]] = {
    FEISTEL: (None, feistel),
    "echelon, randperm": (None, explicit),
    "torch RandomSampler": (None, random_sampler),
    f"torch DistributedSampler, 1 of {REPLICAS}": (None, distributed_sampler),
    "accelerate skip_first_batches": ("accelerate", accelerate),
    "torchdata stateful samplers": ("torchdata", torchdata),
}


def measure(name: str, n: int, start: int) -> dict[str, float]:
    """Return CPU seconds to the first batch from ``start`` on, nanoseconds per index after it, and bytes."""
    torch.set_num_threads(1)
    contender = CONTENDERS[name][1]
    next(contender(1000, 500))  # imports and other one-time work
    before = memory("VmRSS")
    began = time.process_time()
    batches = contender(n, start)
    next(batches)
    seconds = time.process_time() - began
    began = time.process_time()
    count = sum(map(len, islice(batches, NEXT)))
    each = (time.process_time() - began) / count
    return {"seconds": seconds, "nanoseconds": 1e9 * each, "bytes": max(0, memory("VmHWM") - before)}


def memory(key: str) -> int:
    """Return a memory figure of this process in bytes: VmRSS is the current one, VmHWM the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def in_fresh_process(name: str, n: int, start: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", name, str(n), str(start)]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def best(name: str, n: int, rounds: int) -> dict[str, float]:
    """Return the best of ``rounds`` (noise only increases values): seconds to the start and to the middle, and the rest."""
    starts = [in_fresh_process(name, n, 0) for _ in range(rounds)]
    seeks = [in_fresh_process(name, n, n // 2 // BATCH * BATCH) for _ in range(rounds)]
    return {
        "start": min(run["seconds"] for run in starts),
        "seek": min(run["seconds"] for run in seeks),
        "nanoseconds": min(run["nanoseconds"] for run in starts + seeks),
        "bytes": min(max(pair[0]["bytes"], pair[1]["bytes"]) for pair in zip(starts, seeks)),
    }


def row(name: str, n: int, found: dict[str, float], base: dict[str, float] | None) -> str:
    ratio = f"{found['seek'] / base['seek']:,.0f} x" if base else ""
    return (
        f"| {n:,} | {name} | {1e3 * found['start']:,.1f} | {1e3 * found['seek']:,.1f} | {ratio} "
        f"| {found['nanoseconds']:.0f} | {found['bytes'] / 1e6:,.1f} |"
    )


def report(names: list[str], *, sizes: tuple[int, ...], rounds: int) -> str:
    rows = []
    for n in sizes:
        found = {name: best(name, n, rounds if n < LARGE else 1) for name in names}
        rows += [row(name, n, values, found[FEISTEL]) for name, values in found.items()]
    rows += [row(FEISTEL, n, best(FEISTEL, n, rounds), None) for n in BEYOND]
    return f"""## Order

Index lists of {BATCH}; no sample is read. One thread, milliseconds of CPU time, the best of {rounds} new processes ({LARGE:,} samples: one
process). "First" is the time from the start to the first batch of an epoch. "Middle" is the time from the start to the first batch
after half of the epoch, with the resume function of each library (torch's samplers have none, so the loop skips batches).
"ns per index" is the cost of each further index, as a Python integer in a list. Memory is the peak growth of the process. Ratio
is that of "middle" to the first row.

| samples | order | first, ms | middle, ms | ratio | ns per index | memory, MB |
|---:|---|---:|---:|---:|---:|---:|
{chr(10).join(rows)}

{footer("order.py --large", "accelerate", "torchdata", "numpy", needs_peers=True)}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--large", action="store_true", help=f"also with {LARGE:,} samples: 9 GB of memory, minutes")
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/RESULTS.md")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options: Any = parser.parse_args()
    if options.measure:
        name, n, start = options.measure
        print(json.dumps(measure(name, int(n), int(start))))
        return
    missing = [package for package, _ in CONTENDERS.values() if package and not installed(package)]
    if missing:
        print(f"!! {', '.join(missing)} not installed. To compare with all: make peers, make bench.")
    if missing and options.write:
        sys.exit("--write needs all peers: a table without them says nothing")
    names = [name for name, (package, _) in CONTENDERS.items() if package not in missing]
    section = report(names, sizes=(SIZE, LARGE) if options.large else (SIZE,), rounds=options.rounds)
    publish(section, is_written=options.write)


if __name__ == "__main__":
    main()
