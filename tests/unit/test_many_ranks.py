"""What the coordinator does about thousands of ranks takes time in proportion to their number, and a run of many machines works."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from echelon.diagnose.goodput import Attempt, RankTimes, break_down_time
from echelon.diagnose.stall import RankView, StallClock
from echelon.launch.failures.failure import ErrorRecord, Frame, RankEnd, explain
from echelon.launch.multinode.roster import join_names
from echelon.report.rank_rows import RankSample, RowTracker
from echelon.status.board import Mark, Phase, StatusNote, StepPart, Times

_NUM_RANKS = 8192
_LIMIT_S = 4.0
"""CPU time; each took at least three times as long while it compared each rank with all others."""


def watch_ranks_that_stand_still() -> None:
    clock = StallClock(60.0)
    views = [RankView(rank=rank) for rank in range(_NUM_RANKS)]
    assert not clock.update(views, 0.0)
    assert not clock.update(views, 100.0)  # nobody waits for another rank


def explain_a_failure_after_which_all_others_ended() -> None:
    ends = [RankEnd(rank=rank, exit_code=0) for rank in range(_NUM_RANKS)]
    ends[7] = RankEnd(rank=7, exit_code=1, ended_ns=1)
    assert "rank 7 failed first" in explain(ends, logs="none")[0]


def explain_as_many_errors_as_ranks() -> None:
    def end(rank: int) -> RankEnd:
        record = ErrorRecord(
            time_ns=rank + 1, type="ValueError", message="no", frames=(Frame(file="f.py", line=rank, function="main"),)
        )
        return RankEnd(rank=rank, exit_code=1, record=record)

    assert "rank 0 failed first" in explain([end(rank) for rank in range(_NUM_RANKS)], logs="none")[0]


def divide_the_time_of_a_run_that_started_from_scratch_again() -> None:
    spent = (10**9,) * len(StepPart)
    times = Times(1, 10**9, -1, 100, StepPart.FORWARD, spent)
    ranks = [RankTimes(rank=rank, times=times, marks=[Mark(5, spent)] * 8) for rank in range(_NUM_RANKS)]
    attempts = [Attempt(started_ns=0, failed_ns=10**10, noticed_ns=10**10, ranks=ranks)] * 2
    assert break_down_time(attempts, began_ns=0, ended_ns=2 * 10**10).seconds["lost steps"] > 0


def compare_the_ranks_of_the_live_view() -> None:
    note = StatusNote(0, 5, 0, 0, Phase.TRAIN, False, "", "", "", "")
    samples = [RankSample(view=RankView(rank=rank, note=note), times=None) for rank in range(_NUM_RANKS)]
    assert len(RowTracker().update(samples, 1.0)) == _NUM_RANKS


@pytest.mark.parametrize(
    "work",
    [
        watch_ranks_that_stand_still,
        explain_a_failure_after_which_all_others_ended,
        explain_as_many_errors_as_ranks,
        divide_the_time_of_a_run_that_started_from_scratch_again,
        compare_the_ranks_of_the_live_view,
    ],
)
def test_work_for_all_ranks_grows_with_their_number_only(work: Callable[[], None]) -> None:
    began = time.process_time()
    work()
    assert time.process_time() - began < _LIMIT_S


def test_names_of_many_machines_are_cut() -> None:
    assert join_names(["a", "b"]) == "a, b"
    assert join_names([f"node{number}" for number in range(1024)]).endswith("node31, ...")


@pytest.mark.slow
def test_sixteen_machines_join_fail_and_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    many_nodes = import_module("many_nodes")
    result = many_nodes.measure(16, quiet_s=1.0)
    assert result.join_s < many_nodes.JOIN_LIMIT_S
    assert 0 < result.verdict_s < result.restart_s < 30.0
    sys.modules.pop("many_nodes")
