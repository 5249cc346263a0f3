"""Skipping the first batches of a pass: in the batch sampler where there is one, so that they are not read."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from echelon.base.protocols import SupportsSetEpoch
from echelon.data.rebuild_loader import like

__all__ = ["SkipBatchSampler", "SkipDataLoader", "skip_in_plain_loader"]


class SkipBatchSampler(BatchSampler):
    """A batch sampler without its first ``skip_batches`` batches.

    Args:
        batch_sampler: any iterable of lists of indices.
        skip_batches: how many, in every pass.
    """

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        # BatchSampler's own __init__ is not called: the batches are those of the other one.
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches
        self.sampler = getattr(batch_sampler, "sampler", None)  # type: ignore[assignment]
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))

    @property
    def total_length(self) -> int:
        """The number of batches, with the skipped ones."""
        return len(self.batch_sampler)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the batch sampler and of its sampler, if they have one."""
        for owner in (self.batch_sampler, self.sampler):
            if isinstance(owner, SupportsSetEpoch):
                owner.set_epoch(epoch)

    def __len__(self) -> int:
        return max(len(self.batch_sampler) - self.skip_batches, 0)

    def __iter__(self) -> Iterator[list[int]]:
        return islice(iter(self.batch_sampler), self.skip_batches, None)


class SkipDataLoader(DataLoader[Any]):
    """A DataLoader that reads its first batches and drops them: for data that cannot be skipped otherwise.

    Args:
        dataset: as for ``DataLoader``.
        skip_batches: how many, in every pass.
        kwargs: of ``DataLoader``.
    """

    def __init__(self, dataset: Any, skip_batches: int = 0, **kwargs: Any) -> None:
        super().__init__(dataset, **kwargs)
        self.skip_batches = skip_batches

    def __len__(self) -> int:
        return max(super().__len__() - self.skip_batches, 0)

    def __iter__(self) -> Any:
        return islice(super().__iter__(), self.skip_batches, None)


def skip_in_plain_loader(loader: DataLoader[Any], num_batches: int) -> DataLoader[Any]:
    """Return a loader like ``loader``, without its first ``num_batches`` batches."""
    if isinstance(loader.dataset, IterableDataset):
        return like(  # type: ignore[no-any-return]
            loader,
            loader.dataset,
            kind=SkipDataLoader,
            skip_batches=num_batches + (loader.skip_batches if isinstance(loader, SkipDataLoader) else 0),
            batch_size=loader.batch_size,
            drop_last=loader.drop_last,
        )
    if loader.batch_sampler is None:  # no batches: the sampler's items go to the dataset as they are
        items = SkipBatchSampler(loader.sampler, num_batches)
        return like(loader, loader.dataset, kind=DataLoader, sampler=items, batch_size=None)  # type: ignore[no-any-return]
    skipping = SkipBatchSampler(loader.batch_sampler, num_batches)
    skipped: DataLoader[Any] = like(loader, loader.dataset, kind=DataLoader, batch_sampler=skipping)
    # A DataLoader with a batch sampler shows neither; scripts read them.
    skipped.__dict__.update(batch_size=loader.batch_size, drop_last=loader.drop_last)
    return skipped
