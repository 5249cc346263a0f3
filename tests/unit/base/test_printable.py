"""Text of others cannot steer the terminal: reports, summaries, hosts, file names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from echelon.base.errors import ConfigError, LaunchError
from echelon.base.printable import printable
from echelon.cli.doctor import command as doctor
from echelon.diagnose.goodput import TimeBreakdown
from echelon.diagnose.stall import Class, Stall
from echelon.diagnose.straggler import steps_of
from echelon.launch.failures.failure import ErrorRecord, Frame, RankEnd, explain
from echelon.launch.local.goodput_recorder import GoodputReport
from echelon.status.board import StepPart

# Clears the screen, sets the title, writes over the line, turns the text around.
EVIL = "\x1b[2J\x1b]0;owned\x07all well\r\x9b31m\u202egnp.exe\u2066\x7f\x00\u2028echelon: fine\ud800"
# Everything but these is a character that a terminal draws, or no more than a line break and a tab.
STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\u2028\u2029\ud800-\udfff]")


def test_terminal_control_sequences_are_escaped() -> None:
    shown = printable(EVIL)
    assert not STEERS.search(shown)
    assert shown.startswith(r"\x1b[2J\x1b]0;owned\x07all well\r\x9b31m\u202egnp.exe\u2066\x7f\x00\u2028echelon")


@pytest.mark.parametrize(
    "text",
    ["plain\n\ttext", "\u4e2d\u6587\uff1a\u8bad\u7ec3\u3000\u5b8c\u6210", "caf\u00e9\u00a0\u20ac", "\u0645\u0631\u062d\u0628\u0627", "\U0001f469\u200d\U0001f4bb", "\u0928\u092e\u0938\u094d\u0924\u0947"],
)  # fmt: skip
def test_readable_text_is_unchanged(text: str) -> None:
    assert printable(text) == text


def test_the_report_of_a_failure_shows_the_text_of_an_exception_and_of_files_escaped() -> None:
    frame = Frame(file=f"/tmp/{EVIL}\n.py", line=3, function=EVIL, source=f"raise Error({EVIL!s})")
    record = ErrorRecord(
        time_ns=1, type=f"Bad{EVIL}", message=f"\u574f\u6837\u672c {EVIL}\n{EVIL}", frames=(frame,), thread=EVIL
    )
    failed = RankEnd(rank=0, exit_code=1, record=record)
    what, where, do = explain([failed, RankEnd(rank=1, exit_code=None)], logs=f"/logs/{EVIL}", machines={0: EVIL})
    text = str(LaunchError(what, where=where, do=do))
    assert not STEERS.search(text)
    assert "\u574f\u6837\u672c \\x1b[2J" in text
    # No line of it is made by the text itself.
    heads = [line[:8] for line in text.splitlines() if not line.startswith(" " * 9)]
    assert heads == ["rank 0 f", "  others", "  where:", "  logs: "]


def test_printed_errors_are_escaped_and_keep_their_text() -> None:
    error = ConfigError(f"no host {EVIL}", where=f"file {EVIL}:3", do=f"correct {EVIL}")
    assert not STEERS.search(str(error))
    assert error.what == f"no host {EVIL}"  # what code reads is what was given


def test_summaries_and_stall_reports_are_escaped() -> None:
    steps = steps_of({0: [1.0] * len(StepPart), 1: [1.0, 900.0, *[1.0] * 6]}, num_steps=25)
    assert steps is not None
    books = GoodputReport(
        breakdown=TimeBreakdown(wall_s=1.0, num_restarts=0, seconds={}), steps=steps, machines={0: EVIL, 1: EVIL}
    )
    assert not STEERS.search("\n".join(books.lines()))
    stall = Stall(kind=Class.MISSING, culprits=(1,), what=EVIL, ranks={0: EVIL, 1: EVIL}, do="", waited_s=1.0)
    assert not STEERS.search(str(LaunchError(stall.what + "".join(stall.lines()))))


def test_doctor_escapes_stacks_and_errors(tmp_path: Path) -> None:
    rank = tmp_path / "attempt_0" / "rank_0"
    rank.mkdir(parents=True)
    frames = [{"file": "a.py", "line": 1, "function": "f", "source": EVIL, "user": True}]
    record = {
        "time_ns": 1,
        "where": EVIL,
        "type": "E",
        "message": f"\u4e2d\u6587 {EVIL}",
        "chain": [],
        "frames": frames,
    }
    (rank / "error.json").write_text(json.dumps([record]))
    (rank / "stacks_1.json").write_text(json.dumps({"stack": [EVIL], "threads": []}))
    (tmp_path / "attempt_0" / "stall_1.txt").write_text(EVIL.replace("\ud800", ""))
    result = CliRunner().invoke(doctor, [str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "\u4e2d\u6587 \\x1b[2J" in result.output
    assert not STEERS.search(result.output)
