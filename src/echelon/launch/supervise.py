"""Watch the boards of the running ranks: when the run stands still, ask every rank, save the stacks, say why."""

from __future__ import annotations

import linecache
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal, TypeAlias, final

from echelon.base.errors import LaunchError
from echelon.diagnose.stall import Answer, RankView, Stall, StallClock, diagnose
from echelon.launch.failure import Frame
from echelon.launch.records import read_answer, read_stack
from echelon.launch.worker import STACK_FILE
from echelon.status.board import Board, Doing
from echelon.status.place import Place
from echelon.status.reporter import ANSWER_FILE, DUMP_SIGNAL

__all__ = ["STALL_FILE", "OnStall", "StallRules", "Supervisor"]

OnStall: TypeAlias = Literal["report", "restart", "stop"]

STALL_FILE = "stall_{}.txt"
"""In the folder of the attempt, with the number of the question: the report."""

_LOOK_EVERY_S = 0.5
_ANSWERS_WITHIN_S = 2.5
_POLL_S = 0.05
_STACK_WITHIN_S = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class StallRules:
    """What the user asked for."""

    timeout: timedelta
    on_stall: OnStall


@final
class Supervisor:
    """Looks at the ranks of one attempt.

    Args:
        board: theirs.
        directory: of the attempt; ``rank_<n>/`` have the answers.
        rules: when it is a stall.
        check: called while it waits for answers; it raises when the launcher is to stop.
    """

    def __init__(self, board: Board, *, directory: Path, rules: StallRules, check: Callable[[], None]) -> None:
        self._board = board
        self._directory = directory
        self._rules = rules
        self._check = check
        self._clock = StallClock(rules.timeout.total_seconds())
        self._next_look = 0.0
        self._quiet_until = 0.0
        self._question = 0
        self._told: str | None = None

    def look(self, ranks: Mapping[int, tuple[int, int | None]]) -> Stall | None:
        """Return the stall that there is, after it has been told; None: none, or one that was told before.

        Args:
            ranks: for each local rank, in order, its process id and its exit code so far.
        """
        now = time.monotonic()
        if now < self._next_look or not self._rules.timeout:
            return None
        self._next_look = now + _LOOK_EVERY_S
        if not self._clock.look(self._views(ranks), now) or now < self._quiet_until:
            return None
        answers = self.ask(ranks)
        now = time.monotonic()
        views = self._views(ranks)
        if not self._clock.look(views, now):
            return None  # it went on while we asked
        for index, view in enumerate(views):
            if view.rank not in answers and self._clock.is_silent(view, now):
                answers[view.rank] = self._stack_of(view, index)
        stall = diagnose(views, answers, self._clock, now=now)
        self._quiet_until = now + self._rules.timeout.total_seconds()
        if stall is None or stall.what == self._told:
            return None
        self._told = stall.what
        self._tell(stall, sorted({answer.no_histories for answer in answers.values() if answer.no_histories}))
        return stall

    def _views(self, ranks: Mapping[int, tuple[int, int | None]]) -> list[RankView]:
        views = []
        for index, (rank, (pid, code)) in enumerate(ranks.items()):
            state, cpu_s = _process(pid) if code is None else ("", 0.0)
            views.append(
                RankView(
                    rank=rank,
                    watch=self._board.watch(index),
                    note=self._board.note(index),
                    exit_code=code,
                    is_stopped=state == "T",
                    cpu_s=cpu_s,
                )
            )
        return views

    def ask(self, ranks: Mapping[int, tuple[int, int | None]]) -> dict[int, Answer]:
        """Return what the running ranks say of where they are, as far as they can; they save their stacks.

        Args:
            ranks: as for ``look``.
        """
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

    def _stack_of(self, view: RankView, index: int) -> Answer:
        """Return where a rank is that runs and does not answer: by a signal, else where it was seen last.

        Only when the verdict is certain: a signal ends a sleep, or a wait, of native code.
        """
        watch = self._board.watch(index)
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
        return Answer(place=Place(file=file, line=line, source=linecache.getline(file, line).strip()))

    def _tell(self, stall: Stall, no_histories: list[str]) -> None:
        report = self._report(stall, no_histories)
        path = self._directory / STALL_FILE.format(self._question)
        path.write_text(report + "\n", encoding="utf-8")
        print(f"echelon: {report}", file=sys.stderr, flush=True)

    def _report(self, stall: Stall, no_histories: list[str]) -> str:
        lines = "".join(f"\n    {line}" for line in stall.lines())
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
            do=f"{stall.do}\n  stacks: echelon doctor {self._directory.parent}",
        )
        return str(error)


def _process(pid: int) -> tuple[str, float]:
    """Return the state of a process (T: stopped) and the seconds of processor time that it has used."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        return ("", 0.0) if Path("/proc/self").exists() else _process_by_ps(pid)
    except OSError:  # it ends
        return "", 0.0
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _process_by_ps(pid: int) -> tuple[str, float]:
    done = subprocess.run(["ps", "-o", "stat=,time=", "-p", str(pid)], capture_output=True, text=True, check=False)
    state, _, used = done.stdout.strip().partition(" ")
    seconds = 0.0
    for part in used.strip().split(":"):  # [hours:]minutes:seconds, with a fraction on macOS
        seconds = 60 * seconds + float(part or 0)
    return state[:1], seconds
