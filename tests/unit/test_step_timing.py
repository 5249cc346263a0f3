"""Without a launcher, the parts of short steps are timed in some steps only, and every nanosecond is attributed once."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from echelon.accelerator.update import step_timing
from echelon.status import notes as status_notes
from echelon.status.board import Phase, StepPart
from echelon.status.notes import Notes

MS = 1_000_000


class _Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000
        monkeypatch.setattr(status_notes, "monotonic_ns", lambda: self.now)


def _step(notes: Notes, clock: _Clock, number: int, *, scale: int = 1, data_ms: int = 1) -> bool:
    """Make a step of 1 ms for data and 2 ms for the rest; return whether it was timed."""
    was_timed = notes.is_timed
    if was_timed:
        notes.phase(Phase.DATA)
    clock.now += data_ms * MS * scale
    if was_timed:
        notes.phase(Phase.TRAIN)
    clock.now += 2 * MS * scale
    notes.step(number, Phase.TRAIN)
    return was_timed


def test_one_of_17_short_steps_is_timed_and_the_others_are_divided_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, notes = _Clock(monkeypatch), Notes(None)
    begin = clock.now
    timed = [_step(notes, clock, number) for number in range(1, 36)]
    assert [i for i, was_timed in enumerate(timed) if was_timed] == [0, 1, 18]
    assert sum(notes.spent_ns) == clock.now - begin
    assert notes.spent_ns[StepPart.DATA] == pytest.approx(35 * MS, rel=1e-6)
    assert notes.spent_ns[StepPart.OTHER] == pytest.approx(70 * MS, rel=1e-6)
    assert notes.times.num_steps == 35


def test_steps_of_10_ms_are_all_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, notes = _Clock(monkeypatch), Notes(None)
    assert all(_step(notes, clock, number, scale=4) for number in range(1, 40))


def test_what_is_no_part_of_a_step_is_timed_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, notes = _Clock(monkeypatch), Notes(None)
    for number in range(1, 6):
        _step(notes, clock, number)
    assert not notes.is_timed
    with notes.within(Phase.SAVE):
        clock.now += 500 * MS
    with notes.communicating():
        clock.now += 300 * MS
    assert notes.is_timed
    assert notes.spent_ns[StepPart.CHECKPOINT] == 500 * MS
    assert notes.spent_ns[StepPart.COMMUNICATION] == 300 * MS
    _step(notes, clock, 6)
    assert notes.is_timed  # the step was not timed as a whole
    _step(notes, clock, 7)
    assert not notes.is_timed


def test_a_slow_step_is_followed_by_a_timed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, notes = _Clock(monkeypatch), Notes(None)
    for number in range(1, 6):
        _step(notes, clock, number)
    _step(notes, clock, 6, data_ms=50)  # nobody knows that it waited for data
    assert notes.spent_ns[StepPart.DATA] == pytest.approx(5 * MS + 2 * MS, rel=1e-6)
    assert notes.is_timed
    before = notes.spent_ns[StepPart.DATA]
    _step(notes, clock, 7, data_ms=50)
    assert notes.spent_ns[StepPart.DATA] - before == 50 * MS


def test_the_hooks_of_a_model_are_there_while_steps_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, notes = _Clock(monkeypatch), Notes(None)
    monkeypatch.setattr(step_timing, "notes_of_process", lambda: notes)
    model = nn.Linear(2, 2)
    step_timing.time_forward(model)
    seen: list[int] = []
    other = model.register_forward_hook(lambda *_: seen.append(1))

    def count() -> tuple[int, int]:
        return len(model._forward_pre_hooks), len(model._forward_hooks)

    assert count() == (1, 2)
    same: Any = pickle.loads(pickle.dumps(nn.Sequential(_without(model, other))))
    same(torch.ones(1, 2))
    copy.deepcopy(model)(torch.ones(1, 2))
    _step(notes, clock, 1)
    _step(notes, clock, 2)
    assert not notes.is_timed
    assert count() == (0, 1)  # the user's hook remains
    for number in range(3, 19):
        _step(notes, clock, number)
    assert notes.is_timed
    assert count() == (1, 2)
    model(torch.ones(1, 2))
    assert seen


def _without(model: nn.Module, handle: Any) -> nn.Module:
    """Return a copy of ``model`` without the hook of ``handle``, which cannot be pickled."""
    found = copy.deepcopy(model)
    del found._forward_hooks[handle.id]
    return found
