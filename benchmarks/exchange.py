"""Measures a step of two processes on one machine that exchange gradients through shared memory, and through gloo's sockets.

In the same processes, two prepared models alternate step by step: one with `speed="safe"`, one of which the exchange is left out. The ratio of each pair
counts, because the speed of a shared machine varies by 10 % within seconds.

python benchmarks/exchange.py --write
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from overhead import processor, write
from torch import nn

from echelon import Accelerator
from echelon.accelerator.prepare import speed
from echelon.distributed import process_group, spawn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from mnist_net import Net

RANKS, WARM_UP = 2, 6


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "MLP, 64 wide": (lambda: mlp(64), (32, 64), 600),
    "MLP, 128 wide": (lambda: mlp(128), (32, 128), 600),
    "MLP, 256 wide": (lambda: mlp(256), (32, 256), 300),
    "MLP, 384 wide": (lambda: mlp(384), (32, 384), 300),
    "MLP, 512 wide": (lambda: mlp(512), (32, 512), 300),
    "MLP, 1,024 wide": (lambda: mlp(1024), (32, 1024), 150),
    "MLP, 2,048 wide": (lambda: mlp(2048), (32, 2048), 60),
    "network of the MNIST example": (Net, (64, 1, 28, 28), 80),
}
"""The model, the shape of its inputs, and the number of pairs of steps."""


def stepper(accelerator: Accelerator, make: Callable[[], nn.Module], inputs: torch.Tensor, fewest: int) -> Any:
    torch.manual_seed(0)
    model: Any = make()
    optimizer: Any = torch.optim.AdamW(model.parameters())
    with patch.object(speed, "_FEWEST_EXCHANGED", fewest), patch.object(speed, "usable_cores", return_value=RANKS):
        model, optimizer = accelerator.prepare(model, optimizer)
    assert (model.exchange is not None) == (fewest == 0)

    def step() -> float:
        began = time.perf_counter()
        optimizer.zero_grad()
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
        return 1e3 * (time.perf_counter() - began)

    return step


def measure(rank: int, result: str) -> None:
    torch.set_num_threads(1)
    rows = []
    with process_group():
        accelerator = Accelerator(cpu=True)
        for name, (make, shape, num) in CASES.items():
            inputs = torch.randn(shape)
            by_gloo, by_memory = (stepper(accelerator, make, inputs, fewest) for fewest in (1 << 60, 0))
            pairs = []
            for i in range(WARM_UP + num):
                if i % 2:
                    pairs.append((by_gloo(), by_memory()))
                else:
                    second = by_memory()
                    pairs.append((by_gloo(), second))
            gloo, memory = (statistics.median(one) for one in zip(*pairs[WARM_UP:]))
            ratio = statistics.median(second / first for first, second in pairs[WARM_UP:])
            megabytes = sum(4 * p.numel() for p in make().parameters()) / 2**20
            rows.append(f"| {name} | {megabytes:.1f} | {gloo:.2f} | {memory:.2f} | {ratio:.2f} |")
            accelerator.free_memory()
        if rank == 0:
            Path(result).write_text("\n".join(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/RESULTS.md")
    options = parser.parse_args()
    os.environ.update({"OMP_NUM_THREADS": "1", "ECHELON_NO_RECORD": "1"})
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result")
        spawn(measure, args=(str(result),), nprocs=RANKS)
        rows = result.read_text()
    section = f"""## Exchange of gradients on one machine

Milliseconds of a step of {RANKS} processes with one thread each (medians): two prepared models alternate in the same processes; AdamW. The ratio is the
median of those of the pairs.

| model | gradients, MiB | by gloo | through memory | ratio |
|---|---:|---:|---:|---:|
{rows}

{date.today()}, {processor()}, Python {platform.python_version()}; torch {torch.__version__}, echelon {version("echelon")}.
Repeat: `.venv/bin/python benchmarks/exchange.py --write`.
"""
    print(section)
    if options.write:
        write(section)


if __name__ == "__main__":
    main()
