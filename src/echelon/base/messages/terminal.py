"""Prints the launcher's messages: in colour where the terminal has it, never on the line of a progress bar, and in columns and lines
of the width that their characters take.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import IO, Literal
from unicodedata import east_asian_width

from echelon.base import environ
from echelon.base.printable import printable

Kind = Literal["note", "warning", "error"]

_STYLES = {"error": "\x1b[1;31m", "warning": "\x1b[1;33m", "note": "\x1b[1m"}
_LABEL_STYLE, _RESET = "\x1b[1m", "\x1b[0m"
_STYLE = re.compile(r"\x1b\[[\d;]*m")
_LABELS = re.compile(r"^(  )(\S[^\s:\uff1a]*[:\uff1a])", re.MULTILINE)


def say(text: object, *, kind: Kind = "note", stream: IO[str] | None = None) -> None:
    """Print ``echelon: TEXT`` to ``stream`` (default: stderr), in the user's language, with control characters escaped."""
    stream = sys.stderr if stream is None else stream
    message = printable(str(text))
    name = "echelon:"
    if has_colour(stream):
        name = f"{_STYLES[kind]}{name}{_RESET}"
        message = _LABELS.sub(rf"\1{_LABEL_STYLE}\2{_RESET}", message)
    # A single write, so that the output of ranks does not come in between.
    stream.write(f"{on_own_line(stream)}{name} {message}\n")
    stream.flush()


def pad(text: str, width: int) -> str:
    """Return ``text`` with spaces up to ``width`` columns of the terminal, of which a Chinese character takes two."""
    return text + " " * (width - num_columns(text))


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row, with the cells of each column below each other."""
    widths = [max(map(num_columns, column)) for column in zip(*rows)]
    return ["  ".join(map(pad, row, widths)).rstrip() for row in rows]


def wrap(text: str, width: int) -> list[str]:
    """Return ``text`` as lines of at most ``width`` columns; a line may end after each Chinese character, except before punctuation."""
    lines, line = [], ""
    for token in _TOKEN.findall(text):
        if line and num_columns(line) + num_columns(token.rstrip()) > width:
            lines.append(line.rstrip())
            line = token.lstrip()
        else:
            line += token
    return [*lines, line.rstrip()] if line.strip() else lines


_WIDE = r"\u4e00-\u9fff\u3000-\u303f\uff00-\uffef"
_OPENING = r"[\u300a\u300c\uff08\u201c(]*"
_CLOSING = r"[\u3001\u3002\uff0c\uff1b\uff1a\uff09\uff01\uff1f\u300d\u300b\u201d]*"
# A word or a wide character, with the brackets before it and the punctuation and spaces after it.
_TOKEN = re.compile(rf"{_OPENING}(?:[{_WIDE}]|[^\s{_WIDE}]+){_CLOSING}\s*|\s+")


def num_columns(text: str) -> int:
    """Return the width of ``text`` in a terminal, in which a Chinese character takes two columns, and colours none."""
    return (
        len(text)
        if text.isascii() and "\x1b" not in text
        else sum(2 if east_asian_width(one) in "WF" else 1 for one in _STYLE.sub("", text))
    )


def has_colour(stream: IO[str]) -> bool:
    """Return whether to write colours to ``stream``; NO_COLOR, FORCE_COLOR and TERM count as in Python's own tracebacks."""
    wanted = environ.wants_colour()
    return environ.has_cursor() and _is_terminal(stream) if wanted is None else wanted


def on_own_line(stream: IO[str]) -> str:
    """Return what to write to ``stream`` first if its last line may be unfinished, as a progress bar leaves it.

    On a terminal, the line is erased; the next update draws the bar again, below the message. In a file, a line is ended.
    """
    try:
        if _is_terminal(stream):
            return "\r\x1b[K" if environ.has_cursor() else ""
        return "\n" if _ends_in_line(stream.fileno()) else ""
    except (OSError, ValueError):  # closed, or not a file
        return ""


def beside_progress_bars() -> AbstractContextManager[object]:
    """Return a context in which the lines of this process's tqdm bars are cleared, so that a message gets a line of its own."""
    tqdm = sys.modules.get("tqdm.std")
    if tqdm is None or sys.stderr is None or not getattr(tqdm.tqdm, "_instances", True):  # no bar: skip tqdm's lock
        return nullcontext()
    clearing: AbstractContextManager[object] = tqdm.tqdm.external_write_mode(sys.stderr)
    return clearing


def _is_terminal(stream: IO[str]) -> bool:
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


def _ends_in_line(descriptor: int) -> bool:
    """Return whether ``descriptor`` is a file whose last character is not a line break."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size == 0:
        return False
    # The descriptor may be open for writing only.
    with open(f"/proc/self/fd/{descriptor}", "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) not in (b"\n", b"\r")
