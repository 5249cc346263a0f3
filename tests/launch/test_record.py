"""A run leaves a folder that says what ran, how it ended, and where its time went; nothing is left if nothing shall be command."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from echelon.report.run_folder import read_run
from echelon.status import run_files
from tests.launch.conftest import Command

# The second start succeeds.
ONCE = """
import os, sys
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    raise ValueError("once")
"""


RECORD = {"ECHELON_NO_RECORD": ""}


def test_a_run_is_described_with_its_restart(command: Command) -> None:
    command.write("once.py", ONCE)
    result = command.launch(
        "--num_processes=2", "--max_restarts=1", "once.py", "--lr", "3", "--api_key", "abc", **RECORD
    )
    assert result.code == 0, result.err
    (folder,) = (command.directory / "echelon-runs").iterdir()
    info = run_files.read_info(folder)
    assert folder.name.split("-", 2)[2] == f"once-{info['pid']}"
    words = ["--num_processes=2", "--max_restarts=1", "once.py", "--lr", "3", "--api_key", "***"]
    assert info["command"] == ["echelon", "launch", *words]
    assert (info["script"], info["arguments"], info["cwd"]) == ("once.py", words[3:], str(command.directory))
    assert (info["num_processes"], info["num_restarts"]) == (2, 1)
    assert (info["outcome"], info["exit_code"], info["board"]) == ("succeeded", 0, None)
    wall_s = info["ended"] - info["began"]
    assert info["goodput"]["wall_s"] == pytest.approx(wall_s, abs=0.1)
    assert sum(info["goodput"]["parts"].values()) == pytest.approx(info["goodput"]["wall_s"], rel=0.005)
    events = run_files.read_lines(folder / "events.jsonl")
    assert [(event["kind"], event["attempt"], event["rank"]) for event in events] == [
        ("start", 0, None),
        ("failure", 0, 1),
        ("restart", 1, None),
        ("end", 1, None),
    ]
    assert events[1]["text"] == "rank 1 failed first: ValueError: once"
    assert (folder / "config.json").is_file()


@pytest.mark.parametrize(
    ("flags", "variable"), [(["--no_record"], ""), ([], "1"), (["--no_record", "--log_dir", "logs"], "")]
)
def test_nothing_is_recorded_if_the_user_does_not_want_it(flags: list[str], variable: str, command: Command) -> None:
    result = command.launch(*flags, "--no_python", "true", ECHELON_NO_RECORD=variable)
    assert result.code == 0, result.err
    assert not (command.directory / "echelon-runs").exists()
    assert not list(command.directory.rglob("run.json"))


def test_a_folder_that_cannot_be_created_is_one_warning(command: Command) -> None:
    (command.directory / "echelon-runs").write_text("a file")
    result = command.launch("--num_processes=2", "--no_python", "sh", "-c", "echo ran", **RECORD)
    assert (result.code, result.out) == (0, "ran\nran\n")
    warnings = [line for line in result.err.splitlines() if "warning" in line]
    assert len(warnings) == 1
    assert "the run is not recorded, because its folder" in warnings[0]
    assert "(--log_dir DIR chooses another one, --no_record none)" in warnings[0]


@pytest.mark.parametrize(("number", "outcome", "code"), [("SIGINT", "interrupted", 130), ("SIGKILL", "running", None)])
def test_a_stopped_run_says_so(number: str, outcome: str, code: int | None, command: Command) -> None:
    launcher = command.start_launch("--no_python", "sh", "-c", "echo ready; sleep 60", **RECORD)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "ready\n"
    (folder,) = (command.directory / "echelon-runs").iterdir()
    command.wait_for(lambda: run_files.read_info(folder)["board"] is not None, "the board")
    info = run_files.read_info(folder)
    assert Path(info["board"]).is_file()
    assert read_run(folder).outcome == "running"
    launcher.send_signal(signal.Signals[number])
    launcher.wait(30)
    info = run_files.read_info(folder)
    assert (info["outcome"], info["exit_code"]) == (outcome, code)
    assert read_run(folder).outcome == ("ended without a record" if number == "SIGKILL" else outcome)
