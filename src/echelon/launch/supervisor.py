"""Watch the ranks: when the run stalls, ask every rank for its stack, save the stacks, and report the cause."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeAlias, final

from echelon.base.errors import LaunchError
from echelon.diagnose.stall import LONG_FACTOR, Class, Stall, StallClock, diagnose, name_ranks
from echelon.launch.local.ranks import Ranks

__all__ = ["STALLED", "OnStall", "StallRules", "Supervisor"]

STALLED = 124
"""Exit code of a run that was stopped because it stalled, as that of timeout(1)."""

OnStall: TypeAlias = Literal["report", "restart", "stop"]

_POLL_EVERY_S = 0.5
_REQUEST_EVERY_S = 3.0
"""The ranks write their stacks at most this often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StallRules:
    """When a run counts as stalled, and what follows."""

    timeout: timedelta
    """How long a rank may wait for others without progress; zero: for ever."""
    on_stall: OnStall
    slow_timeout: timedelta | None = None
    """How long a declared slow phase may last; None: ten times ``timeout``; zero: for ever."""

    @property
    def slow_s(self) -> float:
        """How many seconds a declared slow phase may last."""
        limit = LONG_FACTOR * self.timeout if self.slow_timeout is None else self.slow_timeout
        return limit.total_seconds() or math.inf


@final
class Supervisor:
    """Detects and reports stalls of the ranks of one attempt.

    Args:
        ranks: the ranks.
        directory: of the run, for the report.
        rules: what counts as a stall.
        machines: rank -> name of its machine; empty: a single machine.
        clock: in seconds, the clock of the heartbeats.
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
        self._rules = rules
        self._machines = machines
        self._now = clock
        self._clock = StallClock(rules.timeout.total_seconds(), rules.slow_s)
        self._next_poll = 0.0
        self._suspicions: frozenset[tuple[str, int]] = frozenset()
        """Why the ranks were last asked, and when."""
        self._requested_at = float("-inf")
        self._reported: set[str] = set()
        """Alarms since the last progress."""
        self._last_note = ""

    def poll(self) -> Stall | None:
        """Report a new stall and return it; None: no stall, or one that was reported before."""
        now = self._now()
        if now < self._next_poll or not self._rules.timeout:
            return None
        self._next_poll = now + _POLL_EVERY_S
        suspicions = self._clock.update(self._ranks.views(), now)
        if not suspicions:
            self._reported.clear()  # progress: another stall is reported again
            return None
        # The ranks need not answer the same suspicion again and again; a new one cannot wait.
        quiet_s = self._rules.timeout.total_seconds() if suspicions == self._suspicions else _REQUEST_EVERY_S
        if now - self._requested_at < quiet_s:
            return None
        answers = self._ranks.request_stacks()
        now = self._now()
        self._suspicions, self._requested_at = suspicions, now
        views = self._ranks.views()
        if not self._clock.update(views, now):
            return None  # progress while we asked
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

    def _print_report(self, stall: Stall, no_histories: list[str]) -> None:
        report = self._report(stall, no_histories)
        self._ranks.save_report(report)
        print(f"echelon: {report}", file=sys.stderr, flush=True)

    def _report(self, stall: Stall, no_histories: list[str]) -> str:
        lines = "".join(f"\n    {line}" for line in [*stall.lines(), *self._machine_lines(stall)])
        kind = "stall" if stall.is_alarm else "note"
        missing = f"\n    collectives unknown: {'; '.join(no_histories)}" if no_histories and stall.is_alarm else ""
        then = {"report": "the run continues", "restart": "the run restarts", "stop": "the run stops"}
        action = then[self._rules.on_stall if stall.is_alarm else "report"]
        error = LaunchError(
            f"{kind} ({stall.kind.value}): {stall.what}{lines}{missing}",
            where=f"{self._limit(stall)}; {action} (--on_stall)",
            do=f"{stall.do}\n  stacks: echelon doctor {self._directory}"
            + (" (each machine has the stacks of its own ranks)" if self._machines else ""),
        )
        return str(error)

    def _limit(self, stall: Stall) -> str:
        if stall.kind is Class.LONG:
            default = "" if self._rules.slow_timeout is not None else f", {LONG_FACTOR} times --stall_timeout"
            return f"limit reached (--slow_timeout {self._rules.slow_s:g}{default})"
        limit = f"(--stall_timeout {self._rules.timeout.total_seconds():g})"
        return f"no progress for {stall.waited_s:.0f} s {limit}"

    def _machine_lines(self, stall: Stall) -> list[str]:
        """Return which machines the ranks of the stall are on."""
        ranks: dict[str, list[int]] = {}
        for rank in stall.culprits or stall.ranks:
            if rank in self._machines:
                ranks.setdefault(self._machines[rank], []).append(rank)
        return [f"{name_ranks(numbers)}: on {machine}" for machine, numbers in list(ranks.items())[:_MAX_MACHINES]]


_MAX_MACHINES = 4
