"""Sends each rank's output to the terminal, a file, or both."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from echelon.base.errors import ConfigError
from echelon.base.messages.translation import gettext as _
from echelon.launch.local.worker import HIDE, SHOW

Streams = frozenset[Literal["stdout", "stderr"]]

_BITS: Mapping[str, Streams] = {
    "0": frozenset(),
    "1": frozenset({"stdout"}),
    "2": frozenset({"stderr"}),
    "3": frozenset({"stdout", "stderr"}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """For each local rank, which streams are copied to a file (``tee``) or only written to a file (``redirect``)."""

    tee: Mapping[int, Streams]
    redirect: Mapping[int, Streams]
    debugged: int | None = None
    """Local rank that owns the terminal and its input, or None if no rank is being debugged."""

    def destination(self, local_rank: int, stream: Literal["stdout", "stderr"]) -> Literal["terminal", "both", "file"]:
        """Return where ``local_rank``'s ``stream`` goes."""
        if local_rank == self.debugged:
            return "terminal"
        if stream in self.tee.get(local_rank, frozenset()):
            return "both"
        return "file" if stream in self.redirect.get(local_rank, frozenset()) else "terminal"


def parse_streams(text: str, *, num_processes: int, flag: str) -> dict[int, Streams]:
    """Parse torchrun's notation: ``0`` (none), ``1`` (stdout), ``2`` (stderr) or ``3`` (both), or per rank,
    ``0:3,1:2``.

    Raises:
        ConfigError: the syntax is invalid.
    """
    if text in _BITS:
        return dict.fromkeys(range(num_processes), _BITS[text])
    streams: dict[int, Streams] = {}
    for part in text.split(","):
        match = re.fullmatch(r"(\d+):([0-3])", part.strip())
        if match is None or int(match[1]) >= num_processes:
            raise ConfigError(
                _("{flag} {text} is not valid", flag=flag, text=text),
                do=_(
                    "use 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or set each rank separately, as in 0:3,1:2 "
                    "(ranks 0 to {most})",
                    most=num_processes - 1,
                ),
            )
        streams[int(match[1])] = _BITS[match[2]]
    return streams


_CHUNK_BYTES = 1 << 16
_HIDE, _SHOW = f"{HIDE}\n".encode(), f"{SHOW}\n".encode()


def relay(pipe: int, file: BinaryIO, terminal: Literal["stdout", "stderr"], *, prefix: str) -> threading.Thread:
    """Start a thread that copies ``pipe`` unchanged to ``file``, and to ``terminal`` with ``prefix`` before each line.

    When the last writer has closed the pipe, the thread closes ``pipe`` and ``file`` and exits.
    """
    thread = threading.Thread(
        target=_relay, args=(pipe, file, terminal, prefix.encode()), daemon=True, name=f"echelon-tee {prefix}"
    )
    thread.start()
    return thread


def _relay(pipe: int, file: BinaryIO, terminal: Literal["stdout", "stderr"], prefix: bytes) -> None:
    target = sys.stdout.buffer if terminal == "stdout" else sys.stderr.buffer
    rest, num_written, is_hidden = b"", 0, False
    with file:
        while chunk := os.read(pipe, _CHUNK_BYTES):
            # Write complete lines only, so that lines of ranks do not mix. A carriage return (progress bars) also ends a line.
            *lines, rest = re.split(rb"(?<=[\r\n])", rest + chunk)
            shown = []
            for line in lines:
                if line in (_HIDE, _SHOW):
                    is_hidden = line == _HIDE
                    continue
                file.write(line[num_written:])
                num_written = 0
                shown += [] if is_hidden else [_prefixed(line, prefix)]
            if not rest.startswith(b"\0"):  # the beginning of _HIDE
                file.write(rest[num_written:])
                num_written = len(rest)
            file.flush()
            _SCREEN.write(target, shown, prefix)
        file.write(rest[num_written:])
        _SCREEN.write(target, [_prefixed(rest, prefix) + b"\n"] if rest and not is_hidden else [], prefix)
    os.close(pipe)


def _prefixed(line: bytes, prefix: bytes) -> bytes:
    """Return ``line`` after ``prefix``, which torch has already written before each line of a traceback in a process group."""
    return line if line.startswith(prefix) else prefix + line


class _Screen:
    """The terminal, or the file or pipe in its place, to which all relays write."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unfinished = b""
        """The rank whose progress bar was the last output."""

    def write(self, target: BinaryIO, lines: list[bytes], rank: bytes) -> None:
        """Write the lines of a rank; those of another rank start on a line of their own."""
        if not lines:
            return
        with self._lock:
            start = b""
            if self._unfinished not in (b"", rank):
                start = b"\r\x1b[K" if target.isatty() else b"\n"
            target.write(start + b"".join(lines))
            target.flush()
            self._unfinished = rank if lines[-1].endswith(b"\r") else b""


_SCREEN = _Screen()


def log_file(directory: Path, stream: str) -> BinaryIO:
    """Open the log file for one of a rank's streams, in the rank's directory."""
    return (directory / f"{stream}.log").open("wb")
