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

__all__ = ["Outputs", "Streams", "parse_streams", "relay"]

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
                f"{flag} {text} is not valid",
                do=(
                    "use 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or set each rank separately, as in 0:3,1:2 "
                    f"(ranks 0 to {num_processes - 1})"
                ),
            )
        streams[int(match[1])] = _BITS[match[2]]
    return streams


_CHUNK_BYTES = 1 << 16
_TERMINAL = threading.Lock()


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
    rest = b""
    with file:
        while chunk := os.read(pipe, _CHUNK_BYTES):
            file.write(chunk)
            file.flush()
            # Write complete lines only, so that lines of ranks do not mix. A carriage return (progress bars) also ends a line.
            *lines, rest = re.split(rb"(?<=[\r\n])", rest + chunk)
            _show(target, [prefix + line for line in lines])
        _show(target, [prefix + rest + b"\n"] if rest else [])
    os.close(pipe)


def _show(target: BinaryIO, lines: list[bytes]) -> None:
    with _TERMINAL:
        target.write(b"".join(lines))
        target.flush()


def log_file(directory: Path, stream: str) -> BinaryIO:
    """Open the log file for one of a rank's streams, in the rank's directory."""
    return (directory / f"{stream}.log").open("wb")
