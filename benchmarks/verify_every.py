"""Measures what ``verify_every`` costs: a step without it, between two checks, and one check, in CPU time of one process.

The ranks run in this process's children on one thread each. A loop without checks and one with checks take turns of a few steps, because
the speed of a shared machine varies from second to second. CPU time leaves out the time in which another program has the core, and the
time in which a rank waits for the others.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from results import footer, publish
from torch import nn

from echelon import Accelerator

HEADING = "## Cost of checking live updates"
EVERY = 20  # in this benchmark, to see many checks; the costs are then given for every 1,000th
TARGET = 0.002
TOUCHED = 4  # steps: one prepares, one is observed, at the beginning of the next the ranks compare, and one finds other data in the caches
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
    text = _table(rows, arguments, _counting())
    publish(text, is_written=arguments.write)


def _measure(rank: int, world_size: int, shape: Sequence[int], num_turns: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    loops = [_Loop(shape, every) for every in (None, EVERY)]
    for loop in loops:
        loop.run(2 * EVERY - 2)  # the next step prepares a check
    without, between, first_without, first_checked = [], [], [], []
    for _ in range(num_turns):
        turns = [loop.run(EVERY) for loop in loops]
        first_without.append(sum(turns[0][:TOUCHED]))
        first_checked.append(sum(turns[1][:TOUCHED]))
        without += turns[0][TOUCHED:]
        between += turns[1][TOUCHED:]
    if rank == 0:
        check = statistics.median(first_checked) - statistics.median(first_without)
        torch.save([statistics.median(without), statistics.median(between), check], f"{folder}/times")
    dist.barrier()
    dist.destroy_process_group()


class _Loop:
    def __init__(self, shape: Sequence[int], every: int | None) -> None:
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


def _counting() -> float:
    """Return the microseconds that a backward pass which belongs to no check takes longer."""
    check = _Loop(next(iter(MODELS.values()))[:4], 10**9)._accelerator.session.live_check
    assert check is not None
    inner = check._policy.backward = lambda *_: None  # type: ignore[method-assign]
    times: dict[Any, list[int]] = {check.run_backward: [], inner: []}
    for _ in range(9):
        for backward, turns in times.items():
            began = time.process_time_ns()
            for _ in range(5000):
                backward(None, None, {})
            turns.append(time.process_time_ns() - began)
    with_check, without = (statistics.median(turns) / 5000 / 1000 for turns in times.values())
    return with_check - without


def _table(rows: list[tuple[Any, ...]], arguments: argparse.Namespace, counting: float) -> str:
    lines = [
        HEADING,
        "",
        "A training step with backward pass, clipping and AdamW, on the CPU (gloo), one thread per rank; CPU time of rank 0, medians over "
        f"{arguments.turns} turns of {EVERY} steps (of the smallest model, 4 times as many).",
        '"A check" is the time by which a check lengthens the four steps that it touches: it prepares, observes and compares, and the next step finds',
        "its data no longer in the caches.",
        "",
        "| model | ranks | us per step | between checks | a check, us | in steps | a check at N = 1,000 |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    met = 0
    for name, world_size, without, between, check in rows:
        share = check / 1000 / without
        met += share <= TARGET
        lines.append(
            f"| {name} | {world_size} | {without:.0f} | {between:.0f} | {check:.0f} | {check / without:.1f} | {100 * share:.2f} % |"
        )
    reached = "reached" if met == len(rows) else "missed"
    lines += [
        "",
        f"- a check costs at most two steps ({100 * TARGET:g} % at N = 1,000) in {met} of {len(rows)} rows (target: all, {reached})",
        f"- between checks, a step counts its backward pass, which takes {counting:.1f} us",
        "- the time of a check of the smallest model does not depend on the number of its elements: it goes into some hundred calls of small torch",
        "  operations and the Python around them. Repeating the optimizer's step takes about a fifth, hooks and summaries of local gradients a fifth,",
        "  summaries of the reduced and the clipped gradient a quarter, and the comparison a sixth",
        "",
        footer(f"verify_every.py --turns {arguments.turns} --models {arguments.models}"),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
