"""``echelon runs`` and ``echelon report`` on recorded runs."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from echelon.cli.main import main
from echelon.report.live_run import LiveRun
from echelon.report.run_folder import read_run
from echelon.report.step_series import step_series
from echelon.status.run_files import append_line
from tests.recorded_runs import record_steps, write_run


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_run(Path("echelon-runs"), "one", num_ranks=2, num_steps=20, kills=(13,))
    write_run(Path("echelon-runs"), "two", num_steps=30, lr=5e-4, began=1_790_009_000.0, facts={"outcome": "failed"})
    return tmp_path / "echelon-runs"


def _echelon(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as end:
        main(argv)
    output = capsys.readouterr()
    assert end.value.code == code, output.err
    return output.err if code else output.out


def test_runs_ls_shows_when_what_and_how_it_ended(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, one, two, *_ = _echelon(capsys, "runs", "ls").splitlines()
    assert one.split()[0] == "one"
    assert "succeeded" in one
    assert "3f2a9c1d5+  train.py --lr 0.001 --epochs 3" in one
    assert "failed" in two
    rows = json.loads(_echelon(capsys, "runs", "ls", str(runs), "--json"))
    assert [(row["run"], row["ranks"], row["step"]) for row in rows] == [("one", 2, 20), ("two", 1, 30)]
    series = step_series(read_run(runs / "one"))
    assert series is not None
    assert rows[0]["loss"] == pytest.approx(series.last_loss)


def test_a_run_that_resumed_at_the_end_says_that_it_took_no_step(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the rerun of a finished training: it writes no step records."""
    shutil.rmtree(runs / "two" / "records")
    append_line(
        runs / "two" / "events.jsonl", {"time": 2e9, "kind": "resume", "step": 16, "text": "resumed at step 16"}
    )
    append_line(runs / "one" / "events.jsonl", {"time": 2e9, "kind": "resume", "step": 4, "text": "resumed at step 4"})
    _, one, two, *_ = _echelon(capsys, "runs", "ls").splitlines()
    assert "0 (already at step 16)" in two
    assert "already" not in one
    rows = json.loads(_echelon(capsys, "runs", "ls", str(runs), "--json"))
    assert [(row["step"], row["resumed_at"]) for row in rows] == [(20, 4), (None, 16)]
    assert re.search(r"steps +0 \(already at step 16\)\n", _echelon(capsys, "runs", "show", "two"))
    assert re.search(r"steps +20 +0 \(already at step 16\)\n", _echelon(capsys, "runs", "compare"))


def test_runs_show_describes_the_newest_run(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = _echelon(capsys, "runs", "show")
    for expected in ("failed", "30", "--lr 0.0005 --epochs 3", "mixed_precision", "(file echelon.toml:3)", "2.13.0"):
        assert expected in text
    assert "rank 0 was killed by signal 9" in _echelon(capsys, "runs", "show", "one")


def test_a_metric_whose_last_value_is_not_a_number_is_shown(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for at, value in ((28, 0.25), (29, math.nan)):
        append_line(runs / "two" / "metrics.jsonl", {"time": 2e9, "step": at, "values": {"eval_loss": value}})
    for output in (_echelon(capsys, "runs", "show", "two"), _echelon(capsys, "runs", "compare")):
        assert re.search(r"eval_loss +(0\.\d+ +|- +)?nan\n", output), output


def test_a_loss_that_is_not_a_number_is_not_hidden_by_earlier_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record_steps(tmp_path, 0, [1.0, 0.5, math.nan, math.nan])
    append_line(tmp_path / "metrics.jsonl", {"time": 2e9, "step": 2, "values": {"loss": 0.5}})
    assert re.search(
        r"last loss +0\.5, nan or infinite from step 3 on\n", _echelon(capsys, "runs", "show", str(tmp_path))
    )
    (row,) = json.loads(_echelon(capsys, "runs", "ls", "--json", str(tmp_path)), parse_constant=pytest.fail)
    assert row["loss"] == {"float": "nan"}
    assert LiveRun(tmp_path).read().to_json()["loss"] == "nan"


def test_an_error_about_a_missing_run_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for argv, folder in (
        (("runs", "show"), "echelon-runs"),
        (("runs", "show", "gone"), "gone"),
        (("report", "."), "."),
        (("runs", "compare", "a", "b"), "a"),
        (("runs", "compare", "."), "."),
    ):
        assert f"\n  where: {(tmp_path / folder)}\n" in _echelon(capsys, *argv, code=2)


def test_runs_compare_names_what_differs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = _echelon(capsys, "runs", "compare")
    differing = [line.split()[1] for line in text.splitlines() if line.startswith(" * ")]
    assert {"outcome", "steps", "arguments", "processes", "num_processes"} <= set(differing)
    assert "torch" not in text
    assert _echelon(capsys, "runs", "compare", "one", "two") == text
    (runs / "two").rename(runs.parent / "elsewhere")
    assert "contains one run, and a comparison needs two" in _echelon(capsys, "runs", "compare", code=2)
    assert "absent is not a folder" in _echelon(capsys, "runs", "compare", "absent", code=2)


def _log_hyperparameters(folder: Path, **values: Any) -> None:
    append_line(folder / "hyperparameters.jsonl", {"group": "logged", "values": values})


def test_hyperparameters_are_shown_and_compared(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, lr in (("one", 1e-2), ("two", 3e-3)):
        _log_hyperparameters(runs / name, lr=lr, width=8)
        line = {"group": "arguments", "values": {"num_train_epochs": 20, "seed": 42}, "defaults": ["seed"]}
        append_line(runs / name / "hyperparameters.jsonl", line)
    shown = _echelon(capsys, "runs", "show")
    assert re.search(
        r"\nhyperparameters\n  lr +0.003\n  width +8\n\ntraining arguments\n  num_train_epochs +20\n\n", shown
    )
    compared = _echelon(capsys, "runs", "compare")
    assert re.search(r"\nhyperparameters\n \* lr +0.01 +0.003\ncommand\n", compared)
    # Beside a run without a Trainer, its arguments are listed, but not those that have their defaults.
    (runs / "one" / "hyperparameters.jsonl").unlink()
    assert re.search(
        r"\ntraining arguments\n \* num_train_epochs +- +20\ncommand\n", _echelon(capsys, "runs", "compare")
    )


def test_runs_ls_sorts_by_a_metric_and_selects_tags(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(Path("echelon-runs"), "three", num_steps=9, began=1_790_019_000.0, facts={"tags": ["wide", "try"]})
    for name, value in (("one", 0.9), ("two", 0.25), ("three", math.nan)):
        append_line(runs / name / "metrics.jsonl", {"time": 2e9, "step": 1, "values": {"eval_accuracy": value}})

    def names(*flags: str) -> list[str]:
        return [row["run"] for row in json.loads(_echelon(capsys, "runs", "ls", "--json", *flags))]

    assert names() == ["one", "two", "three"]
    assert names("--sort", "eval_accuracy") == ["three", "two", "one"]
    assert names("--tag", "try", "--tag", "wide") == ["three"]
    head, *rows = _echelon(capsys, "runs", "ls", "--sort", "eval_accuracy").splitlines()
    assert "eval_accuracy  tags" in head
    assert "wide try" in rows[0]
    error = _echelon(capsys, "runs", "ls", "--sort", "accuracy", code=2)
    assert "no run has a metric 'accuracy'" in error
    assert "use one of these: loss, eval_accuracy" in error
    assert "use one of these: try, wide" in _echelon(capsys, "runs", "ls", "--tag", "narrow", code=2)


def test_a_run_is_found_by_its_name(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, began in (("three", 1.790_019e9), ("four", 1.790_029e9)):
        write_run(Path("echelon-runs"), folder, num_steps=9, began=began, facts={"name": "wide net"})
    assert _echelon(capsys, "report", "wide net") == f"report: {runs / 'four' / 'report.html'}\n"


def test_failed_runs_are_red_on_a_terminal(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    _, one, two, *_ = _echelon(capsys, "runs", "ls").splitlines()
    assert (one.startswith("\x1b"), two.startswith("\x1b[31m"), two.endswith("\x1b[0m")) == (False, True, True)
    monkeypatch.delenv("FORCE_COLOR")
    assert "\x1b" not in _echelon(capsys, "runs", "ls")  # not a terminal
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in _echelon(capsys, "runs", "ls")


def test_report_writes_a_page_and_prints_its_path(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _echelon(capsys, "report") == f"report: {runs / 'two' / 'report.html'}\n"
    assert _echelon(capsys, "report", "one", "two") == f"report: {runs / 'report.html'}\n"
    assert _echelon(capsys, "report", str(runs), "-o", "page.html") == f"report: {runs.parent / 'page.html'}\n"
    assert (runs.parent / "page.html").read_text() == (runs / "two" / "report.html").read_text()
    assert "cannot write" in _echelon(capsys, "report", "-o", "gone/page.html", code=2)
