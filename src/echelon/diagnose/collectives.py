"""Which collectives the ranks have begun, side by side: where they first differ, or who is behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["CollectiveCall", "Divergence", "History", "first_divergence", "read_history"]

# What each rank brings may differ in these: only the kind is compared.
_UNLIKE_SIZES = frozenset(
    {"gather", "scatter", "all_to_all", "all_to_allv", "all_to_all_single", "alltoall", "alltoall_base"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """One call, as torch's flight recorder has it."""

    number: int
    """From 1 on, in its group."""
    kind: str
    sizes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    is_over: bool = False

    def __str__(self) -> str:
        tensors = ", ".join(f"{dtype.lower()}{list(size)}" for size, dtype in zip(self.sizes, self.dtypes))
        return f"{self.kind} number {self.number}" + (f" of {tensors}" if tensors else "")

    def brings(self, other: CollectiveCall) -> bool:
        """Tell whether this and ``other`` of another rank can be one operation."""
        if self.kind != other.kind:
            return False
        return self.kind in _UNLIKE_SIZES or (self.sizes, self.dtypes) == (other.sizes, other.dtypes)


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What one rank has begun in one group, the oldest first."""

    ranks: tuple[int, ...]
    """The members of the group."""
    begun: tuple[CollectiveCall, ...]

    @property
    def number(self) -> int:
        """The number of the last one."""
        return self.begun[-1].number if self.begun else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first place at which the ranks of a group do not do the same."""

    kind: Literal["other operation", "other shape", "behind"]
    at: Mapping[int, CollectiveCall | None]
    """What each rank has begun there; of a rank that is behind, nothing."""
    diverging: tuple[int, ...]
    """The ranks that differ from most of the others; empty: there is no majority."""


def read_history(data: Any) -> dict[str, History]:
    """Return the history of each group from what a rank wrote down (``recorded_collectives``); {} when it has none.

    Raises:
        ValueError, TypeError, KeyError: it is something else.
    """
    found = {}
    for name, group in (data or {}).get("groups", {}).items():
        begun = tuple(
            CollectiveCall(
                number=int(number),
                kind=str(kind),
                sizes=tuple(tuple(int(n) for n in size) for size in sizes),
                dtypes=tuple(map(str, dtypes)),
                is_over=bool(is_over),
            )
            for number, kind, sizes, dtypes, is_over in group["entries"]
        )
        found[str(name)] = History(ranks=tuple(int(rank) for rank in group["ranks"]), begun=begun)
    return found


def first_divergence(histories: Mapping[int, Mapping[str, History]]) -> Divergence | None:
    """Return where the ranks first differ: in what they call, else in how far they are; None: nowhere.

    Args:
        histories: by rank and group; ranks that gave none are left out.
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
            at = {rank: None if rank in behind else history.begun[-1] for rank, history in of_group.items()}
            return Divergence(kind="behind", at=at, diverging=tuple(sorted(behind)))
    return None


def _first_difference(histories: Mapping[int, History]) -> Divergence | None:
    by_number: dict[int, dict[int, CollectiveCall]] = {}
    for rank, history in histories.items():
        for collective in history.begun:
            by_number.setdefault(collective.number, {})[rank] = collective
    for number in sorted(by_number):
        at = by_number[number]
        first = next(iter(at.values()))
        if all(first.brings(other) for other in at.values()):
            continue
        is_one_kind = len({collective.kind for collective in at.values()}) == 1
        return Divergence(kind="other shape" if is_one_kind else "other operation", at=at, diverging=_minority(at))
    return None


def _minority(at: Mapping[int, CollectiveCall]) -> tuple[int, ...]:
    """Return the ranks that do not do what more than half of them do."""
    camps: list[list[int]] = []
    for rank, collective in at.items():
        camp = next((camp for camp in camps if at[camp[0]].brings(collective)), None)
        if camp is None:
            camps.append([rank])
        else:
            camp.append(rank)
    largest = max(camps, key=len)
    if 2 * len(largest) <= len(at):
        return ()
    return _sorted_without(at, largest)


def _sorted_without(ranks: Mapping[int, object], left_out: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(set(ranks) - set(left_out)))
