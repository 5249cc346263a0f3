"""Measures what each choice of ``speed`` gains: alternating runs in one process, the fastest of each.

python benchmarks/speed.py    # prints a table; one thread
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Accelerator
from echelon.base.device import has_bf16

ROUNDS = 12


def fastest(variants: Mapping[str, Callable[[], None]], num: int) -> dict[str, float]:
    """Return the shortest time of each variant in microseconds per repetition; ``num`` repetitions a round, in turns."""
    best = dict.fromkeys(variants, float("inf"))
    for _ in range(ROUNDS):
        for name, run in variants.items():
            begun = time.perf_counter()
            run()
            best[name] = min(best[name], (time.perf_counter() - begun) / num * 1e6)
    return best


def _images(num: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(num, 784, generator=draw), torch.randint(0, 10, (num,), generator=draw))


def _read(speed: str | None) -> Callable[[], None]:
    loader: Any = DataLoader(_images(3200), batch_size=64, shuffle=True)
    if speed is not None:
        loader = Accelerator(cpu=True, speed=speed).prepare(loader)

    def run() -> None:
        for _ in loader:
            pass

    return run


def _step(kind: str, num_parameters: int, size: int, speed: str) -> Callable[[], None]:
    parameters = [nn.Parameter(torch.randn(size)) for _ in range(num_parameters)]
    optimizer: Any = getattr(torch.optim, kind)(parameters, lr=1e-3)
    for parameter in parameters:
        parameter.grad = torch.randn(size)
    Accelerator(cpu=True, speed=speed, mixed_precision="no").prepare(optimizer)
    return lambda: [optimizer.step() for _ in range(10)] and None


def _epoch(hidden: int | None, kind: str, speed: str | None) -> Callable[[], None]:
    """An epoch of 50 batches of 64 images; ``speed`` None: the plain loop."""
    torch.manual_seed(0)
    layers = (784, 10) if hidden is None else (784, hidden, 10)
    model: Any = nn.Sequential(*(nn.Sequential(nn.ReLU(), nn.Linear(a, b)) for a, b in pairwise(layers)))
    optimizer: Any = getattr(torch.optim, kind)(model.parameters(), lr=1e-3)
    loader: Any = DataLoader(_images(3200), batch_size=64, shuffle=True)
    backward: Any = torch.Tensor.backward
    if speed is not None:
        accelerator = Accelerator(cpu=True, speed=speed, mixed_precision="no")
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        backward = accelerator.backward

    def run() -> None:
        for x, y in loader:
            optimizer.zero_grad()
            backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()

    return run


def _convolutions(speed: str) -> Callable[[], None]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, speed=speed)
    layers = nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    model: Any = nn.Sequential(*layers, nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    x, y = torch.randn(64, 1, 28, 28), torch.randint(0, 10, (64,))

    def run() -> None:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()

    return run


def main() -> None:
    torch.set_num_threads(1)
    os.environ["ECHELON_NO_RECORD"] = "1"  # record_cost.py measures what a record costs

    def show(title: str, variants: Mapping[str, Callable[[], None]], num: int) -> None:
        found = fastest(variants, num)
        first = next(iter(found.values()))
        print(f"{title}: " + ", ".join(f"{name} {us:.0f} us ({first / us:.2f}x)" for name, us in found.items()))

    show("read a batch of 64 images", {"plain loader": _read(None), **{s: _read(s) for s in ("off", "safe")}}, 50)
    for kind in ("SGD", "AdamW"):
        for num, size in ((16, 1000), (100, 1000), (100, 10_000), (50, 100_000)):
            variants = {speed: _step(kind, num, size, speed) for speed in ("off", "safe", "max")}
            show(f"{kind} step, {num} parameters of {size:,}", variants, 10)
    for kind in ("SGD", "AdamW"):
        for hidden in (None, 32, 128):
            variants = {"plain loop": _epoch(hidden, kind, None)}
            variants |= {speed: _epoch(hidden, kind, speed) for speed in ("off", "safe", "max")}
            name = "linear model" if hidden is None else f"MLP with {hidden} hidden units"
            show(f"training step, {name}, {kind}", variants, 50)
    show(
        f"training step, MNIST example (bf16: {has_bf16(cpu=True)})", {s: _convolutions(s) for s in ("safe", "max")}, 1
    )


if __name__ == "__main__":
    main()
