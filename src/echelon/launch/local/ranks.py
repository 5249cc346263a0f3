"""The ranks of this machine as they are seen from outside: their boards, their processes, their answers and stacks."""

from __future__ import annotations

import linecache
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol, final

from echelon.diagnose.stall import Answer, RankView
from echelon.launch.failures.failure import Frame, RankEnd, is_settled, lost_each_other
from echelon.launch.failures.rank_errors import read_answer, read_stack
from echelon.launch.local.worker import STACK_FILE
from echelon.status.board import Board, Doing
from echelon.status.call_site import CallSite
from echelon.status.reporter import ANSWER_FILE, DUMP_SIGNAL

__all__ = ["STALL_FILE", "LocalRanks", "Ranks", "settled"]

# A rank that fails takes its exit up to 1.7 s to show, its victims' errors come before: who failed is known after this.
_STRAGGLERS_S = 1.5
_SETTLE_POLL_S = 0.02

_ANSWERS_WITHIN_S = 2.5
_POLL_S = 0.05
_STACK_WITHIN_S = 0.3
_STOPPED = frozenset("Tt")  # t: by a debugger that traces it (gdb)


class Ranks(Protocol):
    """The ranks that a supervisor watches: of one machine, or of all."""

    def views(self) -> list[RankView]:
        """Return how each rank is now; times are on this machine's ``time.monotonic``."""

    def ask(self) -> dict[int, Answer]:
        """Return what the running ranks say of where they are, as far as they can; they save their stacks."""

    def stack_of(self, view: RankView) -> Answer:
        """Return where a rank is that runs and does not answer."""

    def keep(self, report: str) -> None:
        """Put ``report`` beside the stacks that were saved last."""


STALL_FILE = "stall_{}.txt"
"""In the folder of the attempt, with the number of the question: the report."""


@final
class LocalRanks:
    """Those of one attempt on this machine.

    Args:
        board: theirs.
        directory: of the attempt; ``rank_<n>/`` have the answers.
        running: gives for each rank, in the order of the slots, its process id and its exit code so far.
        check: called while it waits for answers; it raises when the launcher is to stop.
    """

    def __init__(
        self,
        board: Board,
        *,
        directory: Path,
        running: Callable[[], Mapping[int, tuple[int, int | None]]],
        check: Callable[[], None],
    ) -> None:
        self._board = board
        self._directory = directory
        self._running = running
        self._check = check
        self._question = 0

    def views(self) -> list[RankView]:
        """Return how each rank is now."""
        views = []
        for index, (rank, (pid, code)) in enumerate(self._running().items()):
            state, cpu_s, num_faults = _process(pid) if code is None else ("", 0.0, 0)
            views.append(
                RankView(
                    rank=rank,
                    watch=self._board.watch(index),
                    note=self._board.note(index),
                    exit_code=code,
                    is_stopped=state in _STOPPED,
                    cpu_s=cpu_s,
                    num_faults=num_faults,
                )
            )
        return views

    def ask(self) -> dict[int, Answer]:
        """Return what the running ranks say of where they are, as far as they can; they save their stacks."""
        ranks = self._running()
        question = self._board.ask()
        self._question = question
        folders = {rank: self._directory / f"rank_{rank}" for rank in ranks}
        deadline = time.monotonic() + _ANSWERS_WITHIN_S
        missing = {rank: index for index, rank in enumerate(ranks) if ranks[rank][1] is None}
        while missing and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            self._check()
            missing = {r: i for r, i in missing.items() if not (w := self._board.watch(i)) or w.answered < question}
        answers = {
            rank: read_answer(folders[rank] / ANSWER_FILE.format(question)) for rank in ranks if rank not in missing
        }
        return {rank: answer for rank, answer in answers.items() if answer is not None}

    def stack_of(self, view: RankView) -> Answer:
        """Return where a rank is that runs and does not answer: by a signal, else where it was seen last.

        Only when the verdict is certain: a signal ends a sleep, or a wait, of native code.
        """
        watch = self._board.watch(list(self._running()).index(view.rank))
        assert watch is not None, view
        frames: tuple[Frame, ...] = ()
        if watch.doing & Doing.DUMPS and DUMP_SIGNAL is not None:
            with suppress(ProcessLookupError):
                os.kill(watch.pid, DUMP_SIGNAL)
            time.sleep(_STACK_WITHIN_S)
            frames = read_stack(self._directory / f"rank_{view.rank}" / STACK_FILE)
        users = [frame for frame in frames if frame.user]
        if not users:
            return Answer()
        file, line = users[0].file, users[0].line
        return Answer(place=CallSite(file=file, line=line, source=linecache.getline(file, line).strip()))

    def keep(self, report: str) -> None:
        """Put ``report`` beside the stacks that were saved last."""
        (self._directory / STALL_FILE.format(self._question)).write_text(report + "\n", encoding="utf-8")


def settled(
    ends_now: Callable[[], Sequence[RankEnd]], ranks: Ranks, check: Callable[[], None] = lambda: None
) -> list[RankEnd]:
    """Return how all ranks ended, once waiting longer would not change the verdict.

    Args:
        ends_now: gives how they ended so far.
        ranks: the same ranks.
        check: called while this waits; it raises when the launcher is to stop.
    """
    deadline = time.monotonic() + _STRAGGLERS_S
    while not is_settled(ends := ends_now()) and time.monotonic() < deadline:
        time.sleep(_SETTLE_POLL_S)
        check()
    running = [end.rank for end in ends if end.exit_code is None and end.record is None]
    if not running or not lost_each_other(ends):
        return list(ends)
    # Nobody has failed by himself: those that run still may say what they do instead.
    answers = ranks.ask()
    return [replace(end, last_words=answers.get(end.rank)) if end.rank in running else end for end in ends_now()]


def _process(pid: int) -> tuple[str, float, int]:
    """Return the state of a process, the seconds of processor time that it has used, and how many pages it has waited for."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        return ("", 0.0, 0) if Path("/proc/self").exists() else (*_process_by_ps(pid), 0)
    except OSError:  # it ends
        return "", 0.0, 0
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), int(fields[9])


def _process_by_ps(pid: int) -> tuple[str, float]:
    done = subprocess.run(["ps", "-o", "stat=,time=", "-p", str(pid)], capture_output=True, text=True, check=False)
    state, _, used = done.stdout.strip().partition(" ")
    seconds = 0.0
    for part in used.strip().split(":"):  # [hours:]minutes:seconds, with a fraction on macOS
        seconds = 60 * seconds + float(part or 0)
    return state[:1], seconds
