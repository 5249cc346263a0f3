"""The launcher's part of preemption: detects requests to save and exit, and reports ranks that take too long.

SIGTERM or SIGUSR1 reaches the launcher or any rank. The launcher does not forward it to the ranks, which instead read a
command on the status board (``status/stop_barrier.py``). A signal that stops ranks after a failure therefore cannot be
mistaken for a preemption. If no rank reads the board, because the script does not use echelon or is still starting, the
run is stopped.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import final

from echelon.base.errors import LaunchError
from echelon.base.messages.terminal import say
from echelon.base.messages.translation import gettext as _, gettext_noop as N_
from echelon.diagnose.stall import name_ranks
from echelon.launch.interrupts import Interrupts
from echelon.status.board import Board, StatusNote
from echelon.status.stop_barrier import EXIT_CODE, SIGNALS, RankState, state_of


@final
class PreemptionRequest:
    """Detects a request to save and exit: a signal to the launcher, or to a rank on this machine.

    Args:
        interrupts: the signals that the launcher has received.
        grace: how long the ranks may take to agree on a step; if zero, signals stop the run immediately.
        on_request: called once per attempt with a description of the requester.
    """

    def __init__(self, interrupts: Interrupts, grace: timedelta, on_request: Callable[[str], None]) -> None:
        self._interrupts, self._grace, self._on_request = interrupts, grace, on_request
        self._board: Board | None = None
        self.is_pending = False
        self.requester = ""

    def watch(self, board: Board | None) -> None:
        """Watch the ranks in a new attempt."""
        self._board = board
        self.is_pending = False

    def check(self) -> None:
        """Call ``on_request`` if there is a new request.

        Raises:
            Interrupted: the run must stop, because a second or a different signal was received, or because no rank
                reads the board.
        """
        if not self.is_pending and (requester := self._find_requester()):
            self.is_pending, self.requester = True, requester
            self._on_request(requester)
        num_expected = 1 if (self._interrupts.first or 0) in SIGNALS else 0
        if not self.is_pending or self._interrupts.count > num_expected:
            self._interrupts.check()

    def _find_requester(self) -> str:
        """Return a description of the requester; empty if there is no request or no rank reads the board."""
        if self._board is None or not self._grace or not any(self._board.read_positions()):
            return ""
        first = self._interrupts.first or 0
        if first in SIGNALS and self._interrupts.count == 1:
            return signal.Signals(first).name
        rank, number = next(((i, n) for i, n in enumerate(self._board.preemption_signals()) if n), (0, 0))
        return _("{name} to rank {rank}", name=signal.Signals(number).name, rank=rank) if number else ""


def stop_barrier_timeout(
    requester: str, grace: timedelta, positions: Mapping[int, int], notes: Mapping[int, StatusNote | None]
) -> LaunchError:
    """Return the error for ranks that did not reach a common step in time.

    Args:
        requester: description of the requester.
        grace: the ranks' time limit.
        positions: each rank's position, encoded as in ``stop_barrier.py``.
        notes: each rank's last status note.
    """
    where: dict[str, list[int]] = {}
    for rank, position in positions.items():
        note = notes.get(rank)
        text = _("no step yet")
        if note is not None:
            phase = _(str(note.phase) or N_("elsewhere"))
            text = _("step {step}, {phase}", step=note.step, phase=phase)
        text += _(" (at the stop barrier)") if state_of(position) is RankState.STOPPED else ""
        where.setdefault(text, []).append(rank)
    return LaunchError(
        _(
            "{requester}: the ranks did not reach a common step within {grace:g} s and were stopped",
            requester=requester,
            grace=grace.total_seconds(),
        ),
        where=_("; ").join(_("{ranks}: {state}", ranks=name_ranks(ranks), state=text) for text, ranks in where.items()),
        do=_("the next start resumes from the last checkpoint; set --preemption_grace to give the ranks more time"),
    )


def report_preempted(requester: str, error: LaunchError | None = None) -> int:
    """Print how a preempted run ended, and return the launcher's exit code."""
    text = _(
        "{requester}: all ranks stopped at the same step; exit code {exit_code}; rerun the same command to resume",
        requester=requester or _("preempted"),
        exit_code=EXIT_CODE,
    )
    say(error or text, kind="note" if error is None else "error")
    return EXIT_CODE
