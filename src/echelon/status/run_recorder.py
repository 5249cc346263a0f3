"""The record of a run in its folder: ``run.json`` and ``events.jsonl``, by the launcher or by the first process without one."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, final

from echelon.base.messages.terminal import say
from echelon.base.messages.translation import gettext as _, gettext_noop as N_
from echelon.status.run_facts import GitQuery, machine_facts, mask_secrets, package_versions
from echelon.status.run_files import EVENTS_FILE, append_line, event_texts, whole_texts, write_info

EventKind: TypeAlias = Literal["start", "restart", "failure", "stall", "straggler", "preemption", "end"]
RunOutcome: TypeAlias = Literal["succeeded", "failed", "preempted", "interrupted"]

_MAX_SAME_NAME = 100


def run_name(program: str, unique: str) -> str:
    """Return the name of a new run's folder: the time, ``program``, and ``unique``."""
    name = re.sub(r"[^\w.-]", "_", program)[:60] or "run"
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{name}-{unique}"


def new_folder(path: Path) -> Path:
    """Create the folder ``path``, or ``path-2`` and so on if it exists: containers often have equal process ids.

    Raises:
        OSError: it cannot be created.
    """
    for name in (path.name, *(f"{path.name}-{number}" for number in range(2, _MAX_SAME_NAME))):
        folder = path.with_name(name)
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))


@final
class RunRecorder:
    """Records a run in its folder. If a file cannot be written, it warns once and stops recording; the run continues.

    Args:
        folder: the run's folder; None to record nothing.
        began_ns: ``time.monotonic_ns()`` when the launcher started.
        raises: whether to raise the OSError instead of warning.
    """

    def __init__(self, folder: Path | None, *, began_ns: int, raises: bool = False) -> None:
        self.folder = folder
        """The run's folder, or None if nothing is recorded."""
        self._began_ns = began_ns
        self._raises = raises
        self._info: dict[str, Any] = {}
        self._git: GitQuery | None = None
        self._attempt = -1

    @property
    def has_steps(self) -> bool:
        """Whether a process on this machine has recorded an optimizer step."""
        return self.folder is not None and any(self.folder.glob("records/*/*.steps"))

    def describe(
        self,
        *,
        command: Sequence[str],
        script: str,
        arguments: Sequence[str],
        num_processes: int,
        num_machines: int,
        launcher: str = "echelon launch",
        run_id: str | None = None,
        name: str | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        """Record what is known before the processes start.

        Args:
            command: the launcher's command line.
            script: the program.
            arguments: its arguments.
            num_processes: number of processes on all machines.
            num_machines: number of machines.
            launcher: what started the processes.
            run_id: the run's name, which is the same on all machines (default: the folder's name).
            name: the name that the user has given it.
            tags: words that the user has given it.
        """
        if self.folder is None:
            return
        self._info = {
            "run_id": run_id or self.folder.name,
            "name": name,
            "tags": [*tags],
            "launcher": launcher,
            "command": mask_secrets(command),
            "script": script,
            "arguments": mask_secrets(arguments),
            "cwd": str(Path.cwd()),
            "git": None,
            "versions": package_versions(),
            "machine": dict(machine_facts()),
            "num_processes": num_processes,
            "num_machines": num_machines,
            "began": self._unix(self._began_ns),
            "ended": None,
            "outcome": "running",
            "exit_code": None,
            "num_restarts": 0,
            "pid": os.getpid(),
            "board": None,
            "goodput": None,
        }
        self._write()
        if self.folder is not None:
            file = Path(script).absolute()
            self._git = GitQuery(file.parent if file.is_file() else Path.cwd())

    def start_attempt(
        self,
        number: int,
        *,
        board: str | None,
        num_processes: int,
        num_machines: int,
        run_id: str | None = None,
    ) -> None:
        """Record that the processes of an attempt have been started.

        Args:
            number: number of the attempt.
            board: path of the status board of this machine's processes.
            num_processes: number of processes on all machines.
            num_machines: number of machines.
            run_id: the run's name on all machines (default: unchanged).
        """
        if self.folder is None:
            return
        self._take_commit()
        is_first = self._attempt < 0
        self._attempt = number
        self._info.update(
            board=board,
            num_restarts=number,
            num_processes=num_processes,
            num_machines=num_machines,
            run_id=run_id or self._info["run_id"],
        )
        self._write()
        count, es = num_processes, "es" if num_processes > 1 else ""
        text = _("{count} process{es} started", count=count, es=es)
        if not is_first:
            text = _("{count} process{es} restarted (restart {number})", count=count, es=es, number=number)
        self.event("start" if is_first else "restart", text)

    def event(
        self,
        kind: EventKind,
        text: str,
        *,
        rank: int | None = None,
        step: int | None = None,
        at_ns: int | None = None,
        report: Mapping[str, str | None] | None = None,
    ) -> None:
        """Record an event.

        Args:
            kind: kind of the event.
            text: what happened, in a sentence.
            rank: the rank that it concerns.
            step: the last optimizer step before it.
            at_ns: ``time.monotonic_ns()`` of the event; None for the current time.
            report: ``what``, ``where`` and ``do`` of the message that the launcher prints.
        """
        if self.folder is None:
            return
        moment = self._unix(time.monotonic_ns() if at_ns is None else at_ns)
        record = {
            "time": moment,
            "attempt": max(0, self._attempt),
            "kind": kind,
            "rank": rank,
            "step": step,
            **event_texts(text),
            **({"report": {name: whole_texts(part) for name, part in report.items() if part}} if report else {}),
        }
        try:
            append_line(self.folder / EVENTS_FILE, record)
        except OSError as error:
            self._give_up(error)

    def breakdown(self, *, wall_s: float, seconds: Mapping[str, float]) -> None:
        """Record the time breakdown of the run until now: its duration, and the seconds in each of its parts."""
        if self.folder is not None:
            self._take_commit()
            parts = {item: round(s, 6) for item, s in seconds.items()}
            self._info["goodput"] = {"wall_s": round(wall_s, 6), "parts": parts}
            self._write()

    def update(self) -> None:
        """Record the commit of the code if it has become known."""
        if self._git is not None and self._git.is_done:
            self._take_commit()
            self._write()

    def _take_commit(self) -> None:
        if self._git is not None and self._git.is_done:
            self._info["git"], self._git = self._git.answer(), None

    def end(self, outcome: RunOutcome, code: int | None) -> None:
        """Record how the run ended; ``code`` is None if the exit code is unknown."""
        if self.folder is None or not self._info:
            return
        if self._git is not None:
            self._info["git"], self._git = self._git.answer(timeout_s=1.0), None
        self._info.update(outcome=outcome, exit_code=code, ended=time.time(), board=None)
        self._write()
        end = _(_ENDS[outcome])
        self.event("end", end if code is None else _("{end} (exit code {code})", end=end, code=code))

    def _unix(self, ns: int) -> float:
        return round(time.time() - (time.monotonic_ns() - ns) / 1e9, 6)

    def _write(self) -> None:
        if self.folder is None:
            return
        try:
            write_info(self.folder, self._info)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        if self._raises:
            raise error
        say(
            _(
                "warning: the run is no longer recorded in {folder}: {strerror}",
                folder=self.folder,
                strerror=error.strerror,
            ),
            kind="warning",
        )
        self.folder = None


_ENDS: Mapping[RunOutcome, str] = MappingProxyType(
    {
        "succeeded": N_("the run succeeded"),
        "failed": N_("the run failed"),
        "preempted": N_("the run saved and exited"),
        "interrupted": N_("the run was interrupted"),
    }
)
