"""Prepared loaders yield what a DataLoader yields, with the same draws at the same times, or a seedable order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from echelon import Accelerator, DataLoaderConfiguration


class _Augmented(Dataset[Any]):
    """Samples with noise from the global generator, which also the loader and the training loop use."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(2)


def _tensors() -> TensorDataset:
    return TensorDataset(torch.arange(10.0), torch.arange(10))


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffled": lambda: DataLoader(_tensors(), batch_size=4, shuffle=True),
    "in order": lambda: DataLoader(_tensors(), batch_size=4),
    "without the last": lambda: DataLoader(_tensors(), batch_size=4, shuffle=True, drop_last=True),
    "smaller than a batch": lambda: DataLoader(_tensors(), batch_size=16, shuffle=True, drop_last=True),
    "own generator": lambda: DataLoader(_tensors(), batch_size=4, shuffle=True, generator=_seeded()),
    "with replacement": lambda: DataLoader(
        _tensors(), batch_size=4, sampler=RandomSampler(_tensors(), replacement=True, num_samples=9)
    ),
    "some samples": lambda: DataLoader(_tensors(), batch_size=4, sampler=RandomSampler(_tensors(), num_samples=7)),
    "more than all": lambda: DataLoader(_tensors(), batch_size=4, sampler=RandomSampler(_tensors(), num_samples=23)),
    "weighted": lambda: DataLoader(_tensors(), batch_size=4, sampler=WeightedRandomSampler(list(range(1, 11)), 10)),
    "augmented": lambda: DataLoader(_Augmented(), batch_size=4, shuffle=True),
    "one by one": lambda: DataLoader(_Augmented(), batch_size=None, shuffle=True),
}


def _run(loader: Any) -> list[Any]:
    """Return what two passes yield, one of them not to its end, and the random numbers that a loop draws meanwhile."""
    found: list[Any] = []
    for limit in (2, 99, 99):
        for number, batch in enumerate(loader):
            found += [*batch, torch.rand(1)]
            if number + 1 == limit:
                break
        found.append(torch.rand(1))
    return found


@pytest.mark.parametrize("kind", LOADERS)
def test_batches_and_draws_are_those_of_a_data_loader(kind: str) -> None:
    torch.manual_seed(0)
    # A prepared loader reads one batch ahead, as it must know which one is the last.
    expected = _run(_one_ahead(LOADERS[kind]()))
    torch.manual_seed(0)
    found = _run(Accelerator(cpu=True).prepare(LOADERS[kind]()))
    assert len(found) == len(expected)
    assert all(torch.equal(torch.as_tensor(one), torch.as_tensor(other)) for one, other in zip(found, expected))


class _one_ahead:
    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Any:
        iterator = iter(self.loader)
        batch = next(iterator, None)
        while batch is not None:
            following = next(iterator, None)
            yield batch
            batch = following


def test_a_subclass_of_torchs_sampler_is_asked_for_its_order() -> None:
    class Backwards(SequentialSampler):
        def __iter__(self) -> Any:
            return reversed(range(10))

    loader = Accelerator(cpu=True).prepare(DataLoader(_tensors(), batch_size=5, sampler=Backwards(_tensors())))
    assert [batch.tolist() for _, batch in loader] == [[9, 8, 7, 6, 5], [4, 3, 2, 1, 0]]


# ---- a batch sampler of the user's own over a RandomSampler is seedable too, as in accelerate: sentence-transformers has such


class OwnBatches(BatchSampler):
    """A batch sampler that has an epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def _order(seed: int) -> list[int]:
    order: list[int] = torch.randperm(8, generator=torch.Generator().manual_seed(seed)).tolist()
    return order


def _flat(loader: Any) -> list[int]:
    return [index for batch in loader for index in batch.tolist()]


@pytest.mark.parametrize("kind", [BatchSampler, OwnBatches])
def test_the_order_is_the_permutation_of_seed_and_epoch(kind: type[BatchSampler]) -> None:
    own = RandomSampler(range(8), generator=torch.Generator().manual_seed(1))
    batches = kind(own, 2, False)
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=7)
    )
    loader = accelerator.prepare(DataLoader(range(8), batch_sampler=batches))  # type: ignore[arg-type]
    assert [_flat(loader), _flat(loader)] == [_order(7), _order(8)]  # the epoch counts on
    loader.set_epoch(5)
    assert _flat(loader) == _order(12)
    assert batches.sampler is own  # the user's object is as it was


def test_without_seedable_samplers_the_generator_goes_on() -> None:
    generator = torch.Generator().manual_seed(3)
    batches = OwnBatches(RandomSampler(range(8), generator=generator), 2, False)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=False))
    loader = accelerator.prepare(DataLoader(range(8), batch_sampler=batches))  # type: ignore[arg-type]
    expected = list(RandomSampler(range(8), generator=torch.Generator().manual_seed(3)))
    assert _flat(loader) == expected
