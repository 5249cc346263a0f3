"""Measures a run's goodput: writes the board's times and their sum to a file when an attempt ends."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from echelon.base.messages.translation import gettext as _
from echelon.base.printable import printable
from echelon.diagnose.goodput import Attempt, RankTimes, TimeBreakdown, break_down_time, spent_in
from echelon.diagnose.straggler import Steps, steps_of
from echelon.launch.failures.failure import RankEnd
from echelon.status import strict_json
from echelon.status.board import Board, Doing, StepPart
from echelon.status.run_recorder import RunRecorder

GOODPUT_FILE = "goodput.jsonl"
"""File in the run's directory with one line per attempt and a last line for the whole run."""
ALL_MACHINES_FILE = "goodput_all.jsonl"
"""File on the rendezvous host with the same content for all machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputReport:
    """A run's time breakdown, and its slow rank."""

    breakdown: TimeBreakdown
    steps: Steps | None
    machines: Mapping[int, str] = field(default_factory=dict)
    """Maps each rank to its machine's name; empty on a single machine."""

    @property
    def is_notable(self) -> bool:
        """Whether to print the report even without ``--summary``: after a restart, or if one rank slowed a long run."""
        slowed = self.steps is not None and self.steps.slowest is not None and self.breakdown.wall_s >= _LONG_S
        return self.breakdown.num_restarts > 0 or slowed

    def record(self, recorder: RunRecorder) -> None:
        """Record the time breakdown, and the slow rank."""
        if self.steps is not None and self.steps.slowest is not None:
            recorder.event("straggler", self.steps.verdict, rank=self.steps.slowest)
        recorder.breakdown(wall_s=self.breakdown.wall_s, seconds=self.breakdown.seconds)

    def lines(self) -> list[str]:
        """Return the report as text for the terminal."""
        return [printable(line) for line in self._lines()]  # machine names come from other machines

    def _lines(self) -> list[str]:
        if self.steps is None:
            return [str(self.breakdown)]
        verdict = self.steps.verdict
        machine = None if self.steps.slowest is None else self.machines.get(self.steps.slowest)
        if machine is not None:
            verdict += _("; it runs on {machine}", machine=machine)
        return [str(self.breakdown), str(self.steps), *filter(None, [verdict])]


_LONG_S = 60.0


@final
class GoodputRecorder:
    """Records the times of each attempt in a run.

    Args:
        path: the file to write.
        began_ns: ``time.monotonic_ns()`` when the launcher started.
    """

    def __init__(self, path: Path, *, began_ns: int) -> None:
        self._path = path
        self._began_ns = began_ns
        self._started_ns = 0
        self._attempts: list[Attempt] = []

    def start_attempt(self) -> None:
        """Record that an attempt starts."""
        self._started_ns = time.monotonic_ns()

    def end_attempt(self, ranks: Sequence[RankTimes], *, failed_ns: int | None = None, noticed_ns: int) -> None:
        """Record that the attempt has ended. Does nothing if this has already been recorded.

        Args:
            ranks: the ranks' times, read from the boards.
            failed_ns: time of the first sign of a failure; None if nothing failed.
            noticed_ns: time at which the launcher detected the end.
        """
        if not self._started_ns:
            return
        attempt = Attempt(
            started_ns=self._started_ns,
            failed_ns=min(max(self._started_ns, noticed_ns if failed_ns is None else failed_ns), noticed_ns),
            noticed_ns=noticed_ns,
            ranks=ranks,
        )
        self._started_ns = 0
        self._attempts.append(attempt)
        self._write({"kind": "attempt", "number": len(self._attempts) - 1, **self._attempt_in_json(attempt)})

    def breakdown(self) -> TimeBreakdown:
        """Return the time breakdown of the attempts until now."""
        return break_down_time(self._attempts, began_ns=self._began_ns, ended_ns=time.monotonic_ns())

    def finish(self) -> GoodputReport:
        """Write and return the report for the whole run."""
        ended_ns = time.monotonic_ns()
        spent: dict[int, list[float]] = {}
        num_steps = 0
        for attempt in self._attempts:
            num_steps += max((one.times.num_steps for one in attempt.ranks if one.times is not None), default=0)
            for one in attempt.ranks:
                row = spent.setdefault(one.rank, [0.0] * len(StepPart))
                for part, ns in zip(StepPart, spent_in(attempt, one) or []):
                    row[part] += ns / 1e6
        report = GoodputReport(
            breakdown=break_down_time(self._attempts, began_ns=self._began_ns, ended_ns=ended_ns),
            steps=steps_of(spent, num_steps=num_steps),
        )
        steps = None if report.steps is None else report.steps.to_json()
        self._write({"kind": "run", "goodput": report.breakdown.goodput, **report.breakdown.to_json(), "steps": steps})
        return report

    def _attempt_in_json(self, attempt: Attempt) -> dict[str, Any]:
        def seconds(ns: int) -> float:
            return round((ns - self._began_ns) / 1e9, 6)

        ranks: list[dict[str, Any]] = []
        for one in attempt.ranks:
            times, spent = one.times, spent_in(attempt, one)
            if times is None or spent is None:
                ranks.append({"rank": one.rank})
                continue
            ranks.append(
                {
                    "rank": one.rank,
                    "loop_s": seconds(times.begun_ns),
                    "num_steps": times.num_steps,
                    "spent_s": {part.name.lower(): round(ns / 1e9, 6) for part, ns in zip(StepPart, spent)},
                }
            )
        loaded = {} if attempt.loaded is None or attempt.loaded < 0 else {"loaded_step": attempt.loaded}
        edges = {
            "started_s": seconds(attempt.started_ns),
            "failed_s": seconds(attempt.failed_ns),
            "noticed_s": seconds(attempt.noticed_ns),
        }
        return {**edges, **loaded, "ranks": ranks}

    def _write(self, record: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(strict_json.dumps(record) + "\n")


def times_on(board: Board, ranks: Sequence[int]) -> list[RankTimes]:
    """Return the times that ``board`` holds for ``ranks``, which are in slot order."""
    found = []
    for index, rank in enumerate(ranks):
        watch = board.watch(index)
        ended_ns = watch.time_ns if watch is not None and watch.doing & Doing.ENDED else None
        found.append(RankTimes(rank=rank, times=board.times(index), marks=board.marks(index), ended_ns=ended_ns))
    return found


def first_sign(ends: Sequence[RankEnd]) -> int | None:
    """Return the time of a failed rank's first exception or exit, or None if it is unknown."""
    signs = [end.record.time_ns if end.record is not None else end.ended_ns for end in ends if end.failed]
    return min((ns for ns in signs if ns is not None), default=None)


def read_goodput(run: Path) -> GoodputReport | None:
    """Return a finished run's goodput report, for all machines if possible, or None if there is no report."""
    try:
        path = run / ALL_MACHINES_FILE
        last = strict_json.loads(
            (path if path.exists() else run / GOODPUT_FILE).read_text(encoding="utf-8").splitlines()[-1]
        )
        if last["kind"] != "run":
            return None
        steps = None if last["steps"] is None else Steps.from_json(last["steps"])
        return GoodputReport(breakdown=TimeBreakdown.from_json(last), steps=steps)
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
