"""The series, the comparison and the commands of the report, against values computed by hand."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from echelon.cli.main import main
from echelon.report.comparison import compare_runs
from echelon.report.live_run import LiveRun
from echelon.report.page import render_page
from echelon.report.page_data import page_data
from echelon.report.run_folder import RecordedRun, read_run
from echelon.report.step_series import MAX_POINTS, StepSeries, step_series
from echelon.status.board import StepPart
from echelon.status.run_files import append_line
from echelon.status.step_records import StepRecorder
from tests.recorded_runs import simulated_clock, write_run


def _record(
    folder: Path,
    rank: int,
    losses: list[float],
    *,
    first: int = 1,
    attempt: int = 0,
    began: float = 0.0,
    has_parts: bool = True,
) -> None:
    """Write steps of 10 ms: 4 ms of data wait, 5 + rank ms forward, the rest communication; 8 samples each."""
    path = folder / "records" / str(attempt) / f"rank_{rank}.steps"
    path.parent.mkdir(parents=True, exist_ok=True)
    with simulated_clock(began) as clock:
        recorder = StepRecorder(path, rank=rank, world_size=2)
        spent = [0] * len(StepPart)
        for i, loss in enumerate(losses):
            clock.now_ns += 10_000_000
            for part, ms in (
                (StepPart.DATA, 4),
                (StepPart.FORWARD, 5 + min(rank, 1)),
                (StepPart.COMMUNICATION, max(0, 1 - rank)),
            ):
                spent[part] += ms * 1_000_000 * has_parts
            recorder.add_loss(loss)
            recorder.num_samples += 8
            recorder.memory_mb = 100.0 + rank + i
            recorder.record(first + i, 0.1, spent)


def _series(folder: Path) -> StepSeries:
    series = step_series(read_run(folder))
    assert series is not None
    return series


def test_the_loss_is_the_mean_over_the_ranks(tmp_path: Path) -> None:
    _record(tmp_path, 0, [3.0, 2.0, 1.0])
    _record(tmp_path, 1, [5.0, math.nan, 2.0])
    series = _series(tmp_path)
    np.testing.assert_array_equal(series.loss.mean, [4.0, 2.0, 1.5])
    assert (series.last_loss, series.num_steps, series.num_samples) == (1.5, 3, 48)


def test_the_time_of_a_step_is_split_by_phase_and_rank(tmp_path: Path) -> None:
    for rank in range(2):
        _record(tmp_path, rank, [1.0] * 4, began=rank * 1e-3)
    series = _series(tmp_path)
    # The first step is only the base of the differences. Rank 1 never communicates, so that rank 0 only waits.
    np.testing.assert_allclose(series.step_ms[1:], 10.0, rtol=1e-12)
    np.testing.assert_allclose(series.part_ms["forward"][1:], 5.5, rtol=1e-12)
    np.testing.assert_allclose(series.part_ms["communication"][1:], 0.0, atol=1e-12)
    np.testing.assert_allclose(series.rank_part_ms["wait"], [1.0, 0.0], atol=1e-12)
    np.testing.assert_allclose(series.rank_part_ms["data"], [4.0, 4.0], rtol=1e-12)
    np.testing.assert_allclose(series.samples_per_s[1:], 2 * 8 / 0.010, rtol=1e-12)
    assert np.isnan(series.samples_per_s[0])
    np.testing.assert_allclose(series.own_ms[:, 1:], [[9.0] * 3, [10.0] * 3], rtol=1e-12)
    np.testing.assert_array_equal(series.rank_memory_mb, [103.0, 104.0])
    assert np.isnan(series.items_per_s).all()


def test_a_program_that_records_no_phases_has_rates_and_step_times(tmp_path: Path) -> None:
    for rank in range(2):
        _record(tmp_path, rank, [1.0] * 4, has_parts=False)
    series = _series(tmp_path)
    np.testing.assert_allclose(series.step_ms[1:], 10.0, rtol=1e-9)
    np.testing.assert_allclose(series.samples_per_s[1:], 1600.0, rtol=1e-9)
    (data,) = page_data([read_run(tmp_path)])["runs"]
    assert (list(data["series"]["parts"]), list(data["ranks"]["parts"])) == (["step"], ["step"])
    assert data["missing"]["stragglers"].startswith("The time by phase")


def test_steps_that_were_repeated_after_a_restart_count_once(tmp_path: Path) -> None:
    _record(tmp_path, 0, [9.0, 8.0, 7.0, 6.0])
    _record(tmp_path, 0, [5.0, 4.0, 3.0], first=3, attempt=1, began=100.0)
    series = _series(tmp_path)
    np.testing.assert_array_equal(series.loss.mean, [9.0, 8.0, 5.0, 4.0, 3.0])
    assert (series.num_steps, series.num_repeated, series.last_step) == (5, 2, 5)


def test_a_spike_survives_downsampling(tmp_path: Path) -> None:
    losses = [1.0] * 5000
    losses[1234], losses[4321] = 50.0, -3.0
    _record(tmp_path, 0, losses)
    series = _series(tmp_path)
    assert len(series.loss.mean) == MAX_POINTS
    assert (np.nanmax(series.loss.most), np.nanmin(series.loss.least)) == (50.0, -3.0)
    assert series.steps[-1] == 5000


def test_a_loss_that_is_not_finite_is_reported(tmp_path: Path) -> None:
    _record(tmp_path, 0, [1.0] * 40 + [math.nan] * 200)
    assert _series(tmp_path).not_finite_from == 41
    (data,) = page_data([read_run(tmp_path)])["runs"]
    assert data["warnings"] == ["The loss is not finite from step 41 on (nan or infinite)."]


def test_a_damaged_file_of_records_is_left_out(tmp_path: Path) -> None:
    _record(tmp_path, 0, [1.0, 2.0])
    (tmp_path / "records" / "0" / "rank_1.steps").write_bytes(b"torn")
    assert _series(tmp_path).ranks == [0]
    assert step_series(RecordedRun(folders=(tmp_path / "gone",), facts={})) is None


def test_every_panel_without_data_says_why(tmp_path: Path) -> None:
    (data,) = page_data([read_run(tmp_path)])["runs"]
    panels = ["goodput", "grad_norm", "items", "loss", "lr", "memory", "metrics", "parts", "samples", "settings"]
    assert sorted(data["missing"]) == [*panels, "stragglers", "timeline"]
    assert all(text.endswith(".") for text in data["missing"].values())
    _record(tmp_path, 0, [1.0, 2.0])
    (data,) = page_data([read_run(tmp_path)])["runs"]
    assert sorted(data["missing"]) == ["goodput", "grad_norm", "items", "metrics", "settings", "stragglers"]


def test_the_time_of_a_run_without_recorded_phases_is_not_called_useful(tmp_path: Path) -> None:
    wall = {"wall_s": 10.0, "parts": {"init": 2.0, "program": 8.0}}
    plain = write_run(tmp_path, "plain", num_steps=3, facts={"goodput": wall})
    phases = {"wall_s": 10.0, "parts": {"init": 6.0, "compute": 3.0, "communication": 1.0}}
    recorded = write_run(tmp_path, "recorded", num_steps=3, facts={"goodput": phases})
    runs = [read_run(plain), read_run(recorded)]
    data = page_data(runs)
    assert [[tile["value"] for tile in run["tiles"] if tile["name"] == "goodput"] for run in data["runs"]] == [
        [],
        ["40.0%"],
    ]
    assert "useful share is unknown" in data["runs"][0]["missing"]["goodput parts"]
    assert "goodput parts" not in data["runs"][1]["missing"]
    (row,) = [fact for fact in compare_runs(runs, [None, None]) if fact.name == "goodput"]
    assert row.values == ("not measured (no training loop recorded)", "40.0%")


def test_metrics_take_the_place_of_missing_losses(tmp_path: Path) -> None:
    lines = [
        {"time": 1.0 + i, "step": 10 * i, "values": {"loss": 1.0 / (i + 1), "bleu": i, "once": 3.0}} for i in range(4)
    ]
    lines[1:] = [{**line, "values": {k: v for k, v in line["values"].items() if k != "once"}} for line in lines[1:]]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"torn')
    (data,) = page_data([read_run(tmp_path)])["runs"]
    assert [metric["name"] for metric in data["metrics"]] == ["loss", "bleu"]
    assert data["metrics"][1]["x"]["step"] == [0, 10, 20, 30]
    assert data["values"] == [("once", "3")]
    assert "loss" not in data["missing"]


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA L40", 181e12),
        ("Tesla V100-SXM2-16GB", 125e12),
    ],
)
def test_the_mfu_is_that_of_the_formula(tmp_path: Path, device: str, peak: float) -> None:
    # 2 ranks, steps of 10 ms; the run resumed at step 990 of 1000, and the Trainer's total counts all 1000 steps.
    for rank in range(2):
        _record(tmp_path, rank, [1.0] * 11, first=990)
    _write_run(tmp_path, accelerators=[device] * 2)
    (data,) = page_data([read_run(tmp_path)])["runs"]
    assert data["mfu"].endswith("because the FLOPs of a step are (the Trainer logs total_flos; scripts can log mfu).")
    # 40 % of the peak of two devices in 10 ms, 1000 times; the time of the last 10 steps alone would give 100 times as much.
    values = {"total_flos": 0.4 * peak * 2 * 0.010 * 1000, "train_runtime": 0.1}
    append_line(tmp_path / "metrics.jsonl", {"time": 1.0, "step": 1000, "values": values})
    (data,) = page_data([read_run(tmp_path)])["runs"]
    assert data["mfu"] == f"MFU 40.0% of {peak / 1e12:.0f} TFLOP/s per device"


def test_the_mfu_of_an_unknown_device_is_unknown_and_the_scripts_own_is_shown(tmp_path: Path) -> None:
    _record(tmp_path, 0, [1.0] * 3)
    _write_run(tmp_path, accelerators=["NVIDIA T4"])
    append_line(tmp_path / "metrics.jsonl", {"time": 1.0, "step": 3, "values": {"total_flos": 1e15}})
    (data,) = page_data([read_run(tmp_path)])["runs"]
    assert data["mfu"] == "1e+15 FLOPs in total. MFU is unknown, because the peak FLOP/s of this device is."
    append_line(tmp_path / "metrics.jsonl", {"time": 1.0, "step": 3, "values": {"mfu": 0.31}})
    (data,) = page_data([read_run(tmp_path)])["runs"]
    assert data["mfu"] == "MFU 31.0% (logged by the script)"


def _write_run(folder: Path, *, accelerators: list[str]) -> None:
    (folder / "run.json").write_text(
        json.dumps({"version": 1, "machine": {"accelerators": accelerators}}), encoding="utf-8"
    )


def test_many_metrics_keep_their_extremes(tmp_path: Path) -> None:
    lines = [{"time": float(i), "step": i, "values": {"m": 100.0 if i == 777 else 0.0}} for i in range(3000)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    ((metric,),) = (run["metrics"] for run in page_data([read_run(tmp_path)])["runs"])
    assert len(metric["y"]) <= MAX_POINTS
    assert metric["x"]["step"][metric["y"].index(100.0)] == 777


def test_texts_in_a_run_cannot_become_parts_of_the_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "run", num_steps=3, facts={"script": "</script><script>alert(1)</script>@@data@@"})
    page = render_page(page_data([read_run(folder)]))
    assert page.count("</script>") == 3
    assert "alert(1)" in page
    assert "<script>alert" not in page


def test_numbers_that_are_not_finite_do_not_break_the_page(tmp_path: Path) -> None:
    lines = [{"time": 1.0, "step": at, "values": {"m": v}} for at, v in ((math.nan, 1.0), (2, math.inf), (3, math.nan))]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "events.jsonl").write_text(json.dumps({"time": math.nan, "kind": "stall", "text": "x"}))
    data = page_data([read_run(tmp_path)])
    assert data["runs"][0]["metrics"][0]["y"] == [1.0, None, None]
    assert "</html>" in render_page(data)


def test_a_run_whose_number_of_ranks_changes_is_shown(tmp_path: Path) -> None:
    for attempt, ranks in enumerate((1, 3, 2)):
        for rank in range(ranks):
            _record(tmp_path, rank, [1.0] * 5, first=1 + 5 * attempt, attempt=attempt, began=100.0 * attempt)
    series = _series(tmp_path)
    assert (series.ranks, series.num_steps, series.num_repeated) == ([0, 1, 2], 15, 0)
    np.testing.assert_allclose(series.samples_per_s[[2, 7, 12]], [800.0, 2400.0, 1600.0], rtol=1e-9)
    assert np.isnan(series.own_ms[2, :5]).all()
    assert "</html>" in render_page(page_data([read_run(tmp_path)]))


def test_the_plot_library_is_the_documented_one() -> None:
    assets = resources.files("echelon.report") / "assets"
    text = (assets / "README.md").read_text()
    for name in ("uPlot.iife.min.js", "uPlot.min.css"):
        assert f"| `{name}` | `{hashlib.sha256((assets / name).read_bytes()).hexdigest()}` |" in text
    assert "v1.6.32" in (assets / "uPlot.iife.min.js").read_text()[:100]


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
    assert rows[0]["loss"] == pytest.approx(_series(runs / "one").last_loss)


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
    _record(tmp_path, 0, [1.0, 0.5, math.nan, math.nan])
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


def test_report_writes_a_page_and_prints_its_path(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _echelon(capsys, "report") == f"report: {runs / 'two' / 'report.html'}\n"
    assert _echelon(capsys, "report", "one", "two") == f"report: {runs / 'report.html'}\n"
    assert _echelon(capsys, "report", str(runs), "-o", "page.html") == f"report: {runs.parent / 'page.html'}\n"
    assert (runs.parent / "page.html").read_text() == (runs / "two" / "report.html").read_text()
    assert "cannot write" in _echelon(capsys, "report", "-o", "gone/page.html", code=2)
