"""``shard``: each rank reads its slice of every global batch, in one global order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from echelon.base.errors import DesyncError, UsageError
from echelon.base.logging import get_logger
from echelon.base.protocols import SupportsSetEpoch
from echelon.base.warnings import UserLine, user_line, warn
from echelon.distributed.checks.already_sharded import (
    ExistingSharding,
    SamplerEpochs,
    check_shards,
    samplers_of,
)
from echelon.distributed.checks.data_fingerprint import (
    are_shards,
    are_table_shards,
)
from echelon.distributed.checks.duplicate_samples import DuplicateSamplesCheck
from echelon.distributed.checks.loader_agreement import gather_loader_facts
from echelon.distributed.checks.ungathered_metrics import DatasetLength, UngatheredMetricsCheck
from echelon.distributed.collectives import broadcast

__all__ = ["METRICS", "ShardedBatchSampler", "ShardedLoader", "shard"]

logger = get_logger(__name__)
METRICS: Final = UngatheredMetricsCheck('Use total = echelon.distributed.reduce(total, "sum"), or gather() in the loop')
"""Of what ``shard()`` gave in this process."""
T = TypeVar("T")


def shard(
    loader: DataLoader[T],
    *,
    seed: int | None = None,
    even: bool | None = None,
    drop_last: bool | None = None,
    already_sharded: bool | None = None,
) -> ShardedLoader[T]:
    """Return ``loader`` sharded: rank r gets its slice of every global batch of world_size * batch_size samples.

    The order of an epoch is the same on all ranks and depends on (seed, epoch) only; the epoch advances by itself with
    each pass (``set_epoch`` overrides it). Every sample is used exactly once, and all ranks make the same number of
    steps: the last global batches are split evenly. Only where that is impossible (fewer samples than ranks in the end,
    and batches of one) does ``even`` decide. Dataset, workers, collate, pinning stay as the user chose them.

    A loader that is sharded already (by a ``DistributedSampler`` or another sampler that knows ``num_replicas`` and
    ``rank``, by webdataset's ``split_by_node``, by an iterable dataset that shards itself, ...) stays so: each rank
    reads its own shard, and ``set_epoch`` reaches the sampler and the dataset.

    Args:
        loader: a map-style DataLoader with a batch size; a shuffling one, a sequential one, or one with a sampler of
            the user's, which rank 0 then draws for all. Or one that is sharded already.
        seed: of the shuffle; None: that of the sampler's generator, else 0.
        even: repeat a few samples so that all ranks make the same number of steps (right for training), or leave some
            ranks a step short (exact, right for evaluation); None: even for a shuffling loader.
        drop_last: leave out the last global batch unless it is whole; None: as the loader.
        already_sharded: each rank's loader yields its own shard (True), or is sharded here in any case (False); None:
            detect it.

    Collective: every rank; with a sampler of the user's, each pass, too (rank 0's order goes to all ranks).

    Raises:
        UsageError: an iterable dataset that does not shard itself, a custom batch sampler, or no batch size; a loader that
            is sharded for other ranks than these, or that is sharded although ``seed``, ``even`` or ``drop_last`` is given.
    """
    line = user_line()
    facts = _agree(loader, already_sharded=already_sharded, line=line)
    if facts.cut is not None:
        given = {"seed": seed, "even": even, "drop_last": drop_last}
        named = [f"{name}={value}" for name, value in given.items() if value is not None]
        if named:
            raise UsageError(
                f"the loader is sharded already by {facts.cut.what}, so {', '.join(named)} has no effect",
                where=str(line),
                do=f"remove {', '.join(named)}, or the loader's own sharding",
            )
        return ShardedLoader(loader, PreshardedBatches(loader), first_pass=facts.first_pass(line, reads_own=True))
    if isinstance(loader.dataset, IterableDataset):
        raise UsageError(
            "shard() cannot shard an iterable dataset: it has no index",
            do="let the dataset itself yield every world_size-th item, starting at its rank (if it does, set "
            "already_sharded=True)",
        )
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise UsageError(
            f"shard() needs a loader with a batch size and torch's own batch sampler, not {type(loader.batch_sampler).__name__}",
            do="build the DataLoader with batch_size= and, if needed, sampler=",
        )
    if facts.differ:
        warn(
            f"the ranks gave shard() different data: their datasets ({type(loader.dataset).__name__}) have other samples at the "
            "same indices, so sharding them again loses most samples. Give every rank the whole dataset, or call "
            "shard(..., already_sharded=True)",
            at=line,
        )
    sampler = ShardedBatchSampler(
        loader.sampler,
        num_samples=len(loader.sampler),  # type: ignore[arg-type]
        batch_size=loader.batch_size,
        rank=facts.rank,
        world_size=facts.world_size,
        seed=_seed_of(loader) if seed is None else seed,
        even=not isinstance(loader.sampler, SequentialSampler) if even is None else even,
        drop_last=loader.drop_last if drop_last is None else drop_last,
    )
    return ShardedLoader(loader, sampler, first_pass=facts.first_pass(line, reads_own=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """What the ranks know about a loader."""

    rank: int
    world_size: int
    token: int
    cut: ExistingSharding | None
    differ: bool
    """The datasets hold different samples, which are not random numbers that each rank has drawn."""

    def first_pass(self, line: UserLine, *, reads_own: bool) -> DuplicateSamplesCheck | None:
        """Return the check that compares the first passes of the ranks."""
        if self.world_size == 1:
            return None
        do = (
            "give each rank different samples, or remove the loader's own sharding and let shard() do it"
            if reads_own
            else "give every rank the same dataset, whose samples depend only on the index, or call "
            "shard(..., already_sharded=True) if each rank has its own shard"
        )
        return DuplicateSamplesCheck(
            self.token,
            rank=self.rank,
            world_size=self.world_size,
            line=line,
            reads_own=reads_own,
            do=do,
            is_error=False,
        )


def _agree(loader: DataLoader[Any], *, already_sharded: bool | None, line: UserLine) -> _Facts:
    """Detect whether the loader is sharded, and whether the ranks have the same data. Collective."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    is_iterable = isinstance(loader.dataset, IterableDataset)
    mine, everybody = gather_loader_facts(
        loader, rank=rank, world_size=world_size, batches=loader.batch_sampler, already_sharded=already_sharded
    )
    # A dataset with an index may know its rank for other reasons.
    cuts = [
        facts.cut
        for facts in everybody
        if facts.cut is not None and (facts.is_iterable or facts.cut.place != "dataset" or already_sharded)
    ]
    if cuts and len(cuts) < world_size:
        raise DesyncError(
            f"the loader is sharded already by {cuts[0].what}, but not on every rank",
            where=str(line),
            do="build the same kind of loader on every rank",
        )
    cut = mine.cut if cuts and check_shards(cuts, world_size=world_size, line=line) else None
    columns = [facts.columns for facts in everybody]
    num_samples = [-1 if facts.is_iterable else facts.num_samples for facts in everybody]
    if not cuts and already_sharded is None and not is_iterable and are_table_shards(columns, num_samples):
        name = type(loader.dataset).__name__
        cut = ExistingSharding(what=f"its dataset ({name}, of which each rank has other rows)", place="dataset")
    first, *others = columns
    same_seeds = len({facts.seed for facts in everybody}) == 1
    return _Facts(
        rank=rank,
        world_size=world_size,
        token=everybody[0].token,
        cut=cut,
        differ=bool(others) and all(are_shards(first, other, same_seeds=same_seeds) for other in others),
    )


class PreshardedBatches(Sampler[Any]):
    """The batches, or the items, that the samplers of a sharded loader yield on this rank.

    Args:
        loader: the user's.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self.batches: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self._epochs = SamplerEpochs(loader)
        self._next_epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass; the passes after it count on from there."""
        self._next_epoch = epoch
        self._set_epoch_of_samplers(epoch)

    def begin_pass(self) -> None:
        """Start the next epoch, or the one that the script has set on its sampler."""
        changed = self._epochs.changed()
        epoch = self._next_epoch if changed is None else changed
        self._set_epoch_of_samplers(epoch)
        self._next_epoch = epoch + 1

    def _set_epoch_of_samplers(self, epoch: int) -> None:
        for owner in (*samplers_of(self.loader), self.loader.dataset):
            if isinstance(owner, SupportsSetEpoch):
                owner.set_epoch(epoch)
        self._epochs.note()

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class ShardedBatchSampler(Sampler[list[int]]):
    """The batches of one rank: slices of one global order."""

    def __init__(
        self,
        sampler: Sampler[int] | Sequence[int] | Any,
        *,
        num_samples: int,
        batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        even: bool,
        drop_last: bool,
    ) -> None:
        self.sampler = sampler
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.even = even
        self.drop_last = drop_last
        self.epoch = 0
        self._next_epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass; the passes after it count on from there."""
        self._next_epoch = epoch

    def begin_pass(self) -> None:
        """Start the next epoch. Called by the loader, which with workers asks for the batches twice a pass."""
        self.epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1

    def steps(self, num_samples: int | None = None) -> list[tuple[int, int]]:
        """Return (start, size) in the global order (of ``num_samples``; None: as its length says) of each global batch."""
        num_samples = self.num_samples if num_samples is None else num_samples
        whole = self.batch_size * self.world_size
        steps = [(start, min(whole, num_samples - start)) for start in range(0, num_samples, whole)]
        if steps and steps[-1][1] < whole and self.drop_last:
            return steps[:-1]
        # Fewer samples than ranks in the last step: it takes some of the step before it, so that no rank is idle.
        if len(steps) > 1 and steps[-1][1] < self.world_size <= whole - self.world_size:
            (before, size), (_, rest) = steps[-2], steps[-1]
            moved = self.world_size - rest
            steps[-2:] = [(before, size - moved), (before + size - moved, self.world_size)]
        return steps

    def __len__(self) -> int:
        steps = self.steps()
        idle = not self.even and bool(steps) and self.rank >= steps[-1][1]
        return len(steps) - int(idle)

    def __iter__(self) -> Iterator[list[int]]:
        return self._slices(self.epoch)

    def _slices(self, epoch: int) -> Iterator[list[int]]:
        order = self._order(epoch)
        for start, size in self.steps(len(order)):  # a sampler may give another number than its length says
            # The first (size % world_size) ranks take one sample more.
            share, extra = divmod(size, self.world_size)
            first = start + self.rank * share + min(self.rank, extra)
            count = share + (self.rank < extra)
            if count:
                yield order[first : first + count].tolist()
            elif self.even:
                yield [int(order[(start + self.rank) % len(order)])]

    def _order(self, epoch: int) -> torch.Tensor:
        """Return the indices of ``epoch``, int64 [num_samples], equal on all ranks."""
        if isinstance(self.sampler, SequentialSampler):
            return torch.arange(self.num_samples)
        if isinstance(self.sampler, RandomSampler) and not self.sampler.replacement:
            whole = len(self.sampler.data_source)
            if self.num_samples == whole:  # no num_samples= of the user's
                generator = torch.Generator().manual_seed(self.seed + epoch)
                return torch.randperm(whole, generator=generator)
        # A sampler of the user's draws from generators that differ between ranks: rank 0's draw counts.
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
        order = torch.tensor(list(self.sampler), dtype=torch.int64)
        shared: torch.Tensor = broadcast(order)
        return shared


class ShardedLoader(DataLoader[T]):
    """A DataLoader over a ``ShardedBatchSampler`` (or ``PreshardedBatches``) whose epoch advances with each pass."""

    def __init__(
        self,
        loader: DataLoader[T],
        batch_sampler: ShardedBatchSampler | PreshardedBatches,
        *,
        first_pass: DuplicateSamplesCheck | None = None,
    ) -> None:
        self._length = DatasetLength()
        super().__init__(
            loader.dataset,
            **_choices_of_batches(loader, batch_sampler),
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            in_order=loader.in_order,
        )
        # DataLoader puts an unused SequentialSampler here and forbids assignment; tutorials call
        # `loader.sampler.set_epoch(epoch)` before each epoch, and that must work.
        self.__dict__["sampler"] = batch_sampler
        self._batches = batch_sampler
        self._first_pass = first_pass
        if isinstance(batch_sampler, PreshardedBatches):
            return
        if batch_sampler.even and not batch_sampler.drop_last:
            steps = batch_sampler.steps()
            missing = batch_sampler.world_size - steps[-1][1] if steps else 0
            if missing > 0:
                logger.warning(
                    "the last step of each epoch has fewer samples than there are ranks: %d sample(s) are used twice "
                    "(shard(..., even=False) leaves these ranks a step short instead)",
                    missing,
                )

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass; the passes after it count on from there."""
        self._batches.set_epoch(epoch)

    @property
    def dataset(self) -> Any:
        """The user's, whole; an evaluation that is divided by its length, and shared with nobody, is warned about."""
        self._length.note_access()
        return self._dataset

    @dataset.setter
    def dataset(self, dataset: Any) -> None:
        self._dataset = dataset

    def __iter__(self) -> Any:
        METRICS.begin_pass()
        self._batches.begin_pass()
        first_pass, self._first_pass = self._first_pass, None
        batches = super().__iter__()
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return batches
        return _watched(batches if first_pass is None else _compared(batches, first_pass), self._length)


def _choices_of_batches(loader: DataLoader[Any], batches: ShardedBatchSampler | PreshardedBatches) -> dict[str, Any]:
    if isinstance(batches, ShardedBatchSampler):
        return {"batch_sampler": batches}
    if isinstance(loader.dataset, IterableDataset):
        return {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if loader.batch_sampler is None:
        return {"sampler": batches, "batch_size": None}
    return {"batch_sampler": batches}


def _compared(batches: Iterator[T], first_pass: DuplicateSamplesCheck) -> Iterator[T]:
    """Yield ``batches``, which ``first_pass`` compares with those of the other ranks."""
    is_wanted = True
    for batch in batches:
        is_wanted = is_wanted and first_pass.note(batch)
        yield batch
    if is_wanted:
        first_pass.end()


def _watched(batches: Iterator[T], length: DatasetLength) -> Iterator[T]:
    """Yield ``batches``, and note whether the ranks exchanged anything during an evaluation and after it."""
    since, is_first = None, True
    for batch in batches:
        if is_first:  # an order that rank zero draws has been sent by now
            since, is_first = METRICS.num_collectives(), False
        yield batch
        METRICS.begin_pass()
    METRICS.note_pass(length, since)


def _seed_of(loader: DataLoader[Any]) -> int:
    for generator in (getattr(loader.sampler, "generator", None), loader.generator):
        if generator is not None:
            return int(generator.initial_seed())
    return 0
