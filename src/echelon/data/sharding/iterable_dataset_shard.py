"""Accelerate's ``IterableDatasetShard``: one process's shard of an iterable dataset."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

from echelon.base.protocols import SupportsSetEpoch
from echelon.data.sharding.sharded_stream import ShardedStream

__all__ = ["IterableDatasetShard"]


class IterableDatasetShard(IterableDataset[Any]):
    """Yields one process's samples: its slice of every global batch in ``dataset``.

    Every process gets the same number of samples. If the dataset has no ``set_epoch``, its ``generator`` is seeded with the
    epoch.

    Args:
        dataset: the user's dataset.
        batch_size: batch size per process or, with ``split_batches``, across all processes.
        drop_last: whether to drop an incomplete last batch instead of filling it with the first samples.
        num_processes: number of processes that share the dataset.
        process_index: index of this process.
        split_batches: whether to split each batch across processes.

    Raises:
        UsageError: with ``split_batches``, the batch size is not divisible by ``num_processes``.
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
        """Set the epoch of the next pass and of the dataset, if it has ``set_epoch``."""
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
