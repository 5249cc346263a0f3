"""A command in a pseudo-terminal, and the screen that a person would see."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from select import select
from typing import Any

import pyte


class TerminalScreen:
    """Runs ``command`` in a terminal of ``columns`` x ``lines``; ends it when the ``with`` block is left."""

    def __init__(self, command: Sequence[str], *, columns: int = 120, lines: int = 24, **variables: str) -> None:
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self._terminal, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.process = subprocess.Popen(
            command,
            stdin=child,
            stdout=child,
            stderr=child,
            env={**os.environ, "TERM": "xterm-256color", "LANG": "C.UTF-8", "PYTHONUTF8": "1", **variables},
            start_new_session=True,
        )
        os.close(child)

    def __enter__(self) -> TerminalScreen:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._terminal)

    def press(self, keys: str) -> None:
        """Type ``keys``."""
        os.write(self._terminal, keys.encode())

    def is_line_mode(self) -> bool:
        """Return whether the terminal shows keys and passes them on in lines, as a shell leaves it."""
        flags = termios.tcgetattr(self._terminal)[3]
        return bool(flags & termios.ICANON) and bool(flags & termios.ECHO)

    def display(self) -> list[str]:
        """Return the lines on the screen, without the spaces at their ends."""
        self._read(0.0)
        return [line.rstrip() for line in self._screen.display]

    def wait_for(self, found: Callable[[list[str]], Any], *, timeout_s: float) -> Any:
        """Return the first true value of ``found(lines)``, and fail with the screen after ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._read(0.05)
            lines = [line.rstrip() for line in self._screen.display]
            if value := found(lines):
                return value
            assert time.monotonic() < deadline, "the screen after the time limit:\n" + "\n".join(lines)

    def _read(self, timeout_s: float) -> None:
        while select([self._terminal], [], [], timeout_s)[0]:
            try:
                data = os.read(self._terminal, 1 << 16)
            except OSError:  # the command has ended (Linux)
                return
            if not data:
                return
            self._stream.feed(data)
            timeout_s = 0.0
