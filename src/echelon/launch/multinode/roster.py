"""Who takes part in a run on several machines: what a launcher says of itself, who may come in, and in which order they stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from echelon.base.errors import LaunchError

__all__ = ["NodeInfo", "MachineSlot", "name_of", "places_of", "refusal", "seats", "who_is_missing"]

_MOST_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo:
    """What a launcher says of itself when it comes in."""

    uid: str
    """Drawn by this launcher: one that comes back after a cut is known by it."""
    host: str
    address: str
    """Its own, on the way to the others."""
    machine_rank: int | None
    """That the user gave it; None: any."""
    num_processes: int
    min_nodes: int
    max_nodes: int
    run_id: str
    versions: Mapping[str, str]
    settings: Mapping[str, str]
    """Those that must be the same on all machines and are not at their default, by name; each with its origin."""


def name_of(info: NodeInfo) -> str:
    """Return how it is called in reports."""
    number = "" if info.machine_rank is None else f", machine rank {info.machine_rank}"
    return f"{info.host} ({info.address}{number})"


def refusal(new: NodeInfo, here: Sequence[NodeInfo], first: NodeInfo) -> LaunchError | None:
    """Return why ``new`` cannot take part; None: it can.

    Args:
        new: who wants to come in.
        here: who is there, without ``new``.
        first: the launcher that the others meet at.
    """
    where = f"{name_of(new)}, at the meeting on {name_of(first)}"
    if new.run_id != first.run_id:
        return LaunchError(
            f"the run there is {first.run_id!r}, not {new.run_id!r}",
            where=where,
            do="give the same --rdzv_id on all machines, and a free --main_process_port to each run",
        )
    if (new.min_nodes, new.max_nodes) != (first.min_nodes, first.max_nodes):
        return LaunchError(
            f"it counts on {_range(new)} machines, and {first.host} on {_range(first)}",
            where=where,
            do="give the same --num_machines (--nnodes) on all machines",
        )
    if new.machine_rank is not None:
        if new.machine_rank >= new.max_nodes:
            return LaunchError(
                f"machine rank {new.machine_rank} of {new.max_nodes} machines",
                where=where,
                do=f"number the machines 0 to {new.max_nodes - 1} (--machine_rank, --node_rank)",
            )
        for other in here:
            if other.machine_rank == new.machine_rank:
                return LaunchError(
                    f"machine rank {new.machine_rank} is there twice: {other.host} ({other.address}) has it, too",
                    where=where,
                    do="give each machine its own --machine_rank (--node_rank)",
                )
    for kind, theirs, ours in (("version", new.versions, first.versions), ("setting", new.settings, first.settings)):
        differing = [n for n in sorted({*theirs, *ours}) if _value(theirs.get(n)) != _value(ours.get(n))]
        if differing:
            texts = [
                f"{n} is {theirs.get(n, 'not given')} there and {ours.get(n, 'not given')} on {first.host}"
                for n in differing[:_MOST_NAMED]
            ]
            more = f", and {len(differing) - _MOST_NAMED} more" if len(differing) > _MOST_NAMED else ""
            what = f"different {kind}s: {', '.join(texts)}{more}"
            do = (
                "install the same versions on all machines"
                if kind == "version"
                else "give the same flags and the same file on all machines (echelon config explain shows where a value comes from)"
            )
            return LaunchError(what, where=where, do=do)
    return None


def _value(text: str | None) -> str | None:
    """Return a setting without its origin: one machine may have it from a file, another from a flag."""
    return None if text is None else text.rpartition(" (from ")[0] or text


def _range(info: NodeInfo) -> str:
    return f"{info.min_nodes}" if info.min_nodes == info.max_nodes else f"{info.min_nodes} to {info.max_nodes}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSlot:
    """A machine's place in a round."""

    uid: str
    group_rank: int
    first_rank: int
    """Of its ranks, which are numbered on."""
    num_processes: int


def seats(infos: Sequence[NodeInfo], *, before: Sequence[str], first: str) -> list[MachineSlot]:
    """Return the machines' places: by the ranks that the user gave, then as in the last round, the meeting's own first.

    Args:
        infos: who takes part, in the order in which they came.
        before: the uids of the last round, in its order.
        first: the uid of the launcher that the others meet at.
    """
    last = {uid: i for i, uid in enumerate(before)}

    def order(entry: tuple[int, NodeInfo]) -> tuple[float, bool, int, int]:
        i, info = entry
        given = float("inf") if info.machine_rank is None else info.machine_rank
        return given, info.uid != first, last.get(info.uid, len(last)), i

    found: list[MachineSlot] = []
    rank = 0
    for group_rank, (_, info) in enumerate(sorted(enumerate(infos), key=order)):
        found.append(
            MachineSlot(uid=info.uid, group_rank=group_rank, first_rank=rank, num_processes=info.num_processes)
        )
        rank += info.num_processes
    return found


def places_of(infos: Mapping[str, NodeInfo], round_: Sequence[MachineSlot]) -> dict[int, str]:
    """Return for each rank the name of its machine."""
    return {
        rank: name_of(infos[seat.uid])
        for seat in round_
        for rank in range(seat.first_rank, seat.first_rank + seat.num_processes)
    }


def who_is_missing(here: Sequence[NodeInfo], *, min_nodes: int, max_nodes: int) -> str:
    """Return who is there and who is not, in words."""
    least = f"at least {min_nodes}" if max_nodes > min_nodes else f"{min_nodes}"
    names = ", ".join(name_of(info) for info in here)
    given = {info.machine_rank for info in here}
    gone = [str(rank) for rank in range(max_nodes) if rank not in given]
    missing = f"; nobody has come with machine rank {', '.join(gone[:8])}" if None not in given and gone else ""
    return f"{len(here)} of {least} machines {'is' if len(here) == 1 else 'are'} there: {names}{missing}"
