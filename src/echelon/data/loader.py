"""The loader that ``prepare`` gives back: the user's DataLoader, cut for the ranks, that knows its last batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from echelon.base.errors import UsageError
from echelon.base.protocols import SupportsSetEpoch
from echelon.data.deal import DealtBatches, LastStep
from echelon.data.order import SeedableSampler, SharedBatches, SharedSampler
from echelon.data.place import to_device
from echelon.world.world import World

__all__ = ["LoaderOptions", "PreparedLoader", "Reading", "prepare_loader"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """How loaders are cut for the ranks."""

    split_batches: bool = False
    """The loader's batch size is the global one; each batch is cut for the ranks."""
    even_batches: bool = True
    """Fill the last round with samples from the beginning, so that every rank makes the same number of steps."""
    use_seedable_sampler: bool = False
    """Shuffle by (seed, epoch) instead of by the loader's generator."""
    data_seed: int | None = None
    """The seed of that order; None: the run's."""
    non_blocking: bool = False
    """Copy batches to the device without waiting (with pinned memory)."""


class Reading:
    """Which prepared loaders are being read, innermost last."""

    __slots__ = ("loaders",)

    def __init__(self) -> None:
        self.loaders: list[PreparedLoader] = []

    @property
    def innermost(self) -> PreparedLoader | None:
        """The loader whose loop is the innermost one now."""
        return self.loaders[-1] if self.loaders else None


def prepare_loader(
    loader: DataLoader[Any], *, world: World, options: LoaderOptions, reading: Reading, place: bool = True
) -> PreparedLoader:
    """Cut ``loader`` for the ranks; everything else stays as the user chose it.

    Args:
        loader: the user's.
        world: whose part to read.
        options: how to cut.
        reading: where the loader notes that it is being read.
        place: move batches to the device.

    Raises:
        UsageError: the batch size cannot be split, or an iterable dataset on several ranks.
    """
    seedable = options.use_seedable_sampler and type(loader.sampler) is RandomSampler
    inner: DataLoader[Any] = loader
    if world.world_size > 1 or seedable:
        inner = _rebuild(loader, world, options, seedable=seedable)
    device = world.device if place and world.device.type != "cpu" else None
    return PreparedLoader(inner, loader, world=world, options=options, reading=reading, device=device)


def _rebuild(loader: DataLoader[Any], world: World, options: LoaderOptions, *, seedable: bool) -> DataLoader[Any]:
    if isinstance(loader.dataset, IterableDataset):
        raise UsageError(
            "this version of echelon cannot cut an iterable dataset for several ranks",
            do="use a dataset with an index (__getitem__ and __len__), or let the dataset yield each rank its own part",
        )
    if loader.batch_sampler is None:
        raise UsageError(
            "a loader without batches (batch_size=None) cannot be dealt to ranks",
            do="give the DataLoader a batch_size or a batch_sampler",
        )
    batches: Any
    if type(loader.batch_sampler) is BatchSampler:
        sampler = loader.batch_sampler.sampler
        order = SeedableSampler(sampler, seed=options.data_seed) if seedable else sampler  # type: ignore[arg-type]
        shared = SharedSampler(order) if world.world_size > 1 else order  # type: ignore[arg-type]
        batches = BatchSampler(shared, loader.batch_sampler.batch_size, loader.batch_sampler.drop_last)
    else:
        batches = SharedBatches(loader.batch_sampler)
    if world.world_size > 1:
        batches = DealtBatches(
            batches,
            batch_size=getattr(loader.batch_sampler, "batch_size", None),
            rank=world.rank,
            world_size=world.world_size,
            even=options.even_batches,
            split=options.split_batches,
        )
    return DataLoader(
        loader.dataset,
        batch_sampler=batches,
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


class PreparedLoader(DataLoader[Any]):
    """A DataLoader for scripts, whose batches come from the loader inside; unknown attributes are the user's loader's."""

    def __init__(
        self,
        inner: DataLoader[Any],
        original: DataLoader[Any],
        *,
        world: World,
        options: LoaderOptions,
        reading: Reading,
        device: torch.device | None,
    ) -> None:
        # DataLoader's own __init__ is not called: this object holds a loader, it does not read by itself.
        own = self.__dict__
        own["inner"] = inner
        own["original"] = original
        own["reading"] = reading
        own["device"] = device
        own["end_of_dataloader"] = False
        own["iteration"] = 0
        own["_options"] = options
        own["_world_size"] = world.world_size

    @property
    def batch_sampler(self) -> Any:  # type: ignore[override]
        """The batches of this rank."""
        return self.inner.batch_sampler

    @property
    def total_batch_size(self) -> int | None:
        """Samples of all ranks in one step."""
        size: int | None = self.original.batch_size
        return size if size is None or self._options.split_batches else size * self._world_size

    @property
    def total_dataset_length(self) -> int:
        """Samples of the dataset."""
        return len(self.original.dataset)

    @property
    def last_step(self) -> LastStep | None:
        """At the last batch of a pass: what each rank has of it; None when nothing was repeated or missing."""
        sampler = self.inner.batch_sampler
        return sampler.last_step if self.end_of_dataloader and isinstance(sampler, DealtBatches) else None

    @property
    def remainder(self) -> int:
        """At the last batch of a pass: the real samples of all ranks in it; -1 when all are."""
        last = self.last_step
        return -1 if last is None else sum(last.real)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass; passes count on from there by themselves."""
        self.iteration = epoch
        self._tell_epoch()

    def _tell_epoch(self) -> None:
        if self.inner is self.original and not isinstance(self.inner.sampler, SupportsSetEpoch):
            places: tuple[Any, ...] = (self.inner.dataset,)
        else:
            batches = self.inner.batch_sampler
            places = (batches, getattr(batches, "sampler", None), self.inner.sampler, self.inner.dataset)
        for place in places:
            if isinstance(place, SupportsSetEpoch):
                place.set_epoch(self.iteration)

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._tell_epoch()
        self.end_of_dataloader = False
        loaders = self.reading.loaders
        loaders.append(self)
        try:
            device, non_blocking = self.device, self._options.non_blocking
            batches = iter(self.inner)
            # One batch ahead: the last one is known as such while it is being used.
            batch = next(batches, _END)
            while batch is not _END:
                following = next(batches, _END)
                if following is _END:
                    self.end_of_dataloader = True
                yield batch if device is None else to_device(batch, device, non_blocking=non_blocking)
                batch = following
        finally:  # also after a break or an error in the loop
            loaders.remove(self)
            self.iteration += 1

    def __getattr__(self, name: str) -> Any:
        if name in ("inner", "original"):
            raise AttributeError(name)  # not there yet (unpickling)
        return getattr(self.original, name)


_END: Any = object()
