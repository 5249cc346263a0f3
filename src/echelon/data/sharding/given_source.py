"""A loader that is used unchanged, because each rank was given its own part of the data."""

from __future__ import annotations

from itertools import repeat
from typing import Any

from torch.utils.data import DataLoader

from echelon.base.protocols import SupportsSetEpoch
from echelon.data.active_loaders import LoaderOptions
from echelon.data.global_batch_slices import LastStep
from echelon.data.sharding.batch_source import BatchSource, PlainSource, Steps, batches_of
from echelon.data.sharding.sharded_batches import RankBatchSampler

__all__ = ["GivenSource"]


class GivenSource(BatchSource):
    """Reads a loader whose batch sampler or dataset may already be specific to this rank.

    Args:
        loader: the loader.
        options: the data options.
    """

    def __init__(self, loader: DataLoader[Any], *, options: LoaderOptions) -> None:
        plain = PlainSource(loader, options=options)
        self.inner, self.order, self.workers, self.batch_size = (
            plain.inner,
            plain.order,
            plain.workers,
            plain.batch_size,
        )
        batches: Any = batches_of(loader)
        self._num_skipped = 0
        while not isinstance(batches, RankBatchSampler) and hasattr(batches, "batch_sampler"):
            self._num_skipped += getattr(batches, "skip_batches", 0)
            batches = batches.batch_sampler
        self.batches: RankBatchSampler | None = batches if isinstance(batches, RankBatchSampler) else None
        """The batch sampler that does the sharding, or None if the loader is not sharded here."""

    @property
    def samples_per_step(self) -> int | None:
        """Number of samples in one step across all ranks, or None if it varies."""
        batches = self.batches
        if batches is None or self.batch_size is None or batches.split_batches:
            return self.batch_size
        return self.batch_size * batches.num_processes

    def steps(self, skip: int) -> Steps:
        batches = self._batches_from(skip)
        return zip(batches, repeat(None) if self.batches is None else self.batches.step_sizes(self._num_skipped + skip))

    def at_end(self) -> LastStep | None:
        last = None if self.batches is None else self.batches.last_step
        self.ended_early = last is not None and self.batches is not None and last.sizes[self.batches.process_index] == 0
        return None if self.ended_early else last

    def num_steps(self) -> int:
        return len(self.inner)

    def owners_of_epoch(self, original: DataLoader[Any]) -> tuple[Any, ...]:
        batches = self.inner.batch_sampler
        inside = getattr(batches, "batch_sampler", None)
        found = (batches, getattr(batches, "sampler", None), getattr(inside, "sampler", None), self.inner.sampler)
        owners = {id(owner): owner for owner in found if isinstance(owner, SupportsSetEpoch)}
        return (*owners.values(), self.inner.dataset)
