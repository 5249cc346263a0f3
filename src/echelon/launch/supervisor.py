"""Detects stalls: requests every rank's stack, saves the stacks, and reports the cause."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Protocol, TypeAlias, final

from echelon.base.errors import LaunchError
from echelon.base.messages.terminal import say
from echelon.base.messages.translation import gettext as _
from echelon.diagnose.stall import LONG_FACTOR, Answer, Class, RankView, Stall, StallClock, diagnose, name_ranks

STALLED = 124
"""Exit code of a run that is stopped because it stalled; timeout(1) uses the same code."""

OnStall: TypeAlias = Literal["auto", "report", "restart", "stop"]

_POLL_EVERY_S = 0.5
_MAX_RANKS_PER_S = 1000
"""How many ranks' states are read each second at most, because the launcher of a large run must not use a whole core."""
_REQUEST_EVERY_S = 3.0
"""Minimum interval between requests for stacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StallRules:
    """Time limits for detecting stalls, and what to do about them."""

    timeout: timedelta
    """How long a rank may wait for other ranks without making progress; zero disables the limit."""
    on_stall: OnStall
    slow_timeout: timedelta | None = None
    """How long a declared slow phase may last; None for ten times ``timeout``, zero for no limit."""

    max_restarts: int = 0
    """How often the run may still be restarted."""

    def action(self, stall: Stall) -> Literal["report", "restart", "stop"]:
        """Return what follows the report of an alarm."""
        if self.on_stall in ("report", "stop"):
            return self.on_stall
        if self.on_stall == "auto" and not stall.is_certain:
            return "report"
        return "restart" if self.max_restarts else "stop"

    @property
    def slow_s(self) -> float:
        """Maximum number of seconds of a declared slow phase."""
        limit = LONG_FACTOR * self.timeout if self.slow_timeout is None else self.slow_timeout
        return limit.total_seconds() or math.inf


class Ranks(Protocol):
    """The ranks that a supervisor monitors."""

    def views(self) -> list[RankView]:
        """Return each rank's current state. Times are on this machine's ``time.monotonic`` clock."""

    def request_stacks(self) -> dict[int, Answer]:
        """Ask the running ranks to save their stacks; return the answers that arrive in time."""

    def stack_of(self, view: RankView) -> Answer:
        """Return the call site of a running rank that does not respond."""

    def save_report(self, report: str) -> None:
        """Save ``report`` next to the stacks from the last request."""


@final
class Supervisor:
    """Detects and reports stalls in one attempt.

    Args:
        ranks: the attempt's ranks.
        directory: the run's directory, for the report.
        rules: limits and action.
        machines: maps each rank to its machine's name; empty on a single machine.
        clock: the clock that heartbeats use, in seconds.
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        directory: Path,
        rules: StallRules,
        machines: Mapping[int, str] = MappingProxyType({}),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ranks = ranks
        self._directory = directory
        self.rules = rules
        self._machines = machines
        self._now = clock
        self._clock = StallClock(rules.timeout.total_seconds(), rules.slow_s)
        self._next_poll = 0.0
        self._suspicions: frozenset[tuple[str, int]] = frozenset()
        """The suspicions that caused the last request for stacks."""
        self._requested_at = float("-inf")
        self._ended_at_request: frozenset[int] = frozenset()
        self._deadlock_quiet_s = _REQUEST_EVERY_S
        """Minimum interval between requests that only look for deadlocked ranks. Each that finds none doubles it, up to the timeout,
        because a run may often wait for seconds by right."""
        self._reported: set[str] = set()
        """Alarms reported since the last progress."""
        self._last_note = ""

    def poll(self) -> Stall | None:
        """Report and return a new stall, or return None if there is none or it has already been reported."""
        now = self._now()
        if now < self._next_poll or not self.rules.timeout:
            return None
        views = self._ranks.views()
        self._next_poll = now + max(_POLL_EVERY_S, len(views) / _MAX_RANKS_PER_S)
        suspicions, deadlocked = self._clock.update(views, now), self._clock.may_be_deadlocked(views, now)
        if not suspicions and not deadlocked:
            self._reported.clear()  # after progress, the same stall is reported again
            return None
        # Repeat a request for the same suspicions only after the full timeout; a new suspicion needs new stacks soon.
        is_early = not suspicions
        quiet_s = self.rules.timeout.total_seconds() if suspicions == self._suspicions else _REQUEST_EVERY_S
        if is_early:
            quiet_s = self._early_quiet_s(views)
        if now - self._requested_at < quiet_s:
            return None
        answers = self._ranks.request_stacks()
        now = self._now()
        self._requested_at = now
        if not is_early:
            self._suspicions = suspicions
        views = self._ranks.views()
        if not self._clock.update(views, now) and not (is_early and self._clock.may_be_deadlocked(views, now)):
            return None  # the ranks made progress during the request
        if is_early and not self._clock.deadlocked_ranks(views, answers, now):
            self._deadlock_quiet_s = min(2 * self._deadlock_quiet_s, self.rules.timeout.total_seconds())
            return None
        for view in views:
            if view.rank not in answers and self._clock.is_silent(view, now):
                answers[view.rank] = self._ranks.stack_of(view)
        stall = diagnose(views, answers, self._clock, now=now)
        if stall is None or stall.what in self._reported or stall.what == self._last_note:
            return None
        if stall.kind is Class.LONG:
            self._clock.mark_reported(views, now)
        if stall.is_alarm:
            self._reported.add(stall.what)
        else:
            self._last_note = stall.what
        self._print_report(stall, sorted({answer.no_histories for answer in answers.values() if answer.no_histories}))
        return stall

    def _early_quiet_s(self, views: Sequence[RankView]) -> float:
        ended = frozenset(view.rank for view in views if view.exit_code is not None)
        if ended != self._ended_at_request:
            self._ended_at_request, self._deadlock_quiet_s = ended, _REQUEST_EVERY_S
        return self._deadlock_quiet_s

    def _print_report(self, stall: Stall, no_histories: list[str]) -> None:
        report = self._report(stall, no_histories)
        self._ranks.save_report(report)
        say(report, kind="warning")

    def _report(self, stall: Stall, no_histories: list[str]) -> str:
        lines = "".join(f"\n    {line}" for line in [*stall.lines(), *self._machine_lines(stall)])
        missing = (
            _("\n    collectives unknown: {reasons}", reasons=_("; ").join(map(_, no_histories)))
            if no_histories and stall.is_alarm
            else ""
        )
        kind = _(stall.kind.value)
        headline = (
            _("stall ({kind}): {what}", kind=kind, what=stall.what)
            if stall.is_alarm
            else _("note ({kind}): {what}", kind=kind, what=stall.what)
        )
        ends = {"report": _("the run continues"), "restart": _("the run restarts"), "stop": _("the run stops")}
        action = ends[self.rules.action(stall) if stall.is_alarm else "report"]
        error = LaunchError(
            f"{headline}{lines}{missing}",
            where=_("{limit}; {action} (--on_stall)", limit=self._limit(stall), action=action),
            do=_("{do}\n  stacks: echelon doctor {directory}", do=stall.do, directory=self._directory)
            + (_(" (each machine has the stacks of its own ranks)") if self._machines else ""),
        )
        return str(error)

    def _limit(self, stall: Stall) -> str:
        if stall.is_certain:
            return _("this wait can never end")
        if stall.kind is Class.LONG:
            default = (
                "" if self.rules.slow_timeout is not None else _(", {number} times --stall_timeout", number=LONG_FACTOR)
            )
            return _("limit reached (--slow_timeout {slow_s:g}{default})", slow_s=self.rules.slow_s, default=default)
        limit_s = self.rules.timeout.total_seconds()
        return _(
            "no progress for {waited_s:.0f} s (--stall_timeout {limit_s:g})", waited_s=stall.waited_s, limit_s=limit_s
        )

    def _machine_lines(self, stall: Stall) -> list[str]:
        """Return lines that name the machines of the stalled ranks."""
        ranks: dict[str, list[int]] = {}
        for rank in stall.culprits or stall.ranks:
            if rank in self._machines:
                ranks.setdefault(self._machines[rank], []).append(rank)
        return [
            _("{ranks}: on {machine}", ranks=name_ranks(numbers), machine=machine)
            for machine, numbers in list(ranks.items())[:_MAX_MACHINES]
        ]


_MAX_MACHINES = 4
