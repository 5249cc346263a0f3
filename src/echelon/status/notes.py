"""Records what a rank's program is doing on the status board: its step, phase, and operations involving other ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, wraps
from time import monotonic_ns
from types import FrameType
from typing import ParamSpec, TypeVar

from echelon.status.board import Mark, Phase, Slot, StatusNote, StepPart, Times
from echelon.status.call_site import is_user_file
from echelon.world.launch_variables import board_slot, is_recording_off

P = ParamSpec("P")
T = TypeVar("T")

# In the order of the phases.
_PART_OF = (
    StepPart.OTHER,
    StepPart.DATA,
    StepPart.OTHER,
    StepPart.OPTIMIZER,
    StepPart.CHECKPOINT,
    StepPart.CHECKPOINT,
    StepPart.EVALUATION,
)
_LOOP_PHASES = frozenset({Phase.DATA, Phase.TRAIN, Phase.OPTIMIZER, Phase.EVALUATE})


class Notes:
    """Writes the training thread's records. Writing a record takes two microseconds, and each step writes only a few.

    Args:
        slot: where the launcher reads them; None in a process without a launcher, which only measures its times.
    """

    def __init__(self, slot: Slot | None) -> None:
        self._slot = slot
        self._begun_ns = self._since_ns = self._num_steps = 0
        self._loaded = -1
        self._part = StepPart.OTHER
        self._num_forward = 0
        self.spent_ns = [0] * len(StepPart)
        """Nanoseconds by ``StepPart`` since the training loop started, without the current part; written only here."""
        self._step = self._num_operations = self._line = 0
        self._phase = Phase.NONE
        self._waits = self._awaits_all = False
        self._operation = self._detail = self._slow = self._file = ""

    @property
    def times(self) -> Times:
        """The times so far."""
        numbers = self._begun_ns, self._since_ns, self._loaded, self._num_steps
        return Times(*numbers, self._part, tuple(self.spent_ns))

    def step(self, step: int, phase: Phase) -> None:
        """Record the number of optimizer steps, and the phase that starts after the last of them."""
        self._step, self._phase = step, phase
        if step > self._num_steps:  # with several optimizers, the largest number of steps
            self._num_steps = step
        if self._slot is not None:
            self._write()
        if not self._begun_ns:
            self._begin(phase)
        self.part(_PART_OF[phase])

    def phase(self, phase: Phase, part: StepPart | None = None) -> Phase:
        """Record that a phase starts, with ``part`` of the step if that is known, and return the previous phase."""
        before = self._phase
        if phase is not before:
            self._phase = phase
            if self._slot is not None:
                self._write()
            if not self._begun_ns:
                self._begin(phase)
            self.part(_PART_OF[phase] if part is None else part)
        return before

    def _begin(self, phase: Phase) -> None:
        if phase in _LOOP_PHASES:
            self._begun_ns = self._since_ns = monotonic_ns()

    def part(self, part: StepPart) -> StepPart:
        """Attribute time to ``part`` of the step from now on, and return the previous part."""
        before = self._part
        if self._begun_ns:
            now = monotonic_ns()
            self.spent_ns[before] += now - self._since_ns
            self._part, self._since_ns = part, now
            if self._slot is not None:
                self._write_times()
        return before

    def begin_forward(self) -> None:
        """Record that a forward pass starts. If it is nested or part of an evaluation, its time counts toward the outer part."""
        self._num_forward += 1
        if self._part is StepPart.OTHER:
            self._num_forward = 1
            self.part(StepPart.FORWARD)

    def end_forward(self) -> None:
        """Record that the innermost forward pass ends."""
        self._num_forward -= 1
        if self._num_forward == 0 and self._part is StepPart.FORWARD:
            self.part(StepPart.OTHER)

    def mark(self, step: int) -> None:
        """Record that saving the checkpoint for ``step`` starts. A restart repeats only what happens after this point."""
        self.part(self._part)
        if self._slot is not None:
            self._slot.mark(Mark(step, tuple(self.spent_ns)))

    def loaded(self, step: int) -> None:
        """Record that the training loop resumes from the checkpoint for ``step``."""
        if not self._begun_ns:
            self._loaded = step
            self._write_times()

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """Count the time spent in the block as communication, unless it is part of saving or loading a checkpoint."""
        before = self._part
        if before is not StepPart.CHECKPOINT:
            self.part(StepPart.COMMUNICATION)
        try:
            yield
        finally:
            self.part(before)

    def operation(self, name: str, detail: str, *, waits: bool = False, awaits_all: bool = False) -> None:
        """Record that an operation involving other ranks starts, and which line of the user's program called it.

        Args:
            name: name of the operation.
            detail: structure of the operation's data.
            waits: whether the program waits until the next record in a way that the reporter cannot see in the stack.
            awaits_all: whether it waits until all ranks of the run have reached the operation.
        """
        if self._slot is None:
            return
        self._file, self._line = _user_line(sys._getframe(1))
        self._num_operations += 1
        self._operation, self._detail, self._waits, self._awaits_all = name, detail, waits, awaits_all
        self._write()

    @contextmanager
    def waiting(self, name: str, *, awaits_all: bool) -> Iterator[None]:
        """Record that the block waits for other ranks in one of echelon's own loops."""
        self.operation(name, "", waits=True, awaits_all=awaits_all)
        try:
            with self.communicating():
                yield
        finally:
            self._waits = self._awaits_all = False
            self._write()

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Record that the block belongs to ``phase``."""
        before = self.phase(phase)
        try:
            yield
        finally:
            self.phase(before)

    @contextmanager
    def slow(self, what: str) -> Iterator[None]:
        """Declare that the block may take a long time and is not a stall."""
        before, self._slow = self._slow, what
        self._write()
        try:
            yield
        finally:
            self._slow = before
            self._write()

    def plan(self, num_steps: int) -> None:
        """Record the number of optimizer steps of the whole run."""
        if self._slot is not None:
            self._slot.write_planned_steps(num_steps)

    def _write(self) -> None:
        if self._slot is None:
            return
        numbers = monotonic_ns(), self._step, self._num_operations, self._line
        texts = self._operation, self._detail, self._slow, self._file
        self._slot.note(StatusNote(*numbers, self._phase, self._waits, *texts, self._awaits_all))

    def _write_times(self) -> None:
        if self._slot is not None:
            self._slot.times(self.times)


def notes_of_process() -> Notes | None:
    """Return this process's ``Notes``.

    None if the board was removed, or if echelon launch did not start this process and it does not record its run.
    """
    slot = board_slot()
    if slot is not None:
        return _open(slot, os.getpid())
    if is_recording_off():
        return None
    return _without_slot(os.getpid())


# Opened once per process, because two writers would number their records independently.
@lru_cache(maxsize=1)
def _open(slot: str, _pid: int) -> Notes | None:
    path, _, index = slot.rpartition(":")
    try:
        return Notes(Slot(path, int(index)))
    except (OSError, ValueError):
        return None  # the program outlived its launcher, or inherited the variable from another program


@lru_cache(maxsize=1)
def _without_slot(_pid: int) -> Notes:
    return Notes(None)


def slow(what: str) -> AbstractContextManager[None]:
    """Return a context for work that takes a long time on this rank while other ranks wait.

    Inside the context, ``echelon launch`` reports a stall only after ``--slow_timeout`` (default: 600 s). ``what`` is the
    name of the work in reports.

    Examples:
        >>> with accelerator.slow("download"):
        ...     dataset = download()
    """
    notes = notes_of_process()
    return nullcontext() if notes is None else notes.slow(what)


def waiting(operation: str, *, awaits_all: bool = False) -> AbstractContextManager[None]:
    """Return a context in which this rank waits for other ranks in one of echelon's own loops.

    Args:
        operation: name of the operation.
        awaits_all: whether it waits, without a time limit of the program's own, until all ranks of the run have reached it.
    """
    notes = notes_of_process()
    return nullcontext() if notes is None else notes.waiting(operation, awaits_all=awaits_all)


def within(phase: Phase) -> AbstractContextManager[None]:
    """Return a context that is recorded as ``phase``."""
    notes = notes_of_process()
    return nullcontext() if notes is None else notes.within(phase)


def note_phase(phase: Phase) -> None:
    """Record that ``phase`` starts."""
    notes = notes_of_process()
    if notes is not None:
        notes.phase(phase)


@contextmanager
def saving(step: int) -> Iterator[None]:
    """Record that the block saves the run's state at ``step``."""
    notes = notes_of_process()
    if notes is None:
        yield
        return
    notes.mark(step)
    with notes.within(Phase.SAVE):
        yield


def note_loaded(step: int) -> None:
    """Record that the run resumes from ``step``, if its training loop has not started yet."""
    notes = notes_of_process()
    if notes is not None:
        notes.loaded(step)


def communicating(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate ``function`` so that its time counts as communication."""

    @wraps(function)
    def recorded(*args: P.args, **kwargs: P.kwargs) -> T:
        notes = notes_of_process()
        if notes is None:
            return function(*args, **kwargs)
        with notes.communicating():
            return function(*args, **kwargs)

    return recorded


def _user_line(frame: FrameType | None) -> tuple[str, int]:
    while frame is not None:
        name = frame.f_code.co_filename
        if is_user_file(name):
            return name, frame.f_lineno
        frame = frame.f_back
    return "", 0
