"""A run's machines: what launchers report when they join, which ones are refused, and how ranks are numbered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from echelon.base.errors import LaunchError
from echelon.base.messages.translation import gettext as _, gettext_noop as N_

_MAX_NAMED = 5
_MAX_MACHINES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo:
    """Facts that a launcher reports about itself when it joins."""

    uid: str
    """Random identifier that the launcher keeps when it reconnects."""
    host: str
    address: str
    """The machine's address on the route to the other machines."""
    machine_rank: int | None
    """Machine rank that the user gave, or None for any."""
    num_processes: int
    min_nodes: int
    max_nodes: int
    run_id: str
    versions: Mapping[str, str]
    settings: Mapping[str, str]
    """Maps the name of each non-default setting that must be the same on all machines to its value and origin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousTimes:
    """Rendezvous time limits."""

    join_timeout: timedelta
    """How long to wait for all machines to join."""
    last_call: timedelta
    """How long to wait for more machines after the minimum number has joined."""
    heartbeat: timedelta
    """Interval between each side's heartbeats."""
    lost_after: timedelta
    """How long a side may be silent before it counts as lost."""


def name_of(info: NodeInfo) -> str:
    """Return the machine's name for reports."""
    number = "" if info.machine_rank is None else _(", machine rank {machine_rank}", machine_rank=info.machine_rank)
    return f"{info.host} ({info.address}{number})"


def refusal(new: NodeInfo, here: Sequence[NodeInfo], host: NodeInfo) -> LaunchError | None:
    """Return the reason why ``new`` cannot join, or None if it can.

    Args:
        new: the launcher that wants to join.
        here: the launchers that have joined, without ``new``.
        host: the launcher on the rendezvous host.
    """
    where = _("{new}, joining at {host}", new=name_of(new), host=name_of(host))
    if new.run_id != host.run_id:
        return LaunchError(
            _(
                "this machine expects run {run_id!r}, but the rendezvous host is running {host_run_id!r}",
                run_id=new.run_id,
                host_run_id=host.run_id,
            ),
            where=where,
            do=_("use the same --rdzv_id on all machines, and a different --main_process_port for each run"),
        )
    if (new.min_nodes, new.max_nodes) != (host.min_nodes, host.max_nodes):
        return LaunchError(
            _(
                "this machine expects {new} machines, but {host} expects {count}",
                new=node_range_text(new),
                host=host.host,
                count=node_range_text(host),
            ),
            where=where,
            do=_("use the same --num_machines (--nnodes) on all machines"),
        )
    if new.machine_rank is not None:
        if new.machine_rank >= new.max_nodes:
            return LaunchError(
                _(
                    "machine rank {machine_rank} is out of range for {max_nodes} machines",
                    machine_rank=new.machine_rank,
                    max_nodes=new.max_nodes,
                ),
                where=where,
                do=_("number the machines 0 to {number} (--machine_rank, --node_rank)", number=new.max_nodes - 1),
            )
        for other in here:
            if other.machine_rank == new.machine_rank:
                return LaunchError(
                    _(
                        "{host} ({address}) already has machine rank {machine_rank}",
                        host=other.host,
                        address=other.address,
                        machine_rank=new.machine_rank,
                    ),
                    where=where,
                    do=_("use a different --machine_rank (--node_rank) on each machine"),
                )
    same_versions = _("install the same versions on all machines")
    same_settings = _(
        "use the same flags and config file on all machines (echelon config explain shows where a value comes from)"
    )
    return _difference(
        N_("different versions: {texts}{more}"), new.versions, host.versions, host.host, where, same_versions
    ) or _difference(
        N_("different settings: {texts}{more}"), new.settings, host.settings, host.host, where, same_settings
    )


def _difference(
    kind: str, theirs: Mapping[str, str], ours: Mapping[str, str], host: str, where: str, do: str
) -> LaunchError | None:
    names = [name for name in sorted({*theirs, *ours}) if _value(theirs.get(name)) != _value(ours.get(name))]
    if not names:
        return None
    texts = [
        _(
            "{name} is {theirs} on the joining machine and {ours} on {host}",
            name=name,
            theirs=theirs.get(name, _("not set")),
            ours=ours.get(name, _("not set")),
            host=host,
        )
        for name in names[:_MAX_NAMED]
    ]
    more = _(", and {number} more", number=len(names) - _MAX_NAMED) if len(names) > _MAX_NAMED else ""
    return LaunchError(_(kind, texts=", ".join(texts), more=more), where=where, do=do)


def _value(text: str | None) -> str | None:
    """Return a setting without its origin, which may differ between machines."""
    return None if text is None else text.rpartition(" (from ")[0] or text


def node_range_text(info: NodeInfo) -> str:
    """Return the range of machines that a run may use, as text."""
    return (
        f"{info.min_nodes}"
        if info.min_nodes == info.max_nodes
        else _("{min_nodes} to {max_nodes}", min_nodes=info.min_nodes, max_nodes=info.max_nodes)
    )


def in_rank_order(infos: Sequence[NodeInfo], *, last_order: Sequence[str], first: str) -> list[NodeInfo]:
    """Return the machines in the order of their ranks: those with a given rank, the host, and the others in their last order.

    Args:
        infos: machines in the order in which they joined.
        last_order: the last generation's uids, in rank order.
        first: the uid of the launcher on the rendezvous host.
    """
    last = {uid: i for i, uid in enumerate(last_order)}

    def order(info: NodeInfo) -> tuple[float, bool, int]:
        given = float("inf") if info.machine_rank is None else info.machine_rank
        return given, info.uid != first, last.get(info.uid, len(last))

    return sorted(infos, key=order)


def join_names(names: Sequence[str]) -> str:
    """Return the machines' names for a message that also has their number; of very many, only the first."""
    return ", ".join([*names[:_MAX_MACHINES], *(["..."] if len(names) > _MAX_MACHINES else [])])


def describe_missing(here: Sequence[NodeInfo], *, min_nodes: int, max_nodes: int) -> str:
    """Return a description of the machines that have joined and of those that are missing."""
    least = _("at least {min_nodes}", min_nodes=min_nodes) if max_nodes > min_nodes else f"{min_nodes}"
    names = join_names([name_of(info) for info in here])
    given = {info.machine_rank for info in here}
    absent = [str(rank) for rank in range(max_nodes) if rank not in given]
    missing = (
        _("; missing machine ranks: {absent}", absent=", ".join(absent[:8])) if None not in given and absent else ""
    )
    return _(
        "{num_here} of {least} machines have joined: {names}{missing}",
        num_here=len(here),
        least=least,
        names=names,
        missing=missing,
    )
