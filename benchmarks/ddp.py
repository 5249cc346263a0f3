"""Measures what echelon adds to a DDP step on 2 gloo processes: torch's DDP by hand, and echelon with `parity="off"` and "exact".

The three loops train the same network (that of parity.py) with the same samples per process, in turns within the same processes.
"""

from __future__ import annotations

import gc
import json
import platform
import statistics
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import parity
import torch
import torch.distributed as dist
from overhead import processor
from parity import BATCH, CPU, RANKS, WALL, WARM_UP, Found, Samples, Variant, net
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from echelon.distributed import process_group

BY_HAND = "DDP by hand"
LIMITS = {"off": 1.01, "exact": 1.03}


def turn_by_hand(steps: int) -> tuple[float, float]:
    """Train for some updates; return milliseconds per update: wall time, and CPU time of this process."""
    model = DistributedDataParallel(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = Samples(BATCH * (WARM_UP + steps))
    loader: Any = DataLoader(data, batch_size=BATCH // RANKS, sampler=DistributedSampler(data))
    wall = cpu = 0.0
    for number, (inputs, labels) in enumerate(loader):
        if number == WARM_UP:
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    ended = time.perf_counter(), time.process_time()
    return 1e3 * (ended[0] - wall) / steps, 1e3 * (ended[1] - cpu) / steps


def measure(rank: int, rounds: int, steps: int, result: str) -> None:
    """Run every loop once per round, each time another one first."""
    torch.set_num_threads(1)
    found: Found = {}
    names = [BY_HAND, "off", "exact"]
    with process_group():
        for number in range(rounds + 1):
            for name in names[number % 3 :] + names[: number % 3]:
                gc.collect()
                num_steps = steps if number else 1
                wall, cpu = turn_by_hand(num_steps) if name == BY_HAND else parity.turn(Variant(name), num_steps)
                sums = torch.tensor([wall, cpu]) / RANKS
                dist.all_reduce(sums)
                if number:  # the first round is a warm-up
                    found.setdefault(name, []).append(sums.tolist())
    if rank == 0:
        Path(result).write_text(json.dumps(found))


def report(found: Found, rounds: int, steps: int) -> str:
    rows, verdicts = [], []
    for name, values in found.items():
        wall, cpu = (statistics.median(one[column] for one in values) for column in (WALL, CPU))
        cells = []
        for column in (WALL, CPU):
            ratio = [own[column] / its[column] for own, its in zip(values, found[BY_HAND], strict=True)]
            low, middle, high = statistics.quantiles(ratio, n=4)
            cells.append(f"{middle:.3f} ({low:.3f} - {high:.3f})")
            if name in LIMITS:
                kind = "wall" if column == WALL else "CPU"
                verdict = "met" if middle <= LIMITS[name] else "missed"
                verdicts.append(
                    f'- `parity="{name}"` takes {middle:.3f} times the {kind} time of DDP by hand (target: {LIMITS[name]}, {verdict})'
                )
        rows.append(f"| {name} | {wall:.1f} | {cpu:.1f} | {' | '.join(cells)} |")
    return f"""## A DDP step

{RANKS} gloo processes with one thread each, {sum(p.numel() for p in net().parameters()) / 1e6:.1f} million parameters, AdamW, {BATCH // RANKS} samples per process, a map-style dataset.
Milliseconds per update, medians of {rounds} rounds of {steps} updates in the same processes; the ratios are to the loop by hand in the
same round (median and middle half).

| loop | wall | CPU | wall ratio | CPU ratio |
|---|---:|---:|---|---|
{chr(10).join(rows)}

{chr(10).join(verdicts)}

{date.today()}, {processor()}, Python {platform.python_version()}; torch {version("torch")}, echelon {version("echelon")}.
Repeat: `.venv/bin/python benchmarks/ddp.py --write`.
"""


if __name__ == "__main__":
    parity.main(__doc__, measure, report, rounds=15, steps=20)
