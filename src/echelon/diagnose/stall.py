"""Diagnoses stalls: whether a run hangs, why, and which rank is the cause, based on all ranks' status boards and stacks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import TypeAlias, final

from echelon.base.messages.translation import gettext as _, gettext_noop as N_
from echelon.diagnose.collectives import CollectiveCall, Divergence, History, first_divergence
from echelon.diagnose.deadlock import find_deadlocked_ranks
from echelon.status.board import Doing, Phase, StatusNote, StepPart, Times, Watch
from echelon.status.call_site import CallSite, is_user_file

_SILENT_S = 10.0
"""Heartbeat age in seconds after which a running rank counts as blocked by native code."""
_BUSY = 0.1
"""Minimum fraction of one CPU that a computing rank uses."""
_WORK_S = 0.5
"""A process without a heartbeat counts as working if it has used this many CPU seconds since the last check."""
_MAX_LINES = 8
_LONG_PHASES = frozenset({Phase.SAVE, Phase.LOAD})
_SEEN_PHASES = (N_("compiling"), N_("importing"))
"""Phases that the reporter recognizes in the stack. The program records the other phases."""
_PARTS = MappingProxyType(
    {
        StepPart.FORWARD: N_("forward pass"),
        StepPart.BACKWARD: N_("backward pass"),
        StepPart.COMMUNICATION: N_("communication"),
        StepPart.OTHER: N_("outside the model"),
    }
)
_DEADLOCK_S = 2.0
"""How long a rank must have waited without progress before it may count as deadlocked, beside a rank that has ended."""
_ALL_WAIT_S = 5.0
"""The same if no rank has ended, but all ranks wait."""
_PhaseKey: TypeAlias = tuple[str, int]
_AWAY = "away"
"""The suspicion against a rank that makes no progress outside of waits; it counts only while another rank waits."""
LONG_FACTOR = 10
"""Default limit for a declared slow phase, as a multiple of the stall timeout."""


class Class(Enum):
    """The kind of stall."""

    STOPPED = N_("a stopped process")
    SILENT = N_("a rank that does not answer")
    UNEVEN = N_("uneven data")
    EXITED = N_("a rank that has exited")
    OTHER_OPERATION = N_("different collectives")
    OTHER_SHAPE = N_("different shapes")
    MISSING = N_("a missing rank")
    LONG = N_("a phase that takes too long")
    SLOW = N_("slow, but alive")
    UNKNOWN = N_("unknown")


class Ending(Enum):
    """How a program ended that succeeded."""

    NONE = ""
    """It is running, has failed, or ended without Python's exit."""
    EXIT = "exit"
    """``sys.exit()``."""
    END = "end"
    """The end of the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """What the launcher knows about a rank at one point in time."""

    rank: int
    watch: Watch | None = None
    note: StatusNote | None = None
    exit_code: int | None = None
    is_stopped: bool = False
    """Whether the process is stopped, for example by SIGSTOP."""
    cpu_s: float = 0.0
    """CPU time that the process has used."""
    num_faults: int = 0
    """Number of major page faults in the process, which grows, for example, while it loads a library."""
    times: Times | None = None

    @property
    def waits(self) -> bool:
        """Whether the rank is inside a call that may wait for other ranks."""
        doing = Doing.NOTHING if self.watch is None else self.watch.doing
        in_call = doing & (Doing.COMMUNICATES | Doing.ENDED) == Doing.COMMUNICATES
        # A signal handler or a hook that hangs during a wait does not wait for another rank.
        return in_call or (self.note is not None and self.note.waits and not doing & Doing.ELSEWHERE)

    @property
    def is_debugged(self) -> bool:
        """Whether a debugger had stopped the rank's program at its last heartbeat."""
        return self.watch is not None and bool(self.watch.doing & Doing.DEBUGS)

    @property
    def slow_phase(self) -> str:
        """The slow phase that the rank declares; empty if there is none or if the rank is waiting for others anyway.

        A stopped rank's declaration persists; ``StallClock.declared`` checks whether the rank is alive.
        """
        if self.watch is not None and self.watch.doing & Doing.ENDED:
            return N_("exiting after the end of its program")
        if self.waits:
            return ""
        if self.watch is not None and self.watch.doing & (Doing.COMPILES | Doing.IMPORTS):
            return _SEEN_PHASES[0] if self.watch.doing & Doing.COMPILES else _SEEN_PHASES[1]
        if self.note is None:
            return ""
        if self.note.slow:
            return _('in slow("{slow}")', slow=self.note.slow)
        return str(self.note.phase) if self.note.phase in _LONG_PHASES else ""

    @property
    def phase(self) -> str:
        """The phase and, during training, the part of the step; empty if unknown."""
        if self.note is None:
            return ""
        times, doing = self.times, Doing.NOTHING if self.watch is None else self.watch.doing
        if self.note.phase is not Phase.TRAIN or times is None:
            return str(self.note.phase)
        # Code outside the model can be told only where both passes are recorded, not after a loss.backward() of the program's own.
        are_recorded = times.spent_ns[StepPart.FORWARD] > 0 and times.spent_ns[StepPart.BACKWARD] > 0
        if times.part is StepPart.OTHER and (not are_recorded or doing & Doing.TRAINS):
            return str(self.note.phase)
        return _PARTS.get(times.part, str(self.note.phase))

    @property
    def progress(self) -> tuple[object, ...]:
        """A value that changes when the rank makes progress."""
        watch, note = self.watch, self.note
        counts = (watch.num_collectives if watch else 0, note and (note.num_operations, note.step, note.phase))
        # While echelon waits, the thread polls, so that its stack changes.
        is_own_wait = note is not None and note.waits
        return (*counts, self.waits, 0 if watch is None or is_own_wait else watch.signature)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A rank's answer to a request, or its record of a failure."""

    call_site: CallSite | None = None
    trains: bool = False
    """Whether the rank is in a backward pass, or in the forward pass of a wrapped model."""
    loops: tuple[str, ...] = ()
    """``file:line`` of each loop that the rank is in, innermost first, excluding loops in torch and the standard library."""
    histories: Mapping[str, History] = field(default_factory=dict)
    no_histories: str = ""
    """Why ``histories`` is empty."""
    ending: Ending = Ending.NONE
    """How the rank's program ended, with ``sys.exit`` at ``call_site``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A stall and its cause."""

    kind: Class
    culprits: tuple[int, ...]
    """Ranks that are late or differ from the majority; empty if unknown."""
    what: str
    """The first line of the report."""
    ranks: Mapping[int, str]
    """Each rank's state and call site."""
    do: str
    waited_s: float
    is_certain: bool = False
    """Whether the run cannot continue, because ranks wait in collectives that can never complete (``deadlock.py``)."""

    @property
    def is_alarm(self) -> bool:
        """Whether the stall requires action. A rank that is merely slow will catch up."""
        return self.kind is not Class.SLOW

    def lines(self) -> list[str]:
        """Return the ranks' states, with one line per distinct text and the culprits first."""
        by_text: dict[str, list[int]] = {}
        for rank, text in sorted(self.ranks.items(), key=lambda item: (item[0] not in self.culprits, item[0])):
            by_text.setdefault(text, []).append(rank)
        lines = [_("{ranks}: {state}", ranks=name_ranks(ranks), state=text) for text, ranks in by_text.items()]
        surplus = len(lines) - _MAX_LINES
        return [*lines[:_MAX_LINES], _("and {surplus} more", surplus=surplus)] if surplus > 0 else lines


@dataclass(slots=True)
class _LastProgress:
    progress: tuple[object, ...]
    time: float
    cpu_s: float


@dataclass(slots=True)
class _Work:
    """Time at which the system's counters last showed that a process was working."""

    time: float
    cpu_s: float
    num_faults: int


@final
class StallClock:
    """Tracks how long each rank has made no progress and how long it has been in a declared slow phase.

    A declared phase counts only while the rank is alive: its process is running, and either its reporter writes heartbeats
    or, if native code holds the GIL, the system's counters show that the process is working. Ranks that wait for a rank in a
    declared phase do not count as stalled until the phase ends. The phase itself may last ``long_timeout_s``.

    Args:
        timeout_s: how long a rank may wait for other ranks without progress, in seconds.
        long_timeout_s: how long a declared phase, or a computation that other ranks wait for, may last, in seconds (default:
            ten times ``timeout_s``).
    """

    def __init__(self, timeout_s: float, long_timeout_s: float | None = None) -> None:
        self._timeout_s = timeout_s
        self.long_timeout_s = LONG_FACTOR * timeout_s if long_timeout_s is None else long_timeout_s
        self._last_progress: dict[int, _LastProgress] = {}
        self._work: dict[int, _Work] = {}
        self._phases: dict[int, dict[_PhaseKey, float]] = {}
        """Each rank's currently declared phases and their start times."""
        self._reported: set[tuple[int, _PhaseKey]] = set()
        """Phases that have already been reported as too long."""
        self._excused = float("-inf")
        """Time at which a rank was last seen in a declared phase."""

    def update(self, views: Sequence[RankView], now: float) -> frozenset[tuple[str, int]]:
        """Track progress since the last update, and return (suspicion, rank) pairs; empty if there are none."""
        for view in views:
            known = self._last_progress.get(view.rank)
            if known is None or (not view.is_stopped and known.progress != view.progress):
                self._last_progress[view.rank] = _LastProgress(view.progress, now, view.cpu_s)
            work = self._work.get(view.rank)
            if work is None or view.cpu_s - work.cpu_s >= _WORK_S or view.num_faults > work.num_faults:
                self._work[view.rank] = _Work(now, view.cpu_s, view.num_faults)
        running = [view for view in views if view.exit_code is None]
        if any(view.is_debugged and self._is_alive(view, now) for view in running):
            for last in self._last_progress.values():  # the other ranks wait for the debugger
                last.time = now
            self._phases.clear()
            return frozenset()
        for view in running:
            self._track_phase(view, now)
        if any(self.declared(view, now) and not _has_ended(view) for view in running):
            self._excused = now
        found = [(reason, view.rank) for view in running for reason in self._suspicions(view, now)]
        if any(reason == _AWAY for reason, _ in found) and not self._has_waited_too_long(running, now):
            found = [suspicion for suspicion in found if suspicion[0] != _AWAY]
        return frozenset(found)

    def may_be_deadlocked(self, views: Sequence[RankView], now: float) -> frozenset[tuple[str, int]]:
        """Return (suspicion, rank) pairs for ranks that may be deadlocked, which is looked at long before the timeout.

        These are ranks that wait, without progress, after another rank has ended, and all ranks of a run in which all wait.
        """
        running = [view for view in views if view.exit_code is None and not _has_ended(view)]
        if any(view.is_debugged for view in running):
            return frozenset()
        has_ended = any(map(_has_succeeded, views))
        standing = [view.rank for view in running if self._stands(view, now, _DEADLOCK_S if has_ended else _ALL_WAIT_S)]
        if not has_ended and (len(standing) < len(running) or len(standing) < 2):
            return frozenset()
        return frozenset(("deadlocked", rank) for rank in standing)

    def deadlocked_ranks(
        self, views: Sequence[RankView], answers: Mapping[int, Answer], now: float
    ) -> Mapping[int, frozenset[int]]:
        """Return the ranks that wait in calls that can never complete, each with the ranks that never join its call."""
        histories = {rank: answer.histories for rank, answer in answers.items()}
        standing = [view for view in views if view.exit_code is None and self._stands(view, now, _DEADLOCK_S)]
        at_barrier = {
            view.rank for view in standing if view.note is not None and view.note.waits and view.note.awaits_all
        }
        # In other loops of echelon, a rank waits for some ranks only, which are not known here.
        in_torch = {view.rank for view in standing if view.note is None or not view.note.waits}
        ended = {view.rank for view in views if _has_succeeded(view)}
        return find_deadlocked_ranks(at_barrier | in_torch, at_barrier=at_barrier, ended=ended, histories=histories)

    def _stands(self, view: RankView, now: float, limit_s: float) -> bool:
        """Return whether the rank is known to wait for other ranks and has made no progress for ``limit_s``."""
        last = self._last_progress.get(view.rank)
        if last is None or not view.waits or _has_ended(view) or view.is_stopped or self.is_silent(view, now):
            return False
        return now - last.time >= min(limit_s, self._timeout_s)

    def _track_phase(self, view: RankView, now: float) -> None:
        if not self.declared(view, now):
            self._phases.pop(view.rank, None)
            if self._reported:
                self._reported = {entry for entry in self._reported if entry[0] != view.rank}
            return
        phases = self._phases.setdefault(view.rank, {})
        # Imports during a compilation do not interrupt it; any other phase does.
        if view.slow_phase not in _SEEN_PHASES:
            for phase in [phase for phase in phases if phase[0] in _SEEN_PHASES]:
                del phases[phase]
        phases.setdefault(_phase_of(view), now)

    def _suspicions(self, view: RankView, now: float) -> list[str]:
        if self.overdue(view, now):
            return ["too long"]
        if self.declared(view, now):
            return []
        stalled_s = self.stalled_s(view, now)
        if stalled_s < self._timeout_s:
            return []
        if view.is_stopped:
            return ["stopped"]
        if self.is_silent(view, now):
            return ["silent"]
        if view.waits:
            return ["waits", "waits long"] if stalled_s >= self.long_timeout_s else ["waits"]
        return [_AWAY]

    def _has_waited_too_long(self, running: Sequence[RankView], now: float) -> bool:
        """Return whether a rank has waited for others for the whole timeout, so that a rank outside a wait is missed."""
        waiting = (view for view in running if view.waits and not self._is_away(view, now))
        return any(now - self._last_progress[view.rank].time >= self._timeout_s for view in waiting)

    def stalled_s(self, view: RankView, now: float) -> float:
        """Return for how many seconds the rank has made no progress, excluding waits for a rank in a declared phase."""
        last = self._last_progress[view.rank].time
        return now - (last if self._is_away(view, now) else max(last, self._excused))

    def _is_away(self, view: RankView, now: float) -> bool:
        return not view.waits or view.is_stopped or self.is_silent(view, now)

    def declared(self, view: RankView, now: float) -> str:
        """Return the slow phase that a rank declares, or an empty string if it declares none or is not alive."""
        return view.slow_phase if view.slow_phase and self._is_alive(view, now) else ""

    def overdue(self, view: RankView, now: float) -> bool:
        """Return whether the rank exceeds the limit for its declared phase and this has not been reported yet."""
        started = self._phases.get(view.rank, {}).get(_phase_of(view))
        if started is None or not self.declared(view, now) or (view.rank, _phase_of(view)) in self._reported:
            return False
        return now - started >= self.long_timeout_s

    def mark_reported(self, views: Sequence[RankView], now: float) -> None:
        """Mark the phases that currently exceed the limit as reported."""
        self._reported |= {(view.rank, _phase_of(view)) for view in views if self.overdue(view, now)}

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
        # Less than the stall timeout, because a blocked rank keeps its last record and appears to wait like the other ranks.
        return max(2.0, min(_SILENT_S, self._timeout_s / 2))

    def is_silent(self, view: RankView, now: float) -> bool:
        """Return whether the rank's heartbeat is missing for no known reason while its process is running."""
        if view.watch is None or view.is_stopped or _has_ended(view):
            return False  # it has not started writing, is stopped, or has finished
        return not self._is_fresh(view, now) and not self.declared(view, now)

    def is_busy(self, view: RankView, now: float) -> bool:
        """Return whether the rank is computing or making progress."""
        last = self._last_progress[view.rank]
        return now - last.time < self._timeout_s / 2 or view.cpu_s - last.cpu_s > _BUSY * (now - last.time)


def _has_ended(view: RankView) -> bool:
    return view.watch is not None and bool(view.watch.doing & Doing.ENDED)


def _has_succeeded(view: RankView) -> bool:
    """Return whether the rank's program has ended with success; its process may need a moment longer."""
    if view.exit_code is not None:
        return view.exit_code == 0
    return _has_ended(view) and view.watch is not None and bool(view.watch.doing & Doing.FINISHED)


def _phase_of(view: RankView) -> _PhaseKey:
    """Return the key for the declared phase that the rank is in."""
    # The time distinguishes the iterations of a loop that declares each of them.
    return view.slow_phase, 0 if view.note is None or view.slow_phase in _SEEN_PHASES else view.note.time_ns


def diagnose(
    views: Sequence[RankView], answers: Mapping[int, Answer], clock: StallClock, *, now: float
) -> Stall | None:
    """Return the stall and its cause, or None if the run is not stalled.

    Args:
        views: views of all ranks, taken after the answers.
        clock: a clock that has been updated with ``views``.
    """
    running = [view for view in views if view.exit_code is None]
    waiting = [view for view in running if view.waits and not view.is_stopped and not clock.is_silent(view, now)]
    undeclared = [view for view in running if not clock.declared(view, now)]
    waited = max((clock.stalled_s(view, now) for view in undeclared or running), default=0.0)
    texts = {view.rank: _describe_rank(view, answers.get(view.rank), clock, now) for view in views}

    def stall(kind: Class, culprits: Sequence[int], what: str, do: str) -> Stall:
        return Stall(kind=kind, culprits=tuple(culprits), what=what, ranks=texts, do=do, waited_s=waited)

    if deadlocked := clock.deadlocked_ranks(views, answers, now):
        return _of_deadlock(deadlocked, views, answers, stall)
    waiters = ""
    if waiting:
        ranks = name_ranks([view.rank for view in waiting])
        waiters = _(", and {ranks} wait{s} for other ranks", ranks=ranks, s="s" if len(waiting) == 1 else "")
    if stopped := [view.rank for view in running if view.is_stopped]:
        what = _(
            "{stopped} {verb} stopped (SIGSTOP){waiters}",
            stopped=name_ranks(stopped),
            verb=_is(stopped),
            waiters=waiters,
        )
        return stall(Class.STOPPED, stopped, what, _("continue the process (kill -CONT) or stop the run"))
    if silent := [view.rank for view in running if clock.is_silent(view, now)]:
        what = _(
            "{silent} {verb} blocked by native code that holds the GIL{waiters}",
            silent=name_ranks(silent),
            verb=_is(silent),
            waiters=waiters,
        )
        return stall(
            Class.SILENT,
            silent,
            what,
            _("at the line above, look for a library call that holds the GIL while it waits"),
        )
    if overdue := [view for view in running if clock.overdue(view, now)]:
        names = [view.rank for view in overdue]
        doing = _(" and ").join(dict.fromkeys(_(view.slow_phase) for view in overdue))
        what = _(
            "{names} {verb} been {doing} for {duration}{waiters}",
            names=name_ranks(names),
            verb=_has(names),
            doing=doing,
            duration=format_duration(clock.long_timeout_s),
            waiters=waiters,
        )
        return stall(
            Class.LONG,
            names,
            what,
            _("increase --slow_timeout if the rank makes progress; otherwise, read its stack"),
        )
    if not waiting:
        return None
    # A process may keep running long after its program has ended, while other ranks wait for it.
    if ended := [view.rank for view in views if view.exit_code == 0 or (view.exit_code is None and _has_ended(view))]:
        kind, do = _of_ended_ranks(ended, [view.rank for view in waiting], answers)
        what = _("{ended} {verb} exited{waiters}", ended=name_ranks(ended), verb=_has(ended), waiters=waiters)
        return stall(kind, ended, what, do)
    away = [view for view in undeclared if not view.waits]
    if idle := [view.rank for view in away if not clock.is_busy(view, now)]:
        what = _(
            "{idle} {verb} not reached the collective{waiters}", idle=name_ranks(idle), verb=_has(idle), waiters=waiters
        )
        return stall(
            Class.MISSING,
            idle,
            what,
            _("find out why this rank does not call the collective; every rank must call the same collectives"),
        )
    if len(undeclared) < len(running):
        return None  # the waiting ranks wait for a declared phase
    if away:
        is_long = min(clock.stalled_s(view, now) for view in waiting) >= clock.long_timeout_s
        return stall(
            *_of_computing_ranks([view.rank for view in away], clock.long_timeout_s if is_long else None, waiters)
        )
    if len(waiting) < 2:
        return None  # a single process does not wait for another rank
    # A backward pass counts as a waiting call from its start.
    computing = [v.rank for v in waiting if clock.is_busy(v, now) and not _has_started(answers.get(v.rank))]
    if computing:
        what = _(
            "{ranks} {verb} slow, but alive{waiters}", ranks=name_ranks(computing), verb=_is(computing), waiters=""
        )
        return stall(Class.SLOW, computing, what, _("wait, because the rank is computing"))
    found = first_divergence({rank: answer.histories for rank, answer in answers.items()})
    if found is not None:
        kind, what, do = _of_divergence(
            found, answers, {view.rank: _operation_of(view, answers.get(view.rank)) for view in running}
        )
        return stall(kind, found.diverging, what, do)
    return _without_histories(running, answers, stall)


def _of_deadlock(
    deadlocked: Mapping[int, frozenset[int]],
    views: Sequence[RankView],
    answers: Mapping[int, Answer],
    stall: Callable[[Class, Sequence[int], str, str], Stall],
) -> Stall:
    """Return the stall of ranks that wait in calls that can never complete (``StallClock.deadlocked_ranks``)."""
    waiting = sorted(deadlocked)
    awaited = {rank for ranks in deadlocked.values() for rank in ranks}
    if ended := [view.rank for view in views if view.rank in awaited and _has_succeeded(view)]:
        kind, do = _of_ended_ranks(ended, waiting, answers)
        what = _(
            "{ended} {verb} exited, but {waiting} still wait{s} in a collective",
            ended=name_ranks(ended),
            verb=_has(ended),
            waiting=name_ranks(waiting),
            s="s" if len(waiting) == 1 else "",
        )
        return replace(stall(kind, ended, what, do), is_certain=True)
    operations = {view.rank: _operation_of(view, answers.get(view.rank)) for view in views}
    found = first_divergence({rank: answer.histories for rank, answer in answers.items()})
    if found is None or found.kind == "behind":  # each in a call of its own, none of which the others have called
        ranks_by_call: dict[str, list[int]] = {}
        for view in views:
            if view.rank in deadlocked:
                call = operations[view.rank] or _pending_of(answers.get(view.rank)) or _("an unknown call")
                ranks_by_call.setdefault(call, []).append(view.rank)
        what = _("the ranks wait for each other in different calls: {calls}", calls=_in_calls(ranks_by_call))
        largest = max(ranks_by_call.values(), key=len)
        culprits = [rank for rank in waiting if rank not in largest] if 2 * len(largest) > len(waiting) else []
        return replace(stall(Class.OTHER_OPERATION, culprits, what, _(_SAME)), is_certain=True)
    kind, what, do = _of_divergence(found, answers, operations)
    one = stall(kind, found.diverging, what, do)
    ranks = dict(one.ranks)
    for rank, collective in found.at.items():
        if collective is not None and collective.is_over:  # the rank has gone on
            at = _(" at {place}", place=collective.place) if collective.place else ""
            ranks[rank] = _("{state}; before: {call}{at}", state=ranks[rank], call=collective, at=at)
    return replace(one, ranks=ranks, is_certain=True)


def _of_ended_ranks(
    ended: Collection[int], waiting: Collection[int], answers: Mapping[int, Answer]
) -> tuple[Class, str]:
    """Return kind and advice for ranks that have ended while ``waiting`` wait for them."""
    has_called_exit = any(rank in answers and answers[rank].ending is Ending.EXIT for rank in ended)
    if not has_called_exit and any(rank in answers and answers[rank].trains for rank in waiting):
        return Class.UNEVEN, _(_UNEVEN)
    return Class.EXITED, _(EARLY_EXIT)


def describe_ending(words: Answer | None, note: StatusNote | None, watch: Watch | None) -> str:
    """Return how and where the program of a rank ended that exited with code 0.

    Args:
        words: what it recorded at its end; None if it ended without Python's exit.
        note: the last record of its program.
        watch: its last heartbeat.
    """
    place = "" if words is None or words.call_site is None else str(words.call_site)
    if words is None:
        parts = [_("without Python's exit (os._exit)")]
    elif words.ending is Ending.EXIT:
        parts = [_("sys.exit() at {place}", place=place) if place else _("sys.exit()")]
    else:
        parts = [_("the end of its program")]
    if note is not None and (note.step or note.phase):
        parts.append(_("step {step}", step=note.step) + (_(", ") + _(str(note.phase)) if note.phase else ""))
    calls = [] if words is None else [group.started[-1] for group in words.histories.values() if group.started]
    if (
        not place
        and watch is not None
        and watch.file
        and is_user_file(watch.file)
        and not any(call.place for call in calls)
    ):
        parts.append(_("last seen at {place}", place=f"{watch.file}:{watch.line}"))
    parts += [
        _("its last collective: {call} at {place}", call=call, place=call.place) for call in calls[:1] if call.place
    ]
    return _("; ").join(parts)


def _of_computing_ranks(ranks: list[int], long_s: float | None, waiters: str) -> tuple[Class, list[int], str, str]:
    """Return kind, culprits, text and advice for ranks that compute while others wait; ``long_s`` is the exceeded limit, if any."""
    if long_s is not None:
        what = _(
            "{ranks} {verb} been computing for {duration}{waiters}",
            ranks=name_ranks(ranks),
            verb=_has(ranks),
            duration=format_duration(long_s),
            waiters=waiters,
        )
        do = _(
            "check that the loop ends; if the work is expected to take this long, run it in `with "
            "accelerator.slow(...)`"
        )
        return Class.LONG, ranks, what, do
    what = _("{ranks} {verb} slow, but alive{waiters}", ranks=name_ranks(ranks), verb=_is(ranks), waiters=waiters)
    return Class.SLOW, ranks, what, _('wait, or run the work in `with accelerator.slow("what it does")`')


_UNEVEN = N_(
    "make every rank run the same number of steps: use equal numbers of batches (drop_last, a padded "
    "sampler, join_uneven_inputs), and avoid an early break or return on one rank"
)
EARLY_EXIT = N_(
    "make every rank run the same number of steps and collectives; look for an early return, break, sys.exit() or caught "
    "exception on the rank that exited"
)
_SAME = N_(
    "call the same collectives with the same shapes in the same order on every rank; look for a collective inside `if rank == 0`, an "
    "early break or return, and a caught exception"
)


def disagreement(answers: Mapping[int, Answer]) -> Stall | None:
    """Return how the collectives of a failed run's ranks differ, or None if no difference is known.

    Args:
        answers: records that the ranks wrote when they lost contact, or answers that they gave after that.
    """
    found = first_divergence({rank: answer.histories for rank, answer in answers.items()})
    if found is None:
        return None
    kind, what, do = _of_divergence(found, answers, {})
    texts = {}
    for rank, answer in answers.items():
        collective = found.at.get(rank)
        texts[rank] = _describe_call(collective, answer)
    return Stall(kind=kind, culprits=found.diverging, what=what, ranks=texts, do=do, waited_s=0.0)


def _describe_call(collective: CollectiveCall | None, answer: Answer) -> str:
    place = (None if collective is None else collective.place) or answer.call_site
    at = [_("at {place}", place=place)] if place else []
    if collective is None:
        return _("; ").join(at) or _("at an unknown line")
    has_moved = collective.is_over and collective.place not in ("", str(answer.call_site))
    is_past = has_moved or answer.ending is not Ending.NONE
    text = _("called {call}", call=collective) if is_past else _("in {call}", call=collective)
    ended = [] if answer.ending is Ending.NONE else [_("exited later (code 0)")]
    return _("; ").join([text, *at, *ended])


def _of_divergence(
    found: Divergence, answers: Mapping[int, Answer], operations: Mapping[int, str]
) -> tuple[Class, str, str]:
    ranks = found.diverging
    if found.kind == "behind":
        others = next(str(collective) for collective in found.at.values() if collective is not None)
        return (
            Class.MISSING,
            _(
                "{ranks} {verb} not reached {others}, which the other ranks have started",
                ranks=name_ranks(ranks),
                verb=_has(ranks),
                others=others,
            ),
            _("find out what this rank is waiting for; every rank must call the same collectives in the same order"),
        )
    training = [rank for rank in sorted(found.at) if rank in answers and answers[rank].trains]
    elsewhere = [rank for rank in sorted(found.at) if rank not in training]
    if found.kind == "other operation" and training and elsewhere:
        calls = _(" and ").join(dict.fromkeys(operations.get(rank) or str(found.at[rank]) for rank in elsewhere))
        return _beside_training(calls, answers, elsewhere, training)
    kind = Class.OTHER_OPERATION if found.kind == "other operation" else Class.OTHER_SHAPE
    calls = _in_calls(_ranks_by_call(found))
    if not ranks:
        return kind, _("the ranks use {difference}: {calls}", difference=_(kind.value), calls=calls), _(_SAME)
    return (
        kind,
        _(
            "{ranks} {verb} not make the same call as the other ranks: {calls}",
            ranks=name_ranks(ranks),
            verb=_does(ranks),
            calls=calls,
        ),
        _(_SAME),
    )


def _beside_training(
    calls: str, answers: Mapping[int, Answer], elsewhere: Sequence[int], training: Sequence[int]
) -> tuple[Class, str, str]:
    """Return kind, text and advice for ranks that call a different collective while the other ranks are still training."""
    loop = next(iter(answers[training[0]].loops), "")
    is_inside = loop != "" and any(rank in answers and loop in answers[rank].loops for rank in elsewhere)
    # Of a loop in a library, such as the Trainer's, it is not known which lines of the program belong to it.
    is_known = loop != "" and is_user_file(loop)
    if is_known and not is_inside:
        what = _(
            "{elsewhere} {verb} left the training loop ({loop}), but {training} {verb2} still training",
            elsewhere=name_ranks(elsewhere),
            verb=_has(elsewhere),
            loop=loop,
            training=name_ranks(training),
            verb2=_is(training),
        )
        return Class.UNEVEN, what, _(_UNEVEN)
    what = _(
        "{elsewhere} call{s} {calls}{inside}, but {training} {verb} not: {they} in a forward or backward pass",
        elsewhere=name_ranks(elsewhere),
        s="s" if len(elsewhere) == 1 else "",
        calls=calls,
        inside=_(" in the training loop ({loop})", loop=loop) if is_inside else "",
        training=name_ranks(training),
        verb=_does(training),
        they="it is" if len(training) == 1 else "they are",
    )
    do = _(
        "call it on every rank: move it out of `if accelerator.is_main_process:`, `if rank == 0:` and "
        "similar conditions"
    )
    if not is_inside:
        do = _(
            "{do}. If the loop of {elsewhere} ended earlier, {uneven}",
            do=do,
            elsewhere=name_ranks(elsewhere),
            uneven=_(_UNEVEN),
        )
    return Class.OTHER_OPERATION, what, do


def _in_calls(ranks_by_call: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(
        _("{ranks} in {call}", ranks=name_ranks(group), call=text) for text, group in ranks_by_call.items()
    )


def _ranks_by_call(found: Divergence) -> dict[str, list[int]]:
    ranks_by_call: dict[str, list[int]] = {}
    for rank, collective in sorted(found.at.items()):
        ranks_by_call.setdefault(str(collective), []).append(rank)
    return ranks_by_call


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
        what = _("{names} wait for each other at the same line", names=name_ranks(names))
        return stall(Class.UNKNOWN, (), what, _("check the network between the ranks, and read the stacks"))
    most = max(by_line.values(), key=len)
    largest = frozenset(most)
    culprits = [rank for rank in names if rank not in largest] if 2 * len(largest) > len(names) else []
    what = _(
        "the ranks wait at different lines: {lines}",
        lines=", ".join(_("{ranks} at {line}", ranks=name_ranks(r), line=line) for line, r in by_line.items()),
    )
    return stall(Class.OTHER_OPERATION, culprits, what, _(_SAME))


def _operation_of(view: RankView, answer: Answer | None) -> str:
    """Return the echelon operation that the rank is in, as the user called it, or an empty string if it is in none."""
    note = view.note
    if note is None or not note.operation or not (note.waits or _is_at(answer, note)):
        return ""
    return note.operation + (f" of {note.detail}" if note.detail else "")


def _is_at(answer: Answer | None, note: StatusNote) -> bool:
    """Return whether the rank is at the line of its last recorded operation."""
    call_site = None if answer is None else answer.call_site
    return (
        call_site is not None and call_site.line == note.line and call_site.file.endswith(note.file.removeprefix("..."))
    )


def _has_started(answer: Answer | None) -> bool:
    return answer is not None and any(not c.is_over for h in answer.histories.values() for c in h.started)


def _pending_of(answer: Answer | None) -> str:
    """Return the first collective that the rank has called and that has not ended, or an empty string."""
    histories = {} if answer is None else answer.histories
    return next((str(c) for history in histories.values() for c in history.started if not c.is_over), "")


def _line_of(view: RankView, answer: Answer | None) -> str:
    if answer is not None and answer.call_site is not None:
        return f"{answer.call_site.file}:{answer.call_site.line}"
    return f"{view.watch.file}:{view.watch.line}" if view.watch is not None else _("an unknown line")


def _describe_rank(view: RankView, answer: Answer | None, clock: StallClock, now: float) -> str:
    """Return a rank's state, operation, phase, step and line in the user's code."""
    if _has_succeeded(view):
        return _("exited (code 0): {ending}", ending=describe_ending(answer, view.note, view.watch))
    if view.exit_code is not None:
        return _("exited (code {exit_code})", exit_code=view.exit_code)
    parts: list[str] = []
    if view.is_stopped:
        parts.append(_("stopped"))
    elif clock.is_silent(view, now):
        parts.append(_("silent"))
    elif (doing := clock.declared(view, now)) and (view.note is None or doing != str(view.note.phase)):
        parts.append(_(doing))
    note = view.note
    if operation := _operation_of(view, answer):
        parts.append(_("in {call}", call=operation))
    elif view.waits and (pending := _pending_of(answer)):
        parts.append(_("in {call}", call=pending))
    if note is not None and (note.step or note.phase):
        parts.append(_(", ").join(filter(None, (_("step {step}", step=note.step), view.phase and _(view.phase)))))
    if answer is not None and answer.call_site is not None:
        return _("; ").join([*parts, _("at {place}", place=answer.call_site)])
    return _("; ").join([*parts, _("last seen at {place}", place=_line_of(view, None))])


def _is(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _has(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _does(ranks: Sequence[int]) -> str:
    return "does" if len(ranks) == 1 else "do"


def format_duration(seconds: float) -> str:
    """Return ``10 minutes``, ``90 seconds`` or ``2 hours``."""
    for unit, size in ((N_("{number} hour{s}"), 3600.0), (N_("{number} minute{s}"), 60.0)):
        if seconds >= 2 * size or seconds == size:
            number = seconds / size
            shown = f"{number:g}" if number == int(number) else f"{number:.1f}"
            return _(unit, number=shown, s="s" if number != 1 else "")
    return _("{seconds:g} seconds", seconds=seconds)


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
    return _("ranks {ranks}", ranks=shown) if len(ranks) > 1 else _("rank {rank}", rank=shown)
