"""The launcher's view of the ranks on this machine: boards, processes and stacks."""

from __future__ import annotations

import linecache
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import final

from echelon.diagnose.stall import Answer, RankView
from echelon.launch.failures.failure import Frame
from echelon.launch.local.rank_errors import read_answer, read_last_words, read_stack
from echelon.launch.local.worker import STACK_FILE
from echelon.status.board import Board, Doing
from echelon.status.call_site import CallSite
from echelon.status.stack_reporter import ANSWER_FILE, DUMP_SIGNAL

_ANSWER_S = 2.5
_POLL_S = 0.05
_STACK_S = 0.3
STOPPED_STATES = frozenset("Tt")
"""States of a stopped process; t: traced by a debugger (gdb)."""


STALL_FILE = "stall_{}.txt"
"""Stall report in the attempt's directory; the placeholder is the request number."""


@final
class LocalRanks:
    """One attempt's ranks on this machine.

    Args:
        board: the ranks' status board.
        directory: the attempt's directory, in which ``rank_<n>/`` contains the answers.
        running: returns a dict from rank to (process id, exit code or None), in slot order.
    """

    def __init__(
        self,
        board: Board,
        *,
        directory: Path,
        running: Callable[[], Mapping[int, tuple[int, int | None]]],
    ) -> None:
        self._board = board
        self._directory = directory
        self._running = running
        self._request = 0
        self._is_kept = True

    def views(self) -> list[RankView]:
        """Return each rank's current state."""
        views = []
        for index, (rank, (pid, code)) in enumerate(self._running().items()):
            state, cpu_s, num_faults = read_process(pid) if code is None else ("", 0.0, 0)
            views.append(
                RankView(
                    rank=rank,
                    watch=self._board.watch(index),
                    note=self._board.note(index),
                    exit_code=code,
                    is_stopped=state in STOPPED_STATES,
                    cpu_s=cpu_s,
                    num_faults=num_faults,
                    times=self._board.times(index),
                )
            )
        return views

    def request_stacks(self) -> dict[int, Answer]:
        """Ask the running ranks to save their stacks; return the answers that arrive in time, and what ended ranks have recorded."""
        ranks = self._running()
        folders = {rank: self._directory / f"rank_{rank}" for rank in ranks}
        if not self._is_kept:  # of a request after which nothing was reported
            for folder in folders.values():
                (folder / ANSWER_FILE.format(self._request)).unlink(missing_ok=True)
        request = self._board.request_stacks()
        self._request, self._is_kept = request, False
        deadline = time.monotonic() + _ANSWER_S
        ended = {rank for index, rank in enumerate(ranks) if ranks[rank][1] is not None or self._has_ended(index)}
        missing = {rank: index for index, rank in enumerate(ranks) if rank not in ended}
        while missing and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            missing = {r: i for r, i in missing.items() if not (w := self._board.watch(i)) or w.answered < request}
        answers = {
            rank: read_last_words(folder) if rank in ended else read_answer(folder / ANSWER_FILE.format(request))
            for rank, folder in folders.items()
            if rank not in missing
        }
        return {rank: answer for rank, answer in answers.items() if answer is not None}

    def _has_ended(self, index: int) -> bool:
        watch = self._board.watch(index)
        return watch is not None and bool(watch.doing & Doing.ENDED)

    def stack_of(self, view: RankView) -> Answer:
        """Return the call site of a running rank that does not respond, from the stack that it writes on a signal.

        Call this only when a stall is certain, because the signal interrupts a sleep or wait in native code.
        """
        watch = self._board.watch(list(self._running()).index(view.rank))
        assert watch is not None, view
        frames: tuple[Frame, ...] = ()
        if watch.doing & Doing.DUMPS and DUMP_SIGNAL is not None:
            with suppress(ProcessLookupError):
                os.kill(watch.pid, DUMP_SIGNAL)
            time.sleep(_STACK_S)
            frames = read_stack(self._directory / f"rank_{view.rank}" / STACK_FILE)
        users = [frame for frame in frames if frame.user]
        if not users:
            return Answer()
        file, line = users[0].file, users[0].line
        return Answer(call_site=CallSite(file=file, line=line, source=linecache.getline(file, line).strip()))

    def save_report(self, report: str) -> None:
        """Save ``report`` next to the stacks from the last request."""
        self._is_kept = True
        (self._directory / STALL_FILE.format(self._request)).write_text(report + "\n", encoding="utf-8")


def read_process(pid: int) -> tuple[str, float, int]:
    """Return a process's state, CPU seconds and number of major page faults; the state is empty if there is no process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        return ("", 0.0, 0) if Path("/proc/self").exists() else (*_process_by_ps(pid), 0)
    except OSError:  # the process is ending
        return "", 0.0, 0
    fields = text.rpartition(")")[2].split()  # the process name before it may contain anything
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), int(fields[9])


def _process_by_ps(pid: int) -> tuple[str, float]:
    done = subprocess.run(["ps", "-o", "stat=,time=", "-p", str(pid)], capture_output=True, text=True, check=False)
    state, _, used = done.stdout.strip().partition(" ")
    seconds = 0.0
    for part in used.strip().split(":"):  # [hours:]minutes:seconds, with a fraction on macOS
        seconds = 60 * seconds + float(part or 0)
    return state[:1], seconds
