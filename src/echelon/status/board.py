"""The status board: a small file in shared memory where each rank writes its status for the launcher to read.

Layout (version 4, little-endian): A 64-byte header contains ``8s`` magic, ``I`` version, ``I`` number of slots, and ``I``
request number, which the launcher increments to request stacks from all ranks. It is followed by one 2048-byte slot per local
rank, with ``Watch`` records at offsets 0 and 160, ``StatusNote`` at 320 and 672, ``Times`` at 1024 and 1152, and the last
eight ``Mark`` records, of 80 bytes each, starting at 1280. A record consists of ``I`` CRC-32 of the rest, ``I`` number, and
its fields in the order below. Strings are UTF-8, padded with zeros. Two words for preemption are stored at offset 24 in the
header and at offset 1920 in each slot; a word at offset 1936 is the number of steps of the whole run.

Each record except ``Mark`` has two copies, which are written alternately. A reader uses the newest copy with a correct
checksum. Therefore, it never sees a torn record, even on processors that reorder stores, and if a rank dies during a write,
the previous copy is still there. Only the reporter thread writes ``Watch``, and only the training thread writes the other
records.

This file uses only the standard library, because ranks whose programs do not use echelon load it by path.
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
from typing import Any, NamedTuple

from echelon.base.messages.translation import gettext_noop as N_

_MAGIC, _VERSION = b"ECHBOARD", 4
_HEADER = struct.Struct("<8sIII")
_HEADER_BYTES = 64
_REQUEST_AT = 16
_COMMAND_AT, _GRACE_AT = 24, 32
_SLOT_BYTES = 2048
_HEAD = struct.Struct("<II")
_REQUEST = struct.Struct("<I")
_WATCH = struct.Struct("<qIQQIII100s")
_NOTE = struct.Struct("<qQQIBB48s96s48s100s?")
_WATCH_AT = (0, 160)
_NOTE_AT = (320, 672)
_TIMES = struct.Struct("<QQqQB8Q")
_TIMES_AT = (1024, 1152)
_MARK = struct.Struct("<Q8Q")
_MARKS_AT = tuple(range(1280, 1920, 80))
_POSITION_AT, _SIGNAL_AT, _PLANNED_AT = 1920, 1928, 1936
# Native byte order and alignment make loads and stores atomic.
_WORD = struct.Struct("@Q")
_FILE_BYTES = 100
_TRIES = 3
_ORPHAN_S = 60.0
_SHARED = "/dev/shm"
_PREFIX = "echelon-board-"


class Phase(IntEnum):
    """A phase of a training program."""

    NONE = 0
    DATA = 1
    TRAIN = 2
    OPTIMIZER = 3
    SAVE = 4
    LOAD = 5
    EVALUATE = 6

    def __str__(self) -> str:
        """Return the phase's name for use in reports."""
        return _IN_WORDS[self]


_IN_WORDS = (
    "",
    N_("waiting for data"),
    N_("training"),
    N_("optimizer step"),
    N_("saving a checkpoint"),
    N_("loading a checkpoint"),
    N_("evaluation"),
)


class StepPart(IntEnum):
    """A part of a training step, for attributing time."""

    DATA = 0
    FORWARD = 1
    """Calls of prepared models."""
    BACKWARD = 2
    COMMUNICATION = 3
    """Time spent on transfers and on waiting for slower ranks."""
    OPTIMIZER = 4
    EVALUATION = 5
    CHECKPOINT = 6
    OTHER = 7
    """The rest of the loop, such as computing the loss outside the model, processing batches, and logging."""


class Doing(IntFlag):
    """What the main thread is doing, as far as the reporter can tell from its stack."""

    NOTHING = 0
    COMMUNICATES = 1
    """The thread is in a call that may wait for other ranks."""
    TRAINS = 2
    """The call that may wait is part of a backward pass, or of a wrapped model's forward pass."""
    COMPILES = 4
    """The thread is running a compiler."""
    ENDED = 8
    """The program has ended and the interpreter is exiting. Nothing more is recorded."""
    FINISHED = 16
    """The program succeeded."""
    DUMPS = 32
    """``DUMP_SIGNAL`` makes the process write its stacks, even if native code holds the GIL."""
    DEBUGS = 64
    """The thread is stopped in a debugger, which does not count as a stall."""
    IMPORTS = 128
    """The thread is importing a module."""
    ELSEWHERE = 256
    """The innermost code is not part of Python, torch or echelon."""


class Watch(NamedTuple):
    """The latest sample taken by a rank's reporter."""

    time_ns: int
    """``time.monotonic_ns()`` when the sample was taken, which serves as the heartbeat."""
    pid: int
    signature: int
    """Hash of the main thread's stack, which changes when the thread makes progress."""
    num_collectives: int
    """Number of collectives that this rank has started in all groups."""
    doing: Doing
    answered: int
    """Number of the last request that the reporter answered."""
    line: int
    file: str

    def shifted(self, offset_ns: int) -> Watch:
        """Convert the record's time to another clock."""
        return self._replace(time_ns=self.time_ns + offset_ns)


class StatusNote(NamedTuple):
    """The latest record written by a rank's program."""

    time_ns: int
    step: int
    num_operations: int
    """Number of echelon operations that the program has started and that involve other ranks."""
    line: int
    phase: Phase
    waits: bool
    """Whether ``operation`` has not returned yet."""
    operation: str
    detail: str
    """Structure of the operation's data (shapes and dtypes)."""
    slow: str
    """Name of the slow phase that the program has declared; empty if none."""
    file: str
    awaits_all: bool = False
    """Whether ``operation`` waits, without a time limit of the program's own, until all ranks of the run have reached it."""

    def shifted(self, offset_ns: int) -> StatusNote:
        """Convert the record's time to another clock."""
        return self._replace(time_ns=self.time_ns + offset_ns)


class Times(NamedTuple):
    """The time that a rank has spent on each ``StepPart`` since its training loop started."""

    begun_ns: int
    """``time.monotonic_ns()`` when the loop started; 0 if it has not started."""
    since_ns: int
    """``time.monotonic_ns()`` when the current ``part`` started. Its time is not included in ``spent_ns`` yet."""
    loaded: int
    """Step of the checkpoint that the rank resumed from; -1 if it did not resume."""
    num_steps: int
    """Number of optimizer steps in this process."""
    part: StepPart
    spent_ns: tuple[int, ...]
    """Nanoseconds by ``StepPart``."""

    def shifted(self, offset_ns: int) -> Times:
        """Convert the record's times to another clock."""
        return self._replace(begun_ns=self.begun_ns + offset_ns, since_ns=self.since_ns + offset_ns)


class Mark(NamedTuple):
    """The time that a rank had spent on each ``StepPart`` when it started saving a checkpoint."""

    step: int
    """Step of the run."""
    spent_ns: tuple[int, ...]


def _text(text: str, num_bytes: int) -> bytes:
    data = text.encode("utf-8", "replace")
    return data if len(data) <= num_bytes else data[:num_bytes]


def _path(text: str) -> bytes:
    data = text.encode("utf-8", "replace")
    return data if len(data) <= _FILE_BYTES else b"..." + data[3 - _FILE_BYTES :]


def _string(data: bytes) -> str:
    return data.rstrip(b"\0").decode("utf-8", "replace")


class Slot:
    """The part of a board that one rank writes.

    Raises:
        OSError: the file does not exist.
        ValueError: the file is not a board, or does not have this slot.
    """

    def __init__(self, path: str, index: int) -> None:
        self._memory = _mapped(path)
        _, _, num_slots, _ = _HEADER.unpack_from(self._memory)
        if not 0 <= index < num_slots:
            raise ValueError(f"slot {index} is out of range, because {path} has only {num_slots} slots")
        self._at = _HEADER_BYTES + index * _SLOT_BYTES
        self._num_watches = self._num_notes = self._num_times = self._num_marks = 0

    @property
    def request(self) -> int:
        """Number of the launcher's last request for stacks."""
        return int(_REQUEST.unpack_from(self._memory, _REQUEST_AT)[0])

    def watch(self, watch: Watch) -> None:
        """Write the reporter's record."""
        self._num_watches += 1
        fields = _WATCH.pack(*watch[:7], _path(watch.file))
        self._write(_WATCH_AT[self._num_watches & 1], self._num_watches, fields)

    def note(self, note: StatusNote) -> None:
        """Write the program's record."""
        self._num_notes += 1
        texts = _text(note.operation, 48), _text(note.detail, 96), _text(note.slow, 48), _path(note.file)
        self._write(_NOTE_AT[self._num_notes & 1], self._num_notes, _NOTE.pack(*note[:6], *texts, note.awaits_all))

    def times(self, times: Times) -> None:
        """Write a ``Times`` record."""
        self._num_times += 1
        fields = _TIMES.pack(*times[:5], *times.spent_ns)
        self._write(_TIMES_AT[self._num_times & 1], self._num_times, fields)

    def mark(self, mark: Mark) -> None:
        """Write a mark, replacing the oldest mark."""
        self._num_marks += 1
        offset = _MARKS_AT[self._num_marks % len(_MARKS_AT)]
        self._write(offset, self._num_marks, _MARK.pack(mark.step, *mark.spent_ns))

    @property
    def grace_ms(self) -> int:
        """Milliseconds that ranks have to agree on a step when preempted; 0 if the launcher does not run a stop barrier."""
        return int(_WORD.unpack_from(self._memory, _GRACE_AT)[0])

    def read_command(self) -> int:
        """Return the stop barrier's command (see ``stop_barrier.py``)."""
        return int(_WORD.unpack_from(self._memory, _COMMAND_AT)[0])

    def write_position(self, position: int) -> None:
        """Write this rank's position in the stop barrier (see ``stop_barrier.py``)."""
        _WORD.pack_into(self._memory, self._at + _POSITION_AT, position)

    def write_preemption_signal(self, number: int) -> None:
        """Notify the launcher that this rank received signal ``number``, which requests it to save and exit."""
        _WORD.pack_into(self._memory, self._at + _SIGNAL_AT, number)

    def write_planned_steps(self, number: int) -> None:
        """Write the number of optimizer steps of the whole run."""
        _WORD.pack_into(self._memory, self._at + _PLANNED_AT, number)

    def _write(self, offset: int, number: int, fields: bytes) -> None:
        record = _HEAD.pack(zlib.crc32(fields, number), number) + fields
        begin = self._at + offset
        self._memory[begin : begin + len(record)] = record


class BoardReader:
    """Reads all slots of a board, in any process of the user who started the run.

    Args:
        path: the board's path.
        access: ``mmap.ACCESS_READ`` or, for the launcher, ``mmap.ACCESS_WRITE``.

    Raises:
        OSError: the file does not exist.
        ValueError: the file is not a board.
    """

    def __init__(self, path: str, *, access: int = mmap.ACCESS_READ) -> None:
        self._memory = _mapped(path, access)
        self.num_slots = int(_HEADER.unpack_from(self._memory)[2])

    def watch(self, index: int) -> Watch | None:
        """Return the latest record from a rank's reporter, or None if the reporter has not started."""
        fields = self._read(index, _WATCH_AT, _WATCH)
        if fields is None:
            return None
        time_ns, pid, signature, num_collectives, doing, answered, line, file = fields
        return Watch(time_ns, pid, signature, num_collectives, Doing(doing), answered, line, _string(file))

    def note(self, index: int) -> StatusNote | None:
        """Return the latest record from a rank's program, or None."""
        fields = self._read(index, _NOTE_AT, _NOTE)
        if fields is None:
            return None
        time_ns, step, num_operations, line, phase, waits, *texts, awaits_all = fields
        operation, detail, slow, file = map(_string, texts)
        place = Phase(phase), bool(waits), operation, detail, slow, file
        return StatusNote(time_ns, step, num_operations, line, *place, awaits_all)

    def times(self, index: int) -> Times | None:
        """Return a rank's times, or None if it has not recorded any."""
        fields = self._read(index, _TIMES_AT, _TIMES)
        if fields is None:
            return None
        begun_ns, since_ns, loaded, num_steps, part, *spent_ns = fields
        return Times(begun_ns, since_ns, loaded, num_steps, StepPart(part), tuple(spent_ns))

    def marks(self, index: int) -> list[Mark]:
        """Return the marks for a rank's latest checkpoints, oldest first."""
        return [Mark(step, tuple(spent_ns)) for step, *spent_ns in self._intact(index, _MARKS_AT, _MARK)]

    def planned_steps(self) -> int:
        """Return the number of optimizer steps of the whole run; 0 if it is unknown."""
        first = _HEADER_BYTES + _PLANNED_AT
        return max(int(_WORD.unpack_from(self._memory, first + i * _SLOT_BYTES)[0]) for i in range(self.num_slots))

    def _read(self, index: int, offsets: tuple[int, ...], layout: struct.Struct) -> tuple[Any, ...] | None:
        for _ in range(_TRIES):  # neither copy is intact only while the first record is being written
            found = self._intact(index, offsets, layout)
            if found:
                return found[-1]
        return None

    def _intact(self, index: int, offsets: tuple[int, ...], layout: struct.Struct) -> list[tuple[Any, ...]]:
        """Return the fields of the intact records at ``offsets``, ordered by their numbers."""
        begin = _HEADER_BYTES + index * _SLOT_BYTES
        found: list[tuple[int, bytes]] = []
        for offset in offsets:
            record = self._memory[begin + offset : begin + offset + _HEAD.size + layout.size]
            checksum, number = _HEAD.unpack_from(record)
            if number and zlib.crc32(record[_HEAD.size :], number) == checksum:
                found.append((number, record))
        return [layout.unpack_from(record, _HEAD.size) for _, record in sorted(found)]

    def close(self) -> None:
        """Unmap the file."""
        self._memory.close()


class Board(BoardReader):
    """The launcher's view of the board, with all slots.

    Args:
        num_slots: number of ranks on this machine.
        folder: folder for the file on systems without /dev/shm.
    """

    def __init__(self, num_slots: int, *, folder: str) -> None:
        shared = os.path.isdir(_SHARED) and os.access(_SHARED, os.W_OK)
        if shared:
            _remove_orphans(_SHARED)
        # Only this user can read the file (mkstemp). The lock shows that the launcher is alive.
        self._file, self.path = tempfile.mkstemp(prefix=_PREFIX, dir=_SHARED if shared else folder)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        os.ftruncate(self._file, _HEADER_BYTES + num_slots * _SLOT_BYTES)
        os.pwrite(self._file, _HEADER.pack(_MAGIC, _VERSION, num_slots, 0), 0)
        super().__init__(self.path, access=mmap.ACCESS_WRITE)

    def request_stacks(self) -> int:
        """Request the stacks from all ranks, and return the request's number."""
        number = int(_REQUEST.unpack_from(self._memory, _REQUEST_AT)[0]) + 1
        _REQUEST.pack_into(self._memory, _REQUEST_AT, number)
        return number

    def set_grace(self, grace_ms: int) -> None:
        """Set the time that ranks have to agree on a step when preempted; 0 disables the stop barrier."""
        _WORD.pack_into(self._memory, _GRACE_AT, grace_ms)

    def write_command(self, command: int) -> None:
        """Write the stop barrier's command (see ``stop_barrier.py``)."""
        _WORD.pack_into(self._memory, _COMMAND_AT, command)

    def read_positions(self) -> list[int]:
        """Return each rank's position in the stop barrier; 0 if the rank has not joined yet."""
        return self._words(_POSITION_AT)

    def preemption_signals(self) -> list[int]:
        """Return, for each rank, the signal that requested it to save and exit; 0 if there was none."""
        return self._words(_SIGNAL_AT)

    def _words(self, offset: int) -> list[int]:
        first = _HEADER_BYTES + offset
        return [_WORD.unpack_from(self._memory, first + i * _SLOT_BYTES)[0] for i in range(self.num_slots)]

    def remove(self) -> None:
        """Unmap and remove the file."""
        self.close()
        with suppress(FileNotFoundError):  # deleted with the run's folder
            os.unlink(self.path)
        os.close(self._file)


def _remove_orphans(folder: str) -> None:
    """Remove boards left behind by this user's killed launchers."""
    for entry in os.scandir(folder):
        if not entry.name.startswith(_PREFIX):
            continue
        with suppress(OSError):  # locked by a running launcher, owned by another user, or just removed
            if time.time() - entry.stat().st_mtime < _ORPHAN_S:
                continue  # a new launcher may not have locked it yet
            file = os.open(entry.path, os.O_RDWR)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(entry.path)
            finally:
                os.close(file)


def _mapped(path: str, access: int = mmap.ACCESS_WRITE) -> mmap.mmap:
    with open(path, "rb" if access == mmap.ACCESS_READ else "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0, access=access)
    magic, version, num_slots, _ = _HEADER.unpack_from(memory)
    if (magic, version) != (_MAGIC, _VERSION) or len(memory) != _HEADER_BYTES + num_slots * _SLOT_BYTES:
        memory.close()
        raise ValueError(f"{path} is not a version {_VERSION} status board")
    return memory
