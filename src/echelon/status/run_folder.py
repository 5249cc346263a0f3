"""A run's folder: the names of its files, and functions that read and write them.

``run.json`` describes the run, ``metrics.jsonl`` has the values that the program logs, ``events.jsonl`` what happened to the run,
and ``records/<attempt>/rank_<rank>.steps`` the step records of each rank. docs/run_folder.md lists the fields.

A run may be killed at any time. Therefore ``run.json`` is replaced as a whole, a line of the other files is a single write, and
readers ignore a last line without an end. This file uses only the standard library.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.status.step_records import StepFile, read_step_file

__all__ = [
    "DEFAULT_PARENT",
    "EVENTS_FILE",
    "INFO_FILE",
    "METRICS_FILE",
    "append_line",
    "has_lost_launcher",
    "newest_run",
    "read_info",
    "read_lines",
    "read_steps",
    "runs_below",
    "steps_path",
    "write_info",
]

DEFAULT_PARENT = "echelon-runs"
"""Folder, in the current one, for the folders of runs that have no ``--log_dir``."""
INFO_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"

_VERSION = 1
_STEP_FILE = re.compile(r"rank_(\d+)\.steps")


def write_info(folder: Path, info: Mapping[str, Any]) -> None:
    """Replace ``run.json`` in ``folder``.

    Raises:
        OSError: the file cannot be written. The previous one is unchanged.
    """
    aside = folder / f"{INFO_FILE}.{os.getpid()}.tmp"
    try:
        aside.write_text(json.dumps({"version": _VERSION, **info}, indent=2) + "\n", encoding="utf-8")
        aside.replace(folder / INFO_FILE)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def read_info(folder: Path) -> dict[str, Any]:
    """Return the contents of ``run.json`` in ``folder``.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a description of a run.
    """
    path = folder / INFO_FILE
    info = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(info, dict) or info.get("version") != _VERSION:
        raise ValueError(f"{path} is not a description of a run in format version {_VERSION}")
    return info


def has_lost_launcher(info: Mapping[str, Any]) -> bool:
    """Return whether a run that is recorded as running on this machine has no launcher anymore, because it was killed."""
    if info.get("outcome") != "running" or info.get("machine", {}).get("host") != socket.gethostname():
        return False
    try:
        os.kill(int(info["pid"]), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OSError):  # a process of another user
        return False
    return False


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append ``record`` to a file of JSON lines with a single write.

    Raises:
        OSError: the file cannot be written.
    """
    data = (json.dumps(record) + "\n").encode()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o666)
    try:
        os.write(file, data)
    finally:
        os.close(file)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records in a file of JSON lines without those that are damaged; empty if the file cannot be read."""
    try:
        data = path.read_bytes()
    except OSError:
        return []
    records = []
    for line in data.split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue  # the writer was killed, or the disk was full
        if isinstance(record, dict):
            records.append(record)
    return records


def steps_path(folder: Path, *, attempt: int, rank: int) -> Path:
    """Return the path of a rank's step records in the run's folder."""
    return folder / "records" / str(attempt) / f"rank_{rank}.steps"


def read_steps(folder: Path) -> dict[int, dict[int, StepFile]]:
    """Return the step records in a run's folder, by attempt and rank, without files that cannot be read."""
    found: dict[int, dict[int, StepFile]] = {}
    for path in (folder / "records").glob("*/rank_*.steps"):
        match = _STEP_FILE.fullmatch(path.name)
        if match is None or not path.parent.name.isdecimal():
            continue
        try:
            found.setdefault(int(path.parent.name), {})[int(match[1])] = read_step_file(path)
        except (OSError, ValueError):
            continue  # the rank was killed while it created the file
    return {attempt: dict(sorted(ranks.items())) for attempt, ranks in sorted(found.items())}


def runs_below(folder: Path) -> dict[Path, dict[str, Any]]:
    """Return the runs whose folders are in ``folder``, with the contents of ``run.json``, oldest first."""
    found: dict[Path, dict[str, Any]] = {}
    for path in folder.glob(f"*/{INFO_FILE}"):
        try:
            found[path.parent] = read_info(path.parent)
        except (OSError, ValueError):
            continue  # another program's file
    return dict(sorted(found.items(), key=lambda item: (item[1].get("began", 0.0), item[0])))


def newest_run(folder: Path) -> Path | None:
    """Return ``folder`` if it is a run's folder, or else the folder of the newest run in it; None if there is none."""
    if (folder / INFO_FILE).is_file():
        return folder
    return next(reversed(runs_below(folder)), None)
