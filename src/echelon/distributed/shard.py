"""A loader cut for the ranks: the same global order on all of them, each its own part of every global batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from echelon.base.errors import UsageError
from echelon.base.logging import get_logger
from echelon.distributed.collectives import broadcast

__all__ = ["ShardedBatchSampler", "ShardedLoader", "shard"]

logger = get_logger(__name__)
T = TypeVar("T")


def shard(
    loader: DataLoader[T], *, seed: int | None = None, even: bool | None = None, drop_last: bool | None = None
) -> ShardedLoader[T]:
    """Return ``loader`` cut for the ranks: rank r gets its slice of every global batch of world_size * batch_size.

    The order of an epoch is the same on all ranks and depends on (seed, epoch) only; the epoch advances by itself with
    each pass (``set_epoch`` overrides it). Every sample comes exactly once, and all ranks make the same number of
    steps: the last global batches are cut evenly. Only where that is impossible (fewer samples than ranks in the end,
    and batches of one) does ``even`` decide. Dataset, workers, collate, pinning stay as the user chose them.

    Args:
        loader: a map-style DataLoader with a batch size; a shuffling one, a sequential one, or one with a sampler of
            the user's, which rank 0 then draws for all.
        seed: of the shuffle; None: that of the sampler's generator, else 0.
        even: repeat a few samples so that all ranks make the same number of steps (right for training), or leave some
            ranks a step short (exact, right for evaluation); None: even for a shuffling loader.
        drop_last: leave out the last global batch unless it is whole; None: as the loader.

    Collective: with a sampler of the user's, each pass (rank 0's order goes to all ranks).

    Raises:
        UsageError: an iterable dataset, a custom batch sampler, or no batch size.
    """
    if isinstance(loader.dataset, IterableDataset):
        raise UsageError(
            "shard() cannot cut an iterable dataset: it has no index",
            do="let the dataset itself yield every world_size-th item, starting at its rank",
        )
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise UsageError(
            f"shard() needs a loader with a batch size and torch's own batch sampler, not {type(loader.batch_sampler).__name__}",
            do="give DataLoader batch_size= and, if need be, sampler=, and shard that",
        )
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    sampler = ShardedBatchSampler(
        loader.sampler,
        num_samples=len(loader.sampler),  # type: ignore[arg-type]
        batch_size=loader.batch_size,
        rank=rank,
        world_size=world_size,
        seed=_seed_of(loader) if seed is None else seed,
        even=not isinstance(loader.sampler, SequentialSampler) if even is None else even,
        drop_last=loader.drop_last if drop_last is None else drop_last,
    )
    return ShardedLoader(loader, sampler)


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
        """Go on to the next epoch. The loader says so: with workers it asks for the batches twice a pass."""
        self.epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1

    def steps(self) -> list[tuple[int, int]]:
        """Return (start, size) in the global order of each global batch."""
        whole = self.batch_size * self.world_size
        starts = range(0, self.num_samples, whole)
        steps = [(start, min(whole, self.num_samples - start)) for start in starts]
        if steps and steps[-1][1] < whole and self.drop_last:
            return steps[:-1]
        # Fewer samples than ranks in the last step: let the step before it give some up, so that no rank is idle.
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
        for start, size in self.steps():
            # The first (size % world_size) ranks take one sample more.
            share, extra = divmod(size, self.world_size)
            first = start + self.rank * share + min(self.rank, extra)
            count = share + (self.rank < extra)
            if count:
                yield order[first : first + count].tolist()
            elif self.even:
                yield [int(order[(start + self.rank) % self.num_samples])]

    def _order(self, epoch: int) -> torch.Tensor:
        """Return the indices of ``epoch``, int64 [num_samples], equal on all ranks."""
        if isinstance(self.sampler, SequentialSampler):
            return torch.arange(self.num_samples)
        if isinstance(self.sampler, RandomSampler) and not self.sampler.replacement:
            whole = len(self.sampler.data_source)
            if self.num_samples == whole:  # no num_samples= of the user's
                generator = torch.Generator().manual_seed(self.seed + epoch)
                return torch.randperm(whole, generator=generator)
        # A sampler of the user's draws from generators that differ between ranks: rank 0's draw is everybody's.
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
        order = torch.tensor(list(self.sampler), dtype=torch.int64)
        shared: torch.Tensor = broadcast(order)
        return shared


class ShardedLoader(DataLoader[T]):
    """A DataLoader over a ``ShardedBatchSampler`` whose epoch advances with each pass."""

    def __init__(self, loader: DataLoader[T], batch_sampler: ShardedBatchSampler) -> None:
        super().__init__(
            loader.dataset,
            batch_sampler=batch_sampler,
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

    def __iter__(self) -> Any:
        self._batches.begin_pass()
        return super().__iter__()


def _seed_of(loader: DataLoader[Any]) -> int:
    for generator in (getattr(loader.sampler, "generator", None), loader.generator):
        if generator is not None:
            return int(generator.initial_seed())
    return 0
