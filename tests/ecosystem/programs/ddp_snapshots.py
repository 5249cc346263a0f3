"""Trains like the DistributedDataParallel tutorials in pytorch/examples: a Trainer class, DistributedSampler, and snapshots to resume from.

``ddp_snapshots.py EPOCHS [--crash]`` runs under torchrun or another launcher; with ``--crash``, rank 1 fails once, in its second epoch.
Rank 0 prints the losses, the accuracy and the weights.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

SNAPSHOT, CRASHED = Path("snapshot.pt"), Path("crashed")


class Trainer:
    """Trains a model with a loader, and saves a snapshot after each epoch."""

    def __init__(self, model: torch.nn.Module, loader: DataLoader[Any], optimizer: torch.optim.Optimizer) -> None:
        self.rank, self.epochs_run = dist.get_rank(), 0
        if SNAPSHOT.exists():
            snapshot = torch.load(SNAPSHOT, weights_only=True)
            model.load_state_dict(snapshot["MODEL_STATE"])
            self.epochs_run = snapshot["EPOCHS_RUN"]
        self.model, self.loader, self.optimizer = DistributedDataParallel(model), loader, optimizer
        self.losses: list[float] = []

    def train(self, epochs: int, *, crash: bool) -> None:
        """Train until ``epochs`` epochs are done, counting those of the snapshot."""
        for epoch in range(self.epochs_run, epochs):
            self.loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            for source, targets in self.loader:
                self.optimizer.zero_grad()
                loss = F.cross_entropy(self.model(source), targets)
                loss.backward()
                self.optimizer.step()
                if crash and self.rank == 1 and epoch == 1 and not CRASHED.exists():
                    CRASHED.touch()
                    raise RuntimeError("the planned failure")
                self.losses.append(loss.item())
            if self.rank == 0:
                state = {"MODEL_STATE": self.model.module.state_dict(), "EPOCHS_RUN": epoch + 1}
                torch.save(state, "snapshot.tmp")
                os.replace("snapshot.tmp", SNAPSHOT)
            dist.barrier()


def train(epochs: int, crash: bool) -> None:
    """Train in the default process group."""
    torch.manual_seed(0)
    features = torch.randn(96, 20)
    data = TensorDataset(features, (features.sum(1) > 0).long())
    model = torch.nn.Sequential(torch.nn.Linear(20, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    loader = DataLoader(data, batch_size=8, shuffle=False, sampler=DistributedSampler(data))
    trainer = Trainer(model, loader, torch.optim.SGD(model.parameters(), lr=0.1))
    trainer.train(epochs, crash=crash)
    correct = torch.tensor(sum(int((model(x).argmax(1) == y).sum()) for x, y in loader))
    dist.all_reduce(correct)
    if trainer.rank == 0:
        weights = [float(parameter.detach().double().norm()) for parameter in model.parameters()]
        print("RESULT " + json.dumps({"losses": trainer.losses, "correct": int(correct), "weights": weights}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("epochs", type=int)
    parser.add_argument("--crash", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    train(args.epochs, args.crash)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
