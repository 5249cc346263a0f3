"""Reads the batches of a loader without workers as torch does, but without the work that torch's iterator adds to each batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, MapDataPipe, SequentialSampler
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter
from torch.utils.data.dataset import IterableDataset

from echelon.data.sharding.sample_order import SeedableRandomSampler, SharedSampler
from echelon.data.whole_batches import WholeBatches

__all__ = ["read_directly"]


def read_directly(loader: DataLoader[Any], iterator: Iterator[Any]) -> Iterator[Any]:
    """Return an iterator over the batches of ``iterator``, which is ``iter(loader)`` and has not been used.

    It makes the same draws and reads the same samples at the same times. ``iterator`` itself enters a profiler region and several
    functions for each batch, which takes 10 microseconds. It is returned while a profiler runs, and if it does more than read.
    """
    if type(iterator) is not _SingleProcessDataLoaderIter or type(loader) is not DataLoader or loader.pin_memory:
        return iterator
    if isinstance(loader.dataset, (IterableDataset, MapDataPipe)) or torch.autograd._profiler_enabled():
        return iterator
    dataset: Any = loader.dataset
    batches = loader.batch_sampler
    if type(dataset) is not WholeBatches:
        return map(iterator._dataset_fetcher.fetch, iterator._sampler_iter)
    if type(batches) is BatchSampler and type(batches.sampler) in (
        SequentialSampler,
        SharedSampler,
        SeedableRandomSampler,
    ):
        return _read_rows(dataset, batches)
    return map(dataset.__getitems__, iterator._sampler_iter)


def _read_rows(dataset: WholeBatches, batches: BatchSampler) -> Iterator[Any]:
    """Yield the batches of ``batches``, whose order is drawn once per pass in one tensor, when its first batch is read."""
    sampler: Any = batches.sampler
    is_sequential = type(sampler) is SequentialSampler
    order = torch.arange(len(sampler)) if is_sequential else sampler.permutation()
    if order is None:
        yield from map(dataset.__getitems__, batches)
        return
    size = batches.batch_size
    if batches.drop_last:
        order = order[: len(order) // size * size]
    yield from map(dataset.read_rows, order.split(size) if len(order) else ())
    if not is_sequential:
        sampler.end_pass()
