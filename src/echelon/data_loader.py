"""Provides the names in ``accelerate.data_loader``, implemented by echelon."""

from echelon.accelerator.prepare.data_loaders import (
    get_sampler as get_sampler,
    prepare_data_loader as prepare_data_loader,
    skip_first_batches as skip_first_batches,
)
from echelon.accelerator.prepare.loader_classes import (
    DataLoaderAdapter as DataLoaderAdapter,
    DataLoaderDispatcher as DataLoaderDispatcher,
    DataLoaderShard as DataLoaderShard,
    DataLoaderStateMixin as DataLoaderStateMixin,
)
from echelon.data.sharding.sample_order import SeedableRandomSampler as SeedableRandomSampler
from echelon.data.sharding.sharded_batches import RankBatchSampler as _RankBatchSampler
from echelon.data.sharding.sharded_stream import IterableDatasetShard as IterableDatasetShard
from echelon.data.skip_batches import SkipBatchSampler as SkipBatchSampler, SkipDataLoader as SkipDataLoader

BatchSamplerShard = _RankBatchSampler
