"""Every nanosecond of a training loop is attributed to one part of a step."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Accelerator
from echelon.accelerator.update import step_timing, update_policy
from echelon.data import pass_observers
from echelon.status import notes as status_notes
from echelon.status.board import Phase, StepPart
from echelon.status.notes import Notes

MS = 1_000_000


class _Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000
        monkeypatch.setattr(status_notes, "monotonic_ns", lambda: self.now)


def test_the_forward_passes_of_a_model_and_of_its_copies_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, notes = _Clock(monkeypatch), Notes(None)
    monkeypatch.setattr(step_timing, "notes_of_process", lambda: notes)
    model = nn.Linear(2, 2)
    step_timing.time_forward(model)

    def wait(*_: object) -> None:
        clock.now += MS

    notes.phase(Phase.TRAIN)
    for one in (model, copy.deepcopy(model)):
        one.register_forward_hook(wait, prepend=True)
        one(torch.ones(1, 2))
        clock.now += 10 * MS
    assert notes.spent_ns[StepPart.FORWARD] == 2 * MS


def test_a_pickled_model_can_be_read_where_echelon_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = Notes(None)
    monkeypatch.setattr(step_timing, "notes_of_process", lambda: notes)
    model = nn.Linear(2, 2)
    step_timing.time_forward(model)
    content = pickle.dumps(model)
    assert b"echelon" not in content
    found = pickle.loads(content)
    notes.phase(Phase.TRAIN)
    torch.testing.assert_close(found(torch.ones(1, 2)), model.forward(torch.ones(1, 2)))
    assert notes.spent_ns[StepPart.FORWARD] == 0


def test_on_one_process_no_hook_is_added_and_the_time_until_backward_counts_as_the_forward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notes = Notes(None)
    for module in (update_policy, pass_observers, step_timing):
        monkeypatch.setattr(module, "notes_of_process", lambda: notes)
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters()), loader)  # type: ignore[arg-type]
    for (x,) in loader:
        accelerator.backward(model(x).sum())
        assert notes.times.part is StepPart.OTHER
        optimizer.step()
    accelerator.end_training()
    assert min(notes.spent_ns[StepPart.FORWARD], notes.spent_ns[StepPart.BACKWARD]) > 0
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
