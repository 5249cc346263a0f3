"""``prepare_loader``: which way a loader is cut for the ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from echelon.base.protocols import SupportsShard, SupportsStateDict
from echelon.data.agree import agree_on_data
from echelon.data.dispatch import SliceFn
from echelon.data.exact_sources import ExactDispatchSource, ExactSource, ExactStreamSource, IndexedExactSource
from echelon.data.loader import DispatchedLoader, PreparedLoader
from echelon.data.reading import LoaderOptions, Reading
from echelon.data.sources import (
    DealtSource,
    DispatchSource,
    OwnShardsSource,
    PlainSource,
    Source,
    StreamSource,
    batches_of,
)
from echelon.world.world import World

__all__ = ["prepare_loader"]


def prepare_loader(
    loader: DataLoader[Any],
    *,
    world: World,
    options: LoaderOptions,
    reading: Reading,
    place: bool = True,
    slice_fn: SliceFn | None = None,
) -> PreparedLoader:
    """Cut ``loader`` for the ranks; everything else stays as the user chose it.

    Args:
        loader: the user's. Where rank zero dispatches, the other ranks' may be one over an empty dataset.
        world: whose part to read.
        options: how to cut.
        reading: where the loader notes that it is being read.
        place: move batches to the device.
        slice_fn: cuts a dispatched batch, called as ``slice_fn(batch, slice, process_index=, num_processes=)``.

    Collective: every rank, in the same order.

    Raises:
        UsageError: the loader cannot be cut in the way asked for.
        DesyncError: the ranks have datasets of different lengths.
    """
    is_iterable = isinstance(loader.dataset, IterableDataset)
    dispatches = options.dispatch_batches
    if dispatches is None:
        dispatches = is_iterable and place
    stateful = options.use_stateful_dataloader or isinstance(loader, SupportsStateDict)
    seedable = options.use_seedable_sampler
    target = world.device if place else None
    even, split, seed = options.even_batches, options.split_batches, options.data_seed
    source: Source
    if world.world_size > 1 and not is_iterable and not dispatches:
        agree_on_data(loader, getattr(batches_of(loader), "batch_size", None))
    if options.exact is not None:
        return _prepare_exact(
            loader,
            world=world,
            options=options,
            reading=reading,
            target=target,
            dispatches=dispatches,
            slice_fn=slice_fn,
        )
    if world.world_size == 1:
        seedable = seedable and type(loader.sampler) is RandomSampler
        source = PlainSource(loader, seed=seed, seedable=seedable, stateful=stateful)
    elif dispatches:
        source = DispatchSource(
            loader,
            world=world,
            even=even,
            split=split,
            seed=seed,
            seedable=seedable and type(loader.sampler) is RandomSampler,
            stateful=stateful,
            slice_fn=slice_fn,
            device=target,
            non_blocking=options.non_blocking,
        )
        return DispatchedLoader(source, loader, world=world, options=options, reading=reading, device=None)
    elif not is_iterable:
        source = DealtSource(
            loader, world=world, even=even, split=split, seed=seed, seedable=seedable, stateful=stateful
        )
    elif not split and isinstance(loader.dataset, SupportsShard) and loader.dataset.n_shards >= world.world_size:
        source = OwnShardsSource(loader, world=world, even=even, stateful=stateful)
    else:
        source = StreamSource(loader, world=world, even=even, split=split, stateful=stateful)
    device = target if target is not None and target.type != "cpu" else None
    return PreparedLoader(source, loader, world=world, options=options, reading=reading, device=device)


def _prepare_exact(
    loader: DataLoader[Any],
    *,
    world: World,
    options: LoaderOptions,
    reading: Reading,
    target: torch.device | None,
    dispatches: bool,
    slice_fn: SliceFn | None,
) -> PreparedLoader:
    exact = options.exact
    assert exact is not None
    if dispatches and world.world_size > 1:
        source: ExactSource = ExactDispatchSource(
            loader,
            world=world,
            options=exact,
            slice_fn=slice_fn,
            device=target,
            non_blocking=options.non_blocking,
        )
        return DispatchedLoader(source, loader, world=world, options=options, reading=reading, device=None)
    kind = ExactStreamSource if isinstance(loader.dataset, IterableDataset) else IndexedExactSource
    source = kind(loader, world=world, options=exact)
    device = target if target is not None and target.type != "cpu" else None
    return PreparedLoader(source, loader, world=world, options=options, reading=reading, device=device)
