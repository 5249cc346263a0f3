"""The status board: what a rank notes is what the launcher reads, whole, whatever happens in the middle of a note."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echelon.base import environ
from echelon.status import board as layout, call_site, notes as status_notes, stack_reporter as reporter
from echelon.status.board import Board, Doing, Phase, Slot, StatusNote, StepPart, Times, Watch
from echelon.world.launch_variables import BOARD_VARIABLE

WATCH = Watch(5, 77, 2**63 + 1, 12, Doing.COMMUNICATES | Doing.DUMPS, 3, 41, "/home/me/train.py")
NOTE = StatusNote(9, 118, 4, 33, Phase.SAVE, True, "gather", "float32[3, 4]", "tokenising", "/home/me/tr\u00e4in.py")


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Board]:
    board = Board(3, folder=str(tmp_path))
    yield board
    board.remove()


def test_written_values_are_read_by_slot(board: Board) -> None:
    slot = Slot(board.path, 1)
    assert (board.watch(1), board.note(1)) == (None, None)
    slot.watch(WATCH)
    slot.note(NOTE)
    assert (board.watch(1), board.note(1)) == (WATCH, NOTE)
    assert [board.note(other) for other in (0, 2)] == [None, None]


def test_long_text_is_truncated_and_a_path_keeps_its_end(board: Board) -> None:
    slot = Slot(board.path, 0)
    slot.note(NOTE._replace(operation="x" * 300, file="/" + "d" * 300 + "/train.py"))
    read = board.note(0)
    assert read is not None
    assert read.operation == "x" * 48
    assert (len(read.file), read.file[:3], read.file[-9:]) == (100, "...", "/train.py")


def test_a_request_reaches_every_slot(board: Board) -> None:
    slots = [Slot(board.path, index) for index in range(3)]
    assert [slot.request for slot in slots] == [0, 0, 0]
    assert board.request_stacks() == 1
    assert board.request_stacks() == 2
    assert [slot.request for slot in slots] == [2, 2, 2]


@pytest.mark.parametrize("kind", ["note", "times"])
def test_a_truncated_write_keeps_the_previous_value(kind: str, board: Board) -> None:
    spent = tuple(range(len(StepPart)))
    old, new = {
        "note": (NOTE, NOTE._replace(step=119, operation="reduce", file="/elsewhere.py")),
        "times": (Times(1, 2, -1, 4, StepPart.DATA, spent), Times(1, 3, -1, 5, StepPart.FORWARD, spent[::-1])),
    }[kind]
    slot = Slot(board.path, 2)
    write: Any = getattr(slot, kind)
    read: Any = getattr(board, kind)
    write(old)
    whole = bytes(slot._memory)
    write(new)
    after = bytes(slot._memory)
    changed = [i for i in range(len(whole)) if whole[i] != after[i]]
    for end in range(changed[0], changed[-1] + 1):  # the process dies when so many bytes are written
        slot._memory[:] = after[:end] + whole[end:]
        assert read(2) == old, end
    slot._memory[:] = after
    assert read(2) == new


def test_a_reader_never_sees_a_mixture_while_a_thread_writes(board: Board) -> None:
    slot, ends = Slot(board.path, 0), threading.Event()

    def write() -> None:
        number = 0
        while not ends.is_set():
            number += 1
            slot.note(NOTE._replace(step=number, num_operations=number, line=number % 10**6, operation=str(number)))

    thread = threading.Thread(target=write)
    thread.start()
    try:
        least, most, steps = time.monotonic() + 0.5, time.monotonic() + 60, set()
        while time.monotonic() < (least if len(steps) > 1 else most):
            note = board.note(0)
            if note is not None:
                assert note.operation == str(note.step) == str(note.num_operations)
                steps.add(note.step)
    finally:
        ends.set()
        thread.join()
    assert len(steps) > 1, "the writer was never let run"


def test_a_file_that_is_not_a_board_is_rejected(board: Board, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"\0" * 4096)
    with pytest.raises(ValueError, match="is not a version 4 status board"):
        Slot(str(other), 0)
    with pytest.raises(ValueError, match="has only 3 slots"):
        Slot(board.path, 3)


def test_the_file_belongs_to_the_user_and_is_removed_after_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "_SHARED", str(tmp_path / "no such folder"))  # macOS
    board = Board(1, folder=str(tmp_path))
    path = Path(board.path)
    assert path.parent == tmp_path
    assert path.stat().st_mode & 0o777 == 0o600
    board.remove()
    assert not path.exists()


def test_the_next_launcher_removes_the_board_of_a_killed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "_SHARED", str(tmp_path))
    running, orphan, young = Board(1, folder="/"), tmp_path / "echelon-board-old", tmp_path / "echelon-board-young"
    for path in (orphan, young):
        path.touch()
    for path in (orphan, Path(running.path)):
        os.utime(path, (0, 0))
    Board(1, folder="/").remove()
    assert not orphan.exists()
    assert young.exists()
    assert Path(running.path).exists()
    running.remove()


def test_the_program_records_its_step_phase_and_operations(board: Board) -> None:
    assert status_notes.notes_of_process() is None  # no launcher: no board
    with environ.patch({BOARD_VARIABLE: f"{board.path}:1"}):
        notes = status_notes.notes_of_process()
        assert notes is not None
        assert notes is status_notes.notes_of_process()
        notes.step(7, Phase.TRAIN)
        notes.operation("gather", "float32[2]")
        line = sys._getframe().f_lineno - 1
        with status_notes.within(Phase.SAVE), status_notes.slow("tokenising"), status_notes.waiting("barrier"):
            inside = board.note(1)
        after = board.note(1)
    assert inside is not None
    assert after is not None
    assert (inside.phase, inside.slow, inside.operation, inside.waits) == (Phase.SAVE, "tokenising", "barrier", True)
    assert (after.phase, after.slow, after.waits, after.step, after.num_operations) == (Phase.TRAIN, "", False, 7, 2)
    assert inside.file == after.file == __file__[-100:]
    assert inside.line == line + 2
    # A variable that was inherited from a run that is over.
    with environ.patch({BOARD_VARIABLE: "/no/such/board:0"}):
        assert status_notes.notes_of_process() is None
    with status_notes.slow("nothing"), status_notes.waiting("nothing"), status_notes.within(Phase.LOAD):
        pass


def test_the_reporter_records_the_threads_position_and_answers_requests(board: Board, tmp_path: Path) -> None:
    with (tmp_path / "stack.txt").open("w") as stack_file:
        here = reporter.Reporter(layout, call_site, f"{board.path}:0", str(tmp_path), stack_file)
        here._terminate = [None]  # leave the C++ of this process alone
        here._sample()
        first = board.watch(0)
        here._sample()  # the same line of this function, another call
        second = board.watch(0)
        assert board.request_stacks() == 1
        here._sample()
        third = board.watch(0)
        here._closing.release()
        if reporter.DUMP_SIGNAL is not None:
            os.kill(os.getpid(), reporter.DUMP_SIGNAL)
            reporter.faulthandler.unregister(reporter.DUMP_SIGNAL)
    assert first is not None
    assert second is not None
    assert third is not None
    assert (first.pid, first.file, first.answered) == (os.getpid(), __file__[-100:], 0)
    assert first.line < second.line < third.line
    assert first.signature != second.signature
    assert first.time_ns <= second.time_ns <= time.monotonic_ns()
    assert third.answered == 1
    answer = json.loads((tmp_path / reporter.ANSWER_FILE.format(1)).read_text())
    assert answer["call_site"]["file"] == __file__
    assert any("test_the_reporter_records_the_threads_position" in line for line in answer["stack"])
    assert reporter.DUMP_SIGNAL is None or "test_the_reporter_records" in (tmp_path / "stack.txt").read_text()


def test_the_reporter_takes_no_sample_after_it_was_closed(
    board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread may come late to the lock, when the interpreter shuts down already."""
    with (tmp_path / "stack.txt").open("w") as stack_file:
        here = reporter.Reporter(layout, call_site, f"{board.path}:0", str(tmp_path), stack_file)
    samples: list[str] = []
    monkeypatch.setattr(here, "_sample", lambda: samples.append("sample"))
    here.close(finished=True)
    assert samples == ["sample"]
    waits = iter((False, True))  # the period was over just before close() was called

    class Closing:
        def acquire(self, timeout: float) -> bool:
            return next(waits)

    monkeypatch.setattr(here, "_closing", Closing())
    here._run()
    assert samples == ["sample"]
    if reporter.DUMP_SIGNAL is not None:
        reporter.faulthandler.unregister(reporter.DUMP_SIGNAL)
