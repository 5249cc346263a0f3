"""The status board: a small file in shared memory in which each rank notes what it does, and which the launcher reads.

Layout, version 3, little-endian. Header of 64 bytes: ``8s`` magic, ``I`` version, ``I`` number of slots, ``I`` question (a
number that the launcher raises when it wants every rank's stacks). Then a slot of 2048 bytes for each local rank: the
record ``Watch`` at 0 and 160, the record ``StatusNote`` at 320 and 672, ``Times`` at 1024 and 1152, and the last eight records
``Mark`` from 1280 on, 80 bytes each. A record is ``I`` CRC-32 of what follows in it, ``I`` its number, and its fields in the
order below; texts are UTF-8, filled up with zeros. At 24 of the header and 1920 of a slot are two words each for preemption.

Each record but ``Mark`` stands there twice, written in turn, each with its number and checksum: a reader takes the newest
that is whole. So it is never given a torn one, also on processors that reorder stores, and a rank that dies in the middle of
a note leaves the one before. ``Watch`` has one writer, the reporter's thread, the others another, the thread that trains.

Standard library only, and nothing of echelon: the ranks of programs that do not use echelon load this file by its path.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import tempfile
import time
import zlib
from contextlib import suppress
from enum import IntEnum, IntFlag
from functools import lru_cache
from typing import Any, NamedTuple

__all__ = ["Board", "Doing", "Mark", "StatusNote", "StepPart", "Phase", "Slot", "Times", "Watch"]

_MAGIC, _VERSION = b"ECHBOARD", 3
_HEADER = struct.Struct("<8sIII")
_HEADER_BYTES = 64
_QUESTION_AT = 16
_COMMAND_AT, _GRACE_AT = 24, 32
_SLOT_BYTES = 2048
_HEAD = struct.Struct("<II")
_QUESTION = struct.Struct("<I")
_WATCH = struct.Struct("<qIQQIII100s")
_NOTE = struct.Struct("<qQQIBB48s96s48s100s")
_WATCH_AT = (0, 160)
_NOTE_AT = (320, 672)
_TIMES = struct.Struct("<QQqQB8Q")
_TIMES_AT = (1024, 1152)
_MARK = struct.Struct("<Q8Q")
_MARKS_AT = tuple(range(1280, 1920, 80))
_STAND_AT, _ASKED_AT = 1920, 1928
# In the processor's own order, so that it is stored and read in one piece.
_WORD = struct.Struct("@Q")
_FILE_BYTES = 100
_TRIES = 3
_ORPHAN_S = 60.0
_SHARED = "/dev/shm"
_PREFIX = "echelon-board-"


class Phase(IntEnum):
    """What part of a training program a rank is in."""

    NONE = 0
    DATA = 1
    TRAIN = 2
    OPTIMIZER = 3
    SAVE = 4
    LOAD = 5
    EVALUATE = 6

    def __str__(self) -> str:
        """Return it in words, for reports."""
        return _IN_WORDS[self]


_IN_WORDS = (
    "",
    "waiting for data",
    "forward/backward",
    "optimizer step",
    "saving a checkpoint",
    "loading a checkpoint",
    "evaluation",
)


class StepPart(IntEnum):
    """What the time of a training loop goes to."""

    DATA = 0
    FORWARD = 1
    """Of prepared models, from their call to its return."""
    BACKWARD = 2
    COMMUNICATION = 3
    """The transfer, and the wait for ranks that are later."""
    OPTIMIZER = 4
    EVALUATION = 5
    CHECKPOINT = 6
    OTHER = 7
    """Whatever else the program does in its loop: a loss outside the model, its own work on a batch, logging."""


class Doing(IntFlag):
    """What the reporter sees in the stack of the main thread, and of the process."""

    NOTHING = 0
    COMMUNICATES = 1
    """It is in a call that may wait for other ranks."""
    TRAINS = 2
    """That call is a backward pass, or a forward pass of a wrapped model."""
    COMPILES = 4
    """It is in a compiler, which may take long."""
    ENDED = 8
    """Its program is over; what comes now is the interpreter's end, and nothing more is noted."""
    FINISHED = 16
    """It has ended well."""
    DUMPS = 32
    """A signal makes it write its stacks, whatever holds the interpreter's lock."""
    DEBUGS = 64
    """It is in a debugger, where somebody thinks: that is no stall."""
    IMPORTS = 128
    """It imports a module, which may take long."""
    ELSEWHERE = 256
    """What it runs is neither Python's, nor torch's, nor echelon's."""


class Watch(NamedTuple):
    """What the reporter of a rank saw last."""

    time_ns: int
    """``time.monotonic_ns``: the heartbeat."""
    pid: int
    signature: int
    """Of the main thread's stack: another one means that the thread has moved on."""
    num_collectives: int
    """That this rank has begun, in all groups together."""
    doing: Doing
    answered: int
    """The last question that it has answered."""
    line: int
    file: str


class StatusNote(NamedTuple):
    """What the program of a rank noted last."""

    time_ns: int
    step: int
    num_operations: int
    """How many operations of echelon that need other ranks it has begun."""
    line: int
    phase: Phase
    waits: bool
    """It is in ``operation``, and that has not returned."""
    operation: str
    detail: str
    """The structure of the data (shapes, dtypes)."""
    slow: str
    """With what it has declared to take long; empty: with nothing."""
    file: str


class Times(NamedTuple):
    """Where the time of a rank has gone since its training loop began."""

    begun_ns: int
    """``time.monotonic_ns`` of that; 0: it has not."""
    since_ns: int
    """Since when it is in ``part``: that time is not in ``spent_ns`` yet."""
    loaded: int
    """The step of the checkpoint that it has begun with; -1: with none."""
    num_steps: int
    """Optimizer steps that it has made itself."""
    part: StepPart
    spent_ns: tuple[int, ...]
    """By ``StepPart``."""


class Mark(NamedTuple):
    """Where the time had gone when a checkpoint was begun."""

    step: int
    """Of the run."""
    spent_ns: tuple[int, ...]


# The same few texts again and again.
@lru_cache(maxsize=1024)
def _text(text: str, num_bytes: int) -> bytes:
    data = text.encode("utf-8", "replace")
    return data if len(data) <= num_bytes else data[:num_bytes]


@lru_cache(maxsize=1024)
def _path(text: str) -> bytes:
    data = text.encode("utf-8", "replace")
    return data if len(data) <= _FILE_BYTES else b"..." + data[3 - _FILE_BYTES :]


def _string(data: bytes) -> str:
    return data.rstrip(b"\0").decode("utf-8", "replace")


class Slot:
    """The part of a board that belongs to one rank: it writes there.

    Raises:
        OSError: there is no such file.
        ValueError: it is no board, or has no such slot.
    """

    def __init__(self, path: str, index: int) -> None:
        self._memory = _mapped(path)
        _, _, num_slots, _ = _HEADER.unpack_from(self._memory)
        if not 0 <= index < num_slots:
            raise ValueError(f"{path} has {num_slots} slots, and no slot {index}")
        self._at = _HEADER_BYTES + index * _SLOT_BYTES
        self._num_watches = self._num_notes = self._num_times = self._num_marks = 0

    @property
    def question(self) -> int:
        """The number of the launcher's last question."""
        return int(_QUESTION.unpack_from(self._memory, _QUESTION_AT)[0])

    def watch(self, watch: Watch) -> None:
        """Write the reporter's record."""
        self._num_watches += 1
        fields = _WATCH.pack(*watch[:7], _path(watch.file))
        self._write(_WATCH_AT[self._num_watches & 1], self._num_watches, fields)

    def note(self, note: StatusNote) -> None:
        """Write the program's record."""
        self._num_notes += 1
        texts = _text(note.operation, 48), _text(note.detail, 96), _text(note.slow, 48), _path(note.file)
        self._write(_NOTE_AT[self._num_notes & 1], self._num_notes, _NOTE.pack(*note[:6], *texts))

    def times(self, times: Times) -> None:
        """Write where the time goes."""
        self._num_times += 1
        fields = _TIMES.pack(*times[:5], *times.spent_ns)
        self._write(_TIMES_AT[self._num_times & 1], self._num_times, fields)

    def mark(self, mark: Mark) -> None:
        """Write where the time had gone, in the place of the oldest."""
        self._num_marks += 1
        place = _MARKS_AT[self._num_marks % len(_MARKS_AT)]
        self._write(place, self._num_marks, _MARK.pack(mark.step, *mark.spent_ns))

    @property
    def grace_ms(self) -> int:
        """How long a run has to save when it is asked to end; 0: nobody will lead it to that."""
        return int(_WORD.unpack_from(self._memory, _GRACE_AT)[0])

    def read_command(self) -> int:
        """Return what the coordinator of a preemption says (``stop_barrier.py``)."""
        return int(_WORD.unpack_from(self._memory, _COMMAND_AT)[0])

    def write_stand(self, stand: int) -> None:
        """Show the coordinator where this rank is."""
        _WORD.pack_into(self._memory, self._at + _STAND_AT, stand)

    def note_asked(self, number: int) -> None:
        """Tell the launcher that the signal ``number`` has asked this rank to save and end."""
        _WORD.pack_into(self._memory, self._at + _ASKED_AT, number)

    def _write(self, offset: int, number: int, fields: bytes) -> None:
        record = _HEAD.pack(zlib.crc32(fields, number), number) + fields
        begin = self._at + offset
        self._memory[begin : begin + len(record)] = record


class Board:
    """All slots, as the launcher has them: it reads, and asks.

    Args:
        num_slots: the number of ranks of this machine.
        folder: takes the file where the system has no /dev/shm.
    """

    def __init__(self, num_slots: int, *, folder: str) -> None:
        shared = os.path.isdir(_SHARED) and os.access(_SHARED, os.W_OK)
        if shared:
            _remove_orphans(_SHARED)
        # Readable by this user only (mkstemp). The lock says that its launcher lives.
        self._file, self.path = tempfile.mkstemp(prefix=_PREFIX, dir=_SHARED if shared else folder)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self.num_slots = num_slots
        os.ftruncate(self._file, _HEADER_BYTES + num_slots * _SLOT_BYTES)
        os.pwrite(self._file, _HEADER.pack(_MAGIC, _VERSION, num_slots, 0), 0)
        self._memory = _mapped(self.path)

    def ask(self) -> int:
        """Ask every rank for its stacks; return the number of the question."""
        number = int(_QUESTION.unpack_from(self._memory, _QUESTION_AT)[0]) + 1
        _QUESTION.pack_into(self._memory, _QUESTION_AT, number)
        return number

    def set_grace(self, grace_ms: int) -> None:
        """Tell the ranks how long they have to save when they are asked to end; 0: they will not be led to it."""
        _WORD.pack_into(self._memory, _GRACE_AT, grace_ms)

    def write_command(self, command: int) -> None:
        """Give ``command`` to every rank (``stop_barrier.py``)."""
        _WORD.pack_into(self._memory, _COMMAND_AT, command)

    def read_stands(self) -> list[int]:
        """Return where each rank is (``stop_barrier.py``); 0: it takes no part in preemptions yet."""
        return self._words(_STAND_AT)

    def asked(self) -> list[int]:
        """Return for each rank the number of the signal that has asked it to save and end; 0: none has."""
        return self._words(_ASKED_AT)

    def _words(self, offset: int) -> list[int]:
        first = _HEADER_BYTES + offset
        return [_WORD.unpack_from(self._memory, first + i * _SLOT_BYTES)[0] for i in range(self.num_slots)]

    def watch(self, index: int) -> Watch | None:
        """Return what the reporter of a rank saw last; None: it has not begun."""
        fields = self._read(index, _WATCH_AT, _WATCH)
        if fields is None:
            return None
        time_ns, pid, signature, num_collectives, doing, answered, line, file = fields
        return Watch(time_ns, pid, signature, num_collectives, Doing(doing), answered, line, _string(file))

    def note(self, index: int) -> StatusNote | None:
        """Return what the program of a rank noted last; None: it has noted nothing."""
        fields = self._read(index, _NOTE_AT, _NOTE)
        if fields is None:
            return None
        time_ns, step, num_operations, line, phase, waits, *texts = fields
        operation, detail, slow, file = map(_string, texts)
        return StatusNote(time_ns, step, num_operations, line, Phase(phase), bool(waits), operation, detail, slow, file)

    def times(self, index: int) -> Times | None:
        """Return where the time of a rank has gone; None: it has noted nothing."""
        fields = self._read(index, _TIMES_AT, _TIMES)
        if fields is None:
            return None
        begun_ns, since_ns, loaded, num_steps, part, *spent_ns = fields
        return Times(begun_ns, since_ns, loaded, num_steps, StepPart(part), tuple(spent_ns))

    def marks(self, index: int) -> list[Mark]:
        """Return where the time of a rank had gone at its last checkpoints, the oldest first."""
        return [Mark(step, tuple(spent_ns)) for step, *spent_ns in self._whole(index, _MARKS_AT, _MARK)]

    def _read(self, index: int, places: tuple[int, ...], layout: struct.Struct) -> tuple[Any, ...] | None:
        for _ in range(_TRIES):  # neither copy is whole only while the very first one is written, or by a bad accident
            found = self._whole(index, places, layout)
            if found:
                return found[-1]
        return None

    def _whole(self, index: int, places: tuple[int, ...], layout: struct.Struct) -> list[tuple[Any, ...]]:
        """Return the fields of the whole records among those at ``places``, in the order of their numbers."""
        begin = _HEADER_BYTES + index * _SLOT_BYTES
        found: list[tuple[int, bytes]] = []
        for place in places:
            record = self._memory[begin + place : begin + place + _HEAD.size + layout.size]
            checksum, number = _HEAD.unpack_from(record)
            if number and zlib.crc32(record[_HEAD.size :], number) == checksum:
                found.append((number, record))
        return [layout.unpack_from(record, _HEAD.size) for _, record in sorted(found)]

    def close(self) -> None:
        """Remove the file."""
        self._memory.close()
        with suppress(FileNotFoundError):  # it went with the run's folder
            os.unlink(self.path)
        os.close(self._file)


def _remove_orphans(folder: str) -> None:
    """Remove the boards of launchers of this user that were killed before they could."""
    for entry in os.scandir(folder):
        if not entry.name.startswith(_PREFIX):
            continue
        with suppress(
            OSError
        ):  # another launcher's that runs (it is locked), another user's, or one that goes just now
            if time.time() - entry.stat().st_mtime < _ORPHAN_S:
                continue  # it may be about to be locked
            file = os.open(entry.path, os.O_RDWR)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(entry.path)
            finally:
                os.close(file)


def _mapped(path: str) -> mmap.mmap:
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    magic, version, num_slots, _ = _HEADER.unpack_from(memory)
    if (magic, version) != (_MAGIC, _VERSION) or len(memory) != _HEADER_BYTES + num_slots * _SLOT_BYTES:
        memory.close()
        raise ValueError(f"{path} is no status board of version {_VERSION}")
    return memory
