"""Skips the first batches in a pass, without reading them if the loader has a batch sampler."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from echelon.data.rebuild_loader import copy_loader, has_own_reading, stateful_loader
from echelon.distributed.checks.already_sharded import set_epoch
from echelon.distributed.shard import options_of


class SkipBatchSampler(BatchSampler):
    """A batch sampler that skips the first ``skip_batches`` batches of another batch sampler.

    Args:
        batch_sampler: any iterable of lists of indices.
    """

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        # BatchSampler.__init__ is not called, because another batch sampler draws the batches.
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches
        self.sampler = getattr(batch_sampler, "sampler", None)  # type: ignore[assignment]
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))

    @property
    def total_length(self) -> int:
        """Number of batches, including the skipped ones."""
        return len(self.batch_sampler)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the batch sampler and its sampler, if they support epochs."""
        set_epoch(epoch, self.batch_sampler, self.sampler)

    def __len__(self) -> int:
        return max(len(self.batch_sampler) - self.skip_batches, 0)

    def __iter__(self) -> Iterator[list[int]]:
        return islice(iter(self.batch_sampler), self.skip_batches, None)


class SkipDataLoader(DataLoader[Any]):
    """A DataLoader that reads and discards its first batches, for data that cannot be skipped in any other way."""

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(dataset, **kwargs)
        self.skip_batches = skip_batches
        self.use_stateful_dataloader = use_stateful_dataloader
        kind: Any = stateful_loader() if use_stateful_dataloader else DataLoader
        self.base_dataloader = kind(dataset, **kwargs)
        """The loader that reads."""
        if use_stateful_dataloader:  # only then the loader can be saved and restored
            self.state_dict = self.base_dataloader.state_dict
            self.load_state_dict = self.base_dataloader.load_state_dict

    def __len__(self) -> int:
        return max(len(self.base_dataloader) - self.skip_batches, 0)

    def __iter__(self) -> Any:
        return islice(iter(self.base_dataloader), self.skip_batches, None)


def skip_in_plain_loader(loader: DataLoader[Any], num_batches: int) -> DataLoader[Any]:
    """Return a copy of ``loader`` that skips its first ``num_batches`` batches."""
    if isinstance(loader, SkipDataLoader):
        return _discarding(loader.base_dataloader, loader.skip_batches + num_batches)
    if isinstance(loader.dataset, IterableDataset) or has_own_reading(loader):
        return _discarding(loader, num_batches)
    if loader.batch_sampler is None:  # batch_size=None: the dataset is indexed with the sampler's items
        items = SkipBatchSampler(loader.sampler, num_batches)
        return copy_loader(loader, loader.dataset, kind=DataLoader, sampler=items, batch_size=None)  # type: ignore[no-any-return]
    skipping = SkipBatchSampler(loader.batch_sampler, num_batches)
    skipped: DataLoader[Any] = copy_loader(loader, loader.dataset, kind=DataLoader, batch_sampler=skipping)
    # A DataLoader with a batch sampler has neither attribute, but scripts read them.
    skipped.__dict__.update(batch_size=loader.batch_size, drop_last=loader.drop_last)
    return skipped


def _discarding(loader: DataLoader[Any], num_batches: int) -> SkipDataLoader:
    sized: dict[str, Any] = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    skipping = SkipDataLoader(loader.dataset, num_batches, **options_of(loader), **sized)
    if has_own_reading(loader):
        skipping.base_dataloader = loader
    return skipping
