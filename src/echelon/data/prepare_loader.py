"""``prepare_loader``: chooses how a loader is sharded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from echelon.base.errors import UsageError
from echelon.base.lengths import length_of
from echelon.base.protocols import SupportsShard, SupportsStateDict
from echelon.base.warnings import UserLine, user_line
from echelon.data.active_loaders import ActiveLoaders, LoaderOptions
from echelon.data.exact.exact_sources import ExactDispatchSource, ExactSource, ExactStreamSource, IndexedExactSource
from echelon.data.loader import DispatchedLoader, PreparedLoader
from echelon.data.pass_position import BatchPosition, SamplePosition
from echelon.data.rebuild_loader import copy_loader, has_own_reading, stateful_loader
from echelon.data.sharding.batch_source import (
    BatchSource,
    DispatchSource,
    PlainSource,
    ShardedSource,
    StreamSource,
    batches_of,
    own_reading_error,
    saves_state,
)
from echelon.data.sharding.dispatch import SliceFn
from echelon.data.sharding.order_check import OrderCheck
from echelon.data.sharding.presharded_source import PreshardedSource
from echelon.distributed.checks.already_sharded import ExistingSharding, can_undo_sharding
from echelon.distributed.checks.duplicate_samples import DuplicateSamplesCheck
from echelon.distributed.checks.loader_agreement import LoaderAgreement, agree_on_loader
from echelon.world.world import World


def prepare_loader(
    loader: DataLoader[Any],
    *,
    world: World,
    options: LoaderOptions,
    active: ActiveLoaders[PreparedLoader],
    place: bool = True,
    slice_fn: SliceFn | None = None,
) -> PreparedLoader:
    """Shard ``loader`` unless it is already sharded, and keep its other options.

    Args:
        loader: the user's loader. If rank zero dispatches batches, the dataset may be empty on other ranks.
        slice_fn: function that slices a dispatched batch, called as ``slice_fn(batch, slice, process_index=, num_processes=)``.

    Collective: call on every rank, in the same order.

    Raises:
        UsageError: the loader cannot be sharded with these options, or is already sharded for a different number of ranks.
        DesyncError: the ranks have datasets of different lengths or, in the exact modes, with different samples.
    """
    is_exact = options.exact is not None
    line = user_line()
    agreement = agree_on_loader(
        loader,
        world=world,
        batches=batches_of(loader),
        already_sharded=options.already_sharded,
        dispatches=options.dispatch_batches is True,
        is_exact=is_exact,
        line=line,
    )
    device = world.device if place else None
    if loader.pin_memory and device is not None and device.type == "cuda":
        # torch pins for this. A copy that blocks would wait for all kernels in the stream before each step. The pinned batch is
        # the loader's own, and torch does not reuse its memory before the copy has ended.
        options = replace(options, non_blocking=True)
    check = _order_check(loader, agreement, world=world, line=line, is_error=is_exact)
    given = _Given(loader, world, options, agreement, device, slice_fn, check)
    if saves_state(loader, options) and has_own_reading(loader) and not isinstance(loader, SupportsStateDict):
        raise own_reading_error(
            loader, do="remove use_stateful_dataloader=True, or derive the class from StatefulDataLoader"
        )
    if agreement.sharding is not None:
        _refuse_conflicts(agreement.sharding, loader, options, line=line)
    source = _exact_source(given) if is_exact else _source(given)
    kind = SamplePosition if is_exact else BatchPosition
    position = kind(source, loader, world=world, is_stateful=not is_exact and saves_state(loader, options))
    if source.is_dispatched:
        return DispatchedLoader(position, loader, world=world, options=options, active=active, device=None)
    source.first_pass = _first_pass(agreement, world=world, line=line, source=source, is_error=is_exact)
    target = device if device is not None and device.type != "cpu" else None
    return PreparedLoader(position, loader, world=world, options=options, active=active, device=target)


class _Given(NamedTuple):
    """The arguments for building a source."""

    loader: DataLoader[Any]
    world: World
    options: LoaderOptions
    agreement: LoaderAgreement
    device: torch.device | None
    """Device that batches are moved to. If None, batches are not moved."""
    slice_fn: SliceFn | None
    check: OrderCheck | None

    @property
    def dispatches(self) -> bool:
        """Whether rank zero reads for all ranks. By default, this is False if the loader is already sharded."""
        wanted = self.options.dispatch_batches
        if wanted is None:
            is_iterable = isinstance(self.loader.dataset, IterableDataset)
            return is_iterable and self.device is not None and self.agreement.sharding is None
        return wanted


def _source(given: _Given) -> BatchSource:
    """Return the source that provides the batches for ``parity="off"``."""
    loader, world, options = given.loader, given.world, given.options
    # With batch_sampler=, loader.sampler is a default of torch's, and the batch sampler has the one that draws.
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    is_random = any(type(sampler) is RandomSampler for sampler in samplers)
    for_one_reader = replace(options, use_seedable_sampler=options.use_seedable_sampler and is_random)
    if world.is_alone:
        return PlainSource(loader, options=for_one_reader)
    if given.agreement.sharding is not None:
        return PreshardedSource(loader, world=world, agreement=given.agreement, options=options)
    if given.dispatches:
        return DispatchSource(loader, world=world, options=for_one_reader, slice_fn=given.slice_fn, device=given.device)
    if not isinstance(loader.dataset, IterableDataset):
        return ShardedSource(loader, world=world, options=options, check=given.check)
    has_shards = isinstance(loader.dataset, SupportsShard) and loader.dataset.n_shards >= world.world_size
    if has_shards and not options.split_batches:
        own = copy_loader(
            loader,
            loader.dataset.shard(num_shards=world.world_size, index=world.rank),  # type: ignore[attr-defined]
            kind=stateful_loader() if saves_state(loader, options) else DataLoader,
            batch_size=loader.batch_size,
            drop_last=loader.drop_last,
        )
        return PreshardedSource(own, world=world, agreement=given.agreement, options=options)
    return StreamSource(loader, world=world, options=options)


def _exact_source(given: _Given) -> ExactSource:
    loader, world, exact = given.loader, given.world, given.options.exact
    assert exact is not None
    is_iterable = isinstance(loader.dataset, IterableDataset)
    # Bits depend on which samples are collated together. Rank zero collates whole batches, so a single process must, too.
    is_bitwise = exact.canonical_shards is not None and not is_iterable
    if given.dispatches and (not world.is_alone or is_bitwise):
        return ExactDispatchSource(
            loader,
            world=world,
            options=exact,
            slice_fn=given.slice_fn,
            device=given.device,
            non_blocking=given.options.non_blocking,
        )
    if is_iterable:
        return ExactStreamSource(loader, world=world, options=exact)
    return IndexedExactSource(loader, world=world, options=exact, check=given.check)


def _refuse_conflicts(
    sharding: ExistingSharding, loader: DataLoader[Any], options: LoaderOptions, *, line: UserLine
) -> None:
    """Raise an error if the options require an unsharded loader but ``loader`` is already sharded."""
    if options.exact is not None:
        # The sharding of torch's own sampler can be undone, because its order depends only on (seed, epoch).
        batches = batches_of(loader)
        if sharding.place == "sampler" and type(batches) is BatchSampler and can_undo_sharding(batches.sampler):
            return
        mode = "bitwise" if options.exact.canonical_shards is not None else "exact"
        what = f"parity={mode!r} splits every batch so that the updates are the same for any number of processes"
    elif options.dispatch_batches:
        what = "with dispatch_batches=True, only rank zero reads data, so the other ranks' shards would be lost"
    elif options.split_batches:
        what = "split_batches=True splits each batch, so each process would read only part of its shard"
    else:
        return
    raise UsageError(
        f"the loader is already sharded by {sharding.what}, and {what}",
        where=str(line),
        do="remove that sharding, so that echelon shards the loader (pass DataLoader(dataset, shuffle=True) or the whole "
        "stream), or keep the sharding and remove this setting",
    )


def _order_check(
    loader: DataLoader[Any], agreement: LoaderAgreement, *, world: World, line: UserLine, is_error: bool
) -> OrderCheck | None:
    """Return the check that compares the ranks' samplers, or None for torch's own samplers and single-process runs."""
    batches = batches_of(loader)
    sampler = batches.sampler if type(batches) is BatchSampler else batches
    if type(sampler).__module__.startswith(("torch.", "echelon.")) or not agreement.processes:
        return None
    return OrderCheck(sampler, world=world, num_samples=length_of(loader.dataset), line=line, is_error=is_error)


def _first_pass(
    agreement: LoaderAgreement, *, world: World, line: UserLine, source: BatchSource, is_error: bool
) -> DuplicateSamplesCheck | None:
    """Return the check that compares the first pass across ranks, or None if there is only one rank."""
    if world.world_size == 1 or not agreement.reads_alone:
        return None
    return DuplicateSamplesCheck(
        agreement.token,
        rank=world.rank,
        world_size=world.world_size,
        line=line,
        reads_own=source.reads_own_shard,
        do=_ADVICE_FOR_PRESHARDED if source.reads_own_shard else _ADVICE_FOR_SHARDED,
        is_error=is_error,
    )


_ADVICE_FOR_PRESHARDED = (
    "give each rank different samples, or pass already_sharded=False to let echelon shard the loader; if "
    "every process should read all samples, call accelerator.allow_unsharded(loader) instead of prepare"
)
_ADVICE_FOR_SHARDED = (
    "use the same dataset on every rank, with samples that depend only on the index (or the position in "
    "the stream); if each rank has its own shard intentionally, pass already_sharded=True"
)
