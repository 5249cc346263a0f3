"""The series of a run, against values computed by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from echelon.report.page import render_page
from echelon.report.page_data import page_data
from echelon.report.run_folder import RecordedRun, read_run
from echelon.report.step_series import MAX_POINTS, StepSeries, step_series
from tests.recorded_runs import record_steps


def _series(folder: Path) -> StepSeries:
    series = step_series(read_run(folder))
    assert series is not None
    return series


def test_the_loss_is_the_mean_over_the_ranks(tmp_path: Path) -> None:
    record_steps(tmp_path, 0, [3.0, 2.0, 1.0])
    record_steps(tmp_path, 1, [5.0, math.nan, 2.0])
    series = _series(tmp_path)
    np.testing.assert_array_equal(series.loss.mean, [4.0, 2.0, 1.5])
    assert (series.last_loss, series.num_steps, series.num_samples) == (1.5, 3, 48)


def test_the_time_of_a_step_is_split_by_phase_and_rank(tmp_path: Path) -> None:
    for rank in range(2):
        record_steps(tmp_path, rank, [1.0] * 4, began=rank * 1e-3)
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
        record_steps(tmp_path, rank, [1.0] * 4, has_parts=False)
    series = _series(tmp_path)
    np.testing.assert_allclose(series.step_ms[1:], 10.0, rtol=1e-9)
    np.testing.assert_allclose(series.samples_per_s[1:], 1600.0, rtol=1e-9)
    (data,) = page_data([read_run(tmp_path)])["runs"]
    assert (list(data["series"]["parts"]), list(data["ranks"]["parts"])) == (["step"], ["step"])
    assert data["missing"]["stragglers"].startswith("The time by phase")


def test_steps_that_were_repeated_after_a_restart_count_once(tmp_path: Path) -> None:
    record_steps(tmp_path, 0, [9.0, 8.0, 7.0, 6.0])
    record_steps(tmp_path, 0, [5.0, 4.0, 3.0], first=3, attempt=1, began=100.0)
    series = _series(tmp_path)
    np.testing.assert_array_equal(series.loss.mean, [9.0, 8.0, 5.0, 4.0, 3.0])
    assert (series.num_steps, series.num_repeated, series.last_step) == (5, 2, 5)


def test_a_spike_survives_downsampling(tmp_path: Path) -> None:
    losses = [1.0] * 5000
    losses[1234], losses[4321] = 50.0, -3.0
    record_steps(tmp_path, 0, losses)
    series = _series(tmp_path)
    assert len(series.loss.mean) == MAX_POINTS
    assert (np.nanmax(series.loss.most), np.nanmin(series.loss.least)) == (50.0, -3.0)
    assert series.steps[-1] == 5000


def test_a_loss_that_is_not_finite_is_reported(tmp_path: Path) -> None:
    record_steps(tmp_path, 0, [1.0] * 40 + [math.nan] * 200)
    assert _series(tmp_path).not_finite_from == 41
    (data,) = page_data([read_run(tmp_path)])["runs"]
    assert data["warnings"] == ["The loss is not finite from step 41 on (nan or infinite)."]


def test_a_damaged_file_of_records_is_left_out(tmp_path: Path) -> None:
    record_steps(tmp_path, 0, [1.0, 2.0])
    (tmp_path / "records" / "0" / "rank_1.steps").write_bytes(b"torn")
    assert _series(tmp_path).ranks == [0]
    assert step_series(RecordedRun(folders=(tmp_path / "gone",), facts={})) is None


def test_a_run_whose_number_of_ranks_changes_is_shown(tmp_path: Path) -> None:
    for attempt, ranks in enumerate((1, 3, 2)):
        for rank in range(ranks):
            record_steps(tmp_path, rank, [1.0] * 5, first=1 + 5 * attempt, attempt=attempt, began=100.0 * attempt)
    series = _series(tmp_path)
    assert (series.ranks, series.num_steps, series.num_repeated) == ([0, 1, 2], 15, 0)
    np.testing.assert_allclose(series.samples_per_s[[2, 7, 12]], [800.0, 2400.0, 1600.0], rtol=1e-9)
    assert np.isnan(series.own_ms[2, :5]).all()
    assert "</html>" in render_page(page_data([read_run(tmp_path)]))
