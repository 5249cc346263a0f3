"""What the ranks were given: one dataset, or each its own; to be cut here, or cut already."""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from echelon.base.errors import DesyncError, UsageError
from echelon.base.lengths import length_of
from echelon.base.warnings import UserLine, warn
from echelon.distributed.checks.already_sharded import OwnCut, check_parts, find_own_cut, num_repeated
from echelon.distributed.checks.data_fingerprint import (
    ColumnFingerprint,
    are_of_different_data,
    are_parts_of_a_table,
    are_shares,
    column_fingerprints,
)
from echelon.distributed.small_messages import gather_bytes
from echelon.world.world import World

__all__ = ["Agreement", "LoaderFacts", "agree_on_data", "refuse_cut"]

_BOTH_WAYS = (
    "give every rank the whole dataset (echelon cuts it for the ranks), or say that each rank has its own share: "
    "DataLoaderConfiguration(already_sharded=True), TrainingArguments(already_sharded=True), or "
    "accelerator.prepare_data_loader(loader, already_sharded=True)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderFacts:
    """What one rank was given. -1: nobody knows."""

    part: int
    """Whose data it is to read: the rank, where no ranks read the same."""
    kind: str
    """The class of the dataset."""
    is_iterable: bool
    num_samples: int
    """Of the dataset."""
    batch_size: int
    num_drawn: int
    """Samples that the sampler gives in a pass; -1 also where batches have sizes of their own."""
    num_repeated: int
    """Of these, at the end, that are there again."""
    drop_last: bool
    token: int
    """Of rank zero: the number of the loader."""
    cut: OwnCut | None
    columns: dict[str, ColumnFingerprint]
    seed: int
    """Torch's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What all ranks know about a loader that is being prepared."""

    cut: OwnCut | None
    """It has been cut already; None: it is to be cut."""
    parts: list[LoaderFacts]
    """By part; this rank's alone where the other ranks are not there to be asked."""
    processes: list[int]
    """By part: the first of the processes that read it."""
    reads_alone: bool
    """This process is the one of ``processes`` for its part."""
    token: int
    """A number that all ranks have for this loader, and for no other one."""


def agree_on_data(
    loader: DataLoader[Any],
    *,
    world: World,
    batches: Any,
    already_sharded: bool | None,
    dispatches: bool,
    is_exact: bool,
    line: UserLine,
) -> Agreement:
    """Find out whether ``loader`` has been cut already, and whether the ranks were given the same data.

    Args:
        loader: the user's. Where rank zero dispatches, only its own counts.
        world: whose part to read.
        batches: what draws its batches; None for iterable data.
        already_sharded: what the user says; None: as it is recognised.
        dispatches: rank zero alone is asked to read.
        is_exact: what would be a warning is an error.
        line: where the loader was given to echelon.

    Collective: every rank, where there is more than one.

    Raises:
        DesyncError: the datasets, or the batches, do not have one length; or (exact modes) do not hold the same data.
        UsageError: it has been cut for another number of processes, or two ranks have the same part.
    """
    mine = _facts(loader, world=world, batches=batches, already_sharded=already_sharded)
    everybody = [_read(text) for text in gather_bytes(_write(mine))] if world.world_size > 1 else [mine]
    processes = [
        next((rank for rank, facts in enumerate(everybody) if facts.part == part), -1)
        for part in range(world.world_size)
    ]
    is_whole = -1 not in processes
    parts = [everybody[rank] for rank in processes] if is_whole else [mine]
    me = everybody.index(mine)
    considered = [everybody[0]] if dispatches else parts
    cut = _settle_cut(considered, mine, world=world, dispatches=dispatches, says_so=already_sharded, line=line)
    if world.world_size > 1 and not dispatches:
        cut = _compare_data(parts, cut, says_so=already_sharded, is_exact=is_exact, line=line)
    return Agreement(
        cut=cut,
        parts=parts,
        processes=processes if is_whole else [],
        reads_alone=is_whole and processes[mine.part] == me,
        token=everybody[0].token,
    )


def _facts(loader: DataLoader[Any], *, world: World, batches: Any, already_sharded: bool | None) -> LoaderFacts:
    cut = None if already_sharded is False else find_own_cut(loader)
    if cut is None and already_sharded:
        cut = OwnCut(what="its user (already_sharded=True)", place="user")
    dataset = loader.dataset
    is_plain = type(batches) is BatchSampler
    size = getattr(batches, "batch_size", None)
    return LoaderFacts(
        part=world.rank,
        kind=type(dataset).__qualname__,
        is_iterable=isinstance(dataset, IterableDataset),
        num_samples=length_of(dataset),
        batch_size=size if isinstance(size, int) else -1,
        num_drawn=length_of(batches.sampler) if is_plain else -1,
        num_repeated=num_repeated(loader),
        drop_last=bool(getattr(batches, "drop_last", loader.drop_last)),
        token=secrets.randbits(62),
        cut=cut,
        columns=column_fingerprints(dataset) if world.world_size > 1 else {},
        seed=torch.initial_seed(),
    )


def _settle_cut(
    parts: list[LoaderFacts],
    mine: LoaderFacts,
    *,
    world: World,
    dispatches: bool,
    says_so: bool | None,
    line: UserLine,
) -> OwnCut | None:
    found = [facts.cut for facts in parts if facts.cut is not None]
    if not found:
        return None
    if len(found) < len(parts):
        with_cut = ", ".join(f"rank {facts.part}" for facts in parts if facts.cut is not None)
        raise DesyncError(
            f"the loader has been cut already by {found[0].what}, but only that of {with_cut}",
            where=str(line),
            do="give every rank the same kind of loader",
        )
    if world.world_size > 1 and dispatches:  # the other ranks' loaders are never read
        return None if found[0].num_parts == 1 else found[0]
    if found[0].place == "dataset" and not parts[0].is_iterable and says_so is None:
        return None if world.world_size == 1 else mine.cut  # judged by what the ranks hold
    is_cut = check_parts(found, world_size=world.world_size, line=line)
    return mine.cut if is_cut and world.world_size > 1 else None


def _compare_data(
    parts: list[LoaderFacts], cut: OwnCut | None, *, says_so: bool | None, is_exact: bool, line: UserLine
) -> OwnCut | None:
    """Return the cut, after a look at what the ranks hold."""
    first, *others = parts
    is_indexed = not any(facts.is_iterable for facts in parts)
    divides_itself = cut is not None and cut.place in ("dataset", "user")
    have_columns = bool(first.columns) and all(facts.kind == first.kind for facts in others)
    differ = have_columns and all(are_of_different_data(first.columns, facts.columns) for facts in others)
    lengths = [facts.num_samples for facts in parts]
    is_table = are_parts_of_a_table([facts.columns for facts in parts], lengths)
    if cut is None and is_indexed and is_table and says_so is None:
        return OwnCut(what=f"its dataset ({first.kind}, of which each rank has other rows)", place="dataset")
    if cut is not None and is_indexed and cut.place == "dataset" and says_so is None:
        if differ:
            found = [facts.cut for facts in parts if facts.cut is not None]
            return cut if check_parts(found, world_size=len(parts), line=line) else None
        if not have_columns:
            warn(
                f"{cut.what} knows its rank and the number of ranks, and nobody can see whether it gives this rank its own "
                "share, or all the data: it is cut here. If each rank has its own share, samples are lost: say "
                "already_sharded=True, else already_sharded=False",
                at=line,
            )
        return None
    if divides_itself:
        return cut
    if is_indexed:
        _agree(lengths, "dataset has", do=_BOTH_WAYS)
        if cut is None:
            _agree(
                [facts.batch_size for facts in parts],
                "batch size is",
                do="give the loader the same batch size on every rank",
            )
    same_seeds = all(facts.seed == first.seed for facts in others)
    certain = differ and all(are_shares(first.columns, facts.columns, same_seeds=same_seeds) for facts in others)
    if certain or (differ and is_exact):
        _tell_different_data(first.kind, is_exact=is_exact, line=line)
    return cut


def _agree(numbers: list[int], what: str, *, do: str) -> None:
    if len(set(numbers)) > 1:
        named = ", ".join(f"rank {rank}: {_number(number)}" for rank, number in enumerate(numbers))
        raise DesyncError(
            f"the ranks were given different data: the {what} {named}", where="prepare(DataLoader)", do=do
        )


def _number(number: int) -> str:
    return "unknown" if number < 0 else str(number)


def _tell_different_data(kind: str, *, is_exact: bool, line: UserLine) -> None:
    message = (
        f"the ranks were given different data: at the same places of their datasets ({kind}) are other samples, so each rank's "
        "share would be cut once more, and most samples would be lost"
    )
    if is_exact:
        raise DesyncError(
            message,
            where=f"{line}, parity='exact'",
            do="give every rank the whole dataset (random data: seed it alike, torch.manual_seed(0))",
        )
    warn(f"{message}. Either {_BOTH_WAYS}", at=line)


def _write(facts: LoaderFacts) -> bytes:
    return json.dumps(asdict(facts)).encode()


def _read(text: bytes) -> LoaderFacts:
    plain = json.loads(text)
    plain["cut"] = None if plain["cut"] is None else OwnCut(**plain["cut"])
    plain["columns"] = {name: ColumnFingerprint(**column) for name, column in plain["columns"].items()}
    return LoaderFacts(**plain)


def refuse_cut(cut: OwnCut, *, mode: str, line: UserLine) -> UsageError:
    """Return the error of a loader that must not have been cut already."""
    return UsageError(
        f"the loader has been cut for the ranks already by {cut.what}, and {mode}",
        where=str(line),
        do="take that out, so that echelon cuts the loader (DataLoader(dataset, shuffle=True), or the undivided stream); "
        "or keep it, without this setting",
    )
