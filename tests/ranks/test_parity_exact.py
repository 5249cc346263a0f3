"""Training with ``parity="exact"`` resumes from any step, also on another number of ranks (updates: test_parity_rules.py)."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from echelon import Accelerator
from echelon.base.warnings import EchelonWarning
from tests.harness import run_on_ranks


class _Noisy(Dataset[Any]):
    """A dataset that augments by random draws, and notes what is read."""

    def __init__(self, n: int) -> None:
        self.x = torch.randn(n, 4, generator=torch.Generator().manual_seed(n))
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> torch.Tensor:
        self.read.append(i)
        return self.x[i] + 0.1 * torch.randn(4) + random.random()


def _train_from(
    folder: Path | None, num_workers: int, *, accumulation: int, dropout: float, save_to: Path | None = None
) -> tuple[list[torch.Tensor], list[int], int]:
    """Train up to 3 epochs, from ``folder`` on. Returns the weights, what was read, and the updates of the whole run."""
    torch.manual_seed(7)
    accelerator = Accelerator(parity="exact", gradient_accumulation_steps=accumulation)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.Linear(8, 1)).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = _Noisy(11)
    loader: Any = DataLoader(data, batch_size=4, shuffle=True, num_workers=num_workers)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if folder is not None:
        accelerator.load_state(folder)
    steps = 0
    for _ in range(loader.iteration, 3):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch.double()).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            steps += 1
            if save_to is not None:  # in the middle of an update, too
                accelerator.save_state(save_to / f"{steps}")
    return (
        [p.detach().clone() for p in accelerator.unwrap_model(model).parameters()],
        data.read,
        accelerator.progress.step,
    )


def _resume_everywhere(root: Path, num_workers: int) -> tuple[dict[int, bool], dict[int, list[int]], int]:
    whole, _, updates = _train_from(None, num_workers, accumulation=2, dropout=0.5, save_to=root)
    same, read = {}, {}
    for folder in root.iterdir():
        weights, seen, in_all = _train_from(folder, num_workers, accumulation=2, dropout=0.5)
        same[int(folder.name)] = all(map(torch.equal, weights, whole)) and in_all == updates
        read[int(folder.name)] = seen
    return same, read, updates


@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 0), (2, 0), pytest.param(1, 2, marks=pytest.mark.soak)])
def test_a_run_stopped_at_any_step_goes_on_bit_for_bit(tmp_path: Path, world_size: int, num_workers: int) -> None:
    results = run_on_ranks(_resume_everywhere, tmp_path, num_workers, world_size=world_size, timeout=180)
    for same, _, updates in results:
        assert updates == 9
        assert same == dict.fromkeys(range(1, 19), True)  # 9 updates of 2 micro-steps
    if num_workers == 0:  # workers read in processes of their own
        for step in range(1, 19):
            done = step // 2  # updates of 4, 4 and 3 samples: nothing before the place is read again
            left = 33 - [0, 4, 8][done % 3] - done // 3 * 11
            lent = (3 - done // 3) * (world_size - 1)  # an epoch's last update has 3 samples for 2 x 2 micro-batches
            assert sum(len(read[step]) for _, read, _ in results) == left + lent


def _part(source: Path, target: Path, stop_after: int) -> tuple[list[torch.Tensor], list[int]]:
    """Go on from ``source`` for some updates, save to ``target``."""
    torch.manual_seed(7)
    accelerator = Accelerator(parity="exact", max_micro_batch_size=2)
    model: Any = nn.Linear(4, 3).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = _Noisy(29)
    loader: Any = DataLoader(data, batch_size=6, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if source.exists():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".* has random states of . processes", category=EchelonWarning)
            accelerator.load_state(source)
    updates = 0
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch.double()).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        updates += accelerator.sync_gradients
        if updates == stop_after:
            break
    accelerator.save_state(target)
    return [p.detach().clone() for p in accelerator.unwrap_model(model).parameters()], data.read


def test_the_number_of_processes_may_change_within_an_epoch(tmp_path: Path) -> None:
    (expected, read_by_one), *_ = run_on_ranks(_part, tmp_path / "none", tmp_path / "one", 99, world_size=1)
    read: list[int] = []
    for number, (world_size, updates) in enumerate([(1, 1), (2, 2), (3, 1), (1, 99)]):
        source, target = tmp_path / f"part{number - 1}", tmp_path / f"part{number}"
        results = run_on_ranks(_part, source, target, updates, world_size=world_size)
        read += [index for _, seen in results for index in seen]
        weights = results[0][0]
    # One batch is read ahead of the loop, so a stopped part has read some of the next update.
    assert set(read) == set(read_by_one) == set(range(29))
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-14)
