"""The run on one process stands for several: its schedules advance as theirs do, and its weights can be perturbed by one rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from echelon import Accelerator
from echelon.verify.parts import record_everything
from echelon.verify.recorders.merged_batches import MergedBatches
from echelon.verify.recorders.perturbation import Perturbation
from echelon.verify.recording import Recording, recording
from echelon.verify.trace import RecordingSettings, SketchedTensors, read_trace


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    accelerator = Accelerator(cpu=True)
    yield accelerator
    accelerator.end_training()


@contextmanager
def _recorded(folder: Path, record: Callable[[Recording], Any], **settings: Any) -> Iterator[None]:
    with recording(folder, RecordingSettings(steps=9, **settings), rank=0) as one:
        record(one)
        yield


def _loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(24.0).reshape(12, 2)), batch_size=2)


def test_a_prepared_scheduler_steps_once_for_each_merged_batch(tmp_path: Path, accelerator: Accelerator) -> None:
    with _recorded(tmp_path, MergedBatches, batch_factor=2):
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, _loader())
        rates = []
        for (batch,) in loader:
            accelerator.backward(model(batch).mean())
            optimizer.step()
            scheduler.step()
            rates.append(scheduler.get_last_lr()[0])
    assert rates == [0.25, 0.0625, 0.015625]  # on two processes, a prepared scheduler steps twice per update
    scheduler.step()
    assert scheduler.get_last_lr() == [0.0078125]


def test_a_loader_that_is_not_prepared_has_the_length_of_several_processes(
    tmp_path: Path, accelerator: Accelerator
) -> None:
    with _recorded(tmp_path, MergedBatches, batch_factor=2):
        loader = _loader()
        assert (len(loader), len(list(loader))) == (6, 3)
        prepared = accelerator.prepare(loader)
        assert (len(prepared), len(list(prepared))) == (3, 3)
    assert len(loader) == 3  # it was built with merged batches


def test_without_an_accelerator_a_length_is_that_of_the_merged_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One of an earlier test may live, ours or theirs.
    monkeypatch.setattr("echelon.accelerator.current.has_accelerator", lambda: False)
    monkeypatch.setattr("accelerate.state.AcceleratorState._shared_state", {})
    monkeypatch.delitem(globals(), "Accelerator")  # a script that has imported it is about to prepare its loaders
    with _recorded(tmp_path, MergedBatches, batch_factor=2):
        assert len(_loader()) == 3


def test_a_perturbation_is_one_rounding_of_each_weight(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    before, state = model.weight.detach().clone(), torch.get_rng_state()
    with _recorded(tmp_path, Perturbation, perturbation=1):
        model(torch.zeros(1, 8))
    change = (model.weight / before - 1).abs()
    assert 0 < float(change.min().detach()) <= float(change.max().detach()) <= 2 * torch.finfo(torch.float32).eps
    assert torch.equal(torch.get_rng_state(), state)


def test_gradients_are_perturbed_after_they_are_recorded_and_in_opposite_directions(tmp_path: Path) -> None:
    steps, recorded = [], []
    for seed in (1, 2):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = model.weight.detach().clone()
        folder = tmp_path / str(seed)
        changes = {"perturbation": seed, "gradient_errors": {"0:weight": 0.25}}
        with _recorded(folder, record_everything, **changes):
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(1, 8)).sum().backward()
                optimizer.step()
        steps.append((before - model.weight.detach()) / 2)  # two equal gradients, of ones
        assert torch.equal(model.bias.grad, torch.ones(8))  # nothing is known of its error
        tensors = [one for one in read_trace(folder).ranks[0] if isinstance(one, SketchedTensors)]
        recorded.append([one for one in tensors if one.content in ("local", "reduced")])
    assert all(
        one.sketches[0].square_sum == 64.0 for events in recorded for one in events
    )  # recorded before the change
    assert 0.0 < float((steps[0] - 1).abs().max()) <= 0.25 + 1e-6  # the norm times 0.25, spread over 64 elements
    assert torch.allclose(steps[0] + steps[1], torch.full((8, 8), 2.0))
