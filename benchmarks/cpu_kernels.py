"""Measures what ``speed="safe"`` changes on the CPU: the memory that the allocator keeps, and the kernels that replace torch's.

Kernels take turns in one process. A step of the MNIST example is measured in new processes, with ``off`` and ``safe`` in turns.

python benchmarks/cpu_kernels.py --write    # two minutes
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from overhead import processor, write

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

HEADING = "## Memory and kernels on the CPU"
TURNS, STEPS, WARM_UP = 5, 40, 5


def step_of(speed: str) -> None:
    """Print the milliseconds, the page faults and the milliseconds in the kernel of a step, and the largest use of memory in MiB."""
    from mnist_net import Net

    from echelon import Accelerator

    torch.manual_seed(0)
    model: Any = Net()
    optimizer: Any = torch.optim.AdamW(model.parameters())
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward
    if speed != "off":
        accelerator = Accelerator(cpu=True, speed=speed)
        model, optimizer = accelerator.prepare(model, optimizer)
        backward = accelerator.backward
    images, labels = torch.randn(64, 1, 28, 28), torch.arange(64) % 10
    times: list[float] = []
    before = resource.getrusage(resource.RUSAGE_SELF)
    for number in range(WARM_UP + STEPS):
        if number == WARM_UP:
            before = resource.getrusage(resource.RUSAGE_SELF)
        began = time.perf_counter()
        optimizer.zero_grad()
        backward(F.nll_loss(model(images), labels))
        optimizer.step()
        times.append(1e3 * (time.perf_counter() - began))
    after = resource.getrusage(resource.RUSAGE_SELF)
    faults, system = after.ru_minflt - before.ru_minflt, 1e3 * (after.ru_stime - before.ru_stime)
    print(statistics.median(times[WARM_UP:]), faults / STEPS, system / STEPS, after.ru_maxrss / 1024)


def measured(speed: str) -> list[float]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "ECHELON_NO_RECORD": "1"}
    command = [sys.executable, __file__, "--step", speed]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    return [float(number) for number in done.stdout.split()]


def milliseconds(calls: list[Callable[[], Any]]) -> list[float]:
    """Return the median of each call, in turns."""
    times: list[list[float]] = [[] for _ in calls]
    for number in range(43):
        for call, own in zip(calls, times, strict=True):
            began = time.perf_counter()
            call()
            if number > 2:
                own.append(1e3 * (time.perf_counter() - began))
    return [statistics.median(own) for own in times]


def kernels() -> list[str]:
    """Return the rows of the kernels: torch's own are those with ``out=``, and ``bernoulli_``, which are not replaced here."""
    from echelon.accelerator.prepare import cpu_kernels
    from echelon.accelerator.prepare.freed_memory import keep_freed_memory

    assert keep_freed_memory(1 << 30)
    out: Any = torch.ops.aten.max_pool2d_with_indices.out
    images = torch.randn(64, 64, 24, 24).relu()
    values, indices = torch.empty(64, 64, 12, 12), torch.empty(64, 64, 12, 12, dtype=torch.int64)
    mask = torch.empty(64 * 9216)
    into: Any = torch.ops.aten.max_pool2d_with_indices_backward.grad_input
    kept = images.bfloat16().contiguous(memory_format=torch.channels_last)
    pooled, places = out(kept, [2, 2], out=kept.new_empty(0), indices=torch.empty(0, dtype=torch.int64))
    gradients, found = pooled.contiguous(), torch.empty_like(kept)
    window: Any = ([2, 2], [2, 2], [0, 0], [1, 1], False)
    pairs: list[tuple[str, Callable[[], Any], Callable[[], Any]]] = [
        (
            "max_pool2d, 64 images of 64 x 24 x 24",
            lambda: out(images, [2, 2], out=values, indices=indices),
            lambda: cpu_kernels._max_pool2d(images, [2, 2], [2, 2]),
        ),
        (
            "its backward pass, bfloat16, channels last, gradients of flattened images",
            lambda: into(gradients, kept, *window, places, grad_input=found),
            lambda: cpu_kernels._max_pool2d_backward(gradients, kept, *window, places),
        ),
        (
            f"bernoulli_, {mask.numel():,} elements",
            lambda: mask.bernoulli_(0.75),
            lambda: cpu_kernels._bernoulli(mask, 0.75),
        ),
    ]
    rows = []
    for name, torchs, own in pairs:
        before, after = milliseconds([torchs, own])
        rows.append(f"| {name} | {before:.2f} | {after:.2f} | {before / after:.2f} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/RESULTS.md")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.step:
        step_of(options.step)
        return
    turns = [(measured("off"), measured("safe")) for _ in range(TURNS)]
    off, safe = ([statistics.median(turn[i][j] for turn in turns) for j in range(4)] for i in (0, 1))
    rows = [f"| a step of the MNIST example | {off[0]:.1f} | {safe[0]:.1f} | {off[0] / safe[0]:.2f} |", *kernels()]
    section = f"""{HEADING}

`speed="safe"` beside plain torch, in milliseconds, on one thread; the results are equal bit by bit.

| what | torch | safe | faster |
|---|---:|---:|---:|
{chr(10).join(rows)}

- page faults per step: {off[1]:,.0f} without, {safe[1]:,.0f} with kept memory; time in the kernel {off[2]:.1f} and {safe[2]:.1f} ms
- largest use of memory: {off[3]:.0f} and {safe[3]:.0f} MiB

{date.today()}, {processor()}, Python {platform.python_version()}; torch {torch.__version__}.
Repeat: `.venv/bin/python benchmarks/cpu_kernels.py --write`.
"""
    print(section)
    if options.write:
        write(section)


if __name__ == "__main__":
    main()
