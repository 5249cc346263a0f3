"""Where the batches of one rank come from: the ways to cut a loader for the ranks, one class each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from echelon.base.errors import UsageError
from echelon.base.lengths import length_of
from echelon.data.exact.batch_slices import Contribution, LastStep
from echelon.data.rebuild_loader import like, stateful_loader
from echelon.data.rng.worker_rng import WorkerDraws
from echelon.data.sharding.dispatch import SliceFn, dispatch
from echelon.data.sharding.order_check import OrderCheck
from echelon.data.sharding.sample_order import SampleOrder
from echelon.data.sharding.sharded_batches import RankBatchSampler
from echelon.data.sharding.sharded_stream import (
    CollatePiece,
    ShardedStream,
    ShowUsersDataset,
    open_like_rank_zero,
    read_own_shards,
)
from echelon.data.skip_batches import SkipBatchSampler
from echelon.distributed.checks.duplicate_samples import FirstPass
from echelon.distributed.small_messages import gather_counts
from echelon.world.world import World

__all__ = [
    "ShardedSource",
    "DispatchSource",
    "OwnShardsSource",
    "PlainSource",
    "BatchSource",
    "Steps",
    "StreamSource",
    "batches_of",
    "with_batches",
]

Steps = Iterator[tuple[Any, LastStep | Contribution | None]]


class BatchSource(ABC):
    """The steps of one rank, each a batch and what every rank has in it."""

    inner: DataLoader[Any]
    """The loader that reads on this rank."""
    order: SampleOrder | None
    """What draws the order of a pass; None when the data has an order of its own, or another rank draws it."""
    goes_on: bool = False
    """The next pass is one that was begun before (and saved in its middle)."""
    workers: WorkerDraws | None = None
    """Follows what the workers of ``inner`` draw, where the order of their batches is known."""
    batches_per_step: int = 1
    """Of ``inner``."""
    num_behind: int = 0
    """Steps of the next pass that ``inner`` has behind it, because it was given a state."""
    ended_early: bool = False
    """Of the pass that was read to its end: other ranks had one step more, at least."""
    first_pass: FirstPass | None = None
    """Compares what the ranks read in the first pass, until that has begun."""

    @abstractmethod
    def steps(self, skip: int) -> Steps:
        """Begin a pass; leave out the first ``skip`` steps.

        A LastStep of None says that every rank has equally many new samples, or that it is known at the end only.

        Collective: where ranks share an order or a reader.
        """

    @abstractmethod
    def at_end(self) -> LastStep | None:
        """Return what the ranks have in the last step, where that is known at the end only."""

    @abstractmethod
    def num_steps(self) -> int:
        """Return the number of steps of a pass of this rank.

        Raises:
            TypeError: nobody knows.
        """

    @abstractmethod
    def set_even(self, even: bool) -> None:
        """Choose whether the last step is completed, from the next pass on."""

    def _open(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Begin to read; a pass that goes on leaves torch's generator alone, from which a DataLoader draws its seed."""
        before = torch.get_rng_state() if self.goes_on else None
        iterator = iter(loader)
        if before is not None:
            torch.set_rng_state(before)
            self.goes_on = False
        return iterator

    def _batches_from(self, skip: int) -> Iterator[Any]:
        """Yield the batches of a pass of ``inner`` without the first ``skip``."""
        num_again = 0 if self.workers is None else self.workers.begin(skip)
        inner, skip = _skipping(self.inner, skip - num_again)
        batches = islice(self._open(inner), skip, None)
        return batches if self.workers is None else self.workers.follow(batches, num_again)

    def _follow_workers(self, *, num_ahead: int) -> None:
        if self.inner.num_workers and type(self.inner) is DataLoader and getattr(self.inner, "in_order", True):
            self.workers = WorkerDraws(self.inner, num_ahead=num_ahead)
            self.inner = self.workers.following(self.inner)


class PlainSource(BatchSource):
    """The user's loader, read by one process."""

    def __init__(
        self, loader: DataLoader[Any], *, seed: int | None, seedable: bool, stateful: bool, num_ahead: int = 2
    ) -> None:
        self.inner = loader
        self.order = None
        batches = batches_of(loader)
        # A shuffled order is drawn in the same way as on several ranks, bit for bit; so it can be drawn again on resume.
        is_shuffled = type(loader) is DataLoader and type(getattr(batches, "sampler", None)) is RandomSampler
        if (seedable or stateful or is_shuffled) and batches is not None:
            self.order = SampleOrder(batches, seed=seed, seedable=seedable, alone=True)
            self.inner = with_batches(loader, self.order.batches, stateful=stateful)
        elif stateful:
            self.inner = like(
                loader, loader.dataset, kind=stateful_loader(), batch_size=loader.batch_size, drop_last=loader.drop_last
            )
        if batches is not None:
            self._follow_workers(num_ahead=num_ahead)

    def steps(self, skip: int) -> Steps:
        for batch in self._batches_from(skip):
            yield batch, None

    def at_end(self) -> LastStep | None:
        return None

    def num_steps(self) -> int:
        return len(self.inner)

    def set_even(self, even: bool) -> None:
        pass  # one process: there is nothing to complete


class ShardedSource(BatchSource):
    """A loader over a dataset with an index: every rank draws the same batches and reads those that are its own."""

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        world: World,
        even: bool,
        split: bool,
        seed: int | None,
        seedable: bool,
        stateful: bool,
        check: OrderCheck | None = None,
    ) -> None:
        batches = batches_of(loader)
        if batches is None:
            raise UsageError(
                "a loader without batches (batch_size=None) cannot be dealt to ranks",
                do="give the DataLoader a batch_size or a batch_sampler, or use dispatch_batches=True",
            )
        self.order = SampleOrder(batches, seed=seed, seedable=seedable, alone=False, check=check)
        self.batches = RankBatchSampler(
            self.order.batches,
            num_processes=world.world_size,
            process_index=world.rank,
            split_batches=split,
            even_batches=even,
        )
        self.inner = with_batches(loader, self.batches, stateful=stateful)
        self._follow_workers(num_ahead=2)

    def steps(self, skip: int) -> Steps:
        assert self.order is not None
        self.order.begin()
        for batch in self._batches_from(skip):
            yield batch, None

    def at_end(self) -> LastStep | None:
        last = self.batches.last_step
        # A rank that has nothing in it ended a step earlier, with a batch like all the others.
        self.ended_early = last is not None and last.sizes[self.batches.process_index] == 0
        return None if self.ended_early else last

    def num_steps(self) -> int:
        return len(self.batches)

    def set_even(self, even: bool) -> None:
        self.batches.even_batches = even


class StreamSource(BatchSource):
    """A loader over an iterable dataset: every rank reads all of it and keeps its pieces."""

    def __init__(self, loader: DataLoader[Any], *, world: World, even: bool, split: bool, stateful: bool) -> None:
        self.order = None
        self.stream = ShardedStream(
            loader.dataset,
            batch_size=loader.batch_size,
            drop_last=loader.drop_last,
            rank=world.rank,
            world_size=world.world_size,
            even=even,
            split=split,
        )
        self._rank = world.rank
        self.inner = like(
            loader,
            self.stream,
            kind=stateful_loader() if stateful else DataLoader,
            batch_size=None,
            collate_fn=CollatePiece(loader.collate_fn, is_batched=loader.batch_size is None),
            worker_init_fn=ShowUsersDataset(loader.worker_init_fn) if loader.num_workers else None,
        )

    def steps(self, skip: int) -> Steps:
        first_pass, self.first_pass = self.first_pass, None
        return islice(self._read(first_pass), skip, None)

    def _read(self, first_pass: FirstPass | None) -> Steps:
        self.ended_early = False
        for batch, facts, columns in open_like_rank_zero(self.inner, self.stream):
            if first_pass is not None and columns is not None:
                first_pass.note_stream(columns)
                first_pass = None
            if facts is not None and facts.sizes[self._rank] == 0:
                self.ended_early = True
                return
            yield batch, facts

    def at_end(self) -> LastStep | None:
        return None

    def num_steps(self) -> int:
        return self.stream.num_steps()

    def set_even(self, even: bool) -> None:
        self.stream.even = even


class OwnShardsSource(BatchSource):
    """A loader over an iterable dataset that gives each rank whole shards of itself (Hugging Face datasets)."""

    def __init__(self, loader: DataLoader[Any], *, world: World, even: bool, stateful: bool) -> None:
        self.order = None
        self.even = even
        self.drop_last = loader.drop_last
        self.inner = like(
            loader,
            loader.dataset.shard(num_shards=world.world_size, index=world.rank),  # type: ignore[attr-defined]
            kind=stateful_loader() if stateful else DataLoader,
            batch_size=loader.batch_size,
            drop_last=loader.drop_last,
        )

    def steps(self, skip: int) -> Steps:
        return islice(self._read(), skip, None)

    def _read(self) -> Steps:
        self.ended_early = yield from read_own_shards(iter(self.inner), even=self.even, drop_last=self.drop_last)

    def at_end(self) -> LastStep | None:
        return None

    def num_steps(self) -> int:
        return len(self.inner)

    def set_even(self, even: bool) -> None:
        self.even = even


class DispatchSource(BatchSource):
    """A loader that rank zero alone reads; the other ranks' loaders, and their datasets, are never touched.

    Collective: making one.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        world: World,
        even: bool,
        split: bool,
        seed: int | None,
        seedable: bool,
        stateful: bool,
        slice_fn: SliceFn | None,
        device: torch.device | None,
        non_blocking: bool,
    ) -> None:
        self.inner = loader
        self.even = even
        self.split = split
        self.slice_fn = slice_fn
        self.batches_per_step = 1 if split else world.world_size
        self._world = world
        self._device = device
        self._non_blocking = non_blocking
        self.order = None
        own_samples, own_batches = -1, -1
        if world.is_rank_zero:
            ahead = 3 * self.batches_per_step  # it looks for the end
            plain = PlainSource(loader, seed=seed, seedable=seedable, stateful=stateful, num_ahead=ahead)
            self.inner, self.order, self.workers = plain.inner, plain.order, plain.workers
            own_samples, own_batches = length_of(loader.dataset), length_of(loader)
        own_size = -1 if loader.batch_size is None else loader.batch_size
        own_skip = int(batches_of(loader) is not None)
        of_rank_zero = gather_counts(own_samples, own_batches, int(loader.drop_last), own_size, own_skip)
        self.total_samples, self.total_batches, drop_last, batch_size, can_skip = (counts[0] for counts in of_rank_zero)
        """Of rank zero's dataset and loader; -1 when nobody knows."""
        self.drop_last = bool(drop_last)
        self._can_skip = bool(can_skip)
        self.batch_size = None if batch_size < 0 else batch_size
        if split and self.batch_size is not None and self.batch_size % world.world_size:
            raise UsageError(
                f"split_batches cuts every batch for {world.world_size} processes, and batch_size={self.batch_size} is not divisible",
                where="DataLoaderConfiguration(split_batches=)",
                do=f"choose a batch size that is a multiple of {world.world_size}, or leave split_batches out",
            )

    def steps(self, skip: int) -> Steps:
        world = self._world
        batches = None
        # What is read for nothing is dealt for nothing, too: the samples at the beginning complete the last step.
        num_unread, num_unused = (skip * self.batches_per_step, 0) if self._can_skip else (0, skip)
        if world.is_rank_zero:
            batches = self._batches_from(num_unread)
        return islice(self._read(batches), num_unused, None)

    def _read(self, batches: Iterator[Any] | None) -> Steps:
        world = self._world
        self.ended_early = yield from dispatch(
            batches,
            rank=world.rank,
            world_size=world.world_size,
            split=self.split,
            even=self.even,
            drop_last=self.drop_last,
            slice_fn=self.slice_fn,
            device=self._device,
            non_blocking=self._non_blocking,
        )

    def at_end(self) -> LastStep | None:
        return None

    def num_steps(self) -> int:
        if self.total_batches < 0:
            raise TypeError("rank zero's loader has no length")
        whole, rest = divmod(self.total_batches, self.batches_per_step)
        return whole + (rest > 0 and not self.drop_last)

    def set_even(self, even: bool) -> None:
        self.even = even


def batches_of(loader: DataLoader[Any]) -> Any:
    """Return what draws the batches of a loader over a dataset with an index; None when nothing does."""
    if isinstance(loader.dataset, IterableDataset):
        return None
    if isinstance(loader.sampler, BatchSampler):  # DataLoader(sampler=BatchSampler(...), batch_size=None)
        return loader.sampler
    return loader.batch_sampler


def with_batches(
    loader: DataLoader[Any], batches: Any, *, stateful: bool = False, dataset: Any = None
) -> DataLoader[Any]:
    """Return a loader as the user's (over ``dataset`` instead, where given) that reads other batches."""
    kind = stateful_loader() if stateful else DataLoader
    dataset = loader.dataset if dataset is None else dataset
    if loader.batch_sampler is None:
        return like(loader, dataset, kind=kind, sampler=batches, batch_size=None)  # type: ignore[no-any-return]
    return like(loader, dataset, kind=kind, batch_sampler=batches)  # type: ignore[no-any-return]


def _skipping(loader: DataLoader[Any], skip: int) -> tuple[DataLoader[Any], int]:
    """Return a loader that does not read the first ``skip`` batches, and how many are still to be thrown away."""
    batches = batches_of(loader)
    if not skip or batches is None or type(loader) is not DataLoader:
        return loader, skip
    return with_batches(loader, SkipBatchSampler(batches, skip), stateful=False), 0
