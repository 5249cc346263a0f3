"""Computes goodput, a breakdown of a run's wall time across all of its attempts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from echelon.base.messages.translation import gettext as _, gettext_noop as N_
from echelon.status.board import Mark, StepPart, Times

_ITEM_OF = MappingProxyType(
    {
        StepPart.DATA: "data wait",
        StepPart.FORWARD: "compute",
        StepPart.OTHER: "compute",
        StepPart.BACKWARD: "compute",
        StepPart.OPTIMIZER: "compute",
        StepPart.EVALUATION: "compute",
        StepPart.COMMUNICATION: "communication",
        StepPart.CHECKPOINT: "checkpoint",
    }
)
_GOOD = ("compute", "communication")
ITEMS = (
    *(N_("compute"), N_("communication"), N_("program"), N_("data wait"), N_("checkpoint"), N_("init")),
    *(N_("detection"), N_("restart"), N_("lost steps"), N_("end")),
)
"""The items of the breakdown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """A rank's times from the status board at the end of an attempt."""

    rank: int
    times: Times | None = None
    marks: Sequence[Mark] = ()
    ended_ns: int | None = None
    """Time when the rank's program ended on its own, or None if it was still running at the end of the attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of all ranks. Times are in nanoseconds of ``time.monotonic_ns``."""

    started_ns: int
    failed_ns: int
    """Time of the first sign of failure (exit, exception, or last progress before a stall), or else the attempt's end."""
    noticed_ns: int
    """Time when the launcher detected the failure."""
    ranks: Sequence[RankTimes]

    @property
    def loaded(self) -> int | None:
        """Step from which the training loop resumed, -1 if there was no checkpoint, or None if the loop never started."""
        found = [one.times for one in self.ranks if one.times is not None]
        step = max((times.loaded for times in found), default=-1)
        return step if step >= 0 or any(times.begun_ns for times in found) else None

    def has_mark(self, step: int) -> bool:
        """Return whether the attempt started to save a checkpoint at ``step``."""
        return any(mark.step == step for one in self.ranks for mark in one.marks)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBreakdown:
    """Seconds spent on each item, averaged across ranks. The values add up to ``wall_s``."""

    wall_s: float
    num_restarts: int
    seconds: Mapping[str, float]
    """Seconds by item. ``compute`` and ``communication`` count only steps that were kept; ``lost steps`` had to be repeated.
    ``init`` is the time until the training loop starts, ``detection`` the time from a failure to its detection, ``restart``
    the time until the next training loop, and ``end`` the time after the loop. ``program`` is the whole time of programs
    that use neither the Accelerator nor the Trainer, because the parts of their loops are unknown."""

    @property
    def goodput(self) -> float | None:
        """Fraction of the wall time that was spent on computation and communication in steps that were kept.

        None if it is unknown.
        """
        return goodput_of(self.seconds, wall_s=self.wall_s)

    def __str__(self) -> str:
        items = _(", ").join(f"{_(item)} {s:.1f} s" for item, s in self.seconds.items() if s >= 0.05)
        restarts = ""
        if self.num_restarts:
            restarts = _("; {number} restart{s}", number=self.num_restarts, s="s" if self.num_restarts > 1 else "")
        if self.goodput is None:  # the program's time may be useful or not, so that no percentage could be compared
            return _(
                "time {wall_s:.1f} s, not divided, because no training loop was recorded: {items}{restarts}",
                wall_s=self.wall_s,
                items=items,
                restarts=restarts,
            )
        return _(
            "goodput {goodput:.1%} of {wall_s:.1f} s: {items}{restarts}",
            goodput=self.goodput,
            wall_s=self.wall_s,
            items=items,
            restarts=restarts,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the breakdown as JSON data that ``from_json`` accepts."""
        return {"wall_s": self.wall_s, "num_restarts": self.num_restarts, "seconds": dict(self.seconds)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TimeBreakdown:
        """Return the breakdown from JSON data that ``to_json`` returned."""
        return cls(wall_s=data["wall_s"], num_restarts=data["num_restarts"], seconds=data["seconds"])


def goodput_of(seconds: Mapping[str, float], *, wall_s: float) -> float | None:
    """Return the useful fraction of the wall time, or None if no training loop was recorded that would tell it."""
    if seconds.get("program"):
        return None
    return sum(seconds.get(item, 0.0) for item in _GOOD) / wall_s if wall_s else 0.0


def break_down_time(attempts: Sequence[Attempt], *, began_ns: int, ended_ns: int) -> TimeBreakdown:
    """Return a run's time breakdown."""
    totals = dict.fromkeys(ITEMS, 0.0)
    is_recorded = any(one.times is not None and one.times.begun_ns for attempt in attempts for one in attempt.ranks)
    edge = began_ns
    for attempt, kept in zip(attempts, _kept_up_to(attempts)):
        # A rank without this mark died or was stopped after other ranks had started to save, or nobody saved.
        unmarked = None if kept is None or attempt.has_mark(kept) else [0] * len(StepPart)
        before = "init" if edge == began_ns else "restart"
        for one in attempt.ranks:
            # The time that the rank had spent in each part when the lost work started; None if no work was lost.
            lost_from = next((mark.spent_ns for mark in reversed(one.marks) if mark.step == kept), unmarked)
            for item, ns in _row(attempt, one, lost_from, edge=edge, before=before, is_recorded=is_recorded).items():
                totals[item] += ns / len(attempt.ranks)
        totals["detection"] += attempt.noticed_ns - attempt.failed_ns
        edge = attempt.noticed_ns
    totals["end"] += ended_ns - edge
    return TimeBreakdown(
        wall_s=(ended_ns - began_ns) / 1e9,
        num_restarts=max(0, len(attempts) - 1),
        seconds={item: ns / 1e9 for item, ns in totals.items() if ns},
    )


def _row(
    attempt: Attempt,
    one: RankTimes,
    lost_from: Sequence[int] | None,
    *,
    edge: int,
    before: str,
    is_recorded: bool,
) -> dict[str, float]:
    """Return the nanoseconds that a rank spent on each item, from ``edge`` to the failure."""
    row = dict.fromkeys(ITEMS, 0.0)
    failed_ns, spent = attempt.failed_ns, spent_in(attempt, one)
    if spent is None or one.times is None:
        loop_ns = failed_ns if is_recorded else min(attempt.started_ns, failed_ns)
        row[before], row["program"] = loop_ns - edge, failed_ns - loop_ns
        return row
    row[before] = one.times.begun_ns - edge
    row["end"] = failed_ns - one.times.begun_ns - sum(spent)
    for part, ns in zip(StepPart, spent):
        lost = 0 if lost_from is None or part is StepPart.CHECKPOINT else max(0, ns - lost_from[part])
        row[_ITEM_OF[part]] += ns - lost
        row["lost steps"] += lost
    return row


def spent_in(attempt: Attempt, one: RankTimes) -> list[int] | None:
    """Return the nanoseconds a rank spent in each part of its training loop until it failed or ended, or None if no loop ran.

    The values add up to the time since the loop started.
    """
    times = one.times
    if times is None or not 0 < times.begun_ns < attempt.failed_ns:
        return None
    stop_ns = attempt.failed_ns if one.ended_ns is None else max(times.begun_ns, min(attempt.failed_ns, one.ended_ns))
    spent = list(times.spent_ns)
    spent[times.part] += max(0, stop_ns - times.since_ns)
    surplus = max(0, times.since_ns - stop_ns)  # recorded after the failure, before the rank was stopped
    for part in sorted(StepPart, key=lambda part: (part is not times.part, -spent[part])):
        taken = min(surplus, spent[part])
        spent[part] -= taken
        surplus -= taken
    return spent


def _kept_up_to(attempts: Sequence[Attempt]) -> list[int | None]:
    """Return, for each attempt, the step up to which its work was kept: -1 if none was kept, None if all of it was."""
    kept: list[int | None] = []
    need: int | None = None  # the step from which the later attempts continue
    for attempt in reversed(attempts):
        kept.append(need)
        if attempt.loaded is not None and (need is None or attempt.has_mark(need)):
            need = attempt.loaded
    return kept[::-1]
