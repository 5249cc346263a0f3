"""Iterable datasets that every rank reads in full, keeping only its slices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from echelon.base.protocols import SupportsSetEpoch
from echelon.data.batch import num_samples, require_divisible
from echelon.data.global_batch_slices import LastStep
from echelon.data.rng.per_sample_rng import are_equal_states, rng_states
from echelon.distributed.checks.already_sharded import set_epoch
from echelon.distributed.checks.data_fingerprint import ColumnFingerprint, sample_fingerprints
from echelon.distributed.collectives import broadcast
from echelon.distributed.division import real_sizes, share_sizes

Columns = dict[str, ColumnFingerprint]


class ShardedStream(IterableDataset[Any]):
    """Yields for each step: a list of this rank's samples, a LastStep or None, and the fingerprints of all samples or None.

    Every rank reads all samples and keeps its slice. A short last batch is filled with the first samples (``even``), dropped
    (``drop_last``), or else split as evenly as possible.

    With ``batch_size=None``, the dataset yields batches, and each rank takes one out of every ``world_size`` batches.

    Every DataLoader worker splits the samples that it reads, so each worker may have a short last batch. The first step
    contains fingerprints, which are equal on all ranks unless the dataset shards itself.

    Source: accelerate's IterableDatasetShard, which differs only in how it splits a short last batch.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int | None,
        drop_last: bool,
        rank: int,
        world_size: int,
        even: bool,
        split: bool,
    ) -> None:
        if split:
            require_divisible(batch_size, world_size)
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.rank = rank
        self.world_size = world_size
        self.even = even
        self.split = split

    @property
    def samples_per_step(self) -> int:
        """Number of samples (or batches, if the dataset yields batches) that all ranks together take in one step."""
        return (self.batch_size or 1) * (1 if self.split else self.world_size)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the user's dataset, if it supports epochs."""
        set_epoch(epoch, self.dataset)

    def num_steps(self) -> int:
        """Return the number of steps on this rank.

        Raises:
            TypeError: the dataset has no length.
        """
        whole, rest = divmod(len(self.dataset), self.samples_per_step)
        if rest == 0 or self.drop_last:
            return whole
        return whole + (self.even or self.rank < rest)

    def __iter__(self) -> Iterator[tuple[list[Any], LastStep | None, Columns | None]]:
        whole, size = self.samples_per_step, self.samples_per_step // self.world_size
        mine = slice(self.rank * size, (self.rank + 1) * size)
        first: list[Any] = []
        samples: list[Any] = []
        columns: Columns | None = None
        before = None if get_worker_info() is not None else rng_states()
        for sample in self.dataset:
            samples.append(sample)
            if len(samples) == whole:
                columns = self._columns(samples, before) if not first else None
                first = first or samples
                yield samples[mine], self._facts(samples, whole), columns
                samples = []
        if not samples or self.drop_last:
            return
        columns = self._columns(samples, before) if not first else None
        num_real, sizes = len(samples), share_sizes(len(samples), self.world_size)
        # With several loader workers this may not be the last step of the pass, so every rank must make it.
        worker = get_worker_info()
        if self.even or (0 in sizes and worker is not None and worker.num_workers > 1):
            samples = [*samples, *islice(cycle(first or samples), whole - num_real)]
            yield samples[mine], self._facts(samples, num_real), columns
        else:  # a rank without samples has an empty list; its loader ends while others continue
            start = sum(sizes[: self.rank])
            counts = sizes if self.batch_size is not None else _item_sizes(samples, self.world_size)
            yield samples[start : start + sizes[self.rank]], LastStep(counts, counts), columns

    def _columns(self, samples: list[Any], before: Any) -> Columns:
        # In the main process each rank has its own RNG stream, so samples that depend on draws may differ.
        return {} if before is not None and not are_equal_states(before, rng_states()) else sample_fingerprints(samples)

    def _facts(self, samples: list[Any], num_real: int) -> LastStep | None:
        """Return the batch sizes for a step in which every rank has a full slice, with ``num_real`` new samples in total."""
        size = len(samples) // self.world_size
        if self.batch_size is None:  # the dataset yields batches of any size
            sizes = _item_sizes(samples, self.world_size)
            if num_real == self.world_size and len(set(sizes)) == 1:
                return None
            return LastStep(sizes, [s if rank < num_real else 0 for rank, s in enumerate(sizes)])
        if num_real == len(samples):
            return None
        return LastStep([size] * self.world_size, real_sizes(num_real, size, self.world_size))


def _item_sizes(batches: list[Any], world_size: int) -> list[int]:
    return [num_samples(batch) or 1 for batch in batches] + [0] * (world_size - len(batches))


class IterableDatasetShard(IterableDataset[Any]):
    """Accelerate's class of this name. Yields one process's samples: its slice of every global batch in ``dataset``.

    Every process gets the same number of samples. If the dataset has no ``set_epoch``, its ``generator`` is seeded with the
    epoch.

    Args:
        batch_size: batch size per process or, with ``split_batches``, across all processes.
        drop_last: whether to drop an incomplete last batch instead of filling it with the first samples.

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


class CollatePart:
    """Applies the user's ``collate_fn`` to a slice's samples. A class, because it is pickled for DataLoader workers."""

    def __init__(self, collate_fn: Callable[[Any], Any], *, is_batched: bool) -> None:
        self.collate_fn = collate_fn
        self.is_batched = is_batched

    def __call__(
        self, piece: tuple[list[Any], LastStep | None, Columns | None]
    ) -> tuple[Any, LastStep | None, Columns | None]:
        samples, facts, columns = piece
        if not samples:
            return None, facts, columns
        return self.collate_fn(samples[0] if self.is_batched else samples), facts, columns


class ExposeUsersDataset:
    """A ``worker_init_fn`` that sets ``get_worker_info().dataset`` to the user's dataset, then calls the user's function."""

    def __init__(self, then: Callable[[int], Any] | None) -> None:
        self.then = then

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        assert info is not None
        ours: Any = info.dataset
        object.__setattr__(info, "dataset", ours.dataset)  # the class forbids plain assignment
        if self.then is not None:
            self.then(worker_id)


def iterate_like_rank_zero(loader: DataLoader[Any], stream: Any) -> Iterator[Any]:
    """Start a pass using rank zero's generator states and worker seeds, so that every rank reads the same samples.

    Collective: call on every rank.
    """
    generator = getattr(stream.dataset, "generator", None)
    if isinstance(generator, torch.Generator):
        generator.set_state(broadcast(generator.get_state()))
    if loader.num_workers == 0:
        return iter(loader)
    # The loader draws the seed of its workers when it starts them. Each rank's RNG must advance by exactly that draw.
    source = loader.generator
    before = torch.get_rng_state() if source is None else source.get_state()
    _set_state(source, broadcast(before))
    batches = iter(loader)
    if dist.is_initialized() and dist.get_rank() != 0:
        _set_state(source, before)
        torch.empty((), dtype=torch.int64).random_(generator=source)
    return batches


def _set_state(generator: torch.Generator | None, state: torch.Tensor) -> None:
    if generator is None:
        torch.set_rng_state(state)
    else:
        generator.set_state(state)
