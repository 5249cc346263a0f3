"""Loaders that are already sharded: torch's, and stubs that look like those of other libraries.

A stub has the module and attribute names of the original, by which echelon detects it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, TensorDataset, get_worker_info
from torch.utils.data.distributed import DistributedSampler


def numbers(n: int) -> TensorDataset:
    return TensorDataset(torch.arange(float(n)))


def rank_and_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


class StridedSampler(Sampler[int]):
    """A sampler that knows its rank and adds no padding, so ranks may have different numbers of samples."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.rank, self.num_replicas = rank_and_size()
        self.epoch = 0
        self.told: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.told.append(epoch)

    def __len__(self) -> int:
        return len(range(self.rank, self.n, self.num_replicas))

    def __iter__(self) -> Iterator[int]:
        return iter([(i + self.epoch) % self.n for i in range(self.rank, self.n, self.num_replicas)])


class HiddenSampler(Sampler[int]):
    """A dataset of this rank's shard, without any sign of it."""

    def __init__(self, n: int) -> None:
        rank, size = rank_and_size()
        self.mine = range(rank, n, size)

    def __len__(self) -> int:
        return len(self.mine)

    def __iter__(self) -> Iterator[int]:
        return iter(self.mine)


class StridedBatches(BatchSampler):
    """A batch sampler with other attribute names for its rank, and varying batch sizes."""

    def __init__(self, n: int, batch_size: int) -> None:
        self._rank, self._world_size = rank_and_size()
        self.n = n
        self.batch_size = batch_size

    def __len__(self) -> int:
        return (len(range(self._rank, self.n, self._world_size)) + self.batch_size - 1) // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        mine = iter(range(self._rank, self.n, self._world_size))
        while batch := list(islice(mine, self.batch_size)):
            yield batch


def _of_worker(samples: Any) -> Iterator[torch.Tensor]:
    info = get_worker_info()
    for i in samples if info is None else islice(samples, info.id, None, info.num_workers):
        yield torch.tensor(float(i))


class AsksStream(IterableDataset[Any]):
    """An iterable dataset that gets its rank while it is read, as in most tutorials."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        return _of_worker(range(rank, self.n, world_size))


class KnowsStream(IterableDataset[Any]):
    """An iterable dataset that gets its rank when it is created."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.process_index, self.num_processes = rank_and_size()

    def __iter__(self) -> Iterator[Any]:
        return _of_worker(range(self.process_index, self.n, self.num_processes))


def split_by_node(source: Any, group: Any = None) -> Iterator[Any]:
    rank, size = rank_and_size()
    return islice(source, rank, None, size)


class Pipeline(IterableDataset[Any]):
    """A stub of webdataset, with the stages of a pipeline in a list."""

    def __init__(self, n: int) -> None:
        self.pipeline: list[Any] = [range(n), split_by_node, _of_worker]

    def __iter__(self) -> Iterator[Any]:
        source: Any = self.pipeline[0]
        for stage in self.pipeline[1:]:
            source = stage(source)
        return iter(source)


@dataclass
class DistributedConfig:
    rank: int
    world_size: int


def _iterable_of_datasets(n: int) -> Any:
    """A stub of ``datasets.IterableDataset`` after ``split_dataset_by_node``."""

    def read(self: Any) -> Iterator[Any]:
        config = self._distributed
        return _of_worker(range(config.rank, n, config.world_size))

    kind = type("IterableDataset", (IterableDataset,), {"__iter__": read, "__module__": "datasets.iterable_dataset"})
    dataset = kind()
    dataset._distributed = DistributedConfig(*rank_and_size())
    return dataset


def _streaming_of_mosaic(n: int) -> Any:
    def read(self: Any) -> Iterator[Any]:
        rank, size = rank_and_size()
        return _of_worker(range(rank, n, size))

    return type("StreamingDataset", (IterableDataset,), {"__iter__": read, "__module__": "streaming.base.dataset"})()


class _Split:
    def __init__(self) -> None:
        self._output_split_idx, self._world_size = rank_and_size()


_Split.__module__ = "ray.data._internal.iterator.stream_split_iterator"


class GeneratorStream(IterableDataset[Any]):
    def __init__(self, generate: Callable[[], Any]) -> None:
        self.generate = generate

    def __iter__(self) -> Iterator[Any]:
        return iter(self.generate())


def _of_ray(n: int) -> Any:
    split = _Split()
    return GeneratorStream(lambda: _of_worker(range(split._output_split_idx, n, split._world_size)))


def _distributed(n: int, shuffle: bool) -> Any:
    rank, size = rank_and_size()
    return DistributedSampler(range(n), num_replicas=size, rank=rank, shuffle=shuffle)  # type: ignore[arg-type]


def _stateful(n: int) -> Any:
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    rank, size = rank_and_size()
    return StatefulDistributedSampler(range(n), num_replicas=size, rank=rank, shuffle=True)


CUTS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "DistributedSampler": lambda n, b: {"batch_size": b, "sampler": _distributed(n, shuffle=False)},
    "DistributedSampler, shuffled": lambda n, b: {"batch_size": b, "sampler": _distributed(n, shuffle=True)},
    "in a BatchSampler": lambda n, b: {"batch_sampler": BatchSampler(_distributed(n, shuffle=True), b, False)},
    "BatchSampler as the sampler": lambda n, b: {
        "batch_size": None,
        "sampler": BatchSampler(_distributed(n, shuffle=True), b, False),
    },
    "torchdata": lambda n, b: {"batch_size": b, "sampler": _stateful(n)},
    "num_replicas and rank": lambda n, b: {"batch_size": b, "sampler": StridedSampler(n)},
    "a batch sampler": lambda n, b: {"batch_sampler": StridedBatches(n, b)},
}
STREAMS: dict[str, Callable[[int], Any]] = {
    "asks for its rank": AsksStream,
    "knows its rank": KnowsStream,
    "webdataset": Pipeline,
    "datasets": _iterable_of_datasets,
    "MosaicML": _streaming_of_mosaic,
    "Ray": _of_ray,
}


def cut_loader(name: str, n: int, batch_size: int, num_workers: int = 0) -> DataLoader[Any]:
    if name in STREAMS:
        return DataLoader(STREAMS[name](n), batch_size=batch_size, num_workers=num_workers)
    return DataLoader(numbers(n), num_workers=num_workers, **CUTS[name](n, batch_size))
