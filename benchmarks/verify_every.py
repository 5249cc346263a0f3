"""Measures what ``verify_every`` costs: a step without it, between two checks, and one check, in CPU time of one process.

The ranks run in this process's children on one thread each. A loop without checks and one with checks take turns of a few steps, because
the speed of a shared machine varies from second to second. CPU time leaves out the time in which another program has the core, and the
time in which a rank waits for the others.
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
MODELS = {  # inputs, hidden units, layers, batch, and how many times as many turns, because the steps are shorter
    "MLP 16-32-4": (16, 32, 1, 8, 4),
    "MLP of 0.7 million parameters": (256, 512, 3, 64, 1),
    "MLP of 3.7 million": (512, 1024, 4, 64, 1),
}
NUM_RANKS = (1, 2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help="replace the section in RESULTS.md")
    parser.add_argument(
        "--turns", type=int, default=12, help="turns of each loop, with one check in each (default: 12)"
    )
    parser.add_argument(
        "--models", type=int, default=2, help=f"how many of the {len(MODELS)} models, the smallest first (default: 2)"
    )
    arguments = parser.parse_args()
    rows = []
    for name, (*shape, num_turns) in list(MODELS.items())[: arguments.models]:
        for world_size in NUM_RANKS:
            with tempfile.TemporaryDirectory() as folder:
                # A fork, so that torch is imported once; this process runs nothing itself.
                options = (world_size, shape, num_turns * arguments.turns, folder)
                mp.start_processes(_measure, args=options, nprocs=world_size, start_method="fork")
                times = torch.load(f"{folder}/times", weights_only=True)
            rows.append((name, world_size, *times))
            print(rows[-1], flush=True)
    text = _table(rows, arguments)
    print(text)
    if arguments.write:
        before, _, after = RESULTS.read_text().partition(HEADING)
        rest = after.partition("\n## ")
        RESULTS.write_text(f"{before}{text}" + (f"\n## {rest[2]}" if rest[1] else ""))


def _measure(rank: int, world_size: int, shape: list[int], num_turns: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    loops = [_Loop(shape, every) for every in (None, EVERY)]
    for loop in loops:
        loop.run(2 * EVERY - 1)  # the next step is the first after a check
    without, between, checked = [], [], []
    for _ in range(num_turns):
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
    def __init__(self, shape: list[int], every: int | None) -> None:
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
        """Return the microseconds of CPU time of each step."""
        times, began = [], time.process_time_ns()
        for _ in range(num_steps):
            self._accelerator.backward(F.cross_entropy(self._model(self._x), self._y))
            self._accelerator.clip_grad_norm_(self._model.parameters(), 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad()
            times.append((-began + (began := time.process_time_ns())) / 1000)
        return times


def _table(rows: list[tuple[Any, ...]], arguments: argparse.Namespace) -> str:
    lines = [
        HEADING,
        "",
        "A training step with backward pass, clipping and AdamW, on the CPU (gloo), one thread per rank; CPU time of rank 0, medians over "
        f"{arguments.turns} turns of {EVERY} steps (of the smallest model, 4 times as many).",
        '"A check" is what the two steps that a check touches take longer; "all steps" is that and what the steps between checks take longer, '
        "per step.",
        "",
        "| model | ranks | us per step | between checks | a check, us | in steps | a check at N = 1,000 | all steps at N = 1,000 |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    met = 0
    for name, world_size, without, between, checked in rows:
        check = max(checked - 2 * without, 0.0)
        share = check / 1000 / without
        met += share <= TARGET
        total = share + (between - without) / without
        lines.append(
            f"| {name} | {world_size} | {without:.0f} | {between:.0f} | {check:.0f} | {check / without:.1f} | {100 * share:.2f} % "
            f"| {100 * total:.2f} % |"
        )
    reached = "reached" if met == len(rows) else "missed"
    lines += [
        "",
        f"- a check costs at most two steps ({100 * TARGET:g} % at N = 1,000) in {met} of {len(rows)} rows (target: all, {reached})",
        "",
        f"{date.today()}, {platform.processor() or 'AMD EPYC'}, 2 cores, Python {platform.python_version()}; torch {torch.__version__}.",
        f"Repeat: `.venv/bin/python benchmarks/verify_every.py --turns {arguments.turns} --models {arguments.models} --write`.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
