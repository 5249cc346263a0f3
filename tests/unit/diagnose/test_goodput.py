"""The ledger of a run adds up to its time, whatever happened to it; and who is late in a step is told from who waits."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from echelon.diagnose.goodput import Attempt, RankTimes, TimeBreakdown, break_down_time, spent_in
from echelon.diagnose.straggler import Steps, steps_of
from echelon.launch.failures.failure import ErrorRecord, RankEnd
from echelon.launch.local.goodput_recorder import (
    GOODPUT_FILE,
    GoodputRecorder,
    GoodputReport,
    first_sign,
    read_goodput,
    times_on,
)
from echelon.status import notes as status_notes
from echelon.status.board import Board, Mark, Phase, Slot, StepPart, Times
from echelon.status.run_facts import process_start_ns

S = 10**9


def spent(**seconds: float) -> tuple[int, ...]:
    return tuple(int(seconds.get(part.name.lower(), 0) * S) for part in StepPart)


def rank(
    number: int, *, loop: float, until: float, part: StepPart, loaded: int = -1, steps: int = 0, **s: float
) -> RankTimes:
    """A rank whose loop began at `loop` and that is in `part` since `until`."""
    times = Times(int(loop * S), int(until * S), loaded, steps, part, spent(**s))
    assert sum(times.spent_ns) == times.since_ns - times.begun_ns
    return RankTimes(rank=number, times=times)


def marked(one: RankTimes, *marks: Mark, ended: float | None = None) -> RankTimes:
    ended_ns = None if ended is None else int(ended * S)
    return RankTimes(rank=one.rank, times=one.times, marks=marks, ended_ns=ended_ns)


def attempt(started: float, failed: float, noticed: float, *ranks: RankTimes) -> Attempt:
    return Attempt(started_ns=int(started * S), failed_ns=int(failed * S), noticed_ns=int(noticed * S), ranks=ranks)


def ledger(*attempts: Attempt, ended: float) -> dict[str, float]:
    found = break_down_time(attempts, began_ns=0, ended_ns=int(ended * S))
    assert found.wall_s == ended
    assert sum(found.seconds.values()) == pytest.approx(ended, abs=1e-6)
    return {item: pytest.approx(seconds, abs=1e-6) for item, seconds in found.seconds.items()}


# ---- the ledger ----------------------------------------------------------------------------------------------------------


def test_the_time_of_a_fault_free_run_is_divided_into_the_means_over_ranks() -> None:
    one = rank(
        0,
        loop=2,
        until=9,
        part=StepPart.FORWARD,
        data=1,
        forward=2,
        backward=1,
        optimizer=1,
        communication=1,
        checkpoint=1,
    )
    two = rank(1, loop=3, until=9, part=StepPart.DATA, data=1, forward=3, evaluation=2)
    found = ledger(attempt(1, 12, 12, marked(one, ended=11), marked(two, ended=10)), ended=12.5)
    assert found == {
        "init": 2.5,
        "compute": 5.5,  # (4 and the 2 of the open part; 5) / 2
        "communication": 0.5,
        "data wait": 1.5,  # (1; 1 and the 1 of the open part) / 2
        "checkpoint": 0.5,
        "end": 1.5 + 0.5,
    }


def test_repeated_steps_after_a_kill_count_as_lost() -> None:
    first = marked(
        rank(0, loop=2, until=10, part=StepPart.FORWARD, steps=25, forward=6, data=1, checkpoint=1),
        Mark(10, spent(forward=2, data=0.5)),
        Mark(20, spent(forward=4)),
        Mark(20, spent(forward=5, data=0.75, checkpoint=0.5)),  # once more, in the place of the other
    )
    second = rank(0, loop=13, until=15, part=StepPart.FORWARD, loaded=20, forward=2)
    found = ledger(attempt(1, 11, 11.5, first), attempt(12, 15, 15, second), ended=15)
    assert found == {
        "init": 2.0,
        "compute": 5 + 2.0,
        "data wait": 0.75,
        "checkpoint": 1.0,
        "lost steps": (6 + 1 - 5) + 0.25,
        "detection": 0.5,
        "restart": 1.5,
    }


def test_resuming_from_an_older_checkpoint_loses_several_attempts() -> None:
    marks = Mark(10, spent(forward=1)), Mark(20, spent(forward=3))
    first = marked(rank(0, loop=1, until=5, part=StepPart.FORWARD, forward=4), *marks)
    second = marked(rank(0, loop=6, until=8, part=StepPart.FORWARD, loaded=20, forward=2), Mark(30, spent(forward=1)))
    third = rank(0, loop=9, until=10, part=StepPart.FORWARD, loaded=10, forward=1)  # 20 and 30 were damaged
    runs = attempt(0, 5, 5, first), attempt(5, 8, 8, second), attempt(8, 10, 10, third)
    assert ledger(*runs, ended=10) == {"init": 1.0, "restart": 2.0, "compute": 1 + 1.0, "lost steps": 3 + 2.0}
    # From the beginning: nothing of what was before remains.
    fourth = rank(0, loop=11, until=12, part=StepPart.FORWARD, forward=1)
    found = ledger(*runs, attempt(10, 12, 12, fourth), ended=12)
    assert (found["compute"], found["lost steps"]) == (1.0, 7.0)


def test_an_attempt_that_dies_before_training_is_a_restart_without_loss() -> None:
    first = marked(rank(0, loop=1, until=4, part=StepPart.FORWARD, forward=3), Mark(7, spent(forward=2)))
    never = RankTimes(rank=0, times=Times(0, 0, 7, 0, StepPart.FORWARD, spent()))
    third = rank(0, loop=8, until=9, part=StepPart.FORWARD, loaded=7, forward=1)
    found = ledger(
        attempt(0, 4, 4.25, first),
        attempt(4.5, 5, 5.5, RankTimes(rank=0)),
        attempt(5.5, 6, 6, never),
        attempt(6, 9, 9, third),
        ended=9,
    )
    assert found == {"init": 1.0, "compute": 3.0, "lost steps": 1.0, "detection": 0.75, "restart": 3.25}


def test_a_rank_that_dies_at_the_start_of_a_save_loses_nothing() -> None:
    one = marked(rank(0, loop=1, until=3, part=StepPart.CHECKPOINT, forward=2), Mark(5, spent(forward=2)))
    two = rank(1, loop=1, until=3, part=StepPart.FORWARD, forward=2)
    again = [rank(i, loop=5, until=6, part=StepPart.FORWARD, loaded=5, forward=1) for i in (0, 1)]
    found = ledger(attempt(0, 4, 4, one, two), attempt(4, 6, 6, *again), ended=6)
    assert found == {"init": 1.0, "restart": 1.0, "compute": 2.5 + 1, "checkpoint": 0.5}


def test_time_after_the_failure_counts_as_detection() -> None:
    late = rank(0, loop=1, until=7, part=StepPart.OPTIMIZER, forward=4, communication=2)
    assert spent_in(attempt(0, 5, 8, late), late) == list(spent(forward=2, communication=2))
    assert ledger(attempt(0, 5, 8, late), ended=8) == {
        "init": 1.0,
        "compute": 2.0,
        "communication": 2.0,
        "detection": 3.0,
    }


def test_a_program_without_records_is_one_item() -> None:
    runs = attempt(1, 5, 6, RankTimes(rank=0)), attempt(7, 9, 9, RankTimes(rank=0))
    assert ledger(*runs, ended=9) == {"init": 1.0, "program": 6.0, "detection": 1.0, "restart": 1.0}
    text = str(break_down_time(runs, began_ns=0, ended_ns=9 * S))
    assert text == (
        "time 9.0 s, not divided, because no training loop was recorded: program 6.0 s, init 1.0 s, detection 1.0 s, "
        "restart 1.0 s; 1 restart"
    )
    assert break_down_time(runs, began_ns=0, ended_ns=9 * S).goodput is None


def test_the_failure_time_is_the_earlier_of_exception_and_exit() -> None:
    record = ErrorRecord(time_ns=70, type="ValueError", message="")
    failed, killed, well = (
        RankEnd(rank=0, exit_code=1, ended_ns=90, record=record),
        RankEnd(rank=1, exit_code=-9, ended_ns=80),
        RankEnd(rank=2, exit_code=0, ended_ns=10),
    )
    assert first_sign([failed, killed, well]) == 70
    assert first_sign([killed, well]) == 80
    assert first_sign([well]) is None


# ---- what a rank notes ---------------------------------------------------------------------------------------------------


class Clock:
    now = 5 * S

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Board]:
    board = Board(2, folder=str(tmp_path))
    yield board
    board.remove()


def test_the_time_of_a_loop_on_the_status_board_outlives_the_rank(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(status_notes, "monotonic_ns", clock)
    notes = status_notes.Notes(Slot(board.path, 1))
    assert board.times(1) is None
    with notes.within(Phase.LOAD), notes.communicating():  # before the loop: init
        clock.now += S
    notes.loaded(20)
    assert board.times(1) == Times(0, 0, 20, 0, StepPart.OTHER, spent())

    notes.phase(Phase.DATA)
    begun = clock.now
    clock.now += 2 * S
    notes.phase(Phase.TRAIN)
    clock.now += S // 2  # the program's own work on the batch
    notes.begin_forward()
    clock.now += S
    notes.begin_forward()  # of a prepared part of the model
    clock.now += S
    notes.end_forward()
    clock.now += S
    notes.end_forward()
    before = notes.part(StepPart.BACKWARD)
    clock.now += 4 * S
    notes.part(before)
    with notes.communicating():
        clock.now += 5 * S
    notes.phase(Phase.OPTIMIZER)
    clock.now += 6 * S
    notes.step(1, Phase.TRAIN)
    notes.mark(21)
    with notes.within(Phase.SAVE), notes.communicating():  # it waits for the save
        clock.now += 7 * S
    notes.loaded(99)  # not what the loop began with
    clock.now += 8 * S
    notes.phase(Phase.EVALUATE)
    notes.begin_forward()
    clock.now += 9 * S  # it is killed here
    all_spent = spent(data=2, forward=3, other=0.5 + 8, backward=4, communication=5, optimizer=6, checkpoint=7)
    times = board.times(1)
    assert times == Times(begun, clock.now - 9 * S, 20, 1, StepPart.EVALUATION, all_spent)
    assert board.marks(1) == [Mark(21, spent(data=2, forward=3, other=0.5, backward=4, communication=5, optimizer=6))]
    end = attempt(0, clock.now / S, clock.now / S, one := RankTimes(rank=1, times=times))
    assert sum(spent_in(end, one) or []) == clock.now - begun


def test_the_last_eight_marks_are_kept_and_a_torn_one_is_ignored(board: Board) -> None:
    slot = Slot(board.path, 0)
    for step in range(11):
        slot.mark(Mark(step, spent(data=step)))
    assert board.marks(0) == [Mark(step, spent(data=step)) for step in range(3, 11)]
    before = bytes(slot._memory)
    slot.mark(Mark(11, spent(data=11)))
    after = bytes(slot._memory)
    changed = [i for i in range(len(after)) if before[i] != after[i]]
    slot._memory[:] = after[: changed[-1]] + before[changed[-1] :]
    assert [mark.step for mark in board.marks(0)] == list(range(4, 11))


# ---- who is late ---------------------------------------------------------------------------------------------------------


def steps(**ranks: list[float]) -> Steps:
    """From milliseconds of data, forward, backward, communication in a step."""
    rows = {
        int(name[1:]): [100 * ms for ms in (*row, *[0.0] * (len(StepPart) - len(row)))] for name, row in ranks.items()
    }
    found = steps_of(rows, num_steps=100)
    assert found is not None
    return found


def test_the_waiting_rank_is_not_reported_as_slow() -> None:
    # Rank 2 needs 30 ms more for its forward pass; the others are in the reduction longest.
    found = steps(r0=[1, 10, 20, 35], r1=[2, 11, 20, 33], r2=[1, 40, 20, 5], r3=[1, 10, 21, 34])
    assert found.slowest == 2
    assert found.verdict == (
        "rank 2 is slow: forward 40.0 ms per step (median 10.5); the other ranks wait for it for up to 30.0 ms per step"
    )
    forward, wait = found.parts["forward"], found.parts["wait"]
    assert (forward.least, forward.least_rank, forward.median, forward.most, forward.most_rank) == (10, 0, 10.5, 40, 2)
    assert (wait.least, wait.least_rank, wait.most, wait.most_rank) == (0, 2, 30, 0)
    assert found.parts["communication"].most == 5  # the wait is told apart
    assert "forward 10.0 (rank 0) / 10.5 / 40.0 (rank 2)" in str(found)
    assert "communication 5.0, wait 0.0 (rank 2) / 28.5 / 30.0 (rank 0)" in str(found)


def test_slow_data_on_one_of_two_ranks_is_named_and_even_ranks_are_not() -> None:
    found = steps(r0=[1, 10, 20, 25], r1=[21, 10, 20, 5])
    assert (found.slowest, found.slow_part, found.slow_ms) == (1, "data", 21)
    assert steps(r0=[1, 10, 20, 5], r1=[2, 10, 19, 5]).verdict == ""
    assert steps(r0=[1, 10, 20, 0]).verdict == ""
    assert steps_of({0: [1.0] * len(StepPart)}, num_steps=0) is None
    few = steps_of({0: [0, 1, 0, 9, 0, 0, 0, 0], 1: [0, 9, 0, 1, 0, 0, 0, 0]}, num_steps=5)
    assert few is not None
    assert few.verdict == ""  # the first steps say little


# ---- the launcher's report -----------------------------------------------------------------------------------------------


def test_the_report_is_written_to_a_file_and_read_again(board: Board, tmp_path: Path) -> None:
    began = time.monotonic_ns()
    recorder = GoodputRecorder(tmp_path / GOODPUT_FILE, began_ns=began)
    for _ in range(2):
        recorder.start_attempt()
        for index in (0, 1):
            now = time.monotonic_ns()
            Slot(board.path, index).times(Times(now, now, -1, 3, StepPart.FORWARD, spent()))
        time.sleep(0.01)
        recorder.end_attempt(times_on(board, [0, 1]), failed_ns=time.monotonic_ns(), noticed_ns=time.monotonic_ns())
        recorder.end_attempt(times_on(board, [0, 1]), noticed_ns=time.monotonic_ns())  # it was over
    report = recorder.finish()
    assert sum(report.breakdown.seconds.values()) == pytest.approx(report.breakdown.wall_s)
    assert report.breakdown.num_restarts == 1
    assert report.is_notable
    assert report.steps is not None
    assert report.steps.num_steps == 6
    again = read_goodput(tmp_path)
    assert again is not None
    assert again.lines() == report.lines()
    lines = [json.loads(line) for line in (tmp_path / GOODPUT_FILE).read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["attempt", "attempt", "run"]
    assert lines[0]["ranks"][1]["spent_s"]["forward"] >= 0.01
    (tmp_path / GOODPUT_FILE).write_text("{")
    assert read_goodput(tmp_path) is None


def test_a_short_fault_free_run_prints_no_report_by_default() -> None:
    slow = steps(r0=[1, 10, 20, 25], r1=[21, 10, 20, 5])

    def is_told(wall_s: float, found: Steps | None, restarts: int = 0) -> bool:
        return GoodputReport(
            breakdown=TimeBreakdown(wall_s=wall_s, num_restarts=restarts, seconds={}), steps=found
        ).is_notable

    assert [is_told(2, slow), is_told(90, slow), is_told(90, None), is_told(2, None, 1)] == [False, True, False, True]


def test_the_start_time_of_the_process_comes_from_the_system() -> None:
    ago = (time.monotonic_ns() - process_start_ns()) / 1e9
    assert ago == pytest.approx(
        time.time() - psutil.Process().create_time(), abs=1.5
    )  # psutil knows the boot by the second


def test_a_slow_rank_is_reported_with_its_machine() -> None:
    spent = {rank: [0.0] * len(StepPart) for rank in range(2)}
    spent[0][StepPart.FORWARD], spent[1][StepPart.FORWARD] = 100.0, 400.0
    spent[0][StepPart.COMMUNICATION] = 300.0
    steps = steps_of(spent, num_steps=20)
    ledger = TimeBreakdown(wall_s=1.0, num_restarts=0, seconds={})
    (*_, verdict) = GoodputReport(
        breakdown=ledger, steps=steps, machines={0: "one (10.0.0.1)", 1: "two (10.0.0.2)"}
    ).lines()
    assert verdict.startswith("rank 1 is slow")
    assert verdict.endswith("; it runs on two (10.0.0.2)")
