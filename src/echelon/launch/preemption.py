"""The launcher's part in a preemption: who asked, leading the ranks to one step, and what is told about it.

SIGTERM or SIGUSR1 reaches the launcher or any rank. The ranks are not sent a signal: they read a command on the status board
(``status/stop_barrier.py``), so that the signal that stops them after a failure cannot be taken for this one. A run in which no rank
takes part (a script that does not use echelon, or is still starting) has nothing that can be saved so, and is stopped.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import final

from echelon.base.errors import LaunchError
from echelon.diagnose.stall import name_ranks
from echelon.launch.interrupts import Interrupts
from echelon.status.board import Board
from echelon.status.stop_barrier import EXIT_CODE, SIGNALS, BarrierCoordinator, BarrierOutcome, RankState, state_of

__all__ = ["PreemptionCoordinator"]


@final
@dataclass(slots=True)
class PreemptionCoordinator:
    """One run's.

    Args:
        interrupts: the launcher's signals.
        grace: the ranks have so long to come to one step; zero: they are not asked, and signals stop the run.
        pass_on: of a run on several machines: who has asked is told to this, and the ranks are led by somebody else.
    """

    interrupts: Interrupts
    grace: timedelta
    pass_on: Callable[[str], None] | None = None
    _is_passed_on: bool = False
    _board: Board | None = None
    _coordinator: BarrierCoordinator | None = None
    _who: str = ""
    _lost: str = ""

    def watch(self, board: Board) -> None:
        """A new attempt begins, with ``board``."""
        board.set_grace(int(self.grace.total_seconds() * 1000))
        self._board = board
        self._is_passed_on = False

    @property
    def is_asked(self) -> bool:
        """Are the ranks being led to one step, or have they been?"""
        return self._coordinator is not None or self._is_passed_on

    @property
    def is_saved(self) -> bool:
        """Have all come, and were they told to save?"""
        return self._coordinator is not None and self._coordinator.look() is BarrierOutcome.MET

    def check(self) -> None:
        """Begin if somebody has asked.

        Raises:
            Interrupted: signals came that stop the run: others, a second one, or no rank takes part.
        """
        if not self.is_asked and (asked := self._asked()) is not None:
            self._who = asked
            if self.pass_on is not None:
                self._is_passed_on = True
                self.pass_on(asked)
                return
            assert self._board is not None
            print(
                f"echelon: {asked}: all ranks save at one step and end (within {self.grace.total_seconds():g} s; a second "
                "signal stops them at once)",
                file=sys.stderr,
                flush=True,
            )
            self._coordinator = BarrierCoordinator(self._board, self.grace.total_seconds())
        if not self.is_asked or self.interrupts.count > self._num_expected:
            self.interrupts.check()

    @property
    def _num_expected(self) -> int:
        first = self.interrupts.first or 0
        return 1 if first in SIGNALS else 0

    def _asked(self) -> str | None:
        """Return who has asked, in words; None: nobody has, or no rank takes part."""
        if self._board is None or not self.grace or not any(self._board.read_stands()):
            return None
        first = self.interrupts.first or 0
        if first in SIGNALS and self.interrupts.count == 1:
            return signal.Signals(first).name
        rank, number = next(((i, n) for i, n in enumerate(self._board.asked()) if n), (0, 0))
        return f"{signal.Signals(number).name} to rank {rank}" if number else None

    def look(self) -> bool:
        """Lead the ranks on; return whether they are to be stopped, because their time is over."""
        assert self._coordinator is not None
        assert self._board is not None
        if self._coordinator.look() is not BarrierOutcome.LATE:
            return False
        where: dict[str, list[int]] = {}
        for rank, stand in enumerate(self._board.read_stands()):
            note = self._board.note(rank)
            step = "" if note is None else f"step {note.step}, {note.phase or 'elsewhere'}"
            if state_of(stand) is RankState.STOPPED:
                step += " (has come)"
            where.setdefault(step.strip(), []).append(rank)
        self._lost = "; ".join(f"{name_ranks(ranks)}: {text or 'no step yet'}" for text, ranks in where.items())
        return True

    def tell(self) -> int:
        """Say how it ended; return the launcher's exit code."""
        if self._lost:
            error = LaunchError(
                f"{self._who}: the ranks did not come to one step within {self.grace.total_seconds():g} s, and were stopped",
                where=self._lost,
                do="start it again: it goes on from the last checkpoint; --preemption_grace gives more time",
            )
            print(f"echelon: {error}", file=sys.stderr)
        else:
            print(
                f"echelon: {self._who or 'asked to end'}: all ranks have ended at the same step; exit code {EXIT_CODE}; start it again with the "
                "same command",
                file=sys.stderr,
            )
        return EXIT_CODE
