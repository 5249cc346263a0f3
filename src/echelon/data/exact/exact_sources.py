"""Sources of a rank's micro-batches in the exact modes: map-style data, streams and dispatched data."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    TensorDataset,
    default_collate,
    default_convert,
    get_worker_info,
)

from echelon.base.errors import UsageError
from echelon.base.lengths import length_of
from echelon.base.protocols import SupportsStateDict
from echelon.data.batch import slice_batch
from echelon.data.data_facts import DataFacts, known_length
from echelon.data.exact.exact_batches import (
    ExactBatches,
    ExactOptions,
    UpdateSplitter,
    make_order,
    partial_update_error,
)
from echelon.data.global_batch_slices import Contribution, PassPlan, join_small_batches
from echelon.data.rebuild_loader import FollowedBatches, copy_loader, has_own_reading
from echelon.data.rng.per_sample_rng import OF_COLLATE, OF_WORKERS, KeyedCollate, KeyedDataset, draws_of, key_of
from echelon.data.sharding.batch_source import (
    BatchSource,
    Steps,
    batches_of,
    followed,
    own_reading_error,
    rows_check,
    with_batches,
)
from echelon.data.sharding.dispatch import ReadBatch, SliceFn, global_batches
from echelon.data.sharding.order_check import OrderCheck
from echelon.data.sharding.sharded_stream import ExposeUsersDataset
from echelon.distributed.checks.already_sharded import set_epoch
from echelon.distributed.checks.data_fingerprint import ColumnFingerprint, sample_fingerprints
from echelon.distributed.collectives import broadcast
from echelon.distributed.small_messages import gather_counts
from echelon.world.world import World


class ExactSource(BatchSource):
    """A source that yields (micro-batch, Contribution) pairs and can start a pass at any position."""

    @abstractmethod
    def begin(self, plan: PassPlan, *, epoch: int, position: int, resumed: dict[str, Any] | None) -> None:
        """Prepare the next pass.

        Args:
            position: position of the pass's first sample.
            resumed: the ``state`` that was saved during the pass, or None for a new pass.

        Raises:
            UsageError: the data source cannot start at ``position``.
        """

    @abstractmethod
    def state(self, position: int) -> dict[str, Any]:
        """Return the state needed to resume the pass at ``position``, in addition to the position and the epoch."""


class IndexedExactSource(ExactSource):
    """A loader over a map-style dataset. Each rank reads its slices of every global batch.

    Args:
        num_ranks: number of ranks that each batch is eventually split across; None means the size of ``world``.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        world: World,
        options: ExactOptions,
        num_ranks: int | None = None,
        check: OrderCheck | None = None,
    ) -> None:
        batches = batches_of(loader)
        if batches is None:
            raise UsageError(
                "the exact modes require global batches, but this loader has batch_size=None",
                where="parity='exact'",
                do="pass batch_size or batch_sampler to the DataLoader",
            )
        order = make_order(batches, loader.dataset, options, alone=world.is_alone, check=check)
        self.batch_size = getattr(batches, "batch_size", None) if order.may_join else None
        size = self.batch_size if num_ranks is None else None
        self.batches = ExactBatches(order, _splitter(world, options, size), smallest=num_ranks)
        draws_nothing = type(loader.dataset) is TensorDataset and loader.collate_fn is default_collate
        dataset = None if draws_nothing else KeyedDataset(loader.dataset)
        batches = followed(loader, self.batches)
        self.inner = with_batches(loader, batches, dataset=dataset, by_sample=options.by_sample)
        if not draws_nothing and loader.num_workers:
            self.inner.worker_init_fn = ExposeUsersDataset(loader.worker_init_fn)
        if loader.collate_fn not in (default_collate, default_convert):
            self.inner.collate_fn = KeyedCollate(loader.collate_fn)
        self._is_resumed = False

    def begin(self, plan: PassPlan, *, epoch: int, position: int, resumed: dict[str, Any] | None) -> None:
        batches = self.batches
        batches.epoch, batches.start, batches.plan = epoch, position, plan
        if resumed is not None:
            batches.order.pin(resumed["order"])
        self._is_resumed = resumed is not None

    def state(self, position: int) -> dict[str, Any]:
        return {"order": self.batches.order.state()}

    def steps(self, skip: int) -> Steps:
        self.batches.skip = skip
        before = torch.get_rng_state()
        batches, counted = iter(self.inner), self.inner.batch_sampler
        if self._is_resumed:  # the pass drew the seed of its workers before it was saved
            torch.set_rng_state(before)
        ahead: deque[Contribution] | None = None
        for batch in counted.follow(batches) if isinstance(counted, FollowedBatches) else batches:
            ahead = self.batches.ahead if ahead is None else ahead  # that of this pass, which has begun now
            yield batch, ahead.popleft()

    def num_steps(self, plan: PassPlan) -> int:
        return self.batches.num_steps(plan)

    def dataset_indices(self, epoch: int, positions: range) -> tuple[int, ...] | None:
        if not self.batches.order.is_seekable:  # known on the rank that draws the order
            return None
        found: list[int] = []
        for _batch, indices in self.batches.order.batches(epoch, positions.start):
            found += indices
            if len(found) >= len(positions):
                break
        return tuple(found[: len(positions)])

    def lengths(self) -> tuple[int, int]:
        """Return the number of samples and the number of global batches in a pass; -1 means unknown."""
        return self.batches.order.num_samples(), self.batches.order.num_batches()


@dataclass(frozen=True, slots=True, kw_only=True)
class _GlobalBatch:
    """One rank's part of a global batch from a stream."""

    pieces: list[tuple[Any, Contribution]]
    """This rank's micro-batches. Positions are relative to the global batch."""
    state: Any
    """The dataset's state after this batch, recorded because the loader prefetches; None if the dataset has no state."""
    columns: dict[str, ColumnFingerprint] | None = None
    """Fingerprints of all ranks' samples, in the first global batch of a pass."""


class _RankStream(IterableDataset[Any]):
    """Reads the whole stream on every rank, and yields this rank's part of each global batch.

    Random numbers for shuffling, augmentation and masking depend only on (seed, epoch, worker, position). Therefore every
    rank reads the same samples, even after resuming, and the RNG stream for dropout is unaffected.
    """

    def __init__(self, loader: DataLoader[Any], splitter: UpdateSplitter, *, smallest: int) -> None:
        assert loader.batch_size is not None
        self.dataset: Any = loader.dataset
        self.splitter = splitter
        self.batch_size: int = loader.batch_size
        self.drop_last = loader.drop_last
        self.collate_fn: Callable[[Any], Any] = loader.collate_fn
        self.smallest = smallest
        # The next pass: number of micro-steps, trains, epoch, position. Shared with persistent workers.
        self._next = torch.tensor([1, 1, 0, 0])
        if loader.num_workers:
            self._next.share_memory_()  # type: ignore[no-untyped-call]

    def begin(self, plan: PassPlan, *, epoch: int, position: int) -> None:
        """Prepare the next pass, which reads from ``position``, the dataset's current position."""
        self._next.copy_(torch.tensor([plan.num_micro_steps, int(plan.trains), epoch, position]))

    def __iter__(self) -> Iterator[_GlobalBatch]:
        num_micro_steps, trains, epoch, position = self._next.tolist()
        plan = PassPlan(num_micro_steps=num_micro_steps, trains=bool(trains))
        info = get_worker_info()
        set_epoch(epoch, self.dataset)
        updates = self._updates(epoch, 0 if info is None else info.id, position)
        if not plan.trains:
            updates = join_small_batches(updates, _join, smallest=self.smallest, size=lambda update: len(update[0]))
        columns: dict[str, ColumnFingerprint] | None = None
        for number, (samples, state, key) in enumerate(updates):
            columns = sample_fingerprints(samples) if number == 0 else None
            with draws_of(*key, OF_COLLATE):
                pieces = [
                    (self.collate_fn(samples[one.samples.start : one.samples.stop]), one)
                    for one in self.splitter.split(range(len(samples)), plan)
                ]
            yield _GlobalBatch(pieces=pieces, state=state, columns=columns)

    def _updates(self, epoch: int, worker: int, position: int) -> Iterator[tuple[list[Any], Any, tuple[int, ...]]]:
        """Yield each batch's samples, the dataset's state after them, and the RNG key."""
        source: Iterator[Any] | None = None
        keeps_state = isinstance(self.dataset, SupportsStateDict) and get_worker_info() is None
        while True:
            key = (self.splitter.options.seed, epoch, worker, position)
            with draws_of(*key):
                source = iter(self.dataset) if source is None else source
                samples = list(islice(source, self.batch_size))
            if not samples or (self.drop_last and len(samples) < self.batch_size):
                return
            yield samples, self.dataset.state_dict() if keeps_state else None, key
            position += len(samples)


def _join(batch: tuple[list[Any], Any, Any], following: tuple[list[Any], Any, Any]) -> tuple[list[Any], Any, Any]:
    return [*batch[0], *following[0]], following[1], batch[2]


def _identity(read: _GlobalBatch) -> _GlobalBatch:
    """Collate function for batches that are already collated."""
    return read


class ExactStreamSource(ExactSource):
    """A loader over an iterable dataset. Every rank reads the whole dataset and keeps its slices of every global batch.

    Args:
        num_ranks: number of ranks that each batch is eventually split across; None means the size of ``world``.
    """

    def __init__(
        self, loader: DataLoader[Any], *, world: World, options: ExactOptions, num_ranks: int | None = None
    ) -> None:
        if has_own_reading(loader):
            raise own_reading_error(loader, do="use a map-style dataset, or parity='off'")
        self.batch_size = loader.batch_size
        if self.batch_size is None:
            raise UsageError(
                "the exact modes require global batches, but this loader has batch_size=None",
                where="parity='exact'",
                do="give the DataLoader a batch_size",
            )
        self._is_alone = world.is_alone
        self._splitter = _splitter(world, options, self.batch_size if num_ranks is None else None)
        least = options.canonical_shards or num_ranks or world.world_size
        self._stream = _RankStream(loader, self._splitter, smallest=least)
        self._drawn_from = loader.generator
        self._start = self._num_to_replay = 0
        self._saved: Any = None
        self._states: dict[int, Any] = {}
        self._generator_state: torch.Tensor | None = None
        self.inner = copy_loader(
            loader,
            self._stream,
            kind=DataLoader,
            batch_size=None,
            collate_fn=_identity,
            generator=torch.Generator(),
            worker_init_fn=ExposeUsersDataset(loader.worker_init_fn) if loader.num_workers else None,
        )

    def begin(self, plan: PassPlan, *, epoch: int, position: int, resumed: dict[str, Any] | None) -> None:
        self._start, self._num_to_replay = position, 0
        self._saved = None if resumed is None else resumed["dataset"]
        dataset = self._stream.dataset
        # The state of a dataset in a loader worker is not accessible.
        keeps_state = isinstance(dataset, SupportsStateDict) and not self.inner.num_workers
        if position and keeps_state and self._saved is not None:
            dataset.load_state_dict(self._saved)
        elif position and self._splitter.options.replays:
            self._num_to_replay = position
        elif position:
            raise UsageError(
                f"cannot resume the pass after {position} samples, because an iterable dataset without state_dict() "
                "cannot seek",
                where="parity='exact'",
                do="implement state_dict() and load_state_dict() in the dataset and set num_workers=0, or pass "
                "DataLoaderConfiguration(replay_iterable=True) to read the first samples again",
            )
        if resumed is None:
            # as at the start of each DataLoader pass
            torch.empty((), dtype=torch.int64).random_(generator=self._drawn_from)
        # The loader draws the seed of its workers from this generator.
        self.inner.generator.manual_seed(key_of(self._splitter.options.seed, epoch, OF_WORKERS) >> 1)
        self._stream.begin(plan, epoch=epoch, position=position - self._num_to_replay)
        self._agree_generator(None if resumed is None or not self._num_to_replay else resumed["generator"])

    def _agree_generator(self, saved: torch.Tensor | None) -> None:
        """Set the dataset's generator to rank zero's state at the start of the pass. Collective."""
        generator = getattr(self._stream.dataset, "generator", None)
        if not isinstance(generator, torch.Generator):
            return
        if saved is not None:
            generator.set_state(saved)
        if not self._is_alone:
            generator.set_state(broadcast(generator.get_state()))
        self._generator_state = generator.get_state()

    def state(self, position: int) -> dict[str, Any]:
        return {"dataset": self._states.get(position), "generator": self._generator_state}

    def steps(self, skip: int) -> Steps:
        return _skip_steps(self._read(), skip)

    def _read(self) -> Iterator[tuple[Any, Contribution]]:
        position = self._start - self._num_to_replay
        states = self._states = {self._start: self._saved}
        first_pass, self.first_pass = self.first_pass, None
        for read in self.inner:
            if first_pass is not None and read.columns is not None:
                first_pass.compare_stream(read.columns)
                first_pass = None
            end = position + len(read.pieces[0][1].update)
            if position >= self._start:
                states[end] = read.state
                if len(states) > 3:  # both ends of the current update, and the end of the next one
                    del states[next(iter(states))]
                for batch, one in read.pieces:
                    yield batch, one.shifted(position)
            position = end

    def num_steps(self, plan: PassPlan) -> int:
        num_samples, num_batches = self.lengths()
        if num_samples < 0:
            raise TypeError(f"object of type {type(self._stream.dataset).__name__} has no len()")
        return self._splitter.num_steps(plan, num_samples=num_samples, num_batches=num_batches)

    def lengths(self) -> tuple[int, int]:
        """Return the number of samples and the number of global batches in a pass; -1 means unknown."""
        num_samples, size = length_of(self._stream.dataset), self._stream.batch_size
        if num_samples < 0:
            return -1, -1
        num_samples -= num_samples % size if self._stream.drop_last else 0
        return num_samples, -(-num_samples // size)


class ExactDispatchSource(ExactSource):
    """A loader that only rank zero reads. Every rank receives its slices of every global batch.

    Collective: the constructor.
    """

    is_dispatched = True

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        world: World,
        options: ExactOptions,
        slice_fn: SliceFn | None,
        device: torch.device | None,
        non_blocking: bool,
    ) -> None:
        self.inner = loader
        self._world = world
        self._slice_fn = slice_fn
        self._device = device
        self._non_blocking = non_blocking
        self._reader: ExactSource | None = None
        self._start = 0
        self._plan = PassPlan()
        self._reading: Callable[[], Iterator[ReadBatch]] | None = None
        self._check = rows_check(loader, slice_fn)
        facts = (-1, -1, -1, -1)
        if world.is_source:
            whole = replace(options, max_micro_batch_size=None, canonical_shards=None)
            least = options.canonical_shards or world.world_size
            alone = replace(world, rank=0, world_size=1, mesh=None)
            is_iterable = isinstance(loader.dataset, IterableDataset)
            kind = ExactStreamSource if is_iterable else IndexedExactSource
            reader = kind(loader, world=alone, options=whole, num_ranks=least)
            self._reader, self.inner = reader, reader.inner
            size = reader.batch_size
            facts = (length_of(loader.dataset), *reader.lengths(), -1 if size is None else size)
        of_rank_zero = (counts[0] for counts in gather_counts(*facts))
        self.total_samples, self._num_samples, self._num_batches, batch_size = of_rank_zero
        """Sizes of rank zero's dataset and of a pass; -1 means unknown."""
        self.batch_size = None if batch_size < 0 else batch_size
        self._splitter = _splitter(world, options, self.batch_size)

    def begin(self, plan: PassPlan, *, epoch: int, position: int, resumed: dict[str, Any] | None) -> None:
        self._plan = plan
        self._start = position
        reader = self._reader
        if reader is None:
            return

        def read() -> Iterator[ReadBatch]:  # begins where a failure is announced to the other ranks
            reader.begin(PassPlan(trains=plan.trains), epoch=epoch, position=position, resumed=resumed)
            for batch, one in reader.steps(0):
                assert isinstance(one, Contribution), one
                yield batch, len(one.samples)

        self._reading = read

    def state(self, position: int) -> dict[str, Any]:
        return {} if self._reader is None else self._reader.state(position)

    def steps(self, skip: int) -> Steps:
        return _skip_steps(self._read(), skip)

    def _read(self) -> Iterator[tuple[Any, Contribution]]:
        position, plan, world, split = self._start, self._plan, self._world, self._slice_fn or slice_batch
        for batch, count, _ in global_batches(
            None if self._reading is None else self._reading(),
            check=self._check,
            world_size=world.world_size,
            split=True,
            drop_last=False,
            finds_end=False,
            device=self._device,
            non_blocking=self._non_blocking,
        ):
            for one in self._splitter.split(range(count), plan):
                part = slice(one.samples.start, one.samples.stop)
                part_batch = split(batch, part, process_index=world.rank, num_processes=world.world_size)
                yield part_batch, one.shifted(position)
            position += count

    def facts_elsewhere(self) -> DataFacts | None:
        if self._world.is_source:
            return None
        return DataFacts(num_samples=known_length(self.total_samples), batch_size=self.batch_size)

    def num_steps(self, plan: PassPlan) -> int:
        return self._splitter.num_steps(plan, num_samples=self._num_samples, num_batches=self._num_batches)


def _splitter(world: World, options: ExactOptions, batch_size: int | None) -> UpdateSplitter:
    return UpdateSplitter(rank=world.rank, world_size=world.world_size, options=options, batch_size=batch_size)


def _skip_steps(steps: Iterator[tuple[Any, Contribution]], skip: int) -> Iterator[tuple[Any, Contribution]]:
    """Read and discard the first ``skip`` steps of data that cannot be indexed."""
    for number in range(skip):
        step = next(steps, None)
        if step is None:
            return
        if number == skip - 1 and not step[1].ends_update:
            raise partial_update_error(skip)
    yield from steps
