"""Finds the folders of recorded runs and reads what the launcher and the ranks wrote into them."""

from __future__ import annotations

import json
import math
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from echelon.base.errors import UsageError
from echelon.base.messages.translation import gettext as _
from echelon.config.run_record import RUN_FILE as CONFIG_FILE
from echelon.status.hyperparameters import Hyperparameter, read_hyperparameters
from echelon.status.run_files import (
    DEFAULT_PARENT,
    EVENTS_FILE,
    HYPERPARAMETERS_FILE,
    INFO_FILE,
    METRICS_FILE,
    read_info,
    read_lines,
)

_GOODPUT_FILE = "goodput.jsonl"
_STEPS = re.compile(r"rank_(\d+)\.steps")


def find_run(folder: str | Path | None = None) -> Path:
    """Return the folder of a run: ``folder`` itself, or the newest run directly below it.

    Args:
        folder: a run's folder, a parent of such folders, or, in ``./echelon-runs``, the name of a folder or the ``--name`` of runs,
            of which the newest is returned; None: ``./echelon-runs``.

    Raises:
        UsageError: there is no run.
    """
    path = Path(DEFAULT_PARENT if folder is None else folder)
    if not path.exists() and (Path(DEFAULT_PARENT) / path).is_dir():
        path = Path(DEFAULT_PARENT) / path
    if folder is not None and not path.exists():
        named = [one for one in runs_below(DEFAULT_PARENT) if _read_info(one).get("name") == str(folder)]
        path = named[-1] if named else path
    if _is_run(path):
        return path
    if newest := runs_below(path):
        return newest[-1]
    if path == Path(DEFAULT_PARENT):
        raise UsageError(
            _("no runs are recorded here yet: ./{path} contains no run", path=path),
            where=str(path.absolute()),
            do=_(
                "record one with echelon launch SCRIPT, or pass the folder of a run, or a folder that contains runs "
                "(--log_dir)"
            ),
        )
    raise UsageError(
        _("{path} contains no run", path=path) if path.is_dir() else _("{path} is not a folder", path=path),
        where=str(path.absolute()),
        do=_(
            "pass the folder of a run, or a folder that contains runs (echelon launch writes to ./echelon-runs, "
            "or to --log_dir)"
        ),
    )


def runs_below(parent: str | Path) -> list[Path]:
    """Return the folders of the runs directly below ``parent``, oldest first; of a run on several machines, the first one's."""
    found = [path for path in sorted(Path(parent).glob("*/")) if _is_run(path)]
    facts = {path: _read_info(path) for path in found}
    primary: dict[str, Path] = {}
    for path in found:
        name = str(facts[path].get("run_id") or path)
        if name not in primary or _rank_zero(path):
            primary[name] = path
    # The names of folders without a run.json begin with the start time, too.
    return sorted(primary.values(), key=lambda path: (_number(facts[path].get("began")), path.name))


def read_run(folder: str | Path) -> RecordedRun:
    """Return the run in ``folder``, with the folders of its other machines in the same parent folder. Missing files are no error."""
    folder = Path(folder)
    facts = _read_info(folder)
    folders = [folder]
    if facts.get("run_id") and _number(facts.get("num_machines")) > 1:
        for other in sorted(folder.resolve().parent.glob(f"*/{INFO_FILE}")):
            is_same = other.parent != folder.resolve() and _read_info(other.parent).get("run_id") == facts["run_id"]
            folders += [other.parent] if is_same else []
    return RecordedRun(folders=tuple(sorted(folders, key=lambda path: not _rank_zero(path))), facts=facts)


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """What a run has left in its folder. A file that is missing or damaged counts as empty."""

    folders: tuple[Path, ...]
    """The run's folder on each machine; the first contains the files of rank 0."""
    facts: Mapping[str, Any]
    """The contents of run.json; empty if there is none."""

    @property
    def folder(self) -> Path:
        """The folder of rank 0."""
        return self.folders[0]

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name

    @property
    def title(self) -> str:
        """The name that the user has given the run, or else its folder's name."""
        return str(self.facts.get("name") or self.name)

    @property
    def tags(self) -> list[str]:
        """The words that the user has given the run."""
        tags = self.facts.get("tags")
        return [str(tag) for tag in tags] if isinstance(tags, list) else []

    @property
    def outcome(self) -> str:
        """How the run ended, or "running"; "ended without a record" if its launcher was killed; "unknown" without run.json."""
        outcome = str(self.facts.get("outcome") or "unknown")
        host = (self.facts.get("machine") or {}).get("host")
        pid = self.facts.get("pid")
        if outcome == "running" and host == socket.gethostname() and isinstance(pid, int) and not _is_alive(pid):
            return "ended without a record"
        return outcome

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return [line for line in read_lines(self.folder / METRICS_FILE) if isinstance(line.get("values"), dict)]

    @cached_property
    def hyperparameters(self) -> list[Hyperparameter]:
        """What the run was run with, as ``hyperparameters.jsonl`` says."""
        return read_hyperparameters(read_lines(self.folder / HYPERPARAMETERS_FILE))

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """The lines of events.jsonl of all machines, in the order of their times."""
        lines = [line for folder in self.folders for line in read_lines(folder / EVENTS_FILE)]
        found = {json.dumps(line, sort_keys=True): line for line in lines if _is_finite(line.get("time"))}
        return sorted(found.values(), key=lambda line: float(line["time"]))

    @property
    def resumed_at(self) -> int | None:
        """The step at which the run, or its last restart, continued; None if it began at the start."""
        steps = [event.get("step") for event in self.events if event.get("kind") == "resume"]
        return steps[-1] if steps and isinstance(steps[-1], int) else None

    @cached_property
    def goodput(self) -> dict[str, Any] | None:
        """Wall time in seconds (``wall_s``) and its parts (``parts``), which add up to it; None if none was written."""
        found = self.facts.get("goodput")
        if not found:
            lines = [line for line in read_lines(self.folder / _GOODPUT_FILE) if line.get("kind") == "run"]
            found = {"wall_s": lines[-1].get("wall_s"), "parts": lines[-1].get("seconds")} if lines else None
        if isinstance(found, dict) and isinstance(found.get("parts"), dict) and _number(found.get("wall_s")) > 0:
            return {"wall_s": float(found["wall_s"]), "parts": {k: float(v) for k, v in found["parts"].items()}}
        return None

    def step_paths(self) -> list[tuple[int, int, Path]]:
        """Return the attempt, the rank and the path of each file of step records."""
        found = []
        for folder in self.folders:
            for path in folder.glob("records/*/rank_*.steps"):
                match = _STEPS.fullmatch(path.name)
                if match and path.parent.name.isdigit():
                    found.append((int(path.parent.name), int(match[1]), path))
        return sorted(found)


def _is_run(path: Path) -> bool:
    if (path / INFO_FILE).exists() or (path / "records").exists() or any(path.glob("attempt_*")):
        return True
    return "shadowed" in (_read_config(path))  # the config.json of a model has other keys


def _rank_zero(path: Path) -> bool:
    return (path / METRICS_FILE).exists() or any(path.glob("records/*/rank_0.steps"))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return True


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def _read_info(folder: Path) -> dict[str, Any]:
    try:
        return read_info(folder)
    except (OSError, ValueError):
        return {}


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        data = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
