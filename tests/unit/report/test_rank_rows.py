"""Which ranks of a live run differ from the others, from samples of their boards; and how rows are folded and losses drawn."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from echelon.diagnose.stall import RankView
from echelon.report.rank_rows import Difference, RankRow, RankSample, RowTracker, fold_rows, sparkline
from echelon.status.board import Doing, Phase, StatusNote, StepPart, Times, Watch

NOW = 1000.0


def _sample(
    rank: int,
    *,
    now: float = NOW,
    step: int = 40,
    phase: Phase = Phase.TRAIN,
    beat_age: float = 0.2,
    note_age: float = 0.0,
    waits: bool = False,
    spent_ms: tuple[float, ...] | None = None,
    num_steps: int = 40,
    **facts: Any,
) -> RankSample:
    view_facts = {name: facts.pop(name) for name in ("is_stopped",) if name in facts}
    doing = facts.pop("doing", Doing.COMMUNICATES if waits else Doing.NOTHING)
    watch = Watch(int((now - beat_age) * 1e9), 10 + rank, 5, 7, doing, 0, 12, "train.py")
    note = StatusNote(int((now - note_age) * 1e9), step, 3, 9, phase, False, "all_reduce", "float32[4]", "", "train.py")
    times = None
    if spent_ms is not None:
        spent_ns = tuple(int(ms * 1e6 * num_steps) for ms in spent_ms)
        times = Times(int((now - 60) * 1e9), int(now * 1e9), -1, num_steps, StepPart.FORWARD, spent_ns)
    return RankSample(view=RankView(rank=rank, watch=watch, note=note, times=times, **view_facts), times=times, **facts)


def _rows(*samples: RankSample, tracker: RowTracker | None = None, now: float = NOW) -> dict[int, RankRow]:
    return {row.rank: row for row in (tracker or RowTracker()).update(samples, now)}


def test_equal_ranks_do_not_differ() -> None:
    rows = _rows(*(_sample(rank) for rank in range(4)))
    assert [row.difference for row in rows.values()] == [Difference.NONE] * 4
    row = rows[2]
    assert (row.step, row.phase, row.operation, row.place) == (
        40,
        "training",
        "all_reduce of float32[4]",
        "train.py:12",
    )
    assert row.heartbeat_s == pytest.approx(0.2)
    assert row.to_text() == (
        "rank 2: step 40; training; last operation all_reduce of float32[4]; 7 collectives; at train.py:12; "
        "heartbeat 0.2 s ago"
    )


def test_the_steps_before_a_restart_count() -> None:
    sample = _sample(0, step=3, spent_ms=(1.0,) * 8)
    assert sample.times is not None
    resumed = replace(sample, times=sample.times._replace(loaded=120))
    assert _rows(resumed)[0].step == 123


def test_a_stopped_an_exited_and_a_silent_rank_come_first() -> None:
    samples = [
        _sample(0),
        _sample(1, beat_age=5.0),
        _sample(2, is_running=False),
        _sample(3, is_stopped=True, beat_age=9.0),
    ]
    rows = RowTracker().update(samples, NOW)
    assert [(row.rank, row.difference) for row in rows] == [
        (3, Difference.STOPPED),
        (2, Difference.EXITED),
        (1, Difference.SILENT),
        (0, Difference.NONE),
    ]
    assert [row.what for row in rows[:3]] == ["stopped (SIGSTOP or a debugger)", "exited", "no heartbeat for 5 s"]


def test_ranks_that_have_all_exited_do_not_differ() -> None:
    rows = _rows(_sample(0, is_running=False), _sample(1, is_running=False))
    assert {row.difference for row in rows.values()} == {Difference.NONE}


def test_the_rank_that_all_others_wait_for_is_named_after_two_seconds() -> None:
    tracker = RowTracker()
    assert _rows(_sample(0, waits=True), _sample(1), tracker=tracker)[1].difference is Difference.NONE
    later = [_sample(0, now=NOW + 3, waits=True), _sample(1, now=NOW + 3)]
    row = _rows(*later, tracker=tracker, now=NOW + 3)[1]
    assert (row.difference, row.what) == (
        Difference.AWAITED,
        "the other ranks have been waiting for it for 3 s",
    )


def test_a_slow_rank_is_named_in_the_first_sample() -> None:
    fast, slow = (0.0, 4.0, 6.0, 40.0, 1.0, 0.0, 0.0, 0.0), (0.0, 4.0, 6.0, 1.0, 1.0, 0.0, 0.0, 39.0)
    rows = _rows(*(_sample(rank, spent_ms=slow if rank == 2 else fast) for rank in range(4)))
    assert rows[2].what == "slow: code outside the model 39 ms per step (median 0)"
    assert [rank for rank, row in rows.items() if row.difference is not Difference.NONE] == [2]


def test_the_last_steps_count_and_not_the_mean_since_the_start() -> None:
    """A rank that becomes slow after 1000 fast steps is named after 20 slow ones."""
    tracker, even = RowTracker(), (0.0, 10.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0)
    _rows(*(_sample(rank, spent_ms=even, num_steps=1000) for rank in range(2)), tracker=tracker)

    def later(rank: int, forward_ms: float, wait_ms: float) -> RankSample:
        totals = tuple(ms * 1000 for ms in even[:1]), 1000 * 10 + 25 * forward_ms, 1000 * 1 + 25 * wait_ms
        spent = (0.0, totals[1] / 1025, 0.0, totals[2] / 1025, 0.0, 0.0, 0.0, 0.0)
        return _sample(rank, now=NOW + 2, spent_ms=spent, num_steps=1025)

    rows = _rows(later(0, 10.0, 31.0), later(1, 40.0, 1.0), tracker=tracker, now=NOW + 2)
    assert rows[1].what == "slow: forward 40 ms per step (median 25)"
    assert tracker.steps_per_s() == pytest.approx(12.5)


def test_without_times_the_rank_that_seldom_waits_is_slow() -> None:
    tracker = RowTracker()
    for i in range(8):
        now = NOW + i / 2
        rows = _rows(*(_sample(rank, now=now, step=i, waits=rank != 1) for rank in range(3)), tracker=tracker, now=now)
    assert rows[1].what == "slow: waits 0% of the time (median of the others 100%)"


def test_one_step_behind_counts_after_a_second_and_two_at_once() -> None:
    tracker = RowTracker()
    assert _rows(_sample(0), _sample(1, step=39), tracker=tracker)[1].difference is Difference.NONE
    row = _rows(_sample(0, now=NOW + 1), _sample(1, step=39, now=NOW + 1), tracker=tracker, now=NOW + 1)[1]
    assert (row.difference, row.what) == (Difference.BEHIND, "1 step behind")
    assert _rows(_sample(0), _sample(1, step=38))[1].what == "2 steps behind"


def test_another_phase_counts_after_a_second() -> None:
    tracker = RowTracker()
    for seconds, expected in ((0.0, Difference.NONE), (1.5, Difference.PHASE)):
        now = NOW + seconds
        samples = [_sample(rank, now=now) for rank in range(3)]
        samples.append(_sample(3, now=now, phase=Phase.EVALUATE, note_age=seconds))
        rows = _rows(*samples, tracker=tracker, now=now)
        assert rows[3].difference is expected
        assert {rows[rank].difference for rank in range(3)} == {Difference.NONE}


def test_rows_that_do_not_fit_are_folded_into_one_line() -> None:
    samples = [
        _sample(rank, is_stopped=rank in (7, 40), step=38 if rank == 9 else 40, memory_mb=400.0 + rank)
        for rank in range(64)
    ]
    rows = RowTracker().update(samples, NOW)
    shown, rest = fold_rows(rows, 64)
    assert (len(shown), rest) == (64, "")
    shown, rest = fold_rows(rows, 10)
    assert [row.rank for row in shown] == [7, 40, 9]
    assert rest == ("ranks 0-6, 8, 10-39, 41-63: step 40; training; heartbeat at most 0.2 s ago; 400-463 MB")
    shown, rest = fold_rows(rows, 2)
    assert [row.rank for row in shown] == [7]
    assert rest.startswith("ranks 0-6, 8-63: 2 of them differ; step 38-40;")


@pytest.mark.parametrize(
    ("values", "width", "expected"),
    [
        ([], 10, ""),
        ([1.0], 10, "▁"),
        ([3.0, 3.0], 10, "▁▁"),
        ([0.0, 7.0], 10, "▁█"),
        ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 8, "▁▂▃▄▅▆▇█"),
        ([0.0, 0.0, 7.0, 7.0], 2, "▁█"),
        ([math.nan, 0.0, math.inf, 7.0], 4, " ▁ █"),
        ([math.nan], 4, " "),
        ([1.0, 2.0], 0, ""),
    ],
)
def test_a_sparkline_shows_means_and_leaves_gaps(values: list[float], width: int, expected: str) -> None:
    assert sparkline(values, width) == expected


def test_a_sparkline_in_ascii() -> None:
    assert sparkline([0.0, 7.0], 4, is_ascii=True) == "_#"


@pytest.mark.parametrize(
    ("part", "spent", "phase"),
    [
        (StepPart.FORWARD, (), "forward pass"),
        (StepPart.BACKWARD, (StepPart.FORWARD,), "backward pass"),
        (StepPart.OTHER, (StepPart.FORWARD, StepPart.BACKWARD), "outside the model"),
        # Without accelerator.backward, a backward pass looks like the code between the passes.
        (StepPart.OTHER, (StepPart.FORWARD,), "training"),
        (StepPart.OTHER, (), "training"),
    ],
)
def test_the_phase_names_the_part_of_the_step_that_is_known(
    part: StepPart, spent: tuple[StepPart, ...], phase: str
) -> None:
    times = Times(1, int(NOW * 1e9), -1, 3, part, tuple(int(one in spent) for one in StepPart))
    sample = _sample(0)
    sample = replace(sample, view=replace(sample.view, times=times), times=times)
    assert _rows(sample)[0].phase == phase
    waits = _sample(1, waits=True, doing=Doing.COMMUNICATES | Doing.TRAINS)
    waits = replace(waits, view=replace(waits.view, times=times), times=times)
    assert _rows(waits)[1].phase == ("training" if phase == "outside the model" else phase) + ", waiting"
