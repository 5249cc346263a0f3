"""The samples of one process of an iterable dataset, for a loader that the user builds, under Accelerate's name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

from echelon.base.protocols import SupportsSetEpoch
from echelon.data.sharding.sharded_stream import ShardedStream

__all__ = ["IterableDatasetShard"]


class IterableDatasetShard(IterableDataset[Any]):
    """What one process has of ``dataset``, sample by sample: its piece of every global batch, the last one completed.

    Every process has equally many. A ``generator`` of a dataset without ``set_epoch`` is seeded by the epoch.

    Args:
        dataset: the user's.
        batch_size: of one process, or (``split_batches``) of all.
        drop_last: leave out a short last batch, instead of completing it from the beginning.
        num_processes: how many share the dataset.
        process_index: whose part.
        split_batches: a batch is cut for the processes.

    Raises:
        UsageError: ``split_batches``, and the batch size is not divisible.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.epoch = 0
        self._stream = ShardedStream(
            dataset,
            batch_size=batch_size,
            drop_last=drop_last,
            rank=process_index,
            world_size=num_processes,
            even=True,
            split=split_batches,
        )

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass, if the dataset has one to choose."""
        self.epoch = epoch
        self._stream.set_epoch(epoch)

    def __len__(self) -> int:
        return self._stream.num_steps() * (self._stream.samples_per_step // self.num_processes)

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not isinstance(self.dataset, SupportsSetEpoch):
            generator.manual_seed(self.epoch)
        for samples, _, _ in self._stream:
            yield from samples
