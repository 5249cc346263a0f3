"""A checkpoint that is loaded within a pass over a loader: the pass goes on, and later passes are those of a plain loop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler

from echelon import Accelerator, DataLoaderConfiguration
from tests.harness import run_on_ranks
from tests.reference import Numbers, permutation

SEED, NUM_SAMPLES, NUM_EPOCHS = 3, 8, 3


def _prepared(parity: str, *, batch_size: int = 2) -> tuple[Accelerator, Any]:
    torch.manual_seed(SEED)
    config = DataLoaderConfiguration(data_seed=SEED if parity != "off" else None)
    accelerator = Accelerator(cpu=True, parity=parity, dataloader_config=config)
    size = batch_size if parity != "off" else batch_size // accelerator.num_processes
    return accelerator, accelerator.prepare(DataLoader(Numbers(NUM_SAMPLES), batch_size=size, shuffle=True))


def _read(parity: str, folder: str, saved_at: int, loaded_at: int) -> list[list[int]]:
    accelerator, loader = _prepared(parity)
    epochs: list[list[int]] = []
    number = 0
    for epoch in range(NUM_EPOCHS):
        loader.set_epoch(epoch)
        epochs.append([])
        for batch in loader:
            epochs[-1] += accelerator.gather_for_metrics(batch).tolist()
            number += 1
            if number == saved_at:
                accelerator.save_state(folder)
            if number == loaded_at:
                accelerator.load_state(folder)
    return epochs


def _read_plainly(saved_at: int, loaded_at: int) -> list[list[int]]:
    torch.manual_seed(SEED)
    loader = DataLoader(Numbers(NUM_SAMPLES), batch_size=2, shuffle=True)
    epochs: list[list[int]] = []
    number, saved = 0, torch.get_rng_state()
    for _ in range(NUM_EPOCHS):
        epochs.append([])
        for batch in loader:
            epochs[-1] += batch.tolist()
            number += 1
            saved = torch.get_rng_state() if number == saved_at else saved
            if number == loaded_at:
                torch.set_rng_state(saved)
    return epochs


@pytest.mark.sample(3)
@pytest.mark.parametrize(("saved_at", "loaded_at"), [(1, 3), (2, 6), (4, 5)])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("parity", ["off", "exact"])
def test_later_passes_are_whole_and_in_the_order_of_a_plain_loop(
    tmp_path: Path, parity: str, world_size: int, saved_at: int, loaded_at: int
) -> None:
    expected = _read_plainly(saved_at, loaded_at)
    if parity == "exact":
        expected = [permutation(NUM_SAMPLES, seed=SEED, epoch=epoch) for epoch in range(NUM_EPOCHS)]
    for found in run_on_ranks(_read, parity, str(tmp_path / "saved"), saved_at, loaded_at, world_size=world_size):
        # Without parity a rank reads whole batches of one sample, so the samples of two ranks alternate.
        assert found == expected


def _save_again(parity: str, folder: Path) -> tuple[list[int], list[int]]:
    accelerator, loader = _prepared(parity)
    read: list[int] = []
    for _ in accelerator.epochs(1):
        for number, batch in enumerate(loader):
            read += batch.tolist()
            if number == 0:
                accelerator.save_state(folder / "first")
            if number == 1:
                accelerator.load_state(folder / "first")
            if number == 2:
                accelerator.save_state(folder / "second")
                break
    accelerator, loader = _prepared(parity)
    accelerator.resume(folder / "second")
    rest = [i for _ in accelerator.epochs(1) for batch in loader for i in batch.tolist()]
    return read, rest


@pytest.mark.parametrize("parity", ["off", "exact"])
def test_what_is_saved_after_it_is_the_position_of_the_running_pass(tmp_path: Path, parity: str) -> None:
    ((read, rest),) = run_on_ranks(_save_again, parity, tmp_path, world_size=1)
    assert len(read) == 6
    assert sorted(read + rest) == list(range(NUM_SAMPLES))


def _leave(folder: str) -> tuple[list[int], list[int]]:
    accelerator, loader = _prepared("exact")
    first: list[int] = []
    for number, batch in enumerate(loader):
        if number == 0:
            accelerator.save_state(folder)
            first += batch.tolist()
        if number == 2:
            accelerator.load_state(folder)
            break
    return first, [i for batch in loader for i in batch.tolist()]


def test_a_loop_that_is_left_after_it_continues_at_the_saved_position(tmp_path: Path) -> None:
    ((first, rest),) = run_on_ranks(_leave, str(tmp_path / "saved"), world_size=1)
    assert first + rest == permutation(NUM_SAMPLES, seed=SEED, epoch=0)


class _Growing(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0], [1, 2], [3, 4, 5])

    def __len__(self) -> int:
        return 3


def _load_between_micro_batches(folder: str) -> list[int]:
    accelerator = Accelerator(cpu=True, parity="exact", max_micro_batch_size=1)
    model: Any = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(Numbers(6), batch_sampler=_Growing())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = []
    for batch in loader:
        accelerator.backward(model(batch.float()[:, None]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if accelerator.sync_gradients:
            steps.append(accelerator.progress.step)
            if len(steps) == 1:
                accelerator.save_state(folder)
            if len(steps) == 2:
                accelerator.load_state(folder)
    return steps


def test_batches_of_unknown_numbers_do_not_keep_it_from_being_loaded(tmp_path: Path) -> None:
    assert run_on_ranks(_load_between_micro_batches, str(tmp_path / "saved"), world_size=1) == [[1, 2, 2]]
