"""Compares the collectives that the ranks have started, to find the first difference or the ranks that are behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# Sizes may differ between ranks, so only the kind is compared.
_UNLIKE_SIZES = frozenset(
    {"gather", "scatter", "all_to_all", "all_to_allv", "all_to_all_single", "alltoall", "alltoall_base"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """One collective call, as recorded by torch's flight recorder."""

    number: int
    """Number of the call in its group, starting at 1."""
    kind: str
    sizes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    is_over: bool = False
    place: str = field(default="", compare=False)
    """The user's line that called it."""
    is_refused: bool = False
    """Whether torch has compared it with the calls of the other ranks and refused it, whatever may differ in general."""

    def __str__(self) -> str:
        tensors = ", ".join(f"{dtype.lower()}{list(size)}" for size, dtype in zip(self.sizes, self.dtypes))
        return f"{self.kind} number {self.number}" + (f" of {tensors}" if tensors else "")

    def matches(self, other: CollectiveCall) -> bool:
        """Return whether this call and ``other`` on another rank can belong to the same operation."""
        if self.kind != other.kind:
            return False
        return (self.kind in _UNLIKE_SIZES and not self.is_refused) or (self.sizes, self.dtypes) == (
            other.sizes,
            other.dtypes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The collectives that a rank has started in a group, oldest first."""

    ranks: tuple[int, ...]
    """Global ranks in the group."""
    started: tuple[CollectiveCall, ...]

    @property
    def number(self) -> int:
        """Number of the last call, or 0 if there is none."""
        return self.started[-1].number if self.started else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first difference between a group's ranks."""

    kind: Literal["other operation", "other shape", "behind"]
    at: Mapping[int, CollectiveCall | None]
    """Each rank's call at the difference; None for a rank that is behind."""
    diverging: tuple[int, ...]
    """Ranks that differ from the majority; empty if there is no majority."""


def read_history(data: Any) -> dict[str, History]:
    """Return a rank's histories by group name from its record (``Reporter.collectives``), or {} if it has none.

    Raises:
        ValueError, TypeError, KeyError: the record is invalid.
    """
    found = {}
    for name, group in (data or {}).get("groups", {}).items():
        started = tuple(
            CollectiveCall(
                number=int(number),
                kind=str(kind),
                sizes=tuple(tuple(int(n) for n in size) for size in sizes),
                dtypes=tuple(map(str, dtypes)),
                is_over=bool(is_over),
                place=str(place),
            )
            for number, kind, sizes, dtypes, is_over, place in group["entries"]
        )
        found[str(name)] = History(ranks=tuple(int(rank) for rank in group["ranks"]), started=started)
    return found


def first_divergence(histories: Mapping[int, Mapping[str, History]]) -> Divergence | None:
    """Return the first call that differs between ranks, else the first group with ranks that are behind, or None.

    Args:
        histories: histories by rank and group; ranks without a history are ignored.
    """
    names = sorted({name for groups in histories.values() for name in groups})
    for name in names:
        of_group = {rank: groups[name] for rank, groups in histories.items() if name in groups}
        found = _first_difference(of_group)
        if found is not None:
            return found
    for name in names:
        of_group = {rank: groups[name] for rank, groups in histories.items() if name in groups}
        last = max(history.number for history in of_group.values())
        behind = {rank: history for rank, history in of_group.items() if history.number < last}
        if behind:
            at = {rank: None if rank in behind else history.started[-1] for rank, history in of_group.items()}
            return Divergence(kind="behind", at=at, diverging=tuple(sorted(behind)))
    return None


def _first_difference(histories: Mapping[int, History]) -> Divergence | None:
    by_number: dict[int, dict[int, CollectiveCall]] = {}
    for rank, history in histories.items():
        for collective in history.started:
            by_number.setdefault(collective.number, {})[rank] = collective
    for number in sorted(by_number):
        at = by_number[number]
        first = next(iter(at.values()))
        if all(first.matches(other) for other in at.values()):
            continue
        is_one_kind = len({collective.kind for collective in at.values()}) == 1
        return Divergence(kind="other shape" if is_one_kind else "other operation", at=at, diverging=_minority(at))
    return None


def _minority(at: Mapping[int, CollectiveCall]) -> tuple[int, ...]:
    """Return the ranks whose call differs from the majority's call; empty if there is no majority."""
    groups: list[list[int]] = []
    for rank, collective in at.items():
        group = next((group for group in groups if at[group[0]].matches(collective)), None)
        if group is None:
            groups.append([rank])
        else:
            group.append(rank)
    largest = max(groups, key=len)
    return () if 2 * len(largest) <= len(at) else tuple(sorted(set(at) - set(largest)))
