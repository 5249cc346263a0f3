"""The state of a live run, read from its board, its processes and its files, from another process than its launcher."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echelon.report.live_run import LiveRun
from echelon.report.rank_rows import Difference
from echelon.status.board import Board, Doing, Phase, Slot, StatusNote, StepPart, Times, Watch
from echelon.status.step_records import StepRecorder

HOST = socket.gethostname()


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Board]:
    board = Board(2, folder=str(tmp_path))
    yield board
    board.remove()


def _folder(parent: Path, name: str = "run", *, ranks: tuple[int, ...] = (0, 1), **facts: Any) -> Path:
    for rank in ranks:
        (parent / name / "attempt_0" / f"rank_{rank}").mkdir(parents=True)
    base = {"version": 1, "run_id": "run", "outcome": "running", "pid": os.getpid(), "num_processes": 2}
    more = {"num_machines": 1, "num_restarts": 0, "began": time.time() - 100, "ended": None, "machine": {"host": HOST}}
    (parent / name / "run.json").write_text(json.dumps({**base, **more, **facts}))
    return parent / name


def _write(board: Board, *, step: int = 7, planned: int = 0) -> None:
    now = time.monotonic_ns()
    for index in range(2):
        slot = Slot(board.path, index)
        slot.watch(Watch(now, os.getpid(), 1, 5, Doing.NOTHING, 0, 3, "train.py"))
        slot.note(StatusNote(now, step, 2, 3, Phase.TRAIN, False, "all_reduce", "", "", "train.py"))
        slot.times(Times(now - 10**10, now, -1, step, StepPart.FORWARD, (10**9,) * 8))
        slot.write_planned_steps(planned)


def test_a_run_on_this_machine(tmp_path: Path, board: Board) -> None:
    folder = _folder(tmp_path, ranks=(2, 3), board=board.path)
    _write(board, planned=70)
    (folder / "events.jsonl").write_text('{"time": 1, "text": "2 processes started"}\n{"time": 2, "te')
    (folder / "metrics.jsonl").write_text(
        '{"step": 5, "epoch": 0.5, "values": {"loss": 1.5, "learning_rate": 0.1}}\n{"st'
    )
    live = LiveRun(folder)
    state = live.read()
    live.close()
    assert [row.rank for row in state.rows] == [2, 3]  # by the folders of the ranks
    assert {row.difference for row in state.rows} == {Difference.NONE}
    assert (state.step, state.num_steps, state.epoch, state.loss, state.lr) == (7, 70, 0.5, 1.5, 0.1)
    assert state.steps_per_s == pytest.approx(0.7, rel=0.05)  # since the loop began, 10 s ago
    assert state.eta_s == pytest.approx(90, rel=0.05)
    assert state.events == ["2 processes started"]
    assert state.rows[0].memory_mb > 1
    assert state.elapsed_s == pytest.approx(100, abs=5)
    assert (state.is_live, state.why_not_live) == (True, "")


def test_losses_and_rates_are_those_of_the_step_records(tmp_path: Path, board: Board) -> None:
    folder = _folder(tmp_path, board=board.path)
    _write(board)
    (folder / "records" / "0").mkdir(parents=True)
    for rank in range(2):
        recorder = StepRecorder(folder / "records" / "0" / f"rank_{rank}.steps", rank=rank, world_size=2)
        for step in range(1, 6):
            recorder.add_loss(10.0 - step)
            recorder.num_samples += 8
            recorder.grad_norm, recorder.memory_mb = 0.5, 100.0 + rank
            recorder.record(step, 0.01, (0,) * 8)
            time.sleep(0.01)
    live = LiveRun(folder)
    state = live.read()
    live.close()
    assert list(state.losses) == [9.0, 8.0, 7.0, 6.0, 5.0]
    assert (state.loss, state.lr, state.grad_norm, state.loss_from) == (5.0, 0.01, 0.5, "rank 0")
    assert 400 < state.samples_per_s < 1700  # 8 samples in a little more than 10 ms, on two ranks
    assert math.isnan(state.items_per_s)
    assert [row.memory_mb for row in state.rows] == [100.0, 101.0]


def test_a_run_that_has_ended_or_runs_elsewhere_says_so(tmp_path: Path, board: Board) -> None:
    cases = {
        "the run has ended": _folder(tmp_path, "ended", outcome="succeeded", ended=time.time()),
        "the run's processes are on other-host": _folder(tmp_path, "elsewhere", machine={"host": "other-host"}),
        "its processes have not been started yet": _folder(tmp_path, "early", board=None),
        "its status board does not exist": _folder(tmp_path, "gone", board=str(tmp_path / "none")),
        "has no run.json": tmp_path,
    }
    for expected, folder in cases.items():
        live = LiveRun(folder)
        state = live.read()
        live.close()
        assert expected in state.why_not_live, expected
        assert (state.is_live, list(state.rows)) == (False, [])


def test_a_new_attempt_has_a_new_board(tmp_path: Path, board: Board) -> None:
    folder = _folder(tmp_path, board=board.path)
    _write(board, step=50)
    live = LiveRun(folder)
    assert live.read().step == 50
    other = Board(2, folder=str(tmp_path))
    try:
        (folder / "attempt_1" / "rank_0").mkdir(parents=True)
        (folder / "attempt_1" / "rank_1").mkdir()
        text = (folder / "run.json").read_text()
        (folder / "run.json").write_text(text.replace(board.path, other.path))
        _write(other, step=41)
        assert live.read().step == 41
    finally:
        live.close()
        other.remove()


def test_of_several_machines_the_ranks_of_this_one_are_shown(tmp_path: Path, board: Board) -> None:
    facts = {"num_machines": 2, "num_processes": 4}
    first = _folder(tmp_path, "node0", machine={"host": "other-host"}, board="/none", **facts)
    (first / "metrics.jsonl").write_text('{"step": 5, "epoch": 0.5, "values": {"loss": 1.5}}\n')
    _folder(tmp_path, "node1", ranks=(2, 3), board=board.path, **facts)
    _write(board)
    live = LiveRun(first)
    state = live.read()
    live.close()
    assert [row.rank for row in state.rows] == [2, 3]
    assert (state.host, state.num_machines, state.loss) == (HOST, 2, 1.5)
