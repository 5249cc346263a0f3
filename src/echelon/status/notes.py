"""What the program of a rank notes on the status board: its step, its phase, the operations that need other ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, wraps
from time import monotonic_ns
from types import FrameType, MappingProxyType
from typing import ParamSpec, TypeVar

from echelon.base import environ
from echelon.status.board import Mark, Phase, Slot, StatusNote, StepPart, Times
from echelon.status.call_site import is_users

__all__ = [
    "BOARD_VARIABLE",
    "Notes",
    "communicating",
    "note_loaded",
    "notes_of_process",
    "saving",
    "slow",
    "waiting",
    "within",
]

P = ParamSpec("P")
T = TypeVar("T")

BOARD_VARIABLE = "ECHELON_BOARD"
"""Path and slot, as ``/dev/shm/echelon-board-...:3``: from the launcher to its ranks."""

_PART_OF = MappingProxyType(
    {
        Phase.NONE: StepPart.OTHER,
        Phase.DATA: StepPart.DATA,
        Phase.TRAIN: StepPart.OTHER,
        Phase.OPTIMIZER: StepPart.OPTIMIZER,
        Phase.SAVE: StepPart.CHECKPOINT,
        Phase.LOAD: StepPart.CHECKPOINT,
        Phase.EVALUATE: StepPart.EVALUATION,
    }
)
_OF_THE_LOOP = frozenset({Phase.DATA, Phase.TRAIN, Phase.OPTIMIZER, Phase.EVALUATE})


class Notes:
    """Writes for one thread, the one that trains. A note costs two microseconds; those of a step are few."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._begun_ns = self._since_ns = self._num_steps = 0
        self._loaded = -1
        self._part = StepPart.OTHER
        self._num_forward = 0
        self._spent_ns = [0] * len(StepPart)
        self._step = self._num_operations = self._line = 0
        self._phase = Phase.NONE
        self._waits = False
        self._operation = self._detail = self._slow = self._file = ""

    def step(self, step: int, phase: Phase) -> None:
        """Note the number of optimizer steps, and what begins after the last one."""
        self._step, self._phase = step, phase
        self._num_steps = max(self._num_steps, step)  # of several optimizers, the one that makes most
        self._write()
        self._spend_on(phase)

    def phase(self, phase: Phase) -> Phase:
        """Note what part of the program begins; return the one that ends."""
        before = self._phase
        if phase is not before:
            self._phase = phase
            self._write()
            self._spend_on(phase)
        return before

    def _spend_on(self, phase: Phase) -> None:
        if not self._begun_ns and phase in _OF_THE_LOOP:
            self._begun_ns = self._since_ns = monotonic_ns()
        self.part(_PART_OF[phase])

    def part(self, part: StepPart) -> StepPart:
        """Note what the time goes to from now on, of a training loop that has begun; return what it went to."""
        before = self._part
        if self._begun_ns:
            now = monotonic_ns()
            self._spent_ns[before] += now - self._since_ns
            self._part, self._since_ns = part, now
            self._write_times()
        return before

    def begin_forward(self) -> None:
        """Note that the forward pass of a model begins; one within another, or in an evaluation, is a part of that."""
        self._num_forward += 1
        if self._part is StepPart.OTHER:
            self._num_forward = 1
            self.part(StepPart.FORWARD)

    def end_forward(self) -> None:
        """Note that the forward pass that was begun last has returned."""
        self._num_forward -= 1
        if self._num_forward == 0 and self._part is StepPart.FORWARD:
            self.part(StepPart.OTHER)

    def mark(self, step: int) -> None:
        """Note that the checkpoint of ``step`` is begun: what was done before need not be done again."""
        self.part(self._part)
        self._slot.mark(Mark(step, tuple(self._spent_ns)))

    def loaded(self, step: int) -> None:
        """Note that the training loop begins with the checkpoint of ``step``."""
        if not self._begun_ns:
            self._loaded = step
            self._write_times()

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """Note that the time of the block goes to other ranks; that of a save or a load stays theirs."""
        before = self._part
        if before is not StepPart.CHECKPOINT:
            self.part(StepPart.COMMUNICATION)
        try:
            yield
        finally:
            self.part(before)

    def operation(self, name: str, detail: str, *, waits: bool = False) -> None:
        """Note that an operation which needs other ranks begins, and where in the user's program.

        Args:
            name: of the operation.
            detail: the structure of its data.
            waits: it waits in a way that the reporter does not see in the stack, until another note says that it does not.
        """
        self._file, self._line = _users_line(sys._getframe(1))
        self._num_operations += 1
        self._operation, self._detail, self._waits = name, detail, waits
        self._write()

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """Note that the block is an operation that waits for other ranks, in a loop of its own."""
        self.operation(name, "", waits=True)
        try:
            with self.communicating():
                yield
        finally:
            self._waits = False
            self._write()

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Note that the block is a part of the program."""
        before = self.phase(phase)
        try:
            yield
        finally:
            self.phase(before)

    @contextmanager
    def slow(self, what: str) -> Iterator[None]:
        """Declare that the block may take long: nobody is to think that this rank has stalled."""
        before, self._slow = self._slow, what
        self._write()
        try:
            yield
        finally:
            self._slow = before
            self._write()

    def _write(self) -> None:
        numbers = monotonic_ns(), self._step, self._num_operations, self._line
        texts = self._operation, self._detail, self._slow, self._file
        self._slot.note(StatusNote(*numbers, self._phase, self._waits, *texts))

    def _write_times(self) -> None:
        numbers = self._begun_ns, self._since_ns, self._loaded, self._num_steps
        self._slot.times(Times(*numbers, self._part, tuple(self._spent_ns)))


def notes_of_process() -> Notes | None:
    """Return what writes for this process; None: no launcher of ours has started it, or its board is gone."""
    place = environ.own(BOARD_VARIABLE)
    return None if place is None else _open(place, os.getpid())


# One file for as long as the process lives: two writers of a record would number their notes apart.
@lru_cache(maxsize=1)
def _open(place: str, _pid: int) -> Notes | None:
    path, _, index = place.rpartition(":")
    try:
        return Notes(Slot(path, int(index)))
    except (OSError, ValueError):
        return None  # a program that has outlived its launcher, or a variable that somebody else's program inherited


def slow(what: str) -> AbstractContextManager[None]:
    """Return a context that may take long on this rank, while the others wait: it is no stall."""
    notes = notes_of_process()
    return nullcontext() if notes is None else notes.slow(what)


def waiting(operation: str) -> AbstractContextManager[None]:
    """Return a context in which this rank waits for others, in a loop of ours."""
    notes = notes_of_process()
    return nullcontext() if notes is None else notes.waiting(operation)


def within(phase: Phase) -> AbstractContextManager[None]:
    """Return a context that is a part of the program (saving, for one)."""
    notes = notes_of_process()
    return nullcontext() if notes is None else notes.within(phase)


@contextmanager
def saving(step: int) -> Iterator[None]:
    """Note that the block saves the run at ``step``."""
    notes = notes_of_process()
    if notes is None:
        yield
        return
    notes.mark(step)
    with notes.within(Phase.SAVE):
        yield


def note_loaded(step: int) -> None:
    """Note that the run goes on from ``step``, if that is before its training loop."""
    notes = notes_of_process()
    if notes is not None:
        notes.loaded(step)


def communicating(function: Callable[P, T]) -> Callable[P, T]:
    """Return ``function``, whose time goes to other ranks."""

    @wraps(function)
    def noted(*args: P.args, **kwargs: P.kwargs) -> T:
        notes = notes_of_process()
        if notes is None:
            return function(*args, **kwargs)
        with notes.communicating():
            return function(*args, **kwargs)

    return noted


def _users_line(frame: FrameType | None) -> tuple[str, int]:
    while frame is not None:
        name = frame.f_code.co_filename
        if is_users(name):
            return name, frame.f_lineno
        frame = frame.f_back
    return "", 0
