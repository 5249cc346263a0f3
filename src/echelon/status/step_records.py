"""Step records: what each rank notes about each of its optimizer steps, in a file that survives the process.

Layout (version 1, little-endian): a header of 4096 bytes with ``8s`` magic, ``I`` version, ``I`` bytes per record, ``I`` length of
the JSON text that follows (rank, number of ranks, start times). The records follow, in the order of their times. A record has
the fields of ``StepRecord``. Its time is written last, so a record whose time is 0 has not been written, or not completely.

The file is mapped into memory: a record costs about a microsecond, and the records of a killed process are in the file. It grows
up to ``MAX_RECORDS``. Then neighboring records are merged, and from there on each record covers twice as many steps. Counts and
times are totals since the start, so that a merged record needs no sums. The disk space is reserved before it is mapped, because on
a full disk a write to a mapped file kills the process.

This file uses only the standard library.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

MAX_RECORDS = 1 << 17
"""Largest number of records in a file, about 17 MB."""
FIRST_RECORDS = 480
"""Number of records for which a new file has room; with the header, it has 64 KB."""

_MAGIC, _VERSION = b"ECHSTEPS", 1
_HEADER = struct.Struct("<8sIII")
_HEADER_BYTES = 4096
RECORD_FORMAT = "<QIIddddQd8Q"
_RECORD = struct.Struct(RECORD_FORMAT)
_TIME = struct.Struct("<Q")
_AFTER_TIME = struct.Struct("<IIddddQd8Q")
_STEP = struct.Struct("<I")
_LOSS = struct.Struct("<Id")
_LOSS_AT = 12
_NORM = struct.Struct("<d")
_NORM_AT = 32
_NAN = math.nan


class StepRecord(NamedTuple):
    """One optimizer step of a rank, or the last of several that were merged."""

    time_ns: int
    """Nanoseconds from the start of the file to the end of the step."""
    step: int
    """Number of the optimizer step."""
    num_losses: int
    """Number of micro-steps in ``loss``."""
    loss: float
    """Mean loss of this rank's micro-steps since the previous record; nan if unknown (``num_losses`` is 0) or not a number."""
    lr: float
    """Learning rate of the optimizer's first parameter group; nan if unknown."""
    grad_norm: float
    """Norm of the gradients before clipping, the largest since the previous record; nan if it was not computed."""
    memory_mb: float
    """Memory in use; nan if unknown."""
    num_samples: int
    """Number of samples that this rank has read since the start of the file."""
    num_items: float
    """Sum of ``num_items=`` (tokens) of this rank since the start of the file."""
    spent_ns: tuple[int, ...]
    """Nanoseconds by ``StepPart`` since the start of the process."""


class StepFile(NamedTuple):
    """Records in a file of step records."""

    rank: int
    world_size: int
    began_ns: int
    """``time.time_ns()`` at the start of the file."""
    records: list[StepRecord]
    """All records, or some that are evenly spaced over the file."""
    last: list[StepRecord]
    """The records at its end."""


class StepRecorder:
    """Writes the step records of this process.

    Args:
        path: the file to create; its folder exists.
        rank: rank of this process.
        world_size: number of processes.
        max_records: largest number of records, an even number.

    Raises:
        FileExistsError: the file exists, because another process records this rank.
        OSError: the file cannot be created.
    """

    def __init__(self, path: str | Path, *, rank: int, world_size: int, max_records: int = MAX_RECORDS) -> None:
        self._path = str(path)
        self._pid, self._max_records = os.getpid(), max_records
        self._began_ns = time.monotonic_ns()
        text = json.dumps({"rank": rank, "world_size": world_size, "began_ns": time.time_ns()}).encode()
        self._header = _HEADER.pack(_MAGIC, _VERSION, _RECORD.size, len(text)) + text
        self._memory = _create(self._path, self._header, min(FIRST_RECORDS, max_records))
        self._offset = _HEADER_BYTES
        self._end = len(self._memory)
        self._stride = 1
        self._num_since = 0  # steps since the last record
        self.loss_sum = 0.0
        """Sum of the losses of the current step's micro-steps."""
        self.num_losses = 0
        self._largest_norm = _NAN
        self.num_samples = 0
        """Number of samples that this rank has read so far."""
        self.num_items = 0.0
        """Number of items in the updates so far."""
        self.grad_norm = _NAN
        """Norm of the gradients of the current step."""
        self.memory_mb = _NAN
        """Memory in use."""
        self.first_bad_loss: tuple[int, float] | None = None
        """The step and the value of the first loss that is nan or infinite."""
        self.before_merge: Callable[[], None] | None = None
        """Called before records are merged, to fill in the losses that are still on a device."""

    def add_loss(self, loss: float, num_losses: int = 1) -> None:
        """Add the loss of a micro-step of the current step, or the sum of several."""
        self.loss_sum += loss
        self.num_losses += num_losses

    def record(self, step: int, lr: float, spent_ns: Sequence[int]) -> int:
        """Record a finished step; return the place of its record for ``fill_loss``, or 0 if there is none.

        Does nothing in a process that was forked from the one that created the recorder.

        Args:
            step: number of the optimizer step.
            lr: learning rate.
            spent_ns: nanoseconds by ``StepPart`` since the start of the process.

        Raises:
            OSError: the disk is full, or the file has been deleted. Nothing can be recorded from now on.
        """
        if os.getpid() != self._pid:
            return 0
        self._num_since += 1
        if self._stride > 1:
            self.grad_norm = self._largest_norm = _larger(self._largest_norm, self.grad_norm)
        if self._num_since < self._stride:
            return 0
        if self._offset == self._end and not self._make_room():
            return 0
        number, place, memory = self.num_losses, self._offset, self._memory
        loss = self.loss_sum / number if number else _NAN
        if number and not math.isfinite(loss) and self.first_bad_loss is None:
            self.first_bad_loss = step, loss
        _AFTER_TIME.pack_into(
            memory, place + _TIME.size, step, number, loss, lr, self.grad_norm,
            self.memory_mb, self.num_samples, self.num_items, *spent_ns,
        )  # fmt: skip
        _TIME.pack_into(memory, place, time.monotonic_ns() - self._began_ns)
        self._offset = place + _RECORD.size
        self.loss_sum = 0.0
        self.num_losses = self._num_since = 0
        self.grad_norm = self._largest_norm = _NAN
        return place

    def fill_loss(self, place: int, loss: float, num_losses: int) -> None:
        """Set the loss of a record that was written without it."""
        if not math.isfinite(loss) and self.first_bad_loss is None:
            (step,) = _STEP.unpack_from(self._memory, place + _TIME.size)
            self.first_bad_loss = step, loss
        _LOSS.pack_into(self._memory, place + _LOSS_AT, num_losses, loss)

    def fill_norm(self, place: int, grad_norm: float) -> None:
        """Set the gradient norm of a record that was written without it."""
        _NORM.pack_into(self._memory, place + _NORM_AT, grad_norm)

    def close(self) -> None:
        """Release the space that is reserved for more records."""
        if os.getpid() == self._pid and not self._memory.closed:
            self._memory.close()
            os.truncate(self._path, self._offset)

    def _make_room(self) -> bool:
        """Extend the file, or merge its records; return whether the current step is recorded now."""
        num_records = (self._end - _HEADER_BYTES) // _RECORD.size
        if num_records < self._max_records:
            end = _HEADER_BYTES + min(2 * num_records, self._max_records) * _RECORD.size
            with open(self._path, "r+b") as file:
                _reserve(file, end)
            self._memory.close()
            self._memory, self._end = _map(self._path), end
            return True
        if self.before_merge is not None:
            self.before_merge()
        self._merge()
        return self._num_since >= self._stride

    def _merge(self) -> None:
        aside = f"{self._path}.{self._stride}.tmp"
        memory = _create(aside, self._header, self._max_records)
        offset = _HEADER_BYTES
        for first in range(_HEADER_BYTES, self._end, 2 * _RECORD.size):
            one, other = (_RECORD.unpack_from(self._memory, first + i * _RECORD.size) for i in range(2))
            _RECORD.pack_into(memory, offset, *_merged(one, other))
            offset += _RECORD.size
        os.replace(aside, self._path)
        self._memory.close()
        self._memory, self._offset = memory, offset
        self._stride *= 2


def read_step_bytes(path: Path) -> tuple[int, int, int, memoryview]:
    """Return the rank, the number of ranks, and the start time of a file of step records, and its records as bytes.

    A record has the fields of ``StepRecord`` in the format ``RECORD_FORMAT`` of the module ``struct``.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a file of step records.
    """
    data = path.read_bytes()
    numbers = _read_header(data, path)
    offsets = range(_HEADER_BYTES, len(data) - _RECORD.size + 1, _RECORD.size)
    # The records without a time are at the end.
    number = bisect_left(offsets, True, key=lambda offset: _TIME.unpack_from(data, offset)[0] == 0)
    return (
        numbers["rank"],
        numbers["world_size"],
        numbers["began_ns"],
        memoryview(data)[_HEADER_BYTES : _HEADER_BYTES + number * _RECORD.size],
    )


def read_step_file(path: Path, *, num_records: int = MAX_RECORDS, num_last: int = 0) -> StepFile:
    """Return the records of a file; only the parts with the requested records are read, whatever its size.

    Args:
        path: a file that a ``StepRecorder`` has written, or is still writing.
        num_records: maximum number of records that are evenly spaced over the file.
        num_last: maximum number of records at the end of the file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a file of step records.
    """
    with path.open("rb", buffering=0) as file:
        numbers = _read_header(file.read(_HEADER_BYTES), path)

        def is_empty(index: int) -> bool:
            file.seek(_HEADER_BYTES + index * _RECORD.size)
            return not any(file.read(_TIME.size))

        def read(index: int, count: int = 1) -> list[StepRecord]:
            file.seek(_HEADER_BYTES + index * _RECORD.size)
            data = file.read(count * _RECORD.size)
            complete = len(data) // _RECORD.size * _RECORD.size
            found = [StepRecord._make((*fields[:9], fields[9:])) for fields in _RECORD.iter_unpack(data[:complete])]
            return [record for record in found if record.time_ns]

        size = (os.fstat(file.fileno()).st_size - _HEADER_BYTES) // _RECORD.size
        length = bisect_left(range(max(size, 0)), True, key=is_empty)
        last = read(max(length - num_last, 0), min(num_last, length))
        if length <= num_records:
            return StepFile(**numbers, records=read(0, length), last=last)
        places = (i * (length - 1) // max(num_records - 1, 1) for i in range(num_records))
        return StepFile(**numbers, records=[record for place in places for record in read(place)], last=last)


def _read_header(data: bytes, path: Path) -> dict[str, int]:
    try:
        magic, version, size, length = _HEADER.unpack_from(data)
        if (magic, version, size) != (_MAGIC, _VERSION, _RECORD.size):
            raise ValueError("its header is unknown")
        facts: dict[str, Any] = json.loads(data[_HEADER.size : _HEADER.size + length])
        return {name: int(facts[name]) for name in ("rank", "world_size", "began_ns")}
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a file of step records of version {_VERSION}: {error}") from error


def _create(path: str, header: bytes, num_records: int) -> mmap.mmap:
    # Never an existing file: shrinking one that another process has mapped would kill that process.
    with open(path, "xb") as file:
        try:
            file.write(header)
            file.flush()
            _reserve(file, _HEADER_BYTES + num_records * _RECORD.size)
        except OSError:
            os.unlink(path)
            raise
    return _map(path)


def _reserve(file: BinaryIO, size: int) -> None:
    """Extend ``file`` to ``size`` bytes of zeros for which the disk has space."""
    have = os.fstat(file.fileno()).st_size
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), have, size - have)
    else:  # macOS, Windows
        file.seek(have)
        file.write(bytes(size - have))


def _map(path: str) -> mmap.mmap:
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def _merged(one: tuple[Any, ...], other: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the fields of one record for both steps: the mean loss, the larger norm, and all else from the last step."""
    number = one[2] + other[2]
    losses = [fields[3] * fields[2] for fields in (one, other) if fields[2]]
    loss = sum(losses) / number if number else _NAN
    return (*other[:2], number, loss, other[4], _larger(one[5], other[5]), *other[6:])


def _larger(one: float, other: float) -> float:
    return other if math.isnan(one) or other > one else one
