"""The names of ``accelerate.data_loader``, so that its scripts run: re-exports only."""

from __future__ import annotations

from echelon.accelerator.prepare.data_loaders import get_sampler, prepare_data_loader, skip_first_batches
from echelon.data.loader import DispatchedLoader as DataLoaderDispatcher
from echelon.data.loader import PreparedLoader as DataLoaderShard
from echelon.data.sharding.iterable_dataset_shard import IterableDatasetShard
from echelon.data.sharding.sample_order import SeedableRandomSampler
from echelon.data.sharding.sharded_batches import RankBatchSampler as BatchSamplerShard
from echelon.data.skip_batches import SkipBatchSampler, SkipDataLoader

__all__ = [
    "BatchSamplerShard",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "IterableDatasetShard",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "SkipDataLoader",
    "get_sampler",
    "prepare_data_loader",
    "skip_first_batches",
]
