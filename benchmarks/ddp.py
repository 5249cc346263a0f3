"""Measures what echelon adds to a DDP step on 2 gloo processes: torch's DDP by hand, and echelon with `parity="off"` and "exact".

The loops train the same network (that of parity.py) with the same number of samples per process. The speed of a shared machine varies by 10 %
within seconds, so two loops in the same processes alternate update by update, and the ratio of each pair counts.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import parity
import torch
import torch.distributed as dist
from parity import BATCH, CPU, RANKS, WALL, Found, Samples, net
from results import footer, verdict
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from echelon import Accelerator
from echelon.distributed import process_group

BY_HAND = "DDP by hand"
LIMITS = {"off": 1.01, "exact": 1.03}
WARM_UP = 17
"""Pairs of a round that are not measured. echelon compares the ranks' weights before steps 1, 2, 3, 5, 9, 17, 33, 65, ...: the later ones are
measured, but are too few to move a median."""
Loop = tuple[Any, Any, Any, Callable[[torch.Tensor], None]]
"""The model, the optimizer, the loader, and the backward pass of a loss."""


def build(name: str, data: Samples) -> tuple[Loop, Callable[[], Any]]:
    """Return the parts of a loop, and a function that releases them."""
    model: Any = net()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if name == BY_HAND:
        sampler: Any = DistributedSampler(data)
        loader: Any = DataLoader(data, batch_size=BATCH // RANKS, sampler=sampler)
        return (DistributedDataParallel(model), optimizer, loader, torch.Tensor.backward), lambda: None
    accelerator = Accelerator(cpu=True, parity=name, step_scheduler_with_optimizer=False)
    loader = DataLoader(data, batch_size=BATCH if name == "exact" else BATCH // RANKS, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    return (model, optimizer, loader, accelerator.backward), accelerator.free_memory


def updates_of(loop: Loop) -> Iterator[tuple[float, float]]:
    """Train; yield the milliseconds of each update: wall time, and CPU time of this process."""
    model, optimizer, loader, backward = loop
    batches = iter(loader)
    while True:
        began, cpu_began = time.perf_counter(), time.process_time()
        batch = next(batches, None)
        if batch is None:
            return
        inputs, labels = batch
        backward(nn.functional.cross_entropy(model(inputs), labels))
        optimizer.step()
        optimizer.zero_grad()
        yield 1e3 * (time.perf_counter() - began), 1e3 * (time.process_time() - cpu_began)


def measure_pair(name: str, num_updates: int) -> list[list[float]]:
    """Return the milliseconds of each update of loop ``name`` and of one by hand, which alternate: wall, CPU, wall, CPU."""
    data = Samples(BATCH * (WARM_UP + num_updates))
    (own, release), (its, _) = build(name, data), build(BY_HAND, data)
    own_updates, its_updates = updates_of(own), updates_of(its)
    found = []
    for number in range(WARM_UP + num_updates):
        if number % 2:
            theirs, mine = next(its_updates), next(own_updates)
        else:
            mine, theirs = next(own_updates), next(its_updates)
        if number >= WARM_UP:
            found.append([*mine, *theirs])
    release()
    return found


def measure(rank: int, rounds: int, steps: int, result: str) -> None:
    """Measure every loop beside the one by hand, which is also measured beside another one by hand."""
    torch.set_num_threads(1)
    found: Found = {}
    with process_group():
        for _ in range(rounds):
            for name in [*LIMITS, BY_HAND]:
                gc.collect()
                times = torch.tensor(measure_pair(name, steps)) / RANKS
                dist.all_reduce(times)  # the mean of the processes
                found.setdefault(name, []).extend(times.tolist())
    if rank == 0:
        Path(result).write_text(json.dumps(found))


def report(found: Found, rounds: int, steps: int) -> str:
    rows, verdicts = [], []
    for name, pairs in found.items():
        cells = []
        for column, kind in ((WALL, "wall"), (CPU, "CPU")):
            low, ratio, high = statistics.quantiles([one[column] / one[2 + column] for one in pairs], n=4)
            cells.append(f"{ratio:.3f} ({low:.3f} - {high:.3f})")
            if name in LIMITS:
                verdicts.append(
                    f'- `parity="{name}"` takes {ratio:.3f} times the {kind} time of DDP by hand (target: {LIMITS[name]}, {verdict(ratio <= LIMITS[name])})'
                )
        times = " | ".join(f"{statistics.median(one[i] for one in pairs):.1f}" for i in (WALL, 2 + WALL, CPU, 2 + CPU))
        label = f"echelon, {name}" if name in LIMITS else name
        rows.append(f"| {label} | {times} | {' | '.join(cells)} |")
    return f"""## A DDP step

{RANKS} gloo processes with one thread each, {sum(p.numel() for p in net().parameters()) / 1e6:.1f} million parameters, AdamW, {BATCH // RANKS} samples per process, a map-style dataset.
Each loop alternates, update by update, with one by hand in the same processes: milliseconds per update of {rounds} rounds of {steps} pairs
(medians), and the ratio of the two updates of a pair (median and middle half). The last row shows what the measurement itself adds.

| loop | wall | wall, by hand | CPU | CPU, by hand | wall ratio | CPU ratio |
|---|---:|---:|---:|---:|---|---|
{chr(10).join(rows)}

{chr(10).join(verdicts)}

{footer("ddp.py")}"""


if __name__ == "__main__":
    parity.main(__doc__, measure, report, rounds=3, steps=150)
