"""The findings that ranks in ``echelon test`` send to the command, and the evidence file. Does not import torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echelon.base.messages.translation import in_english

WEIGHTS_FILE = "weights.json"
"""Name of the file with the final weights' digests, for comparison in a later attempt."""
OWNED_FILE = "owned"
"""Marks a directory that ranks must not remove, because its creator removes it."""

_FILE = "findings.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class TestStart:
    """A check has started."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFinding:
    """The result of a check."""

    name: str
    passed: bool | None
    """None if the check was skipped; ``text`` contains the reason."""
    text: str
    do: str = ""
    """What to do if the check failed."""
    shown: Sequence[str] = ()
    """``text`` and ``do`` in the user's language, if they are in English."""
    figures: Mapping[str, Any] = field(default_factory=dict)


class EvidenceWriter:
    """Appends findings to a file in ``folder``. Only one of the processes that share the directory writes."""

    def __init__(self, folder: Path, *, is_silent: bool) -> None:
        self._folder = folder
        self.is_silent = is_silent
        if not is_silent:
            folder.mkdir(parents=True, exist_ok=True)

    def begin(self, name: str) -> None:
        """Record that the check ``name`` has started."""
        self._write({"started": name})

    def found(
        self, name: str, passed: bool | None, text: str, *, do: str = "", figures: Mapping[str, Any] | None = None
    ) -> None:
        """Record the result of a check. The arguments are those of ``CheckFinding``."""
        line = in_english({"name": name, "passed": passed, "text": text, "do": do, "figures": dict(figures or {})})
        self._write({**line, "shown": [text, do]})

    def keep(self, weights: Mapping[str, Any]) -> None:
        """Store the digests for a later attempt."""
        if not self.is_silent:
            (self._folder / WEIGHTS_FILE).write_text(json.dumps(weights), encoding="utf-8")

    def _write(self, line: Mapping[str, Any]) -> None:
        if not self.is_silent:
            with (self._folder / _FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def read_findings(folder: Path) -> Iterator[list[TestStart | CheckFinding]]:
    """In each iteration, yield the complete findings added to ``folder`` since the previous iteration. Never ends."""
    offset = 0
    while True:
        text = b""
        with suppress(FileNotFoundError), (folder / _FILE).open("rb") as file:
            file.seek(offset)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]
        offset += len(text)
        lines = map(json.loads, text.splitlines())
        yield [TestStart(name=line["started"]) if "started" in line else CheckFinding(**line) for line in lines]


def write_evidence(path: Path, document: Mapping[str, Any]) -> None:
    """Write ``document`` to ``path`` atomically."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(document, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
