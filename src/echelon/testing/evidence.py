"""What the ranks of ``echelon test`` tell the command that started them, and the file that it leaves; without torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["OWNED_FILE", "WEIGHTS_FILE", "TestStart", "CheckFinding", "EvidenceWriter", "told", "write_evidence"]

WEIGHTS_FILE = "weights.json"
"""The digests of the weights with which each training ended, for the comparison with a later start."""
OWNED_FILE = "owned"
"""Whoever made the folder before the ranks came leaves this in it, and removes it himself."""

_FILE = "told.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class TestStart:
    """The ranks have begun a check."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFinding:
    """What came out of a check."""

    name: str
    passed: bool | None
    """None: it was left out; ``text`` says why."""
    text: str
    do: str = ""
    """What to do about it, if it failed."""
    figures: Mapping[str, Any] = field(default_factory=dict)


class EvidenceWriter:
    """Notes what happens, in ``folder``; all processes have one, and one of those that share the folder is not silent."""

    def __init__(self, folder: Path, *, is_silent: bool) -> None:
        self._folder = folder
        self.is_silent = is_silent
        if not is_silent:
            folder.mkdir(parents=True, exist_ok=True)

    def begin(self, name: str) -> None:
        """Note that the check ``name`` begins."""
        self._write({"begun": name})

    def found(
        self, name: str, passed: bool | None, text: str, *, do: str = "", figures: Mapping[str, Any] | None = None
    ) -> None:
        """Note what came out of it; the arguments are those of ``CheckFinding``."""
        self._write({"name": name, "passed": passed, "text": text, "do": do, "figures": dict(figures or {})})

    def keep(self, weights: Mapping[str, Any]) -> None:
        """Keep what a later start compares with."""
        if not self.is_silent:
            (self._folder / WEIGHTS_FILE).write_text(json.dumps(weights), encoding="utf-8")

    def _write(self, line: Mapping[str, Any]) -> None:
        if not self.is_silent:
            with (self._folder / _FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def told(folder: Path) -> Iterator[list[TestStart | CheckFinding]]:
    """Yield, each time it is asked, what has been noted in ``folder`` since: whole lines, without end."""
    place = 0
    while True:
        text = b""
        with suppress(FileNotFoundError), (folder / _FILE).open("rb") as file:
            file.seek(place)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]
        place += len(text)
        yield [_of(json.loads(line)) for line in text.splitlines()]


def _of(line: dict[str, Any]) -> TestStart | CheckFinding:
    return TestStart(name=line["begun"]) if "begun" in line else CheckFinding(**line)


def write_evidence(path: Path, document: Mapping[str, Any]) -> None:
    """Write ``document`` to ``path``, whole or not at all."""
    aside = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        with aside.open("w", encoding="utf-8") as file:
            json.dump(document, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
