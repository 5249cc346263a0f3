"""``prepare_loader``: which way a loader is cut for the ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from echelon.base.lengths import length_of
from echelon.base.protocols import SupportsShard, SupportsStateDict
from echelon.base.warnings import UserLine, user_line
from echelon.data.active_loaders import ActiveLoaders, LoaderOptions
from echelon.data.exact.exact_sources import ExactDispatchSource, ExactSource, ExactStreamSource, IndexedExactSource
from echelon.data.loader import DispatchedLoader, PreparedLoader
from echelon.data.loader_agreement import Agreement, agree_on_data, refuse_cut
from echelon.data.sharding.already_sharded import OwnPartsSource
from echelon.data.sharding.batch_source import (
    BatchSource,
    DispatchSource,
    OwnShardsSource,
    PlainSource,
    ShardedSource,
    StreamSource,
    batches_of,
)
from echelon.data.sharding.dispatch import SliceFn
from echelon.data.sharding.order_check import OrderCheck
from echelon.distributed.checks.already_sharded import OwnCut, is_divisible_again
from echelon.distributed.checks.duplicate_samples import FirstPass
from echelon.world.world import World

__all__ = ["prepare_loader"]


def prepare_loader(
    loader: DataLoader[Any],
    *,
    world: World,
    options: LoaderOptions,
    reading: ActiveLoaders,
    place: bool = True,
    slice_fn: SliceFn | None = None,
) -> PreparedLoader:
    """Cut ``loader`` for the ranks, unless it has been cut already; everything else stays as the user chose it.

    Args:
        loader: the user's. Where rank zero dispatches, the other ranks' may be one over an empty dataset.
        world: whose part to read.
        options: how to cut.
        reading: where the loader notes that it is being read.
        place: move batches to the device.
        slice_fn: cuts a dispatched batch, called as ``slice_fn(batch, slice, process_index=, num_processes=)``.

    Collective: every rank, in the same order.

    Raises:
        UsageError: the loader cannot be cut in the way asked for, or has been cut for others than these ranks.
        DesyncError: the ranks have datasets of different lengths, or (exact modes) of different samples.
    """
    is_iterable = isinstance(loader.dataset, IterableDataset)
    dispatches = options.dispatch_batches
    if dispatches is None:
        dispatches = is_iterable and place
    stateful = options.use_stateful_dataloader or isinstance(loader, SupportsStateDict)
    seedable = options.use_seedable_sampler
    target = world.device if place else None
    even, split, seed = options.even_batches, options.split_batches, options.data_seed
    source: BatchSource
    line = user_line()
    agreement = agree_on_data(
        loader,
        world=world,
        batches=batches_of(loader),
        already_sharded=options.already_sharded,
        dispatches=options.dispatch_batches is True,
        is_exact=options.exact is not None,
        line=line,
    )
    cut = agreement.cut
    if cut is not None:
        _refuse_what_cannot_be(cut, loader, options, line=line)
        dispatches = dispatches and options.dispatch_batches is True  # a whole batch is cut; a share is kept
    if options.exact is not None:
        return _prepare_exact(
            loader,
            world=world,
            options=options,
            reading=reading,
            target=target,
            dispatches=dispatches,
            slice_fn=slice_fn,
            first_pass=_first_pass(agreement, world=world, line=line, reads_own=False, is_error=True),
            check=_order_check(loader, agreement, line=line, is_error=True),
        )
    if world.world_size == 1:
        seedable = seedable and type(loader.sampler) is RandomSampler
        source = PlainSource(loader, seed=seed, seedable=seedable, stateful=stateful)
    elif cut is not None:
        source = OwnPartsSource(
            loader, world=world, agreement=agreement, even=even, seed=seed, seedable=seedable, stateful=stateful
        )
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
        source = ShardedSource(
            loader,
            world=world,
            even=even,
            split=split,
            seed=seed,
            seedable=seedable,
            stateful=stateful,
            check=_order_check(loader, agreement, line=line, is_error=False),
        )
    elif not split and isinstance(loader.dataset, SupportsShard) and loader.dataset.n_shards >= world.world_size:
        source = OwnShardsSource(loader, world=world, even=even, stateful=stateful)
    else:
        source = StreamSource(loader, world=world, even=even, split=split, stateful=stateful)
    reads_own = isinstance(source, (OwnPartsSource, OwnShardsSource))
    source.first_pass = _first_pass(agreement, world=world, line=line, reads_own=reads_own, is_error=False)
    device = target if target is not None and target.type != "cpu" else None
    return PreparedLoader(source, loader, world=world, options=options, reading=reading, device=device)


def _prepare_exact(
    loader: DataLoader[Any],
    *,
    world: World,
    options: LoaderOptions,
    reading: ActiveLoaders,
    target: torch.device | None,
    dispatches: bool,
    slice_fn: SliceFn | None,
    first_pass: FirstPass | None,
    check: OrderCheck | None,
) -> PreparedLoader:
    exact = options.exact
    assert exact is not None
    # Bits depend on what is collated together: rank zero collates whole batches, and one process does so, too.
    is_bitwise = exact.canonical_shards is not None and not isinstance(loader.dataset, IterableDataset)
    if dispatches and (world.world_size > 1 or is_bitwise):
        source: ExactSource = ExactDispatchSource(
            loader,
            world=world,
            options=exact,
            slice_fn=slice_fn,
            device=target,
            non_blocking=options.non_blocking,
        )
        return DispatchedLoader(source, loader, world=world, options=options, reading=reading, device=None)
    if isinstance(loader.dataset, IterableDataset):
        source = ExactStreamSource(loader, world=world, options=exact)
    else:
        source = IndexedExactSource(loader, world=world, options=exact, check=check)
    source.first_pass = first_pass
    device = target if target is not None and target.type != "cpu" else None
    return PreparedLoader(source, loader, world=world, options=options, reading=reading, device=device)


def _refuse_what_cannot_be(cut: OwnCut, loader: DataLoader[Any], options: LoaderOptions, *, line: UserLine) -> None:
    """Raise where a loader that has been cut already is asked for more than its own part."""
    if options.exact is not None:
        # What torch's own sampler has divided can be put together again: it is one order, which depends on (seed, epoch).
        batches = batches_of(loader)
        if cut.place == "sampler" and type(batches) is BatchSampler and is_divisible_again(batches.sampler):
            return
        mode = "bitwise" if options.exact.canonical_shards is not None else "exact"
        raise refuse_cut(
            cut,
            mode=f"parity={mode!r} cuts every batch so that any number of processes makes the same updates",
            line=line,
        )
    if options.dispatch_batches:
        raise refuse_cut(
            cut, mode="dispatch_batches=True lets rank zero alone read: the others' shares would be lost", line=line
        )
    if options.split_batches:
        raise refuse_cut(
            cut,
            mode="split_batches=True cuts each of its batches: each process would read only a piece of its share",
            line=line,
        )


def _order_check(loader: DataLoader[Any], agreement: Agreement, *, line: UserLine, is_error: bool) -> OrderCheck | None:
    """Return what compares the ranks' samplers; None where they are known not to know ranks, or nobody is there."""
    batches = batches_of(loader)
    sampler = batches.sampler if type(batches) is BatchSampler else batches
    if type(sampler).__module__.startswith(("torch.", "echelon.")) or not agreement.processes:
        return None
    return OrderCheck(sampler, num_samples=length_of(loader.dataset), line=line, is_error=is_error)


def _first_pass(
    agreement: Agreement, *, world: World, line: UserLine, reads_own: bool, is_error: bool
) -> FirstPass | None:
    """Return what compares the first pass of this rank with those of the others; None: nobody else is there."""
    if world.world_size == 1 or not agreement.reads_alone:
        return None
    return FirstPass(
        agreement.token,
        rank=world.rank,
        world_size=world.world_size,
        line=line,
        reads_own=reads_own,
        do=_KEPT if reads_own else _CUT,
        is_error=is_error,
    )


_KEPT = (
    "let the loader's own cut give each rank other samples, or leave it out and let echelon cut the loader "
    "(already_sharded=False); accelerator.allow_unsharded(loader), in the place of prepare, is for a loader of which every "
    "process shall read all"
)
_CUT = (
    "give every rank the same dataset, whose samples depend on the index (or the place in the stream) alone; or, if each rank "
    "has its own share on purpose, say already_sharded=True"
)
