"""What watches a pass over a prepared loader: records of the run, and checks of the data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from echelon.data.global_batch_slices import Contribution, LastStep
from echelon.data.rng.host_rng import HostDraws
from echelon.distributed.checks.duplicate_samples import DuplicateSamplesCheck
from echelon.distributed.record.recorder import ProcessRecorder, recorder_of_process
from echelon.distributed.structure import ignorant_find_batch_size
from echelon.status.board import Phase, StepPart
from echelon.status.notes import Notes, notes_of_process

# Looking up a member of an enum takes a tenth of a microsecond.
_DATA, _TRAIN, _EVALUATE, _FORWARD = Phase.DATA, Phase.TRAIN, Phase.EVALUATE, StepPart.FORWARD


BeforeReading = Callable[[Any], object]
AfterReading = Callable[[Any, LastStep | Contribution | None], object]


def observers_of_pass(
    *,
    first_pass: DuplicateSamplesCheck | None,
    begin_batch: BeforeReading | None,
    draws: HostDraws | None,
    is_alone: bool,
) -> tuple[list[BeforeReading], list[AfterReading]]:
    """Return what to call in each step of a pass that begins, with the current batch before the next one is read, and with the
    current batch and all ranks' batch sizes after that; nothing if nothing watches the pass.

    Args:
        draws: where the states of the random number generators are recorded before each batch, if they are.
        is_alone: whether one process trains: then the time until ``backward()`` counts as the forward pass.
    """
    before: list[BeforeReading] = [] if first_pass is None else [first_pass.add]
    after: list[AfterReading] = []
    notes, recorder = notes_of_process(), recorder_of_process()
    if begin_batch is not None:
        before.append(begin_batch)
    if draws is not None:
        before.append(draws.take)
    if notes is not None:
        phases = _Phases(notes, times_forward=is_alone)
        before.append(phases.before_reading)
        after.append(phases.after_reading)
    if recorder is not None:
        after.append(_SampleCounter(recorder).count)
    if draws is not None:
        after.append(draws.end_batch)
    return before, after


class _Phases:
    """Records whether this process reads data, trains or evaluates."""

    def __init__(self, notes: Notes, *, times_forward: bool) -> None:
        self._notes = notes
        self._times_forward = times_forward

    def before_reading(self, _batch: Any) -> None:
        self._notes.phase(_DATA)

    def after_reading(self, _batch: Any, _facts: object) -> None:
        if torch.is_grad_enabled():
            self._notes.phase(_TRAIN, _FORWARD if self._times_forward else None)
        else:
            self._notes.phase(_EVALUATE)


class _SampleCounter:
    """Records the sizes of the batches that are used for training, until one has no size: then the others have none either."""

    def __init__(self, recorder: ProcessRecorder) -> None:
        self._recorder = recorder
        self._has_sizes = True

    def count(self, batch: Any, facts: LastStep | Contribution | None) -> None:
        if not self._has_sizes or not torch.is_grad_enabled():
            return
        size = facts.num_items if isinstance(facts, Contribution) else ignorant_find_batch_size(batch)
        if size is None:
            self._has_sizes = False
        else:
            self._recorder.num_samples += int(size)
