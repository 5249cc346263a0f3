"""Warnings that point to a line of the user's code instead of to echelon or torch."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from echelon.base.messages.terminal import beside_progress_bars
from echelon.base.rank import known_rank

_PACKAGE = str(Path(__file__).resolve().parent.parent)


class EchelonWarning(UserWarning):
    """Category for warnings about something that echelon changed or fixed in the user's program; the run continues."""


class UserLine(tuple[str, int]):
    """A file and a line number in the user's program."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"{self[0]}:{self[1]}"


def is_library(file: str) -> bool:
    """Return whether ``file`` belongs to echelon, torch, or standard library code that calls user code."""
    return file.startswith((_PACKAGE, "<frozen")) or "/torch/" in file or "/contextlib.py" in file


def user_line() -> UserLine:
    """Return the innermost line on the call stack that is neither in echelon nor in torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if not is_library(frame.f_code.co_filename):
            break
        frame = frame.f_back
    return UserLine((frame.f_code.co_filename, frame.f_lineno))


def warn(message: str, *, at: UserLine | None = None) -> None:
    """Warn on rank zero, pointing to the user's line ``at`` (default: the innermost user line on the call stack)."""
    if known_rank() in (None, 0):
        warn_here(message, at=at)


def warn_here(message: str, *, at: UserLine | None = None) -> None:
    """Warn on this rank about something that only this rank knows. Otherwise identical to ``warn``."""
    place = at or user_line()
    with beside_progress_bars():
        warnings.warn_explicit(message, EchelonWarning, filename=place[0], lineno=place[1])
