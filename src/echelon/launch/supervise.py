"""Watch the ranks: when the run stands still, ask every rank, save the stacks, say why."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeAlias, final

from echelon.base.errors import LaunchError
from echelon.diagnose.stall import Stall, StallClock, diagnose, name_ranks
from echelon.launch.ranks import Ranks

__all__ = ["OnStall", "StallRules", "Supervisor"]

OnStall: TypeAlias = Literal["report", "restart", "stop"]

_LOOK_EVERY_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class StallRules:
    """What the user asked for."""

    timeout: timedelta
    on_stall: OnStall


@final
class Supervisor:
    """Looks at the ranks of one attempt.

    Args:
        ranks: those.
        directory: of the run, which the report names.
        rules: when it is a stall.
        places: for each rank the name of its machine; empty: there is but one.
    """

    def __init__(
        self, ranks: Ranks, *, directory: Path, rules: StallRules, places: Mapping[int, str] = MappingProxyType({})
    ) -> None:
        self._ranks = ranks
        self._directory = directory
        self._rules = rules
        self._places = places
        self._clock = StallClock(rules.timeout.total_seconds())
        self._next_look = 0.0
        self._quiet_until = 0.0
        self._told: str | None = None

    def look(self) -> Stall | None:
        """Return the stall that there is, after it has been told; None: none, or one that was told before."""
        now = time.monotonic()
        if now < self._next_look or not self._rules.timeout:
            return None
        self._next_look = now + _LOOK_EVERY_S
        if not self._clock.look(self._ranks.views(), now) or now < self._quiet_until:
            return None
        answers = self._ranks.ask()
        now = time.monotonic()
        views = self._ranks.views()
        if not self._clock.look(views, now):
            return None  # it went on while we asked
        for view in views:
            if view.rank not in answers and self._clock.is_silent(view, now):
                answers[view.rank] = self._ranks.stack_of(view)
        stall = diagnose(views, answers, self._clock, now=now)
        self._quiet_until = now + self._rules.timeout.total_seconds()
        if stall is None or stall.what == self._told:
            return None
        self._told = stall.what
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
            where=f"no rank that waits has moved for {stall.waited_s:.0f} s (--stall_timeout "
            f"{self._rules.timeout.total_seconds():g}); {action} (--on_stall)",
            do=f"{stall.do}\n  stacks: echelon doctor {self._directory}"
            + (" (each machine has those of its ranks)" if self._places else ""),
        )
        return str(error)

    def _machines(self, stall: Stall) -> list[str]:
        """Return on which machines the ranks are that it is about."""
        ranks: dict[str, list[int]] = {}
        for rank in stall.culprits or stall.ranks:
            if rank in self._places:
                ranks.setdefault(self._places[rank], []).append(rank)
        return [f"{name_ranks(numbers)}: on {place}" for place, numbers in list(ranks.items())[:_MOST_MACHINES]]


_MOST_MACHINES = 4
