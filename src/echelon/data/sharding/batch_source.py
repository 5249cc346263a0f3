"""Sources of one rank's batches, with one class for each way to shard a loader."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, repeat
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, default_collate

from echelon.base.errors import UsageError
from echelon.base.lengths import length_of
from echelon.base.protocols import SupportsSetEpoch, SupportsStateDict
from echelon.data.active_loaders import LoaderOptions
from echelon.data.batch import require_divisible, require_rows_per_sample
from echelon.data.data_facts import DataFacts, known_length
from echelon.data.global_batch_slices import Contribution, LastStep, PassPlan
from echelon.data.rebuild_loader import FollowedBatches, copy_loader, has_own_reading, stateful_loader
from echelon.data.rng.worker_rng import WorkerDraws
from echelon.data.sharding.dispatch import CountedCollate, ReadBatch, SliceFn, dispatch, global_batches
from echelon.data.sharding.order_check import OrderCheck
from echelon.data.sharding.sample_order import SampleOrder
from echelon.data.sharding.sharded_batches import RankBatchSampler
from echelon.data.sharding.sharded_stream import (
    CollatePart,
    ExposeUsersDataset,
    ShardedStream,
    iterate_like_rank_zero,
)
from echelon.data.skip_batches import SkipBatchSampler
from echelon.data.whole_batches import WholeBatches, read_whole_batches
from echelon.distributed.checks.duplicate_samples import DuplicateSamplesCheck
from echelon.distributed.small_messages import gather_counts
from echelon.world.world import World

Steps = Iterator[tuple[Any, LastStep | Contribution | None]]


class BatchSource(ABC):
    """Yields one rank's steps. Each step has this rank's batch and all ranks' batch sizes."""

    inner: DataLoader[Any]
    """The loader that reads data on this rank."""
    order: SampleOrder | None = None
    """Order of the samples, or None if the order is fixed or is determined on another rank."""
    batch_size: int | None
    """Batch size of the user's loader, or None if it varies."""
    workers: WorkerDraws | None = None
    """Tracks RNG states in the workers of ``inner``, if their batches arrive in a known order."""
    even: bool = True
    """Whether to fill an incomplete last step with repeated samples."""
    batches_per_step: int = 1
    """Number of batches that ``inner`` reads per step."""
    resumes: bool = False
    """Whether the next pass resumes a pass that was saved before it was complete."""
    num_behind: int = 0
    """Number of steps in the next pass that ``inner`` has already consumed, because a state was loaded into it."""
    ended_early: bool = False
    """Whether other ranks had more steps in the last completed pass."""
    is_dispatched: bool = False
    """Whether rank zero reads for all ranks, in which case this source moves batches to the device."""
    total_samples: int | None = None
    """Length of rank zero's dataset if it reads for all ranks; -1 means unknown."""
    reads_own_shard: bool = False
    """Whether the data is already sharded and each rank reads its own shard."""
    first_pass: DuplicateSamplesCheck | None = None
    """Check to run in the first pass; None once that pass has started."""

    @abstractmethod
    def steps(self, skip: int) -> Steps:
        """Start a pass, skipping its first ``skip`` steps.

        A LastStep of None means that ranks have the same number of new samples, or that the numbers are known only at the end.

        Collective: call on every rank if ranks share an order or a reader.
        """

    def dataset_indices(self, epoch: int, positions: range) -> tuple[int, ...] | None:
        """Return the indices in the dataset of the samples at ``positions`` in the order of an epoch; None if they are not known."""
        return None

    @abstractmethod
    def num_steps(self, plan: PassPlan) -> int:
        """Return the number of steps in a full pass on this rank; only the exact modes use ``plan``.

        Raises:
            TypeError: the number is unknown.
        """

    def at_end(self) -> LastStep | None:
        """Return the batch sizes in the last step, if they are known only at the end of a pass."""
        return None

    def set_even(self, even: bool) -> None:
        """Set whether the last step is filled, with effect from the next pass."""
        self.even = even

    def divide_last_step(self) -> bool:
        """Divide the samples in an incomplete last step evenly, starting with the next pass. Return whether that changes it."""
        return False

    def dataset_length(self, dataset: Any) -> int:
        """Return the number of samples in the user's ``dataset``.

        Raises:
            TypeError: the dataset has no length.
        """
        if self.total_samples is None:
            return len(dataset)
        if self.total_samples < 0:
            raise TypeError(f"object of type {type(dataset).__name__} has no len()")
        return self.total_samples

    def facts_elsewhere(self) -> DataFacts | None:
        """Return what is known about rank zero's data, or None if this rank has the same data."""
        return None

    def sampler_of(self, original: DataLoader[Any]) -> Any:
        """Return the sampler that determines the order of the user's loader."""
        return getattr(original.batch_sampler, "sampler", None) if self.order is None else self.order.sampler

    def set_sampler(self, sampler: Any, original: DataLoader[Any]) -> None:
        """Use another sampler to determine the order.

        Raises:
            UsageError: the data's order is fixed, or is determined on another rank.
        """
        if self.order is None:
            raise UsageError("this loader's order is not determined by a sampler", do="change its dataset instead")
        self.order.sampler = sampler

    def owners_of_epoch(self, original: DataLoader[Any]) -> tuple[Any, ...]:
        """Return the objects that may have a ``set_epoch`` method, in the order in which to call it."""
        inner = self.inner
        batches = inner.batch_sampler
        has_epochs = isinstance(inner.sampler, SupportsSetEpoch) or isinstance(batches, SupportsSetEpoch)
        if inner is original and not has_epochs:
            return (inner.dataset,)
        return batches, getattr(batches, "sampler", None), inner.sampler, inner.dataset

    def _start_reading(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Return an iterator over ``loader``. If the pass resumes, drawing the iterator's seed does not advance torch's RNG."""
        before = torch.get_rng_state() if self.resumes else None
        iterator = iter(loader)
        if before is not None:
            torch.set_rng_state(before)
            self.resumes = False
        batches = loader.batch_sampler
        return batches.follow(iterator) if isinstance(batches, FollowedBatches) else iterator

    def _batches_from(self, skip: int) -> Iterator[Any]:
        """Yield the batches in a pass over ``inner``, except the first ``skip``."""
        num_again = 0 if self.workers is None else self.workers.begin(skip)
        inner, skip = _skip_batches(self.inner, skip - num_again)
        batches = islice(self._start_reading(inner), skip, None)
        return batches if self.workers is None else self.workers.follow(batches, num_again)

    def _follow_workers(self, *, num_ahead: int) -> None:
        if self.inner.num_workers and type(self.inner) is DataLoader and getattr(self.inner, "in_order", True):
            self.workers = WorkerDraws(self.inner, num_ahead=num_ahead)
            self.inner = self.workers.following(self.inner)


class PlainSource(BatchSource):
    """The user's loader in a single-process run."""

    def __init__(self, loader: DataLoader[Any], *, options: LoaderOptions, num_ahead: int = 2) -> None:
        seedable, stateful = options.use_seedable_sampler, saves_state(loader, options)
        self.inner = loader
        batches = batches_of(loader)
        # SampleOrder draws a shuffled order exactly as with several ranks, and can draw it again when a run resumes.
        is_shuffled = type(loader) is DataLoader and type(getattr(batches, "sampler", None)) is RandomSampler
        if (seedable or stateful or is_shuffled) and batches is not None:
            self.order = SampleOrder(batches, seed=options.data_seed, seedable=seedable, alone=True)
            self.inner = with_batches(loader, self.order.batches, stateful=stateful, by_sample=options.by_sample)
        elif not stateful and not options.by_sample and read_whole_batches(loader) is not None:
            self.inner = with_batches(loader, batches)
        elif stateful:
            self.inner = copy_loader(
                loader, loader.dataset, kind=stateful_loader(), batch_size=loader.batch_size, drop_last=loader.drop_last
            )
        self.batch_size = _batch_size(loader, self.inner)
        if batches is not None:
            self._follow_workers(num_ahead=num_ahead)

    def steps(self, skip: int) -> Steps:
        return zip(self._batches_from(skip), repeat(None))  # a generator would be called for each batch

    def num_steps(self, plan: PassPlan) -> int:
        return len(self.inner)

    def set_sampler(self, sampler: Any, original: DataLoader[Any]) -> None:
        if self.order is None and batches_of(original) is not None:
            owner: Any = original.batch_sampler
            owner.sampler = sampler
        else:
            super().set_sampler(sampler, original)


class GivenSource(BatchSource):
    """A loader that is used unchanged, because each rank was given its own batch sampler or dataset."""

    def __init__(self, loader: DataLoader[Any], *, options: LoaderOptions) -> None:
        plain = PlainSource(loader, options=options)
        self.inner, self.order, self.workers = plain.inner, plain.order, plain.workers
        self.batch_size = plain.batch_size
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

    def num_steps(self, plan: PassPlan) -> int:
        return len(self.inner)

    def owners_of_epoch(self, original: DataLoader[Any]) -> tuple[Any, ...]:
        batches = self.inner.batch_sampler
        inside = getattr(batches, "batch_sampler", None)
        found = (batches, getattr(batches, "sampler", None), getattr(inside, "sampler", None), self.inner.sampler)
        owners = {id(owner): owner for owner in found if isinstance(owner, SupportsSetEpoch)}
        return (*owners.values(), self.inner.dataset)


class ShardedSource(BatchSource):
    """A loader over a map-style dataset. Every rank draws the same batches, but reads only its own."""

    def __init__(
        self, loader: DataLoader[Any], *, world: World, options: LoaderOptions, check: OrderCheck | None = None
    ) -> None:
        batches = batches_of(loader)
        if batches is None:
            raise UsageError(
                "a loader with batch_size=None cannot be sharded",
                do="pass batch_size or batch_sampler to the DataLoader, or use dispatch_batches=True",
            )
        self.order = SampleOrder(
            batches, seed=options.data_seed, seedable=options.use_seedable_sampler, alone=False, check=check
        )
        self._num_readers = world.world_size
        self.batches = RankBatchSampler(
            self.order.batches,
            num_processes=world.world_size,
            process_index=world.rank,
            split_batches=options.split_batches,
            even_batches=self._fills(options.even_batches),
        )
        self.inner = with_batches(
            loader, followed(loader, self.batches), stateful=saves_state(loader, options), by_sample=options.by_sample
        )
        self.batch_size = _batch_size(loader, self.inner)
        self._follow_workers(num_ahead=2)

    def steps(self, skip: int) -> Steps:
        assert self.order is not None
        self.order.begin()
        behind, self.num_behind = self.num_behind, 0
        return zip(self._batches_from(skip), self.batches.step_sizes(skip + behind))

    def at_end(self) -> LastStep | None:
        last = self.batches.last_step
        # A rank without samples in the last step ended one step earlier, with a full batch.
        self.ended_early = last is not None and last.sizes[self.batches.process_index] == 0
        return None if self.ended_early else last

    def num_steps(self, plan: PassPlan) -> int:
        return len(self.batches)

    def set_even(self, even: bool) -> None:
        self.batches.even_batches = self._fills(even)

    def _fills(self, even: bool) -> bool:
        """Return whether a short last step is filled: a single reader has no other ranks to keep in step with."""
        return even and self._num_readers > 1

    def divide_last_step(self) -> bool:
        return self.batches.divide_last_step()


class StreamSource(BatchSource):
    """A loader over an iterable dataset. Every rank reads the whole dataset and keeps its own slices."""

    def __init__(self, loader: DataLoader[Any], *, world: World, options: LoaderOptions) -> None:
        if has_own_reading(loader):
            raise own_reading_error(loader, do="pass DataLoaderConfiguration(dispatch_batches=True)")
        self.batch_size = loader.batch_size
        self.stream = ShardedStream(
            loader.dataset,
            batch_size=loader.batch_size,
            drop_last=loader.drop_last,
            rank=world.rank,
            world_size=world.world_size,
            even=options.even_batches and world.world_size > 1,
            split=options.split_batches,
        )
        self._rank, self._num_readers = world.rank, world.world_size
        self.inner = copy_loader(
            loader,
            self.stream,
            kind=stateful_loader() if saves_state(loader, options) else DataLoader,
            batch_size=None,
            collate_fn=CollatePart(loader.collate_fn, is_batched=loader.batch_size is None),
            worker_init_fn=ExposeUsersDataset(loader.worker_init_fn) if loader.num_workers else None,
        )

    def steps(self, skip: int) -> Steps:
        first_pass, self.first_pass = self.first_pass, None
        return islice(self._read(first_pass), skip, None)

    def _read(self, first_pass: DuplicateSamplesCheck | None) -> Steps:
        self.ended_early = False
        for batch, facts, columns in iterate_like_rank_zero(self.inner, self.stream):
            if first_pass is not None and columns is not None:
                first_pass.compare_stream(columns)
                first_pass = None
            if facts is not None and facts.sizes[self._rank] == 0:
                self.ended_early = True
                return
            yield batch, facts

    def num_steps(self, plan: PassPlan) -> int:
        return self.stream.num_steps()

    def set_even(self, even: bool) -> None:
        self.stream.even = even and self._num_readers > 1


def rows_check(loader: DataLoader[Any], slice_fn: SliceFn | None) -> Callable[[Any, int | None], None] | None:
    """Return the check that a batch of ``loader`` can be split; None if the user's function splits it."""
    if slice_fn is not None:
        return None
    return partial(require_rows_per_sample, is_default_collate=loader.collate_fn is default_collate)


class DispatchSource(BatchSource):
    """A loader that only rank zero reads. Loaders and datasets on other ranks are never used.

    Collective: the constructor.
    """

    is_dispatched = True

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        world: World,
        options: LoaderOptions,
        slice_fn: SliceFn | None,
        device: torch.device | None,
    ) -> None:
        self.inner = loader
        self.even = options.even_batches
        self.slice_fn = slice_fn
        self.batches_per_step = 1 if options.split_batches else world.world_size
        self._world = world
        self._options = options
        self._device = device
        own_samples, own_batches = -1, -1
        self._is_counted = False
        self._check = rows_check(loader, slice_fn)
        if world.is_source:
            ahead = 3 * self.batches_per_step  # reads ahead to detect the end
            self._is_counted = slice_fn is None and _counts_samples(loader)
            counted = loader
            if self._is_counted:
                counted = copy.copy(loader)
                counted.collate_fn = CountedCollate(loader.collate_fn)
            plain = PlainSource(counted, options=options, num_ahead=ahead)
            self.inner, self.order, self.workers = plain.inner, plain.order, plain.workers
            own_samples, own_batches = length_of(loader.dataset), length_of(loader)
        own_size = -1 if loader.batch_size is None else loader.batch_size
        own_skip = int(batches_of(loader) is not None)
        of_rank_zero = gather_counts(own_samples, own_batches, int(loader.drop_last), own_size, own_skip)
        self.total_samples, self.total_batches, drop_last, batch_size, can_skip = (counts[0] for counts in of_rank_zero)
        """Length of rank zero's loader; -1 means unknown."""
        self.drop_last = bool(drop_last)
        self._can_skip = bool(can_skip)
        self.batch_size = None if batch_size < 0 else batch_size
        if options.split_batches and self.batch_size is not None:
            require_divisible(self.batch_size, world.world_size)

    def steps(self, skip: int) -> Steps:
        world = self._world
        batches: Iterator[ReadBatch] | None = None
        # Skipped batches that must be read are also split, because the first samples fill the last step.
        num_unread, num_unused = (skip * self.batches_per_step, 0) if self._can_skip else (0, skip)
        if world.is_source:
            read = self._batches_from(num_unread)
            batches = read if self._is_counted else zip(read, repeat(None))
        return islice(self._read(batches), num_unused, None)

    def _read(self, batches: Iterator[ReadBatch] | None) -> Steps:
        world, even = self._world, self.even
        whole = global_batches(
            batches,
            check=self._check,
            world_size=world.world_size,
            split=self._options.split_batches,
            drop_last=self.drop_last,
            finds_end=not even,
            device=self._device,
            non_blocking=self._options.non_blocking,
        )
        size = self.batch_size
        self.ended_early = yield from dispatch(
            whole,
            rank=world.rank,
            world_size=world.world_size,
            batch_size=size if size is None else size * self.batches_per_step // world.world_size,
            even=even,
            slice_fn=self.slice_fn,
        )

    def facts_elsewhere(self) -> DataFacts | None:
        if self._world.is_source:
            return None
        return DataFacts(num_samples=known_length(self.total_samples), batch_size=self.batch_size)

    def num_steps(self, plan: PassPlan) -> int:
        if self.total_batches < 0:
            raise TypeError("rank zero's loader has no length")
        whole, rest = divmod(self.total_batches, self.batches_per_step)
        return whole + (rest > 0 and not self.drop_last)


def _counts_samples(loader: DataLoader[Any]) -> bool:
    """Return whether the samples of each batch can be counted where they are collated, and need to be."""
    return (
        loader.batch_sampler is not None
        and not has_own_reading(loader)
        and read_whole_batches(loader) is None  # rows of tensors: their number is that of the samples
    )


def own_reading_error(loader: DataLoader[Any], *, do: str) -> UsageError:
    """Return the error for a loader that reads in its own way, where its batches are made in another way here."""
    kind = type(loader)
    return UsageError(
        f"{kind.__name__} reads its batches in its own __iter__, which cannot be used here",
        where=f"the prepared {kind.__module__}.{kind.__qualname__}",
        do=f"{do}; or change the batches in collate_fn or in the dataset instead of in __iter__",
    )


def saves_state(loader: DataLoader[Any], options: LoaderOptions) -> bool:
    """Return whether ``loader`` is read through a StatefulDataLoader, whose state can be saved during a pass."""
    return options.use_stateful_dataloader or isinstance(loader, SupportsStateDict)


def batches_of(loader: DataLoader[Any]) -> Any:
    """Return the batch sampler of a loader over a map-style dataset, or None for iterable data."""
    if isinstance(loader.dataset, IterableDataset):
        return None
    if isinstance(loader.sampler, BatchSampler):  # DataLoader(sampler=BatchSampler(...), batch_size=None)
        return loader.sampler
    return loader.batch_sampler


def followed(loader: DataLoader[Any], batches: Any) -> Any:
    """Return ``batches``, counted if the user's ``loader`` reads them in its own way."""
    return FollowedBatches(batches, type(loader)) if has_own_reading(loader) else batches


def with_batches(
    loader: DataLoader[Any], batches: Any, *, stateful: bool = False, dataset: Any = None, by_sample: bool = False
) -> DataLoader[Any]:
    """Return a copy of the user's loader with a different batch sampler and, if given, a different ``dataset``.

    With ``by_sample``, samples are read one by one even if whole batches could be (``speed="off"``).
    """
    kind = stateful_loader() if stateful else DataLoader
    if dataset is None and not stateful and not by_sample and (whole := read_whole_batches(loader)) is not None:
        dataset, collate_fn = whole
        return copy_loader(loader, dataset, kind=kind, batch_sampler=batches, collate_fn=collate_fn)  # type: ignore[no-any-return]
    dataset = loader.dataset if dataset is None else dataset
    if loader.batch_sampler is None:
        return copy_loader(loader, dataset, kind=kind, sampler=batches, batch_size=None)  # type: ignore[no-any-return]
    return copy_loader(loader, dataset, kind=kind, batch_sampler=batches)  # type: ignore[no-any-return]


def _batch_size(loader: DataLoader[Any], inner: DataLoader[Any]) -> int | None:
    """Return the batch size of the user's ``loader`` or, if it has none, that of the batch sampler in ``inner``."""
    batches = inner.sampler if isinstance(inner.sampler, BatchSampler) else inner.batch_sampler
    return getattr(batches, "batch_size", None) if loader.batch_size is None else loader.batch_size


def _skip_batches(loader: DataLoader[Any], skip: int) -> tuple[DataLoader[Any], int]:
    """Return a loader that skips batches without reading them, and the number of batches that the caller must still drop."""
    batches = batches_of(loader)
    if not skip or batches is None or type(loader) is not DataLoader:
        return loader, skip
    by_sample = not isinstance(loader.dataset, WholeBatches)
    return with_batches(loader, SkipBatchSampler(batches, skip), stateful=False, by_sample=by_sample), 0
