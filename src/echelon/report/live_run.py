"""A run while it is live: its status board, processes and files, read by another process than its launcher."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from echelon.base.messages.translation import gettext as _, in_english
from echelon.diagnose.stall import RankView
from echelon.launch.local.ranks import STOPPED_STATES, read_process
from echelon.report.rank_rows import RankRow, RankSample, RowTracker
from echelon.report.run_folder import RecordedRun, read_run
from echelon.status.board import BoardReader
from echelon.status.run_files import EVENTS_FILE, INFO_FILE, METRICS_FILE, event_text
from echelon.status.step_records import StepFile, read_step_file
from echelon.status.strict_json import loads

_NUM_LOSSES = 240
_NUM_LAST = 64
_MAX_EVENTS = 4
_TAIL_BYTES = 1 << 16
_PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 2**20 if hasattr(os, "sysconf") else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What is known about a run at one point in time. Numbers that are unknown are nan."""

    name: str
    """The name of the run's folder."""
    outcome: str
    """"running", or how the run ended."""
    is_live: bool
    """Whether the run has a status board on this machine."""
    why_not_live: str
    host: str
    num_processes: int
    num_machines: int
    num_restarts: int
    command: Sequence[str]
    elapsed_s: float
    step: int
    """Largest number of steps of a rank; 0 if unknown."""
    num_steps: int
    """Number of steps of the whole run; 0 if unknown."""
    epoch: float
    steps_per_s: float
    samples_per_s: float
    """Samples of the ranks on this machine."""
    items_per_s: float
    """Items (tokens) of the ranks on this machine."""
    eta_s: float
    loss: float | None
    """The last loss, which may be nan or infinite; None if unknown."""
    lr: float
    grad_norm: float
    losses: Sequence[float]
    loss_from: str
    """Where the losses are from."""
    rows: Sequence[RankRow]
    events: Sequence[str]
    """The last events, oldest first."""

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON data, with None for numbers that are unknown; a loss that is not finite is text."""
        fields = {name: getattr(self, name) for name in self.__slots__ if name != "rows"}
        rows = []
        for row in self.rows:
            rows.append({name: _plain(getattr(row, name)) for name in row.__slots__})
            rows[-1]["difference"] = row.difference.name.lower()
        loss = self.loss if self.loss is None or math.isfinite(self.loss) else str(self.loss)
        return {**{name: _plain(value) for name, value in fields.items()}, "loss": loss, "rows": rows}


@final
class LiveRun:
    """Reads a run again and again.

    Args:
        folder: the run's folder on this machine.
        clock: the clock of the heartbeats, in seconds.
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder = folder
        self._clock = clock
        self._tracker = RowTracker()
        self._board: BoardReader | None = None
        self._board_path = ""

    def close(self) -> None:
        """Close the board."""
        if self._board is not None:
            self._board.close()
        self._board, self._board_path = None, ""

    def read(self) -> Snapshot:
        """Return the current state. Missing files are no error."""
        run = read_run(self.folder)
        here, facts = _on_this_machine(self.folder, run)
        why_not = self._open_board(facts, run.outcome)
        board = self._board
        recent = _RecentSteps(run.step_paths())
        ranks = [] if board is None else _rank_numbers(here, board.num_slots)
        samples = [
            _sample(board, i, rank, recent.memory_mb.get(rank, math.nan))
            for i, rank in enumerate(ranks)
            if board is not None
        ]
        rows = self._tracker.update(samples, self._clock()) if samples else []
        metrics = _last_lines(run.folder / METRICS_FILE)
        values = {name: value for line in metrics for name, value in (line.get("values") or {}).items()}
        step = max([row.step for row in rows if row.step is not None] + [recent.step])
        steps_per_s = self._tracker.steps_per_s() if samples else math.nan
        planned = 0 if self._board is None else self._board.planned_steps()
        now = time.time()
        began, ended = float(facts.get("began") or now), facts.get("ended")
        return Snapshot(
            name=run.name,
            outcome=run.outcome,
            is_live=self._board is not None,
            why_not_live=why_not,
            host=str((facts.get("machine") or {}).get("host") or ""),
            num_processes=int(facts.get("num_processes") or len(rows)),
            num_machines=int(facts.get("num_machines") or 1),
            num_restarts=int(facts.get("num_restarts") or 0),
            command=[str(word) for word in facts.get("command") or []],
            elapsed_s=float(ended or now) - began,
            step=step,
            num_steps=planned,
            epoch=next((float(line["epoch"]) for line in reversed(metrics) if line.get("epoch") is not None), math.nan),
            steps_per_s=steps_per_s,
            samples_per_s=recent.per_second("num_samples") if samples else math.nan,
            items_per_s=recent.per_second("num_items") if samples else math.nan,
            eta_s=(planned - step) / steps_per_s if planned >= step and planned and steps_per_s > 0 else math.nan,
            loss=recent.loss if recent.loss is not None else _number(values.get("loss")),
            lr=_first_known(recent.lr, values.get("learning_rate")),
            grad_norm=_first_known(recent.grad_norm, values.get("grad_norm")),
            losses=recent.losses,
            loss_from=recent.loss_from,
            rows=rows,
            events=[event_text(event) for event in _last_lines(self.folder / EVENTS_FILE)[-_MAX_EVENTS:]],
        )

    def _open_board(self, facts: Mapping[str, Any], outcome: str) -> str:
        """Open the board of the current attempt; return why there is none, or an empty string."""
        path = str(facts.get("board") or "")
        if path != self._board_path:
            self.close()
            self._tracker = RowTracker()  # other processes
        if outcome != "running":
            self.close()
            return (
                _("the run has ended")
                if facts
                else _("{folder} has no {info_file}", folder=self.folder, info_file=INFO_FILE)
            )
        if self._board is not None:
            return ""
        host = str((facts.get("machine") or {}).get("host") or "")
        if host and host != socket.gethostname():
            return _("the run's processes are on {host}; run this command there to see its ranks", host=host)
        if not path:
            return _("its processes have not been started yet")
        try:
            self._board, self._board_path = BoardReader(path), path
        except FileNotFoundError:
            return _("its status board does not exist (yet); the launcher removes it at the end of each attempt")
        except (OSError, ValueError) as error:
            return _("its status board cannot be read: {error}", error=error)
        return ""


def _on_this_machine(folder: Path, run: RecordedRun) -> tuple[Path, Mapping[str, Any]]:
    """Return the run's folder of this machine and its facts, or ``folder`` if the run has no processes here."""
    for place in (folder, *run.folders) if len(run.folders) > 1 else ():
        facts = run.facts if place == folder else read_run(place).facts
        if (facts.get("machine") or {}).get("host") == socket.gethostname():
            return place, facts
    return folder, run.facts


@final
class _RecentSteps:
    """The step records of the last attempt, evenly spaced for a curve, and the last ones for rates."""

    def __init__(self, paths: Sequence[tuple[int, int, Path]]) -> None:
        attempt = max((number for number, _rank, _path in paths), default=0)
        self._files: list[StepFile] = []
        for number, _rank, path in paths:
            with suppress(OSError, ValueError):  # the rank is creating it
                if number == attempt:
                    num_spread = 0 if self._files else _NUM_LOSSES  # the curve is that of one rank
                    self._files.append(read_step_file(path, num_records=num_spread, num_last=_NUM_LAST))
        first = self._files[0] if self._files else None
        self.losses = [record.loss for record in first.records] if first else []
        """The losses of one rank, evenly spaced over the attempt."""
        self.loss_from = _("rank {rank}", rank=first.rank) if first else ""
        last = list(reversed(first.last)) if first else []
        # On an accelerator, losses and norms are known some steps later.
        self.loss = next((record.loss for record in last if record.num_losses), None)
        self.grad_norm = next((record.grad_norm for record in last if not math.isnan(record.grad_norm)), math.nan)
        self.lr = last[0].lr if last else math.nan
        self.step = max((file.last[-1].step for file in self._files if file.last), default=0)
        self.memory_mb = {file.rank: file.last[-1].memory_mb for file in self._files if file.last}
        """The memory in use that each rank has recorded last: of its accelerator if it uses one."""

    def per_second(self, total: Literal["num_samples", "num_items"]) -> float:
        """Return how much ``total`` of all ranks together grows in a second; nan if it is unknown or zero."""
        rates = [_rate(file, total) for file in self._files]
        return sum(rates) or math.nan


def _rate(file: StepFile, total: Literal["num_samples", "num_items"]) -> float:
    if len(file.last) < 2:
        return 0.0
    first, last = file.last[0], file.last[-1]
    seconds, number = (last.time_ns - first.time_ns) / 1e9, len(file.last) - 1
    still_s = (time.time_ns() - file.began_ns - last.time_ns) / 1e9
    if still_s > 1.0 + 3 * seconds / number:  # the rank stands still
        seconds += still_s
    return float(getattr(last, total) - getattr(first, total)) / seconds if seconds > 0 else 0.0


def _sample(board: BoardReader, index: int, rank: int, memory_mb: float) -> RankSample:
    watch = board.watch(index)
    state, cpu_s, num_faults = ("", 0.0, 0) if watch is None else read_process(watch.pid)
    times = board.times(index)
    view = RankView(
        rank=rank,
        watch=watch,
        note=board.note(index),
        is_stopped=state in STOPPED_STATES if state else False,
        cpu_s=cpu_s,
        num_faults=num_faults,
        times=times,
    )
    is_running = watch is None or (state not in ("", "Z", "X"))
    if math.isnan(memory_mb) and watch is not None and is_running:
        memory_mb = _resident_mb(watch.pid)
    return RankSample(view=view, times=times, is_running=is_running, memory_mb=memory_mb)


def _resident_mb(pid: int) -> float:
    """Return the resident memory of a process; nan if unknown."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * _PAGE_MB
    except (OSError, ValueError, IndexError):  # it has ended, or the system has no /proc
        return math.nan


def _rank_numbers(folder: Path, num_slots: int) -> list[int]:
    """Return the ranks on this machine, in the order of the board's slots."""
    attempts = [int(path.name[8:]) for path in folder.glob("attempt_*") if path.name[8:].isdecimal()]
    names = (path.name for path in (folder / f"attempt_{max(attempts)}").glob("rank_*")) if attempts else ()
    ranks = sorted(int(name[5:]) for name in names if name[5:].isdecimal())
    return ranks if len(ranks) == num_slots else list(range(num_slots))


def _last_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records at the end of a file of JSON lines; empty if it does not exist."""
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - _TAIL_BYTES, 0))
            lines = file.read().splitlines()
    except OSError:
        return []
    records = []
    for line in lines:
        with suppress(ValueError):  # the first line may lack its beginning, and the last its end
            records.append(loads(line))
    return [record for record in records if isinstance(record, dict)]


def _first_known(*values: object) -> float:
    known = (float(value) for value in values if isinstance(value, (int, float)))
    return next((value for value in known if not math.isnan(value)), math.nan)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _plain(value: Any) -> Any:
    value = in_english(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value
