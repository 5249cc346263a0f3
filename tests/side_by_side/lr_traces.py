"""Print the learning rates of one run: ``python lr_traces.py accelerate|echelon [False]``, on any number of processes.

Seven samples in batches of one: on 2 and 4 processes the last round is uneven. Each line of rank zero is a scheduler,
the learning rate before each update, and the one at the end; two epochs.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, EPOCHS, LR = 7, 2, 0.5


def build(name: str, optimizer: torch.optim.Optimizer, steps_per_epoch: int) -> Any:
    if name == "onecycle":
        return lr_scheduler.OneCycleLR(optimizer, max_lr=LR, epochs=EPOCHS, steps_per_epoch=steps_per_epoch)
    if name == "linear":
        return lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.1, total_iters=EPOCHS * steps_per_epoch)
    return lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)


def trace(accelerator: Any, name: str) -> list[float]:
    """Train; the cosine scheduler steps once per epoch, the others after each update."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    loader = DataLoader(TensorDataset(torch.ones(SAMPLES, 1)))
    scheduler = build(name, optimizer, len(loader))
    if accelerator is not None:
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    rates = []
    for _epoch in range(EPOCHS):
        for (x,) in loader:
            rates.append(optimizer.param_groups[0]["lr"])
            loss = model(x).square().mean()
            accelerator.backward(loss) if accelerator is not None else loss.backward()
            optimizer.step()
            if name != "cosine":
                scheduler.step()
            optimizer.zero_grad()
        if name == "cosine":
            scheduler.step()
    return [*rates, optimizer.param_groups[0]["lr"]]


def main() -> None:
    package = importlib.import_module(sys.argv[1])
    accelerator = package.Accelerator(cpu=True, step_scheduler_with_optimizer="False" not in sys.argv[2:])
    for name in ("onecycle", "cosine", "linear"):
        rates = trace(accelerator, name)
        if accelerator.is_main_process:
            print(name, json.dumps(rates), flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
