"""Measures the cost of `parity="exact"` compared with "off": the same model, data and global batch on 2 gloo processes, in one run.

With "off", the batch size of the loader is that of one process and micro-step; with "exact", that of the whole update.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from results import footer, publish
from torch import nn
from torch.utils.data import DataLoader, Dataset

from echelon import Accelerator
from echelon.distributed import process_group, spawn

RANKS = 2
BATCH = 64  # samples of an update, over all processes and micro-steps
WIDTH, HIDDEN, CLASSES = 256, 1520, 10  # 5.0 million parameters
WARM_UP = 3
LIMIT = 1.05
WALL, CPU = 0, 1

Found = dict[str, list[list[float]]]
"""For each variant and turn, the wall time and the CPU time in milliseconds per update."""
Work = Callable[[int, int, int, str], None]
"""Function of the rank, the number of rounds, the updates per turn, and the file for the results of rank 0."""
Report = Callable[[Found, int, int], str]


@dataclass(frozen=True)
class Variant:
    parity: str
    accumulation: int = 1
    counts_items: bool = False

    @property
    def loader_batch(self) -> int:
        return BATCH if self.parity == "exact" else BATCH // (RANKS * self.accumulation)

    @property
    def kind(self) -> str:
        return ("one micro-step" if self.accumulation == 1 else f"{self.accumulation} micro-steps") + (
            ", `num_items=`" if self.counts_items else ""
        )


KINDS = [(accumulation, counts) for accumulation in (1, 4) for counts in (False, True)]


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A map-style dataset, for which "exact" seeds the random draws of each sample."""

    def __init__(self, num_samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(256, WIDTH, generator=generator)
        self.labels = torch.randint(CLASSES, (256,), generator=generator)
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[number % 256], self.labels[number % 256]


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN)]
    return nn.Sequential(*layers, nn.GELU(), nn.Linear(HIDDEN, CLASSES))


def turn(variant: Variant, steps: int) -> tuple[float, float]:
    """Train for some updates; return milliseconds per update: wall time, and CPU time of this process."""
    accelerator = Accelerator(
        cpu=True,
        parity=variant.parity,
        gradient_accumulation_steps=variant.accumulation,
        step_scheduler_with_optimizer=False,
    )
    model: Any = net()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = Samples(BATCH * (WARM_UP + steps))
    loader: Any = DataLoader(data, batch_size=variant.loader_batch, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    updates = seen = 0
    wall = cpu = 0.0
    for inputs, labels in loader:
        if updates == WARM_UP and not wall:
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss, num_items=len(labels) if variant.counts_items else None)
            optimizer.step()
            optimizer.zero_grad()
        updates += accelerator.sync_gradients
        seen += len(labels)
    ended = time.perf_counter(), time.process_time()
    assert (updates, seen) == (WARM_UP + steps, len(data) // RANKS), (variant, updates, seen)
    accelerator.free_memory()
    return 1e3 * (ended[0] - wall) / steps, 1e3 * (ended[1] - cpu) / steps


def timed_updates(
    accelerator: Accelerator,
    prepared: tuple[Any, Any, Any],
    loss_of: Callable[[Any], torch.Tensor],
    *,
    steps: int,
    warm_up: int,
) -> tuple[float, float]:
    """Train with clipping; return milliseconds per update after ``warm_up``: wall time, and CPU time of this process.

    Args:
        accelerator: frees its memory at the end.
        prepared: the model, the optimizer and the loader.
        loss_of: returns the loss of a batch.
        steps: number of updates that are measured.
        warm_up: number of updates before them.
    """
    model, optimizer, loader = prepared
    updates, wall, cpu = 0, 0.0, 0.0
    for batch in loader:
        if updates == warm_up and not wall:
            if dist.is_initialized():
                dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        updates += accelerator.sync_gradients
    ended = time.perf_counter(), time.process_time()
    assert updates == warm_up + steps, updates
    accelerator.free_memory()
    return 1e3 * (ended[0] - wall) / steps, 1e3 * (ended[1] - cpu) / steps


def measure(rank: int, rounds: int, steps: int, result: str) -> None:
    """Run every variant once per round, in alternating order, so that neither side of a pair is always first."""
    torch.set_num_threads(1)
    found: Found = {}
    with process_group():
        for number in range(rounds + 1):
            for kind in KINDS:
                sides = [Variant(parity, *kind) for parity in ("off", "exact")]
                for variant in sides if number % 2 else sides[::-1]:
                    gc.collect()
                    wall, cpu = turn(variant, steps if number else 1)
                    sums = torch.tensor([wall, cpu]) / RANKS
                    dist.all_reduce(sums)
                    if number:  # the first round is a warm-up
                        found.setdefault(f"{variant.parity}, {variant.kind}", []).append(sums.tolist())
    if rank == 0:
        Path(result).write_text(json.dumps(found))


def ratios(found: Found, kind: str, column: int) -> list[float]:
    """Return the ratio of "exact" to "off" for each round."""
    pairs = zip(found[f"exact, {kind}"], found[f"off, {kind}"], strict=True)
    return [exact[column] / off[column] for exact, off in pairs]


def report(found: Found, rounds: int, steps: int) -> str:
    rows, costs = [], {}
    for kind in (Variant("off", *kind).kind for kind in KINDS):
        medians = [
            statistics.median(one[column] for one in found[f"{parity}, {kind}"])
            for column in (WALL, CPU)
            for parity in ("off", "exact")
        ]
        cells = [f"{value:.1f}" for value in medians]
        for column, name in ((WALL, "time"), (CPU, "CPU time")):
            ratio = ratios(found, kind, column)
            costs[f"{name}, {kind}"] = statistics.median(ratio)
            cells += [f"{statistics.median(ratio):.3f}", f"{min(ratio):.2f} - {max(ratio):.2f}"]
        rows.append(f"| {kind} | {' | '.join(cells)} |")
    worst = max(costs, key=lambda name: costs[name])
    verdict = "met" if costs[worst] <= LIMIT else "missed"
    num_parameters = sum(p.numel() for p in net().parameters())
    return f"""## Cost of exact parity

`parity="exact"` compared with `"off"` on {RANKS} gloo processes with one thread each: a perceptron of {num_parameters / 1e6:.1f} million parameters,
AdamW, global batches of {BATCH}, a map-style dataset. The values are milliseconds per update (CPU: mean of the processes), medians of
{rounds} rounds of {steps} updates, in each of which both run. The ratios are exact over off in the same round, with the median and the
range over the rounds.

| | wall, off | exact | CPU, off | exact | wall ratio | range | CPU ratio | range |
|---|---:|---:|---:|---:|---:|---|---:|---|
{chr(10).join(rows)}

- exact takes {costs[worst]:.3f} times as long as off in the worst case ({worst}; target: {LIMIT}, {verdict})

{footer("parity.py")}"""


def main(description: str | None, work: Work, report: Report, *, rounds: int, steps: int) -> None:
    """Run ``work`` on its ranks, and print or write the section that ``report`` returns."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/RESULTS.md")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result")
        spawn(work, args=(options.rounds, options.steps, str(result)), nprocs=RANKS)
        found = json.loads(result.read_text())
    section = report(found, options.rounds, options.steps)
    publish(section, is_written=options.write)


if __name__ == "__main__":
    main(__doc__, measure, report, rounds=15, steps=20)
