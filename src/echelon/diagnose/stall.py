"""Does the run stand still, why, and because of whom: from the boards of all ranks, and from what they answer when asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias, final

from echelon.diagnose.collectives import Divergence, History, first_divergence
from echelon.status.board import Doing, Phase, StatusNote, Watch
from echelon.status.call_site import CallSite

__all__ = [
    "LONG_FACTOR",
    "Answer",
    "Class",
    "RankView",
    "Stall",
    "StallClock",
    "diagnose",
    "disagreement",
    "name_duration",
    "name_ranks",
]

_SILENT_S = 10.0
"""So long after its last heartbeat a rank that runs is taken to be held by native code."""
_BUSY = 0.1
"""A rank that computes has used at least this part of the time."""
_WORK_S = 0.5
"""A process that has used so much processor time since the last look at that is at work, whatever its heartbeat says."""
_MOST_LINES = 8
_LONG_PHASES = frozenset({Phase.SAVE, Phase.LOAD})
_SEEN = ("compiling", "importing")
"""Phases that the reporter sees in the stack; the others are noted by the program."""
_PhaseKey: TypeAlias = tuple[str, int]
LONG_FACTOR = 10
"""A declared phase may last so many times as long as a wait, unless the user says another time."""


class Class(Enum):
    """What kind of stall it is."""

    STOPPED = "a stopped process"
    SILENT = "a rank that does not answer"
    UNEVEN = "uneven data"
    OTHER_OPERATION = "different collectives"
    OTHER_SHAPE = "different shapes"
    MISSING = "a missing rank"
    LONG = "a phase that takes too long"
    SLOW = "slow, but alive"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """What the launcher knows of one rank at one moment."""

    rank: int
    watch: Watch | None = None
    note: StatusNote | None = None
    exit_code: int | None = None
    is_stopped: bool = False
    """By SIGSTOP or the like."""
    cpu_s: float = 0.0
    """Processor time that the process has used."""
    num_faults: int = 0
    """How often the process has waited for a page of a file: it reads a library, say."""

    @property
    def waits(self) -> bool:
        """Whether it is in a call that may wait for other ranks."""
        doing = Doing.NOTHING if self.watch is None else self.watch.doing
        in_call = doing & (Doing.COMMUNICATES | Doing.ENDED) == Doing.COMMUNICATES
        # A signal handler or a hook that hangs in the middle of a wait waits for no other rank.
        return in_call or (self.note is not None and self.note.waits and not doing & Doing.ELSEWHERE)

    @property
    def is_debugged(self) -> bool:
        """Whether a debugger has stopped its program, in its last heartbeat."""
        return self.watch is not None and bool(self.watch.doing & Doing.DEBUGS)

    @property
    def slow_with(self) -> str:
        """What it says that it does, and may take long with; empty: nothing, or it waits all the same.

        Whether that is still so is the clock's to tell: a rank that was stopped says it for ever.
        """
        if self.watch is not None and self.watch.doing & Doing.ENDED:
            return "ending, after its program"
        if self.waits:
            return ""
        if self.watch is not None and self.watch.doing & (Doing.COMPILES | Doing.IMPORTS):
            return _SEEN[0] if self.watch.doing & Doing.COMPILES else _SEEN[1]
        if self.note is None:
            return ""
        if self.note.slow:
            return f'in slow("{self.note.slow}")'
        return str(self.note.phase) if self.note.phase in _LONG_PHASES else ""

    @property
    def standing(self) -> tuple[object, ...]:
        """What is equal between two moments when the rank has not moved on."""
        watch, note = self.watch, self.note
        counts = (watch.num_collectives if watch else 0, note and (note.num_operations, note.step, note.phase))
        # In a wait of echelon's own the thread looks around again and again, and its stack with it.
        is_own_wait = note is not None and note.waits
        return (*counts, self.waits, 0 if watch is None or is_own_wait else watch.signature)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a rank said when it was asked, or wrote when it failed."""

    place: CallSite | None = None
    trains: bool = False
    """Whether it is in a backward pass, or in the forward pass of a wrapped model."""
    histories: Mapping[str, History] = field(default_factory=dict)
    no_histories: str = ""
    """Why there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """The verdict."""

    kind: Class
    culprits: tuple[int, ...]
    """The ranks that are late, or do something else; empty: there is no majority, or nobody knows."""
    what: str
    """The first line of the report."""
    ranks: Mapping[int, str]
    """What each rank is in."""
    do: str
    waited_s: float

    @property
    def is_alarm(self) -> bool:
        """Whether something has to be done: a rank that is slow comes by itself."""
        return self.kind is not Class.SLOW

    def lines(self) -> list[str]:
        """Return what the ranks are in, a line for those that say the same: the culprits first, and not too many."""
        by_text: dict[str, list[int]] = {}
        for rank, text in sorted(self.ranks.items(), key=lambda item: (item[0] not in self.culprits, item[0])):
            by_text.setdefault(text, []).append(rank)
        lines = [f"{name_ranks(ranks)}: {text}" for text, ranks in by_text.items()]
        surplus = len(lines) - _MOST_LINES
        return [*lines[:_MOST_LINES], f"and {surplus} more"] if surplus > 0 else lines


@dataclass(slots=True)
class _Since:
    standing: tuple[object, ...]
    time: float
    cpu_s: float


@dataclass(slots=True)
class _Work:
    """When a process was last seen to have worked, by the system's own counters."""

    time: float
    cpu_s: float
    num_faults: int


@final
class StallClock:
    """Knows since when each rank has not moved, and since when it is in what it has declared to take long.

    What a rank declares counts only while it is alive: while its process runs, and its reporter writes or, where native
    code holds Python's lock, the system says that the process works. A rank that waits for one that is in a declared phase
    is excused until that ends. The phase itself may last ``long_timeout_s``.

    Args:
        timeout_s: after this time without a move a rank that waits for others makes a stall.
        long_timeout_s: a declared phase, or a computation that others wait for, may last so long; None: ten times as long.
    """

    def __init__(self, timeout_s: float, long_timeout_s: float | None = None) -> None:
        self._timeout_s = timeout_s
        self.long_timeout_s = LONG_FACTOR * timeout_s if long_timeout_s is None else long_timeout_s
        self._since: dict[int, _Since] = {}
        self._work: dict[int, _Work] = {}
        self._phases: dict[int, dict[_PhaseKey, float]] = {}
        """Of each rank what it has been declaring without a gap, and since when it declares that."""
        self._told: set[tuple[int, _PhaseKey]] = set()
        """Phases that have been reported as too long: the others go on to wait for them."""
        self._excused = float("-inf")
        """When a rank was last seen in a declared phase."""

    def look(self, views: Sequence[RankView], now: float) -> frozenset[tuple[str, int]]:
        """Note what moved since the last look; return what is suspicious of which rank; empty: there is nothing to ask."""
        for view in views:
            known = self._since.get(view.rank)
            if known is None or (not view.is_stopped and known.standing != view.standing):
                self._since[view.rank] = _Since(view.standing, now, view.cpu_s)
            work = self._work.get(view.rank)
            if work is None or view.cpu_s - work.cpu_s >= _WORK_S or view.num_faults > work.num_faults:
                self._work[view.rank] = _Work(now, view.cpu_s, view.num_faults)
        running = [view for view in views if view.exit_code is None]
        if any(view.is_debugged and self._is_alive(view, now) for view in running):
            for since in self._since.values():  # somebody thinks, and the others wait for that
                since.time = now
            self._phases.clear()
            return frozenset()
        for view in running:
            self._note_phase(view, now)
        if any(self.declared(view, now) and not _has_ended(view) for view in running):
            self._excused = now
        return frozenset((reason, view.rank) for view in running for reason in self._suspicions(view, running, now))

    def _note_phase(self, view: RankView, now: float) -> None:
        if not self.declared(view, now):
            self._phases.pop(view.rank, None)
            if self._told:
                self._told = {told for told in self._told if told[0] != view.rank}
            return
        phases = self._phases.setdefault(view.rank, {})
        # A compiler imports between, and compiles on: it has not begun anew. After another phase it has.
        if view.slow_with not in _SEEN:
            for phase in [phase for phase in phases if phase[0] in _SEEN]:
                del phases[phase]
        phases.setdefault(_phase_of(view), now)

    def _suspicions(self, view: RankView, running: Sequence[RankView], now: float) -> list[str]:
        if self.overdue(view, now):
            return ["too long"]
        if self.declared(view, now):
            return []
        stands_s = self.stood_s(view, now)
        if stands_s < self._timeout_s:
            return []
        if view.is_stopped:
            return ["stopped"]
        if self.is_silent(view, now):
            return ["silent"]
        if view.waits:
            return ["waits", "waits long"] if stands_s >= self.long_timeout_s else ["waits"]
        others = (other for other in running if other.waits and not self._is_away(other, now))
        return ["away"] if any(now - self._since[o.rank].time >= self._timeout_s for o in others) else []

    def stood_s(self, view: RankView, now: float) -> float:
        """Return how long the rank has not moved; one that waits is excused while another was in a declared phase."""
        since = self._since[view.rank].time
        return now - (since if self._is_away(view, now) else max(since, self._excused))

    def _is_away(self, view: RankView, now: float) -> bool:
        return not view.waits or view.is_stopped or self.is_silent(view, now)

    def declared(self, view: RankView, now: float) -> str:
        """Return what the rank is in that may take long, if it is alive; empty: nothing."""
        return view.slow_with if view.slow_with and self._is_alive(view, now) else ""

    def overdue(self, view: RankView, now: float) -> bool:
        """Tell whether the rank is in a declared phase for too long, and that has not been told."""
        begun = self._phases.get(view.rank, {}).get(_phase_of(view))
        if begun is None or not self.declared(view, now) or (view.rank, _phase_of(view)) in self._told:
            return False
        return now - begun >= self.long_timeout_s

    def note_told(self, views: Sequence[RankView], now: float) -> None:
        """Remember that the phases that are too long now have been reported."""
        self._told |= {(view.rank, _phase_of(view)) for view in views if self.overdue(view, now)}

    def _is_alive(self, view: RankView, now: float) -> bool:
        if view.is_stopped or view.watch is None:
            return False
        if _has_ended(view) or self._is_fresh(view, now):
            return True
        work = self._work.get(view.rank)
        return work is not None and now - work.time <= self._silent_s

    def _is_fresh(self, view: RankView, now: float) -> bool:
        return view.watch is not None and now - view.watch.time_ns / 1e9 <= self._silent_s

    @property
    def _silent_s(self) -> float:
        # Before the others' time is over: a rank that is held looks as it did before, as if it waited with them.
        return max(2.0, min(_SILENT_S, self._timeout_s / 2))

    def is_silent(self, view: RankView, now: float) -> bool:
        """Tell whether the rank's reporter has not written for long although its process runs, and nothing explains that."""
        if view.watch is None or view.is_stopped or _has_ended(view):
            return False  # it has not begun to write, or it cannot, or it has done with it
        return not self._is_fresh(view, now) and not self.declared(view, now)

    def is_busy(self, view: RankView, now: float) -> bool:
        """Tell whether the rank computes, or moves from line to line."""
        since = self._since[view.rank]
        return now - since.time < self._timeout_s / 2 or view.cpu_s - since.cpu_s > _BUSY * (now - since.time)


def _has_ended(view: RankView) -> bool:
    return view.watch is not None and bool(view.watch.doing & Doing.ENDED)


def _phase_of(view: RankView) -> _PhaseKey:
    """Return what is equal for as long as the rank is in one and the same declared phase."""
    # A loop that declares each of its rounds is not one long phase.
    return view.slow_with, 0 if view.note is None or view.slow_with in _SEEN else view.note.time_ns


def diagnose(
    views: Sequence[RankView], answers: Mapping[int, Answer], clock: StallClock, *, now: float
) -> Stall | None:
    """Return why the run stands still; None: it does not.

    Args:
        views: of all ranks, taken after the answers.
        answers: by rank; of a rank that gave none, nothing.
        clock: that has looked at ``views``.
        now: on the clock's time.
    """
    running = [view for view in views if view.exit_code is None]
    waiting = [view for view in running if view.waits and not view.is_stopped and not clock.is_silent(view, now)]
    undeclared = [view for view in running if not clock.declared(view, now)]
    waited = max((clock.stood_s(view, now) for view in undeclared or running), default=0.0)
    texts = {view.rank: _in_words(view, answers.get(view.rank), clock, now) for view in views}

    def stall(kind: Class, culprits: Sequence[int], what: str, do: str) -> Stall:
        return Stall(kind=kind, culprits=tuple(culprits), what=what, ranks=texts, do=do, waited_s=waited)

    waiters = f", and {name_ranks([v.rank for v in waiting])} wait{'s' if len(waiting) == 1 else ''} for others"
    waiters = waiters if waiting else ""
    if stopped := [view.rank for view in running if view.is_stopped]:
        what = f"{name_ranks(stopped)} {_is(stopped)} stopped (SIGSTOP){waiters}"
        return stall(
            Class.STOPPED, stopped, what, "continue it (kill -CONT), or stop the run; somebody else stopped it"
        )
    if silent := [view.rank for view in running if clock.is_silent(view, now)]:
        what = f"{name_ranks(silent)} {_is(silent)} held by native code: not even another thread of it runs{waiters}"
        return stall(
            Class.SILENT,
            silent,
            what,
            "look at the line above: a library that keeps Python's lock (GIL) while it waits",
        )
    if overdue := [view for view in running if clock.overdue(view, now)]:
        names = [view.rank for view in overdue]
        doing = " and ".join(dict.fromkeys(view.slow_with for view in overdue))
        what = f"{name_ranks(names)} {_has(names)} been {doing} for {name_duration(clock.long_timeout_s)}{waiters}"
        return stall(
            Class.LONG, names, what, "if it is at work, give it more time (--slow_timeout SECONDS); else see its stack"
        )
    if not waiting:
        return None
    # A process may be there for long after its program: what others wait for will not come.
    if ended := [view.rank for view in views if view.exit_code == 0 or (view.exit_code is None and _has_ended(view))]:
        what = f"{name_ranks(ended)} {_has(ended)} ended{waiters}"
        return stall(Class.UNEVEN, ended, what, _UNEVEN)
    away = [view for view in undeclared if not view.waits]
    if idle := [view.rank for view in away if not clock.is_busy(view, now)]:
        what = f"{name_ranks(idle)} {_does(idle)} not come{waiters}"
        return stall(
            Class.MISSING, idle, what, "see why this rank is elsewhere; every rank must make the same collective calls"
        )
    if len(undeclared) < len(running):
        return None  # the others wait for what has been declared
    if away:
        names = [view.rank for view in away]
        if min(clock.stood_s(view, now) for view in waiting) >= clock.long_timeout_s:
            what = (
                f"{name_ranks(names)} {_has(names)} been computing for {name_duration(clock.long_timeout_s)}{waiters}"
            )
            return stall(
                Class.LONG,
                names,
                what,
                "see whether its loop ends; what takes so long by intention is declared: with accelerator.slow(...)",
            )
        what = f"{name_ranks(names)} {_is(names)} slow, but alive{waiters}"
        return stall(Class.SLOW, names, what, 'wait, or declare it: with accelerator.slow("what it does")')
    if len(waiting) < 2:
        return None  # one process waits for something of its own
    # A backward pass is such a call from its first line on.
    computing = [v.rank for v in waiting if clock.is_busy(v, now) and not _has_begun(answers.get(v.rank))]
    if computing:
        what = f"{name_ranks(computing)} {_is(computing)} slow, but alive"
        return stall(Class.SLOW, computing, what, "wait; it computes")
    found = first_divergence({rank: answer.histories for rank, answer in answers.items()})
    if found is not None:
        kind, what, do = _of_divergence(found, trains={rank for rank, answer in answers.items() if answer.trains})
        return stall(kind, found.diverging, what, do)
    return _without_histories(running, answers, stall)


_UNEVEN = (
    "let every rank make the same number of steps: as many batches on each (drop_last, a padded sampler, "
    "join_uneven_inputs), no early break or return on one"
)
_SAME = "call the same collectives, with the same shapes, in the same order on every rank; look for `if rank == 0` around one"


def disagreement(answers: Mapping[int, Answer]) -> Stall | None:
    """Return in what the ranks of a run that failed differ; None: in nothing that is known.

    Args:
        answers: what the ranks wrote when they lost each other, or said when they were asked then.
    """
    found = first_divergence({rank: answer.histories for rank, answer in answers.items()})
    if found is None:
        return None
    kind, what, do = _of_divergence(found, trains={rank for rank, answer in answers.items() if answer.trains})
    texts = {}
    for rank, answer in answers.items():
        collective = found.at.get(rank)
        parts = ([f"in {collective}"] if collective else []) + ([f"at {answer.place}"] if answer.place else [])
        texts[rank] = "; ".join(parts) or "at a place that it did not tell"
    return Stall(kind=kind, culprits=found.diverging, what=what, ranks=texts, do=do, waited_s=0.0)


def _of_divergence(found: Divergence, *, trains: set[int]) -> tuple[Class, str, str]:
    ranks = found.diverging
    if found.kind == "behind":
        others = next(str(collective) for collective in found.at.values() if collective is not None)
        return (
            Class.MISSING,
            f"{name_ranks(ranks)} {_does(ranks)} not come to {others}, which the others have begun",
            "see what this rank waits for; every rank must make the same collective calls in the same order",
        )
    elsewhere = {rank for rank in found.at if rank not in trains}
    if found.kind == "other operation" and trains and elsewhere and trains & set(found.at):
        who = sorted(elsewhere)
        return (
            Class.UNEVEN,
            f"{name_ranks(who)} {_has(who)} left the training loop, and {name_ranks(sorted(trains))} still train",
            _UNEVEN,
        )
    kind = Class.OTHER_OPERATION if found.kind == "other operation" else Class.OTHER_SHAPE
    calls = ", ".join(f"{name_ranks(group)} in {text}" for text, group in _camps(found).items())
    if not ranks:
        return kind, f"the ranks are in {kind.value}: {calls}", _SAME
    return kind, f"{name_ranks(ranks)} {_does(ranks)} not do what the others do: {calls}", _SAME


def _camps(found: Divergence) -> dict[str, list[int]]:
    camps: dict[str, list[int]] = {}
    for rank, collective in sorted(found.at.items()):
        camps.setdefault(str(collective), []).append(rank)
    return camps


def _without_histories(
    running: Sequence[RankView],
    answers: Mapping[int, Answer],
    stall: Callable[[Class, Sequence[int], str, str], Stall],
) -> Stall | None:
    by_line: dict[str, list[int]] = {}
    for view in running:
        by_line.setdefault(_line_of(view, answers.get(view.rank)), []).append(view.rank)
    names = [view.rank for view in running]
    if len(by_line) == 1:
        what = f"{name_ranks(names)} wait for each other in one and the same place"
        return stall(Class.UNKNOWN, (), what, "look at the network between the ranks, and at the stacks")
    largest = max(by_line.values(), key=len)
    culprits = [rank for rank in names if rank not in largest] if 2 * len(largest) > len(names) else []
    what = (
        f"the ranks wait in different places: {', '.join(f'{name_ranks(r)} at {line}' for line, r in by_line.items())}"
    )
    return stall(Class.OTHER_OPERATION, culprits, what, _SAME)


def _is_at(answer: Answer | None, note: StatusNote) -> bool:
    """Tell whether the rank is in the operation that it noted last: at the same line."""
    place = None if answer is None else answer.place
    return place is not None and place.line == note.line and place.file.endswith(note.file.removeprefix("..."))


def _has_begun(answer: Answer | None) -> bool:
    return answer is not None and any(not c.is_over for h in answer.histories.values() for c in h.begun)


def _line_of(view: RankView, answer: Answer | None) -> str:
    if answer is not None and answer.place is not None:
        return f"{answer.place.file}:{answer.place.line}"
    return f"{view.watch.file}:{view.watch.line}" if view.watch is not None else "a place that it does not tell"


def _in_words(view: RankView, answer: Answer | None, clock: StallClock, now: float) -> str:
    """Return what the rank is in: state, operation, phase and step, the user's line."""
    if view.exit_code is not None:
        return f"has ended (exit code {view.exit_code})"
    parts: list[str] = []
    if view.is_stopped:
        parts.append("stopped")
    elif clock.is_silent(view, now):
        parts.append("silent")
    elif (doing := clock.declared(view, now)) and (view.note is None or doing != str(view.note.phase)):
        parts.append(doing)
    note = view.note
    if note is not None and note.operation and (note.waits or _is_at(answer, note)):
        parts.append(f"in {note.operation}" + (f" of {note.detail}" if note.detail else ""))
    elif view.waits and answer is not None:
        pending = [c for h in answer.histories.values() for c in h.begun if not c.is_over]
        parts += [f"in {pending[0]}"] if pending else []
    if note is not None and (note.step or note.phase):
        parts.append(", ".join(filter(None, (f"step {note.step}", str(note.phase)))))
    if answer is not None and answer.place is not None:
        return "; ".join([*parts, f"at {answer.place}"])
    return "; ".join([*parts, f"last seen at {_line_of(view, None)}"])


def _is(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _has(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _does(ranks: Sequence[int]) -> str:
    return "does" if len(ranks) == 1 else "do"


def name_duration(seconds: float) -> str:
    """Return ``10 minutes``, ``90 seconds`` or ``2 hours``."""
    for unit, size in (("hour", 3600.0), ("minute", 60.0)):
        if seconds >= 2 * size or seconds == size:
            number = seconds / size
            return (
                f"{number:g} {unit}{'s' if number != 1 else ''}" if number == int(number) else f"{number:.1f} {unit}s"
            )
    return f"{seconds:g} seconds"


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ``rank 3`` or ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    names = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
