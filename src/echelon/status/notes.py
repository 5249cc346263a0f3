"""What the program of a rank notes on the status board: its step, its phase, the operations that need other ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from time import monotonic_ns
from types import FrameType

from echelon.base import environ
from echelon.status.board import Note, Phase, Slot
from echelon.status.place import is_users

__all__ = ["BOARD_VARIABLE", "Notes", "notes_of_process", "slow", "waiting", "within"]

BOARD_VARIABLE = "ECHELON_BOARD"
"""Path and slot, as ``/dev/shm/echelon-board-...:3``: from the launcher to its ranks."""


class Notes:
    """Writes for one thread, the one that trains. A note costs two microseconds; those of a step are few."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._step = self._num_operations = self._line = 0
        self._phase = Phase.NONE
        self._waits = False
        self._operation = self._detail = self._slow = self._file = ""

    def step(self, step: int, phase: Phase) -> None:
        """Note the number of optimizer steps, and what begins after the last one."""
        self._step, self._phase = step, phase
        self._write()

    def phase(self, phase: Phase) -> Phase:
        """Note what part of the program begins; return the one that ends."""
        before = self._phase
        if phase is not before:
            self._phase = phase
            self._write()
        return before

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
        self._slot.note(Note(*numbers, self._phase, self._waits, *texts))


def notes_of_process() -> Notes | None:
    """Return what writes for this process; None: no launcher of ours has started it, or its board is gone."""
    place = environ.get(BOARD_VARIABLE)
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


def _users_line(frame: FrameType | None) -> tuple[str, int]:
    while frame is not None:
        name = frame.f_code.co_filename
        if is_users(name):
            return name, frame.f_lineno
        frame = frame.f_back
    return "", 0
