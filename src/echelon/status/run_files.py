"""The files in a run's folder: their names, and functions that read and write them.

``run.json`` describes the run, ``hyperparameters.jsonl`` says what the program was run with, ``metrics.jsonl`` has the values that
it logs, ``events.jsonl`` what happened to the run, and ``records/<attempt>/rank_<rank>.steps`` the step records of each rank.
docs/run_folder.md lists the fields.

A run may be killed at any time. Therefore ``run.json`` is replaced as a whole, a line of the other files is a single write, and
readers ignore a last line without an end.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.base.messages.translation import Translated, in_english, language
from echelon.status import strict_json

DEFAULT_PARENT = "echelon-runs"
"""Folder, in the current one, for the folders of runs that have no ``--log_dir``."""
INFO_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"
HYPERPARAMETERS_FILE = "hyperparameters.jsonl"
EVENTS_FILE = "events.jsonl"

_VERSION = 1


def write_info(folder: Path, info: Mapping[str, Any]) -> None:
    """Replace ``run.json`` in ``folder``.

    Raises:
        OSError: the file cannot be written. The previous one is unchanged.
    """
    aside = folder / f"{INFO_FILE}.{os.getpid()}.tmp"
    try:
        aside.write_text(strict_json.dumps({"version": _VERSION, **info}, indent=2) + "\n", encoding="utf-8")
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
    info = strict_json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(info, dict) or info.get("version") != _VERSION:
        raise ValueError(f"{path} is not a description of a run in format version {_VERSION}")
    return info


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append ``record`` to a file of JSON lines with a single write.

    Raises:
        OSError: the file cannot be written.
    """
    data = (strict_json.dumps(record) + "\n").encode()
    with path.open("ab+", buffering=0) as file:
        if (size := file.seek(0, os.SEEK_END)) and os.pread(file.fileno(), 1, size - 1) != b"\n":
            data = b"\n" + data  # the previous writer was killed, or the disk was full
        if file.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def event_texts(text: str) -> dict[str, str]:
    """Return the first line of ``text`` as fields of an event: in English and, by its code, in the user's language."""
    return {name: one.partition("\n")[0] for name, one in whole_texts(text).items()}


def whole_texts(text: str) -> dict[str, str]:
    """Return ``text`` as fields that ``event_text`` reads: in English and, by its code, in the user's language."""
    return {"text": str(in_english(text))} | ({language() or "": str(text)} if isinstance(text, Translated) else {})


def event_text(event: Mapping[str, Any]) -> str:
    """Return what happened, in the user's language if the event was recorded in it."""
    english = str(event.get("text") or event.get("kind") or "")
    shown = Translated(event.get(language() or "text") or english)
    shown.english = english
    return shown


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records in a file of JSON lines without those that are damaged; empty if the file cannot be read."""
    try:
        data = path.read_bytes()
    except OSError:
        return []
    records = []
    for line in data.split(b"\n"):
        try:
            record = strict_json.loads(line)
        except ValueError:
            continue  # the writer was killed, or the disk was full
        if isinstance(record, dict):
            records.append(record)
    return records


def steps_path(folder: Path, *, attempt: int, rank: int) -> Path:
    """Return the path of a rank's step records in the run's folder."""
    return folder / "records" / str(attempt) / f"rank_{rank}.steps"
