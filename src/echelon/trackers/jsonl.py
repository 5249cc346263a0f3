"""Writes a run's logs to a JSON Lines file, which echelon's reports also read."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from echelon.status.strict_json import decode
from echelon.trackers.base import GeneralTracker, on_main_process
from echelon.trackers.values import hide_secrets, plain

FILE_NAME = "metrics.jsonl"


class JSONLTracker(GeneralTracker):
    """Appends to ``<logging_dir>/<run_name>/metrics.jsonl`` and flushes after each line.

    Each line has the form ``{"kind": "metrics", "time": seconds since 1970, "step": int or null, "values": {...}}``;
    ``init_trackers`` writes a line of kind ``config``. Numbers, strings, booleans, lists and nested objects keep their
    type. Because strict JSON has no nan or infinity, nan becomes ``{"float": "nan"}`` and infinities likewise; other
    objects become their ``repr``.
    """

    name = "jsonl"
    requires_logging_directory = True
    main_process_only = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str]) -> None:
        super().__init__()
        self.run_name = run_name
        self.path = Path(logging_dir, run_name, FILE_NAME)
        self._file: IO[str] | None = None

    @property
    def tracker(self) -> IO[str] | None:
        """The open file; None before ``start`` and on ranks that do not write."""
        return self._file

    @on_main_process
    def start(self) -> None:
        """Open the file; a resumed run appends to it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a+", encoding="utf-8")
        if not _ends_with_newline(self.path):
            self._file.write("\n")  # ends a partial line that a killed run left

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write the run's configuration, with secrets hidden."""
        self._write({"kind": "config", "time": time.time(), "values": _encode(plain(hide_secrets(values)))})

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write one line."""
        self._write({"kind": "metrics", "time": time.time(), "step": plain(step), "values": _encode(plain(values))})

    @on_main_process
    def finish(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, record: dict[str, Any]) -> None:
        assert self._file is not None, "log() before start()"
        self._file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()


def read_records(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the records that a ``JSONLTracker`` wrote, with their original types; skip lines truncated by a crash.

    Examples:
        >>> losses = [record["loss"] for record in read_records("runs/my_project.jsonl")]  # doctest: +SKIP
    """
    with Path(path).open(encoding="utf-8") as file:
        for line in file:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(record, dict) and "values" in record:
                yield {**record, "values": decode(record["values"])}


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _encode(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return value if value is None or isinstance(value, (str, int, float)) else repr(value)
