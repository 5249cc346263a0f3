"""Commands that take a run accept its folder, its name, or a folder of runs, of which they choose the newest."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from echelon.base.errors import UsageError
from echelon.cli.main import _run as _run_command
from echelon.report.run_folder import find_run, read_run, runs_below


def _run(parent: Path, name: str, **facts: Any) -> Path:
    folder = parent / name
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"version": 1, "run_id": name, **facts}))
    return folder


def test_the_newest_run_is_the_one_that_began_last(tmp_path: Path) -> None:
    old, new = _run(tmp_path, "b", began=5.0), _run(tmp_path, "a", began=7.0)
    (tmp_path / "other").mkdir()
    assert find_run(tmp_path) == new
    assert find_run(old) == old
    assert runs_below(tmp_path) == [old, new]


def test_a_run_without_run_json_is_found(tmp_path: Path) -> None:
    (tmp_path / "20260101-000000-1" / "attempt_0").mkdir(parents=True)
    assert find_run(tmp_path).name == "20260101-000000-1"


def test_the_config_of_a_model_is_not_a_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    run = _run(tmp_path, "run", began=1.0)
    assert find_run(tmp_path) == run
    run.joinpath("run.json").unlink()
    (run / "config.json").write_text('{"settings": {}, "shadowed": []}')
    assert find_run(tmp_path) == run


def test_the_default_is_the_newest_run_in_echelon_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    old, _ = _run(Path("echelon-runs"), "one", began=1.0), _run(Path("echelon-runs"), "two", began=2.0)
    assert find_run() == Path("echelon-runs/two")
    assert find_run("one") == old


def test_a_folder_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="contains no run"):
        find_run(tmp_path)
    with pytest.raises(UsageError, match="gone is not a folder"):
        find_run(tmp_path / "gone")


@pytest.mark.parametrize("argv", [("report",), ("runs", "ls"), ("runs", "show"), ("watch",), ("doctor",)])
def test_where_nothing_was_recorded_the_commands_say_how_to_record_a_run(
    argv: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # without the folder, and with an empty one
        assert _run_command(argv) == 2
        err = capsys.readouterr().err
        assert "no runs are recorded here yet: ./echelon-runs contains no run" in err
        assert "record one with echelon launch SCRIPT" in err
        (tmp_path / "echelon-runs").mkdir(exist_ok=True)


def test_the_folders_of_several_machines_are_one_run(tmp_path: Path) -> None:
    names = ("node0", "node1")
    for rank, name in enumerate(names):
        folder = _run(tmp_path, name, run_id="r", began=1.0 + rank, num_machines=2)
        (folder / "records" / "0").mkdir(parents=True)
        (folder / "records" / "0" / f"rank_{rank}.steps").touch()
        line = {"time": 2.0 - rank, "kind": "start", "text": name}
        (folder / "events.jsonl").write_text(json.dumps(line) + "\n" + '{"time": 3, "kin')
    assert [path.name for path in runs_below(tmp_path)] == ["node0"]
    for name in names:
        run = read_run(tmp_path / name)
        assert [path.name for path in run.folders] == ["node0", "node1"]
        assert [(attempt, rank) for attempt, rank, _ in run.step_paths()] == [(0, 0), (0, 1)]
        assert [event["text"] for event in run.events] == ["node1", "node0"]


def test_missing_files_are_no_error(tmp_path: Path) -> None:
    run = read_run(tmp_path)
    assert (run.outcome, run.metrics, run.events, run.goodput, run.step_paths()) == ("unknown", [], [], None, [])


def test_a_run_whose_launcher_was_killed_is_not_running(tmp_path: Path) -> None:
    facts = {"outcome": "running", "machine": {"host": socket.gethostname()}}
    gone = next(pid for pid in range(2**22 - 1, 0, -1) if not Path(f"/proc/{pid}").exists())
    assert read_run(_run(tmp_path, "a", pid=os.getpid(), **facts)).outcome == "running"
    assert read_run(_run(tmp_path, "b", pid=gone, **facts)).outcome == "ended without a record"
    assert (
        read_run(_run(tmp_path, "c", pid=gone, outcome="running", machine={"host": "elsewhere"})).outcome == "running"
    )


def test_the_goodput_of_a_run_without_run_json_is_found(tmp_path: Path) -> None:
    (tmp_path / "goodput.jsonl").write_text(json.dumps({"kind": "run", "wall_s": 3.0, "seconds": {"compute": 3.0}}))
    assert read_run(tmp_path).goodput == {"wall_s": 3.0, "parts": {"compute": 3.0}}
