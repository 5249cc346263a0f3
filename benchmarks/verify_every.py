"""Measures what ``verify_every`` costs: a step without it, between two checks, and one check, side by side on two ranks.

Both ranks run in this process's children on one thread each. A loop without checks and one with checks take turns of a few steps, because
the speed of a shared machine varies from second to second.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

from echelon import Accelerator

RESULTS = Path(__file__).with_name("RESULTS.md")
HEADING = "## Cost of checking live updates"
EVERY = 20  # in this benchmark, to see many checks; the costs are then given for every 1,000th
TARGET = 0.002
MODELS = {
    "MLP 16-32-4": (16, 32, 1, 8),
    "MLP of 0.8 million parameters": (256, 512, 3, 64),
    "MLP of 4 million": (512, 1024, 4, 64),
}
ROUNDS = 6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help="replace the section in RESULTS.md")
    write = parser.parse_args().write
    rows = []
    for name, shape in MODELS.items():
        for world_size in (1, 2):
            with tempfile.TemporaryDirectory() as folder:
                mp.spawn(_measure, args=(world_size, shape, folder), nprocs=world_size)
                times = torch.load(f"{folder}/times", weights_only=True)
            rows.append((name, world_size, *times))
    text = _table(rows)
    print(text)
    if write:
        before, _, after = RESULTS.read_text().partition(HEADING)
        rest = after.partition("\n## ")
        RESULTS.write_text(f"{before}{text}" + (f"\n## {rest[2]}" if rest[1] else ""))


def _measure(rank: int, world_size: int, shape: tuple[int, ...], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    loops = [_Loop(shape, every) for every in (None, EVERY)]
    for loop in loops:
        loop.run(2 * EVERY - 1)  # the next step is the first after a check
    without, between, checked = [], [], []
    for _ in range(ROUNDS):
        without += loops[0].run(EVERY)
        times = loops[1].run(EVERY)
        # The step of a check, and the next one, at whose beginning the ranks compare.
        between += times[1:-1]
        checked.append(times[-1] + times[0])
    if rank == 0:
        torch.save([statistics.median(each) for each in (without, between, checked)], f"{folder}/times")
    dist.barrier()
    dist.destroy_process_group()


class _Loop:
    def __init__(self, shape: tuple[int, ...], every: int | None) -> None:
        inputs, hidden, depth, batch = shape
        torch.manual_seed(0)
        self._accelerator = Accelerator(cpu=True, verify_every=every)
        layers: list[nn.Module] = [nn.Linear(inputs, hidden), nn.ReLU()]
        for _ in range(depth - 1):
            layers += [nn.Linear(hidden, hidden), nn.ReLU()]
        model = nn.Sequential(*layers, nn.Linear(hidden, 4))
        self._model: Any
        self._optimizer: Any
        self._model, self._optimizer = self._accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        self._x, self._y = torch.randn(batch, inputs), torch.randint(4, (batch,))

    def run(self, num_steps: int) -> list[float]:
        """Return the microseconds of each step."""
        times, began = [], time.perf_counter_ns()
        for _ in range(num_steps):
            self._accelerator.backward(F.cross_entropy(self._model(self._x), self._y))
            self._accelerator.clip_grad_norm_(self._model.parameters(), 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad()
            times.append((-began + (began := time.perf_counter_ns())) / 1000)
        return times


def _table(rows: list[tuple[Any, ...]]) -> str:
    lines = [
        HEADING,
        "",
        "A training step with backward pass, clipping and AdamW, on the CPU (gloo), one thread per rank; medians over turns of "
        f"{EVERY} steps.",
        '"A check" is what the two steps that a check touches take longer; the last column is that of all steps with '
        "`verify_every=1000`.",
        "",
        "| model | ranks | us per step | between checks | a check, us | in steps | at N = 1,000 |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, world_size, without, between, checked in rows:
        check = max(checked - 2 * without, 0.0)
        share = (check / 1000 + max(between - without, 0.0)) / without
        lines.append(
            f"| {name} | {world_size} | {without:.0f} | {between:.0f} | {check:.0f} | {check / without:.1f} | {100 * share:.2f} % |"
        )
    shares = [max(checked - 2 * without, 0.0) / without for _, _, without, _, checked in rows]
    met = [row[0] for row, share in zip(rows, shares) if share <= 1000 * TARGET]
    lines += [
        "",
        f"- a check costs at most two steps ({100 * TARGET:g} % at N = 1,000) in {len(met)} of {len(rows)} rows; the smallest model's step "
        "is shorter than the messages of a check",
        "",
        f"{date.today()}, {platform.processor() or 'AMD EPYC'}, 2 cores, Python {platform.python_version()}; torch {torch.__version__}.",
        "Repeat: `.venv/bin/python benchmarks/verify_every.py --write`.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
