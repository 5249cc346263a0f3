"""What each rank of a live run does, and which ranks differ from the others."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from statistics import median
from types import MappingProxyType
from typing import final

from echelon.base.messages.translation import gettext as _, gettext_noop as N_
from echelon.diagnose.stall import RankView, name_ranks
from echelon.diagnose.straggler import steps_of
from echelon.status.board import Doing, Phase, Times

_SILENT_S = 3.0
"""Age of a heartbeat in seconds from which it counts as missing. A reporter writes one every half second."""
_STILL_S = 1.0
"""Time in seconds for which a difference that every step shows for a moment must last."""
_WAIT_S = 2.0
"""Time in seconds without progress from which ranks count as waiting for one that does not wait."""
_WINDOW_S = 30.0
_MIN_STEPS = 20
"""Minimum number of steps from which a slow rank can be told (see ``diagnose/straggler.py``)."""
_MIN_HEARTBEATS = 6
_SELDOM, _OFTEN = 0.25, 0.6
"""A rank that waits in less than the first part of its heartbeats is slow if the others wait in more than the second."""
_PARTS = MappingProxyType({"data": N_("waiting for data"), "other": N_("code outside the model")})
_BLOCKS, _ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.:-=+*#"


class Difference(IntEnum):
    """How a rank differs from the others, most serious first."""

    STOPPED = 0
    EXITED = 1
    SILENT = 2
    AWAITED = 3
    """The other ranks wait for this rank, which does not wait."""
    SLOW = 4
    BEHIND = 5
    PHASE = 6
    NONE = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSample:
    """What the status board and the system say about a rank at one point in time."""

    view: RankView
    times: Times | None = None
    is_running: bool = True
    """Whether the process exists."""
    memory_mb: float = math.nan
    """Memory of the process; nan if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """A rank's line in the live view."""

    rank: int
    difference: Difference = Difference.NONE
    what: str = ""
    """How the rank differs from the others, for people; empty if it does not."""
    step: int | None = None
    phase: str = ""
    operation: str = ""
    """The last operation that involves other ranks."""
    num_collectives: int = 0
    place: str = ""
    """``file:line`` of the program where the rank was seen last."""
    heartbeat_s: float = math.nan
    """Time since the last heartbeat; nan before the first."""
    memory_mb: float = math.nan

    def to_text(self) -> str:
        """Return the row as one line for ``echelon doctor``."""
        parts = [
            self.what,
            "" if self.step is None else _("step {step}", step=self.step),
            self.phase,
            _("last operation {operation}", operation=self.operation) if self.operation else "",
            _("{num_collectives} collectives", num_collectives=self.num_collectives) if self.num_collectives else "",
            at_place(self.place) if self.place else "",
            ""
            if math.isnan(self.heartbeat_s)
            else _("heartbeat {heartbeat_s:.1f} s ago", heartbeat_s=self.heartbeat_s),
            "" if math.isnan(self.memory_mb) else f"{self.memory_mb:.0f} MB",
        ]
        return _("rank {rank}: {state}", rank=self.rank, state=_("; ").join(filter(None, parts)))


def at_place(place: str) -> str:
    """Return ``at PLACE`` in the user's language."""
    return _("at {place}", place=place)


@dataclass(frozen=True, slots=True, kw_only=True)
class _AllRanks:
    """What the ranks of a run have in common at one time."""

    any_runs: bool
    last_step: int
    phase: Phase | None
    """The phase of more than half of the ranks."""
    awaited: int | None
    """The only rank that does not wait for others, if there is one."""
    awaited_since: float
    """When a rank that waits last made progress."""
    slow: tuple[int, str] | None
    """The slow rank, and why it is slow."""


@final
class RowTracker:
    """Makes rows from successive samples of the same ranks."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, Mapping[int, Times]]] = deque()
        self._progress: dict[int, tuple[tuple[object, ...], float]] = {}
        """Each rank's last progress, and when it was first seen."""
        self._odd_since: dict[tuple[int, Difference], float] = {}
        self._heartbeats: dict[int, deque[tuple[int, bool]]] = {}
        """Each rank's last heartbeats: time, and whether the rank was waiting."""

    def update(self, samples: Sequence[RankSample], now: float) -> list[RankRow]:
        """Return a row for each rank, those that differ first.

        Args:
            now: time on the clock of the heartbeats (``time.monotonic``), in seconds.
        """
        self._remember(samples, now)
        everyone = self._compare(samples)
        rows = [self._row(sample, everyone, now) for sample in samples]
        return sorted(rows, key=lambda row: (row.difference, row.rank))

    def steps_per_s(self) -> float:
        """Return the rate of the last half minute, or the mean since the start if it has seen no step yet; nan if unknown."""
        if not self._samples:
            return math.nan
        (first_s, first), (last_s, last) = self._samples[0], self._samples[-1]
        shared = [rank for rank in last if rank in first]
        if shared and last_s - first_s >= _STILL_S:
            return max(last[rank].num_steps - first[rank].num_steps for rank in shared) / (last_s - first_s)
        rates = [
            times.num_steps / (last_s - times.begun_ns / 1e9)
            for times in last.values()
            if times.num_steps and last_s > times.begun_ns / 1e9
        ]
        return max(rates, default=math.nan)

    def _remember(self, samples: Sequence[RankSample], now: float) -> None:
        times = {sample.view.rank: sample.times for sample in samples if sample.times is not None}
        self._samples.append((now, times))
        while self._samples[0][0] < now - _WINDOW_S:
            self._samples.popleft()
        for sample in samples:
            view = sample.view
            known = self._progress.get(view.rank)
            if known is None:
                seen = now if view.note is None else view.note.time_ns / 1e9
                self._progress[view.rank] = view.progress, seen
            elif known[0] != view.progress and not view.is_stopped:
                self._progress[view.rank] = view.progress, now
            if view.watch is not None and not view.is_stopped:
                beats = self._heartbeats.setdefault(view.rank, deque(maxlen=4 * _MIN_HEARTBEATS))
                if not beats or beats[-1][0] != view.watch.time_ns:
                    beats.append((view.watch.time_ns, view.waits))

    def _row(self, sample: RankSample, everyone: _AllRanks, now: float) -> RankRow:
        view, watch, note = sample.view, sample.view.watch, sample.view.note
        difference, what = self._difference(sample, everyone, now)
        has_step = note is not None and (note.step or note.phase)
        before = (
            0 if sample.times is None else max(sample.times.loaded, 0)
        )  # the board counts since the process started
        return RankRow(
            rank=view.rank,
            difference=difference,
            what=what,
            step=before + note.step if note is not None and has_step else None,
            phase=_phase(sample),
            operation="" if note is None else note.operation + (f" of {note.detail}" if note.detail else ""),
            num_collectives=0 if watch is None else watch.num_collectives,
            place="" if watch is None or not watch.file else f"{watch.file}:{watch.line}",
            heartbeat_s=math.nan if watch is None else max(now - watch.time_ns / 1e9, 0.0),
            memory_mb=sample.memory_mb,
        )

    def _difference(self, sample: RankSample, everyone: _AllRanks, now: float) -> tuple[Difference, str]:
        view, note = sample.view, sample.view.note
        if not sample.is_running:
            return (Difference.EXITED, _("exited")) if everyone.any_runs else (Difference.NONE, "")
        if view.is_stopped:
            return Difference.STOPPED, _("stopped (SIGSTOP or a debugger)")
        if view.watch is not None and view.watch.doing & Doing.ENDED:
            return Difference.NONE, ""
        silent_s = 0.0 if view.watch is None else now - view.watch.time_ns / 1e9
        if silent_s >= _SILENT_S:
            return Difference.SILENT, _("no heartbeat for {silent_s:.0f} s", silent_s=silent_s)
        waited_s = now - everyone.awaited_since
        if everyone.awaited == view.rank and view.watch is not None and waited_s >= _WAIT_S:
            return Difference.AWAITED, _(
                "the other ranks have been waiting for it for {waited_s:.0f} s", waited_s=waited_s
            )
        if everyone.slow is not None and everyone.slow[0] == view.rank:
            return Difference.SLOW, everyone.slow[1]
        num_behind = 0 if note is None else everyone.last_step - note.step
        if self._lasts(view.rank, Difference.BEHIND, num_behind > 0, now) or num_behind > 1:
            return Difference.BEHIND, _(
                "{num_behind} step{s} behind", num_behind=num_behind, s="s" if num_behind > 1 else ""
            )
        is_elsewhere = (
            note is not None and everyone.phase is not None and note.phase not in (Phase.NONE, everyone.phase)
        )
        if self._lasts(view.rank, Difference.PHASE, is_elsewhere, now):
            assert note is not None
            return Difference.PHASE, _("in another phase for {seconds:.0f} s", seconds=now - note.time_ns / 1e9)
        return Difference.NONE, ""

    def _lasts(self, rank: int, difference: Difference, is_so: bool, now: float) -> bool:
        if not is_so:
            self._odd_since.pop((rank, difference), None)
            return False
        return now - self._odd_since.setdefault((rank, difference), now) >= _STILL_S

    def _compare(self, samples: Sequence[RankSample]) -> _AllRanks:
        """Return what the ranks have in common; each of them is then compared with that."""
        running = [sample.view for sample in samples if sample.is_running]
        waiting = [view for view in running if view.waits and not view.is_stopped]
        others = [view.rank for view in running if view.is_stopped or not view.waits]
        phases = Counter(view.note.phase for view in running if view.note is not None)
        phase, number = phases.most_common(1)[0] if phases else (None, 0)
        return _AllRanks(
            any_runs=bool(running),
            last_step=max((sample.view.note.step for sample in samples if sample.view.note is not None), default=0),
            phase=phase if 2 * number > len(samples) else None,
            awaited=others[0] if len(others) == 1 and waiting else None,
            awaited_since=max((self._progress[view.rank][1] for view in waiting), default=math.nan),
            slow=self._slow_rank(samples),
        )

    def _slow_rank(self, samples: Sequence[RankSample]) -> tuple[int, str] | None:
        """Return the slow rank and why it is slow, or None."""
        if len(samples) < 2:
            return None
        if any(sample.times is not None and sample.times.num_steps for sample in samples):
            return self._slow_by_times(samples)
        return self._slow_by_heartbeats(samples)

    def _slow_by_times(self, samples: Sequence[RankSample]) -> tuple[int, str] | None:
        last = self._samples[-1][1]
        if len(last) < len(samples):
            return None  # a rank that has not begun yet
        for _time, first in reversed(self._samples):  # the shortest time with enough steps, else since the start
            if first.keys() == last.keys() and _num_steps(first, last) >= _MIN_STEPS:
                break
        else:
            first = {}
        num_steps = _num_steps(first, last)
        spent_ms = {rank: _spent_ms(first.get(rank), times, num_steps) for rank, times in last.items()}
        steps = steps_of(spent_ms, num_steps=num_steps)
        if steps is None or steps.slowest is None:
            return None
        own = steps.parts[steps.slow_part]
        part = _(_PARTS.get(steps.slow_part, steps.slow_part))
        return steps.slowest, _(
            "slow: {part} {slow_ms} ms per step (median {median})",
            part=part,
            slow_ms=_ms(steps.slow_ms),
            median=_ms(own.median),
        )

    def _slow_by_heartbeats(self, samples: Sequence[RankSample]) -> tuple[int, str] | None:
        """Return the rank that seldom waits while the others often do, for programs whose steps are unknown."""
        beats = {sample.view.rank: self._heartbeats.get(sample.view.rank, ()) for sample in samples}
        if min(map(len, beats.values())) < _MIN_HEARTBEATS:
            return None
        waits = {rank: sum(waited for _, waited in seen) / len(seen) for rank, seen in beats.items()}
        slowest = min(waits, key=lambda rank: waits[rank])
        if waits[slowest] > _SELDOM or min(part for rank, part in waits.items() if rank != slowest) < _OFTEN:
            return None
        others = median(part for rank, part in waits.items() if rank != slowest)
        return slowest, _(
            "slow: waits {waits:.0%} of the time (median of the others {others:.0%})",
            waits=waits[slowest],
            others=others,
        )


def _ms(number: float) -> str:
    return f"{number:.0f}" if number >= 10 else f"{number:.2g}"


def _num_steps(first: Mapping[int, Times], last: Mapping[int, Times]) -> int:
    return min((times.num_steps - (first[rank].num_steps if first else 0) for rank, times in last.items()), default=0)


def _spent_ms(first: Times | None, last: Times, num_steps: int) -> list[float]:
    """Return the time that a rank spent in each part of ``num_steps`` steps, from the mean of the steps that it took."""
    before, number = ((0,) * len(last.spent_ns), 0) if first is None else (first.spent_ns, first.num_steps)
    scale = num_steps / max(last.num_steps - number, 1) / 1e6
    return [(ns - earlier) * scale for ns, earlier in zip(last.spent_ns, before, strict=True)]


def _phase(sample: RankSample) -> str:
    view = sample.view
    if not sample.is_running:
        return _("exited")
    if view.watch is None:
        return _("starting")
    if view.watch.doing & Doing.DEBUGS:
        return _("in a debugger")
    if view.slow_phase:
        return _(view.slow_phase)
    phase = view.phase and _(view.phase)
    if view.waits:
        return _("{phase}, waiting", phase=phase) if phase else _("waiting for other ranks")
    return phase or _("in the program")


def fold_rows(rows: Sequence[RankRow], room: int) -> tuple[list[RankRow], str]:
    """Return the rows to show, and a line for the others (empty if there are none)."""
    if len(rows) <= room:
        return list(rows), ""
    differing = [row for row in rows if row.difference is not Difference.NONE]
    shown = differing[: max(room - 1, 0)]
    rest = rows[len(shown) :]
    num_hidden = len(differing) - len(shown)
    return shown, _summary(rest, num_hidden)


def _summary(rows: Sequence[RankRow], num_differing: int) -> str:
    steps = [row.step for row in rows if row.step is not None]
    phases = Counter(row.phase for row in rows if row.phase)
    ages = [row.heartbeat_s for row in rows if not math.isnan(row.heartbeat_s)]
    memory = [row.memory_mb for row in rows if not math.isnan(row.memory_mb)]
    parts = [
        _("{num_differing} of them differ", num_differing=num_differing) if num_differing else "",
        _span("step", [float(step) for step in steps], ""),
        ", ".join(f"{phase} ({number})" if len(phases) > 1 else phase for phase, number in phases.most_common(3)),
        _("heartbeat at most {ages:.1f} s ago", ages=max(ages)) if ages else "",
        _span("", memory, " MB"),
    ]
    return f"{name_ranks([row.rank for row in rows])}: {'; '.join(filter(None, parts))}"


def _span(name: str, values: Sequence[float], unit: str) -> str:
    if not values:
        return ""
    least, most = f"{min(values):.0f}", f"{max(values):.0f}"
    return f"{name} {least if least == most else f'{least}-{most}'}{unit}".strip()


def sparkline(values: Sequence[float], width: int, *, is_ascii: bool = False) -> str:
    """Return a line of ``width`` characters whose heights show ``values``; unknown values (nan) leave a gap.

    More values than characters are averaged.
    """
    if width < 1 or not values:
        return ""
    blocks = _ASCII_BLOCKS if is_ascii else _BLOCKS
    number = min(width, len(values))
    means = []
    for i in range(number):
        part = values[i * len(values) // number : (i + 1) * len(values) // number]
        known = [value for value in part if math.isfinite(value)]
        means.append(sum(known) / len(known) if known else math.nan)
    finite = [mean for mean in means if not math.isnan(mean)]
    if not finite:
        return " " * number
    least, most = min(finite), max(finite)
    scale = (len(blocks) - 1) / (most - least) if most > least else 0.0
    return "".join(" " if math.isnan(mean) else blocks[round((mean - least) * scale)] for mean in means)
