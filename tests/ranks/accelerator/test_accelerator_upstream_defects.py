"""Correct behaviour where accelerate is wrong or differs; `tests/side_by_side/test_defects.py` lists the cases and runs both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from echelon import Accelerator, PartialState
from tests.harness import run_on_ranks


class Squares:
    """Has no length."""

    def __getitem__(self, index: int) -> int:
        return index * index


def _metrics(data: Any) -> list[int]:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(data, batch_size=2, sampler=range(5)))
    return [number for batch in loader for number in accelerator.gather_for_metrics(batch).tolist()]


def test_metrics_count_the_samplers_samples_not_the_datasets() -> None:
    assert run_on_ranks(_metrics, Squares()) == [[0, 1, 4, 9, 16]] * 2
    assert run_on_ranks(_metrics, list(range(8))) == [[0, 1, 2, 3, 4]] * 2


def _gradients() -> list[float]:
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(torch.ones(5, 1)))  # type: ignore[arg-type]
    found = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            if accelerator.sync_gradients:
                found.append(model.weight.grad.item())
            optimizer.step()
            optimizer.zero_grad()
    return found


def test_the_last_window_is_divided_by_its_own_length() -> None:
    assert run_on_ranks(_gradients, world_size=1) == [[1.0, 1.0]]  # windows of 4 and 1: the mean of ones, both times


def _clearing_first() -> list[float]:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    data: Any = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data))
    found = []
    for batch in loader:
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            accelerator.backward(model(batch).mean())
            if accelerator.sync_gradients:
                found.append(model.weight.grad.item())
            optimizer.step()
    return found


def test_zero_grad_before_the_backward_pass_keeps_the_gradients_of_the_window() -> None:
    assert run_on_ranks(_clearing_first, world_size=1) == [[1.5, 3.5]]


def _rates() -> list[float]:
    accelerator = Accelerator(gradient_accumulation_steps=3)
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=4)
    optimizer, scheduler, loader = accelerator.prepare(optimizer, scheduler, DataLoader(range(9)))  # type: ignore[arg-type]
    rates = []
    for _ in loader:
        with accelerator.accumulate():
            optimizer.step()
            scheduler.step()
            if accelerator.sync_gradients:
                rates.append(scheduler.get_last_lr()[0])
    return rates


def test_one_cycle_counts_updates_not_micro_steps() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=4)
    expected = []
    for _ in range(3):
        optimizer.step()
        scheduler.step()
        expected.append(scheduler.get_last_lr()[0])
    assert run_on_ranks(_rates, world_size=1) == [expected]


def _parts(kind: str) -> list[str]:
    state: Any = Accelerator() if kind == "Accelerator" else PartialState()
    ran: list[str] = []
    state.on_process(lambda: ran.append("rank 3"), process_index=3)()
    state.on_local_process(lambda: ran.append("local rank 3"), local_process_index=3)()
    return ran


@pytest.mark.parametrize("kind", ["Accelerator", "PartialState"])
def test_a_single_process_gets_every_part(kind: str) -> None:
    assert run_on_ranks(_parts, kind, world_size=1) == [["rank 3", "local rank 3"]]
