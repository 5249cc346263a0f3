"""Watch the ranks: when the run stands still, ask every rank, save the stacks, say why."""

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

__all__ = ["OnStall", "StallRules", "Supervisor"]

OnStall: TypeAlias = Literal["report", "restart", "stop"]

_LOOK_EVERY_S = 0.5
_ASK_EVERY_S = 3.0
"""The ranks write their stacks no more often than that, whatever has changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StallRules:
    """What the user asked for."""

    timeout: timedelta
    """After so long without a move of a rank that waits for others; zero: never."""
    on_stall: OnStall
    slow_timeout: timedelta | None = None
    """A declared phase may last so long; None: ten times ``timeout``; zero: for ever."""

    @property
    def slow_s(self) -> float:
        """How many seconds a declared phase may last."""
        limit = LONG_FACTOR * self.timeout if self.slow_timeout is None else self.slow_timeout
        return limit.total_seconds() or math.inf


@final
class Supervisor:
    """Looks at the ranks of one attempt.

    Args:
        ranks: those.
        directory: of the run, which the report names.
        rules: when it is a stall.
        places: for each rank the name of its machine; empty: there is but one.
        clock: in seconds, the one of the heartbeats.
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        directory: Path,
        rules: StallRules,
        places: Mapping[int, str] = MappingProxyType({}),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ranks = ranks
        self._directory = directory
        self._rules = rules
        self._places = places
        self._time = clock
        self._clock = StallClock(rules.timeout.total_seconds(), rules.slow_s)
        self._next_look = 0.0
        self._suspicions: frozenset[tuple[str, int]] = frozenset()
        """That the ranks were last asked for, and when."""
        self._asked_at = float("-inf")
        self._told: set[str] = set()
        """Alarms, for as long as it has not gone on."""
        self._noted = ""
        """The last note."""

    def look(self) -> Stall | None:
        """Return the stall that there is, after it has been told; None: none, or one that was told before."""
        now = self._time()
        if now < self._next_look or not self._rules.timeout:
            return None
        self._next_look = now + _LOOK_EVERY_S
        suspicions = self._clock.look(self._ranks.views(), now)
        if not suspicions:
            self._told.clear()  # it went on: should it stand still again, that is told again
            return None
        # What the ranks were asked for already they need not say again and again; something else cannot wait.
        quiet_s = self._rules.timeout.total_seconds() if suspicions == self._suspicions else _ASK_EVERY_S
        if now - self._asked_at < quiet_s:
            return None
        answers = self._ranks.ask()
        now = self._time()
        self._suspicions, self._asked_at = suspicions, now
        views = self._ranks.views()
        if not self._clock.look(views, now):
            return None  # it went on while we asked
        for view in views:
            if view.rank not in answers and self._clock.is_silent(view, now):
                answers[view.rank] = self._ranks.stack_of(view)
        stall = diagnose(views, answers, self._clock, now=now)
        if stall is None or stall.what in self._told or stall.what == self._noted:
            return None
        if stall.kind is Class.LONG:
            self._clock.note_told(views, now)
        if stall.is_alarm:
            self._told.add(stall.what)
        else:
            self._noted = stall.what
        self._tell(stall, sorted({answer.no_histories for answer in answers.values() if answer.no_histories}))
        return stall

    def _tell(self, stall: Stall, no_histories: list[str]) -> None:
        report = self._report(stall, no_histories)
        self._ranks.keep(report)
        print(f"echelon: {report}", file=sys.stderr, flush=True)

    def _report(self, stall: Stall, no_histories: list[str]) -> str:
        lines = "".join(f"\n    {line}" for line in [*stall.lines(), *self._machines(stall)])
        word = "stall" if stall.is_alarm else "note"
        missing = (
            f"\n    which collectives is not known: {'; '.join(no_histories)}"
            if no_histories and stall.is_alarm
            else ""
        )
        then = {"report": "the run goes on", "restart": "the run is restarted", "stop": "the run is stopped"}
        action = then[self._rules.on_stall if stall.is_alarm else "report"]
        error = LaunchError(
            f"{word} ({stall.kind.value}): {stall.what}{lines}{missing}",
            where=f"{self._limit(stall)}; {action} (--on_stall)",
            do=f"{stall.do}\n  stacks: echelon doctor {self._directory}"
            + (" (each machine has those of its ranks)" if self._places else ""),
        )
        return str(error)

    def _limit(self, stall: Stall) -> str:
        if stall.kind is Class.LONG:
            default = "" if self._rules.slow_timeout is not None else f", {LONG_FACTOR} times --stall_timeout"
            return f"that is the limit (--slow_timeout {self._rules.slow_s:g}{default})"
        limit = f"(--stall_timeout {self._rules.timeout.total_seconds():g})"
        return f"no rank that waits has moved for {stall.waited_s:.0f} s {limit}"

    def _machines(self, stall: Stall) -> list[str]:
        """Return on which machines the ranks are that it is about."""
        ranks: dict[str, list[int]] = {}
        for rank in stall.culprits or stall.ranks:
            if rank in self._places:
                ranks.setdefault(self._places[rank], []).append(rank)
        return [f"{name_ranks(numbers)}: on {place}" for place, numbers in list(ranks.items())[:_MOST_MACHINES]]


_MOST_MACHINES = 4
