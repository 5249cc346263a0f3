"""A batch sampler of the user's own over a RandomSampler is seedable too, as in accelerate: sentence-transformers has such."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from echelon import Accelerator
from echelon.accelerator import DataLoaderConfiguration


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
