"""The data of a report's page: its panels, why one is missing, the metrics, the MFU, and texts that must stay texts."""

from __future__ import annotations

import hashlib
import json
import math
from importlib import resources
from pathlib import Path

import pytest

from echelon.report.comparison import compare_runs
from echelon.report.page import render_page
from echelon.report.page_data import page_data
from echelon.report.run_folder import read_run
from echelon.report.step_series import MAX_POINTS
from echelon.status.run_files import append_line
from tests.recorded_runs import record_steps, write_run


def test_every_panel_without_data_says_why(tmp_path: Path) -> None:
    (data,) = page_data([read_run(tmp_path)])["runs"]
    panels = "goodput grad_norm hyperparameters items loss lr memory metrics output parts samples settings stragglers timeline"
    assert sorted(data["missing"]) == panels.split()
    assert all(text.endswith(".") for text in data["missing"].values())
    record_steps(tmp_path, 0, [1.0, 2.0])
    (data,) = page_data([read_run(tmp_path)])["runs"]
    left = "goodput grad_norm hyperparameters items metrics output settings stragglers"
    assert sorted(data["missing"]) == left.split()


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


def test_predicted_memory_is_beside_the_measured_one(tmp_path: Path) -> None:
    record_steps(tmp_path, 0, [1.0])
    values = {"plan": {"layout": "single", "peak_bytes": 3 * 2**30}}
    append_line(tmp_path / "hyperparameters.jsonl", {"group": "training", "values": values})
    (data,) = page_data([read_run(tmp_path)])["runs"]
    (tile,) = (tile for tile in data["tiles"] if tile["name"] == "memory")
    assert (tile["value"], tile["note"]) == ("100 MB", "largest; predicted peak on a GPU: 3.0 GB")


def test_results_of_evaluations_are_at_the_top_and_runtimes_are_not_plotted(tmp_path: Path) -> None:
    record_steps(tmp_path, 0, [1.0] * 40)
    for step, loss, accuracy in ((10, 0.5, 0.8), (20, 0.4, 0.9), (30, 0.45, 0.85)):
        values = {"eval_loss": loss, "eval_accuracy": accuracy, "eval_runtime": 0.1, "eval_samples_per_second": 9.0}
        append_line(tmp_path / "metrics.jsonl", {"time": 1.0, "step": step, "values": values})
    append_line(tmp_path / "metrics.jsonl", {"time": 2.0, "step": 40, "values": {"total_flos": 0, "train_loss": 0.7}})
    (data,) = page_data([read_run(tmp_path)])["runs"]
    tiles = [(tile["name"], tile["value"], tile["note"]) for tile in data["tiles"]]
    assert tiles[:3] == [
        ("last training loss", "1", "of step 40"),
        ("eval_loss", "0.45", "of step 30; lowest 0.4"),
        ("eval_accuracy", "0.85", "of step 30; highest 0.9"),
    ]
    assert [(metric["name"], metric["isLoss"]) for metric in data["metrics"]] == [
        ("eval_loss", True),
        ("eval_accuracy", False),
    ]
    assert data["values"] == [("eval_runtime", "0.1"), ("eval_samples_per_second", "9"), ("train_loss", "0.7")]


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
        record_steps(tmp_path, rank, [1.0] * 11, first=990)
    _write_run(tmp_path, accelerators=[device] * 2)
    (data,) = page_data([read_run(tmp_path)])["runs"]
    assert data["mfu"].endswith("because the FLOPs of a step are (the Trainer logs total_flos; scripts can log mfu).")
    # 40 % of the peak of two devices in 10 ms, 1000 times; the time of the last 10 steps alone would give 100 times as much.
    values = {"total_flos": 0.4 * peak * 2 * 0.010 * 1000, "train_runtime": 0.1}
    append_line(tmp_path / "metrics.jsonl", {"time": 1.0, "step": 1000, "values": values})
    (data,) = page_data([read_run(tmp_path)])["runs"]
    assert data["mfu"] == f"MFU 40.0% of {peak / 1e12:.0f} TFLOP/s per device"


def test_the_mfu_of_an_unknown_device_is_unknown_and_the_scripts_own_is_shown(tmp_path: Path) -> None:
    record_steps(tmp_path, 0, [1.0] * 3)
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


def test_the_plot_library_is_the_documented_one() -> None:
    assets = resources.files("echelon.report") / "assets"
    text = (assets / "README.md").read_text()
    for name in ("uPlot.iife.min.js", "uPlot.min.css"):
        assert f"| `{name}` | `{hashlib.sha256((assets / name).read_bytes()).hexdigest()}` |" in text
    assert "v1.6.32" in (assets / "uPlot.iife.min.js").read_text()[:100]
