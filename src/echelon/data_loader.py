"""The names of ``accelerate.data_loader``, so that its scripts run: re-exports only."""

from __future__ import annotations

from echelon.accelerator.loaders import get_sampler, prepare_data_loader, skip_first_batches
from echelon.data.deal import DealtBatches as BatchSamplerShard
from echelon.data.loader import DispatchedLoader as DataLoaderDispatcher
from echelon.data.loader import PreparedLoader as DataLoaderShard
from echelon.data.order import SeedableRandomSampler
from echelon.data.shard import IterableDatasetShard
from echelon.data.skip import SkipBatchSampler, SkipDataLoader

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
