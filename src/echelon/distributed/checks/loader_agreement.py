"""Detects whether the ranks' loaders read the same dataset and whether they are already sharded."""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from echelon.base.errors import DesyncError
from echelon.base.lengths import length_of
from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import UserLine, warn
from echelon.distributed.checks.already_sharded import (
    ExistingSharding,
    check_shards,
    find_existing_sharding,
    num_repeated,
)
from echelon.distributed.checks.data_fingerprint import (
    ColumnFingerprint,
    are_of_different_data,
    are_shards,
    are_table_shards,
    column_fingerprints,
)
from echelon.distributed.small_messages import gather_bytes
from echelon.world.world import World

_BOTH_WAYS = (
    "give every rank the whole dataset, so that echelon shards it, or declare that each rank has its own shard, with "
    "DataLoaderConfiguration(already_sharded=True), TrainingArguments(already_sharded=True), or "
    "accelerator.prepare_data_loader(loader, already_sharded=True)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderFacts:
    """Properties of one rank's loader. -1 means unknown."""

    part: int
    """Index of the data slice that the loader reads. It equals the rank unless several ranks read the same data."""
    kind: str
    """Class name of the dataset."""
    is_iterable: bool
    num_samples: int
    """Length of the dataset."""
    batch_size: int
    num_drawn: int
    """Number of samples that the sampler yields per pass, or -1 for a custom batch sampler."""
    num_repeated: int
    """Number of samples that are repeated at the end of a pass."""
    drop_last: bool
    token: int
    """Random number. Rank zero's number identifies the loader."""
    sharding: ExistingSharding | None
    columns: dict[str, ColumnFingerprint]
    seed: int
    """``torch.initial_seed()``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderAgreement:
    """What all ranks agree on about a loader when it is prepared."""

    sharding: ExistingSharding | None
    """This rank's existing sharding, or None if echelon shards the loader."""
    parts: list[LoaderFacts]
    """Facts indexed by ``part``, or only this rank's facts if the other ranks do not participate."""
    processes: list[int]
    """The first process that reads each part."""
    reads_alone: bool
    """Whether this process is in ``processes``."""
    token: int
    """Number that identifies this loader on all ranks."""


def agree_on_loader(
    loader: DataLoader[Any],
    *,
    world: World,
    batches: Any,
    already_sharded: bool | None,
    dispatches: bool,
    is_exact: bool,
    line: UserLine,
) -> LoaderAgreement:
    """Detect whether ``loader`` is already sharded and whether the ranks have the same data.

    Args:
        loader: the user's loader. If rank zero dispatches, only rank zero's loader matters.
        batches: the loader's batch sampler; None for iterable data.
        already_sharded: the user's setting, or None to detect existing sharding.
        dispatches: whether only rank zero reads data.

    Collective: call on every rank.

    Raises:
        DesyncError: the dataset lengths or batch sizes differ between ranks, or, in the exact modes, the contents do.
        UsageError: the loader is sharded for a different number of processes, or two ranks have the same shard.
    """
    mine, everybody = gather_loader_facts(
        loader, rank=world.rank, world_size=world.world_size, batches=batches, already_sharded=already_sharded
    )
    processes = [
        next((rank for rank, facts in enumerate(everybody) if facts.part == part), -1)
        for part in range(world.world_size)
    ]
    is_whole = -1 not in processes
    parts = [everybody[rank] for rank in processes] if is_whole else [mine]
    me = everybody.index(mine)
    considered = [everybody[0]] if dispatches else parts
    sharding = _existing_sharding(
        considered, mine, world=world, dispatches=dispatches, already_sharded=already_sharded, line=line
    )
    if world.world_size > 1 and not dispatches:
        sharding = _compare_data(parts, sharding, already_sharded=already_sharded, is_exact=is_exact, line=line)
    return LoaderAgreement(
        sharding=sharding,
        parts=parts,
        processes=processes if is_whole else [],
        reads_alone=is_whole and processes[mine.part] == me,
        token=everybody[0].token,
    )


def gather_loader_facts(
    loader: DataLoader[Any], *, rank: int, world_size: int, batches: Any, already_sharded: bool | None
) -> tuple[LoaderFacts, list[LoaderFacts]]:
    """Return this rank's loader facts and those of all ranks; see ``agree_on_loader``. Collective: call on every rank."""
    sharding = None if already_sharded is False else find_existing_sharding(loader)
    if sharding is None and already_sharded:
        sharding = ExistingSharding(what="its user (already_sharded=True)", place="user")
    dataset = loader.dataset
    is_plain = type(batches) is BatchSampler
    size = getattr(batches, "batch_size", None)
    mine = LoaderFacts(
        part=rank,
        kind=type(dataset).__qualname__,
        is_iterable=isinstance(dataset, IterableDataset),
        num_samples=length_of(dataset),
        batch_size=size if isinstance(size, int) else -1,
        num_drawn=length_of(batches.sampler) if is_plain else -1,
        num_repeated=num_repeated(loader),
        drop_last=bool(getattr(batches, "drop_last", loader.drop_last)),
        token=secrets.randbits(62),
        sharding=sharding,
        columns=column_fingerprints(dataset) if world_size > 1 else {},
        seed=torch.initial_seed(),
    )
    return mine, [_decode(text) for text in gather_bytes(json.dumps(asdict(mine)).encode())] if world_size > 1 else [
        mine
    ]


def _existing_sharding(
    parts: list[LoaderFacts],
    mine: LoaderFacts,
    *,
    world: World,
    dispatches: bool,
    already_sharded: bool | None,
    line: UserLine,
) -> ExistingSharding | None:
    found = [facts.sharding for facts in parts if facts.sharding is not None]
    if not found:
        return None
    if len(found) < len(parts):
        sharded_on = ", ".join(f"rank {facts.part}" for facts in parts if facts.sharding is not None)
        raise DesyncError(
            f"the loader is already sharded by {found[0].what}, but only on {sharded_on}",
            where=str(line),
            do="build the same kind of loader on every rank",
        )
    if world.world_size > 1 and dispatches:  # the other ranks' loaders are never read
        return None if found[0].num_shards == 1 else found[0]
    if found[0].place == "dataset" and not parts[0].is_iterable and already_sharded is None:
        return None if world.world_size == 1 else mine.sharding  # _compare_data decides
    is_sharded = check_shards(found, world_size=world.world_size, line=line)
    return mine.sharding if is_sharded and world.world_size > 1 else None


def _compare_data(
    parts: list[LoaderFacts],
    sharding: ExistingSharding | None,
    *,
    already_sharded: bool | None,
    is_exact: bool,
    line: UserLine,
) -> ExistingSharding | None:
    """Compare the contents of the ranks' datasets, and return the existing sharding if there is one."""
    first, *others = parts
    is_indexed = not any(facts.is_iterable for facts in parts)
    shards_itself = sharding is not None and sharding.place in ("dataset", "user")
    have_columns = bool(first.columns) and all(facts.kind == first.kind for facts in others)
    differ = have_columns and all(are_of_different_data(first.columns, facts.columns) for facts in others)
    lengths = [facts.num_samples for facts in parts]
    is_table = are_table_shards([facts.columns for facts in parts], lengths)
    if sharding is None and is_indexed and is_table and already_sharded is None:
        return ExistingSharding(what=f"its dataset ({first.kind} with different rows on each rank)", place="dataset")
    if sharding is not None and is_indexed and sharding.place == "dataset" and already_sharded is None:
        if differ:
            found = [facts.sharding for facts in parts if facts.sharding is not None]
            return sharding if check_shards(found, world_size=len(parts), line=line) else None
        if not have_columns:
            warn(
                _(
                    "{what} has attributes for its rank and the number of ranks, but echelon cannot detect whether it "
                    "holds one shard or all of the data. echelon shards it, which loses samples if each rank already "
                    "has its own shard. Set already_sharded=True in that case, and already_sharded=False otherwise",
                    what=sharding.what,
                ),
                at=line,
            )
        return None
    if shards_itself:
        return sharding
    if is_indexed:
        _require_equal(lengths, "dataset has", do=_BOTH_WAYS)
        if sharding is None:
            _require_equal(
                [facts.batch_size for facts in parts],
                "batch size is",
                do="use the same batch size on every rank",
            )
    same_seeds = all(facts.seed == first.seed for facts in others)
    certain = differ and all(are_shards(first.columns, facts.columns, same_seeds=same_seeds) for facts in others)
    if certain or (differ and is_exact):
        _report_different_data(first.kind, is_exact=is_exact, line=line)
    return sharding


def _require_equal(numbers: list[int], what: str, *, do: str) -> None:
    if len(set(numbers)) > 1:
        named = ", ".join(f"rank {rank}: {'unknown' if number < 0 else number}" for rank, number in enumerate(numbers))
        raise DesyncError(f"the ranks have different data: the {what} {named}", where="prepare(DataLoader)", do=do)


def _report_different_data(kind: str, *, is_exact: bool, line: UserLine) -> None:
    message = (
        f"the ranks have different data: their datasets ({kind}) have different samples at the same indices, so sharding "
        "them again would lose most samples"
    )
    if is_exact:
        raise DesyncError(
            message,
            where=f"{line}, parity='exact'",
            do=_(
                "give every rank the whole dataset (if it is random, call torch.manual_seed(0) on every rank before "
                "creating it)"
            ),
        )
    warn(_("{message}. Either {both_ways}", message=message, both_ways=_BOTH_WAYS), at=line)


def _decode(text: bytes) -> LoaderFacts:
    plain = json.loads(text)
    plain["sharding"] = None if plain["sharding"] is None else ExistingSharding(**plain["sharding"])
    plain["columns"] = {name: ColumnFingerprint(**column) for name, column in plain["columns"].items()}
    return LoaderFacts(**plain)
