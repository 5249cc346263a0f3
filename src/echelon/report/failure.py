"""Why a run failed, and what its ranks printed, from what the launcher and the ranks have left in the run's folder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.base.messages.translation import gettext as _
from echelon.report.run_folder import RecordedRun
from echelon.status.run_facts import mask_text
from echelon.status.run_files import event_text

_LAST_BYTES = 32 << 10
"""Bytes of each file that are shown."""
_MAX_FILES = 16
_NUM_LAST_LINES = 12
_LOG = re.compile(r"(stdout|stderr)\.log")
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f]")


def why_it_failed(run: RecordedRun, output: list[dict[str, str]]) -> dict[str, Any] | None:
    """Return the parts of the box "Why it failed"; None if the run has not failed.

    Args:
        run: the run.
        output: what ``recorded_output`` returned, of which the failed rank's last lines are shown.
    """
    if run.outcome not in ("failed", "ended without a record"):
        return None
    causes = [event for event in run.events if event.get("kind") in ("failure", "stall")]
    failures = [event for event in causes if event["kind"] == "failure"]
    # A stall that a failure followed was not what ended the run.
    event: Mapping[str, Any] = (failures or causes or [{}])[-1]
    report = event.get("report") if isinstance(event.get("report"), dict) else {}
    what, where, do = (_text_of(report, name) for name in ("what", "where", "do"))
    lines = [line.strip() for line in (what or event_text(event) or _unknown(run)).splitlines()]
    rank = event.get("rank")
    return {
        "what": lines[0] if lines else _unknown(run),
        "more": lines[1:],
        "step": event.get("step"),
        "rank": rank,
        "where": _lines(where),
        "do": _lines(do) or [_advice(run)],
        "traceback": _traceback(run, event),
        "output": _last_lines(output, rank),
    }


def _text_of(report: Any, name: str) -> str:
    part = report.get(name)
    return event_text(part) if isinstance(part, dict) else ""


def _lines(part: str) -> list[str]:
    """Return the lines of one part of a message, without the next part (where the output is), which the launcher appends."""
    return [line.strip() for line in re.split(r"\n  (?=\S)", part)[0].splitlines()]


def _unknown(run: RecordedRun) -> str:
    if run.outcome == "failed":
        code = run.facts.get("exit_code")
        return _("The program failed.") if code is None else _("The program ended with exit code {code}.", code=code)
    return _("The launcher was killed, or its machine went down, before it could record the end of the run.")


def _advice(run: RecordedRun) -> str:
    if run.outcome != "failed":
        return _("look for a kill for lack of memory (dmesg) and for the limits of the scheduler")
    launcher = run.facts.get("launcher")
    if launcher not in (None, "echelon launch"):
        return _(
            "read the output of the program; a run started with echelon launch, not {launcher}, has the exception here",
            launcher=launcher,
        )
    return _("read the output of the program")


def _traceback(run: RecordedRun, event: Mapping[str, Any]) -> str:
    """Return the traceback of the rank that failed first, as Python prints it; empty if none was recorded."""
    records = _errors(run, attempt=event.get("attempt"), rank=event.get("rank"))
    record = next((one for one in records if one.get("where") == "main"), records[0] if records else None)
    frames = record.get("frames") if record else None
    if not record or not isinstance(frames, list):
        return ""
    lines = []
    for frame in frames:
        lines.append(f'  File "{frame.get("file")}", line {frame.get("line")}, in {frame.get("function")}')
        lines += [f"    {frame['source']}"] if frame.get("source") else []
    lines.append(f"{record.get('type')}: {record.get('message')}")
    return clean("\n".join(lines))


def _errors(run: RecordedRun, *, attempt: object, rank: object) -> list[dict[str, Any]]:
    for folder in run.folders:
        try:
            found = json.loads((folder / f"attempt_{attempt}" / f"rank_{rank}" / "error.json").read_text("utf-8"))
        except (OSError, ValueError):  # on another machine, or no exception of Python
            continue
        if isinstance(found, list):
            return [one for one in found if isinstance(one, dict)]
    return []


def _last_lines(output: list[dict[str, str]], rank: object) -> str:
    """Return the last lines that the rank printed, from stderr if it has some."""
    own = [one["text"] for one in output if one["rank"] == str(rank) and one["text"]]
    return "\n".join(own[-1].splitlines()[-_NUM_LAST_LINES:]) if own else ""


def recorded_output(run: RecordedRun) -> list[dict[str, str]]:
    """Return the end of what each rank has printed in the run's last attempt, as far as it was saved (``--log_dir``).

    Of a failed run, the rank that failed first comes first. Each entry has ``rank``, ``stream``, ``text`` and ``path``.
    """
    files: list[tuple[int, int, str, Path]] = []
    for folder in run.folders:
        for path in folder.glob("attempt_*/rank_*/*.log"):
            attempt, rank = path.parent.parent.name.rpartition("_")[2], path.parent.name.rpartition("_")[2]
            if _LOG.fullmatch(path.name) and attempt.isdigit() and rank.isdigit():
                files.append((int(attempt), int(rank), path.stem, path))
    last = max((attempt for attempt, *_ in files), default=0)
    failed = [event.get("rank") for event in run.events if event.get("kind") == "failure"]
    first = failed[-1] if failed and run.outcome == "failed" else 0
    # stdout before stderr, which ends with the error
    found = sorted(
        (file for file in files if file[0] == last), key=lambda file: (file[1] != first, file[1], file[2] != "stdout")
    )
    entries: list[dict[str, str]] = []
    for _attempt, number, stream, path in found:
        if (text := _end_of(path)) and len(entries) < _MAX_FILES:
            entries.append({"rank": str(number), "stream": stream, "text": text, "path": str(path.resolve())})
    return entries


def _end_of(path: Path) -> str:
    """Return the last lines of a file, of ``_LAST_BYTES`` at most, without progress bars' intermediate states."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _LAST_BYTES))
            data = file.read(_LAST_BYTES)
    except OSError:
        return ""
    text = clean(data.decode("utf-8", errors="replace"))
    if size <= len(data):
        return text
    left_out = _("... ({number:,} bytes before this are in the file)", number=size - len(data))
    return f"{left_out}\n{text.partition(chr(10))[2]}"


def clean(text: str) -> str:
    """Return ``text`` without a terminal's control sequences and without secrets; of a line that is rewritten, the last state."""
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    return mask_text(_CONTROL.sub("", "\n".join(lines)).strip("\n"))
