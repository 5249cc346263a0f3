"""Provides ``shard``, which makes each rank read its slice of every global batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from echelon.base.errors import DesyncError, UsageError
from echelon.base.fork_repair import repair_fork
from echelon.base.logging import get_logger
from echelon.base.messages.translation import gettext as _, gettext_noop as N_
from echelon.base.warnings import UserLine, user_line, warn
from echelon.distributed.checks.already_sharded import (
    ExistingSharding,
    SamplerEpochs,
    check_shards,
    samplers_of,
    set_epoch,
)
from echelon.distributed.checks.data_fingerprint import (
    are_shards,
    are_table_shards,
)
from echelon.distributed.checks.duplicate_samples import DuplicateSamplesCheck
from echelon.distributed.checks.loader_agreement import gather_loader_facts
from echelon.distributed.checks.ungathered_metrics import DatasetAccess, UngatheredMetricsCheck
from echelon.distributed.collectives import broadcast
from echelon.distributed.division import slice_range
from echelon.distributed.record.log import record_object
from echelon.distributed.record.object_facts import loader_facts
from echelon.distributed.record.recorder import ProcessRecorder, recorder_of_process
from echelon.distributed.structure import ignorant_find_batch_size

logger = get_logger(__name__)
METRICS: Final = UngatheredMetricsCheck(
    N_('use total = echelon.distributed.reduce(total, "sum") after the loop, or gather() in it')
)
"""The check that covers all loaders that ``shard()`` has returned in this process."""
T = TypeVar("T")
_KEPT = (
    "collate_fn",
    "generator",
    "in_order",
    "multiprocessing_context",
    "num_workers",
    "persistent_workers",
    "pin_memory",
    "prefetch_factor",
    "timeout",
    "worker_init_fn",
)


def shard(
    loader: DataLoader[T],
    *,
    seed: int | None = None,
    even: bool | None = None,
    drop_last: bool | None = None,
    already_sharded: bool | None = None,
) -> ShardedLoader[T]:
    """Shard ``loader``: each rank gets its slice of every global batch of world_size * batch_size samples.

    The order of samples in an epoch is the same on all ranks and depends only on the seed and the epoch. The epoch advances
    with each pass, and ``set_epoch`` overrides it. Every sample is used exactly once, and all ranks take the same number of
    steps, because the last global batches are split evenly. ``even`` matters only if that is impossible (fewer samples than
    ranks remain, and the batch size is one). The dataset, workers, collate function and memory pinning stay unchanged.

    A loader that is already sharded (for example, by a ``DistributedSampler`` or another sampler with ``num_replicas`` and
    ``rank``, by webdataset's ``split_by_node``, or by an iterable dataset that shards itself) is not sharded again. Each rank
    reads its own shard, and ``set_epoch`` is forwarded to the sampler and the dataset.

    Args:
        loader: an already sharded loader, or a map-style DataLoader with a batch size. It may shuffle, be sequential, or have
            a custom sampler, whose order rank 0 then draws for all ranks.
        seed: the shuffle's seed (default: the initial seed of the sampler's or the loader's generator, else 0).
        even: if True, repeat a few samples so that all ranks take the same number of steps (for training); if False, let
            some ranks end one step early (exact, for evaluation). Default: True unless the loader is sequential.
        drop_last: drop the last global batch if it is incomplete (default: as in the loader).
        already_sharded: if True, each rank's loader yields its own shard; if False, shard the loader in any case (default:
            detect it).

    Collective: call on every rank. With a custom sampler, each pass is collective, too, because rank 0 broadcasts its order.

    Raises:
        UsageError: the dataset is iterable and does not shard itself; the loader has a custom batch sampler or no batch size;
            it is sharded for a different number of ranks; or it is already sharded and ``seed``, ``even`` or ``drop_last`` is
            passed.

    Examples:
        >>> loader = shard(DataLoader(dataset, batch_size=8, shuffle=True))
        >>> for x, y in loader:
        ...     loss = torch.nn.functional.mse_loss(model(x), y)
    """
    repair_fork()  # also for a group that the script has created
    line = user_line()
    facts = _agree(loader, already_sharded=already_sharded, line=line)
    if facts.sharding is not None:
        given = {"seed": seed, "even": even, "drop_last": drop_last}
        named = [f"{name}={value}" for name, value in given.items() if value is not None]
        if named:
            raise UsageError(
                f"{', '.join(named)} has no effect, because the loader is already sharded by {facts.sharding.what}",
                where=str(line),
                do=f"remove {', '.join(named)}, or the loader's own sharding",
            )
        record_object("dataloader", loader_facts(loader, total_batch_size=None))
        return ShardedLoader(loader, PreshardedBatches(loader), first_pass=facts.first_pass(line, reads_own=True))
    if isinstance(loader.dataset, IterableDataset):
        raise UsageError(
            _("shard() cannot shard an iterable dataset, because it does not support indexing"),
            do=_(
                "make the dataset yield only every world_size-th item, starting at its rank. If it already does, set "
                "already_sharded=True"
            ),
        )
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise UsageError(
            f"expected a loader with a batch size and torch's own batch sampler, but got {type(loader.batch_sampler).__name__}",
            do="build the DataLoader with batch_size= and, if needed, sampler=",
        )
    if facts.differ:
        warn(
            _(
                "the ranks passed different data to shard(): their datasets ({name}) have different samples at the "
                "same indices, so sharding them again loses most samples. Give every rank the whole dataset, or call "
                "shard(..., already_sharded=True)",
                name=type(loader.dataset).__name__,
            ),
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
    record_object("dataloader", loader_facts(loader, total_batch_size=loader.batch_size * facts.world_size))
    return ShardedLoader(loader, sampler, first_pass=facts.first_pass(line, reads_own=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """Facts about a loader, collected from all ranks."""

    rank: int
    world_size: int
    token: int
    sharding: ExistingSharding | None
    differ: bool
    """Whether the ranks' datasets hold different samples, other than random numbers drawn by each rank."""

    def first_pass(self, line: UserLine, *, reads_own: bool) -> DuplicateSamplesCheck | None:
        """Return the check that compares the ranks' first passes."""
        if self.world_size == 1:
            return None
        do = (
            "give each rank different samples, or remove the loader's own sharding and let shard() shard it"
            if reads_own
            else "give every rank the same dataset, with samples that depend only on the index, or call "
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
    """Detect whether the loader is already sharded and whether the ranks have the same data. Collective: call on every rank."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    is_iterable = isinstance(loader.dataset, IterableDataset)
    mine, everybody = gather_loader_facts(
        loader, rank=rank, world_size=world_size, batches=loader.batch_sampler, already_sharded=already_sharded
    )
    # A map-style dataset may know its rank for other reasons.
    shardings = [
        facts.sharding
        for facts in everybody
        if facts.sharding is not None and (facts.is_iterable or facts.sharding.place != "dataset" or already_sharded)
    ]
    if shardings and len(shardings) < world_size:
        raise DesyncError(
            f"the loader is already sharded by {shardings[0].what}, but not on every rank",
            where=str(line),
            do="build the same kind of loader on every rank",
        )
    sharding = mine.sharding if shardings and check_shards(shardings, world_size=world_size, line=line) else None
    columns = [facts.columns for facts in everybody]
    num_samples = [-1 if facts.is_iterable else facts.num_samples for facts in everybody]
    if not shardings and already_sharded is None and not is_iterable and are_table_shards(columns, num_samples):
        name = type(loader.dataset).__name__
        sharding = ExistingSharding(what=f"its dataset ({name} with different rows on each rank)", place="dataset")
    first, *others = columns
    same_seeds = len({facts.seed for facts in everybody}) == 1
    return _Facts(
        rank=rank,
        world_size=world_size,
        token=everybody[0].token,
        sharding=sharding,
        differ=bool(others) and all(are_shards(first, other, same_seeds=same_seeds) for other in others),
    )


class PreshardedBatches(Sampler[Any]):
    """The batches or items that an already sharded loader's samplers yield on this rank."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self.batches: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self._epochs = SamplerEpochs(loader)
        self._next_epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch for the next pass; it advances by one with each later pass."""
        self._next_epoch = epoch
        self._set_epoch_of_samplers(epoch)

    def begin_pass(self) -> None:
        """Start the next epoch, or the epoch that the script set on its sampler."""
        changed = self._epochs.changed()
        epoch = self._next_epoch if changed is None else changed
        self._set_epoch_of_samplers(epoch)
        self._next_epoch = epoch + 1

    def _set_epoch_of_samplers(self, epoch: int) -> None:
        set_epoch(epoch, *samplers_of(self.loader), self.loader.dataset)
        self._epochs.record()

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class ShardedBatchSampler(Sampler[list[int]]):
    """Yields one rank's batches, which are slices of one global order."""

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
        """Set the epoch for the next pass; it advances by one with each later pass."""
        self._next_epoch = epoch

    def begin_pass(self) -> None:
        """Start the next epoch. The loader calls this once per pass, because workers make it call ``__iter__`` twice."""
        self.epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1

    def steps(self, num_samples: int | None = None) -> list[tuple[int, int]]:
        """Return (start, size) of each global batch in an order of ``num_samples`` (default: the sampler's length)."""
        num_samples = self.num_samples if num_samples is None else num_samples
        whole = self.batch_size * self.world_size
        steps = [(start, min(whole, num_samples - start)) for start in range(0, num_samples, whole)]
        if steps and steps[-1][1] < whole and self.drop_last:
            return steps[:-1]
        # If the last step has fewer samples than ranks, it takes some of the previous step, so that no rank is idle.
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
        for start, size in self.steps(len(order)):  # a sampler may yield a different number than its length
            own = slice_range(range(start, start + size), num_parts=self.world_size, part=self.rank)
            if own:
                yield order[own.start : own.stop].tolist()
            elif self.even:
                yield [int(order[(start + self.rank) % len(order)])]

    def _order(self, epoch: int) -> torch.Tensor:
        """Return the sample indices for ``epoch``, int64 [num_samples], which are equal on all ranks."""
        if isinstance(self.sampler, SequentialSampler):
            return torch.arange(self.num_samples)
        if isinstance(self.sampler, RandomSampler) and not self.sampler.replacement:
            whole = len(self.sampler.data_source)
            if self.num_samples == whole:  # the user did not set num_samples=
                generator = torch.Generator().manual_seed(self.seed + epoch)
                return torch.randperm(whole, generator=generator)
        # A custom sampler may draw from generators that differ between ranks, so rank 0's order is used.
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
        order = torch.tensor(list(self.sampler), dtype=torch.int64)
        shared: torch.Tensor = broadcast(order)
        return shared


class ShardedLoader(DataLoader[T]):
    """A DataLoader with a ``ShardedBatchSampler`` (or ``PreshardedBatches``) whose epoch advances with each pass."""

    def __init__(
        self,
        loader: DataLoader[T],
        batch_sampler: ShardedBatchSampler | PreshardedBatches,
        *,
        first_pass: DuplicateSamplesCheck | None = None,
    ) -> None:
        self._access = DatasetAccess()
        super().__init__(
            loader.dataset,
            **_batching_options(loader, batch_sampler),
            **options_of(loader),
        )
        # DataLoader sets an unused SequentialSampler and forbids assignment, but `loader.sampler.set_epoch(epoch)`, as in
        # DistributedSampler tutorials, must work.
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
                    N_(
                        "the last step of each epoch has fewer samples than ranks, so %d sample(s) are used twice. To "
                        "let these ranks end one step early instead, use shard(..., even=False)"
                    ),
                    missing,
                )

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch for the next pass; it advances by one with each later pass."""
        self._batches.set_epoch(epoch)

    @property
    def dataset(self) -> Any:
        """The user's whole dataset. Its length must not be used to average results that were not gathered."""
        self._access.record()
        return self._dataset

    @dataset.setter
    def dataset(self, dataset: Any) -> None:
        self._dataset = dataset

    def __iter__(self) -> Any:
        METRICS.begin_pass()
        self._batches.begin_pass()
        first_pass, self._first_pass = self._first_pass, None
        batches: Iterator[Any] = super().__iter__()
        recorder = recorder_of_process()
        if recorder is not None:
            batches = _CountedBatches(batches, recorder)
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return batches
        return _track_pass(batches if first_pass is None else _compare_first_pass(batches, first_pass), self._access)


def options_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the options of ``loader``, except its dataset and those that define its batches."""
    return {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}


def _batching_options(loader: DataLoader[Any], batches: ShardedBatchSampler | PreshardedBatches) -> dict[str, Any]:
    if isinstance(batches, ShardedBatchSampler):
        return {"batch_sampler": batches}
    if isinstance(loader.dataset, IterableDataset):
        return {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if loader.batch_sampler is None:
        return {"sampler": batches, "batch_size": None}
    return {"batch_sampler": batches}


class _CountedBatches(Iterator[T]):
    """Returns ``batches``, and records the sizes of those that are used for training.

    Not a generator, which an exception of the dataset would end: a loop may go on with the next batch.
    """

    def __init__(self, batches: Iterator[T], recorder: ProcessRecorder) -> None:
        self._batches, self._recorder = batches, recorder

    def __next__(self) -> T:
        batch = next(self._batches)
        if torch.is_grad_enabled() and (size := ignorant_find_batch_size(batch)) is not None:
            self._recorder.num_samples += size
        return batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]


def _compare_first_pass(batches: Iterator[T], first_pass: DuplicateSamplesCheck) -> Iterator[T]:
    """Yield ``batches``, and let ``first_pass`` compare them with those on the other ranks."""
    for batch in batches:
        first_pass.add(batch)
        yield batch
    first_pass.end()


def _track_pass(batches: Iterator[T], access: DatasetAccess) -> Iterator[T]:
    """Yield ``batches``, and record the pass for the ungathered-metrics check."""
    since, is_first = None, True
    for batch in batches:
        if is_first:  # after rank zero has broadcast the order of a custom sampler
            since, is_first = METRICS.num_collectives(), False
        yield batch
        METRICS.begin_pass()
    METRICS.end_pass(access, since)


def _seed_of(loader: DataLoader[Any]) -> int:
    for generator in (getattr(loader.sampler, "generator", None), loader.generator):
        if generator is not None:
            return int(generator.initial_seed())
    return 0
