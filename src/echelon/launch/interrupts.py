"""Signals to the launcher (Ctrl-C, SIGTERM, SIGUSR1, SIGHUP), raised immediately or, while processes run, by ``check``."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from echelon.status.stop_barrier import SIGNALS

_SIGNALS = (signal.SIGINT, *SIGNALS, *((signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ()))


class Interrupted(BaseException):  # not an Exception, because it is not a failure
    """Raised after the launcher has received signal ``number``."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Interrupts:
    """The signals that the launcher has received so far."""

    def __init__(self) -> None:
        self._received: list[int] = []
        self._held = False

    @property
    def count(self) -> int:
        """Number of received signals; the second one stops the run immediately."""
        return len(self._received)

    @property
    def first(self) -> int | None:
        """The first received signal, or None."""
        return self._received[0] if self._received else None

    def check(self) -> None:
        """Raise ``Interrupted`` if a signal has been received."""
        if self._received:
            raise Interrupted(self._received[0])

    def hold(self) -> None:
        """Raise only in ``check`` from now on, because an exception during a process start would leak the process."""
        self._held = True
        self.check()

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Record signal ``number``; used as the signal handler."""
        self._received.append(number)
        if not self._held:
            raise Interrupted(number)


@contextmanager
def handle_signals() -> Iterator[Interrupts]:
    """Handle the signals inside the ``with`` block. Signals already ignored (nohup, a shell's ``&``) stay ignored."""
    interrupts = Interrupts()
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    replaced = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in replaced:
        signal.signal(number, interrupts.on_signal)
    try:
        yield interrupts
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)


def end_launcher(process: subprocess.Popen[bytes], *, grace_s: float) -> None:
    """End a launcher that this program started, and with it its ranks; kill it if that takes longer than ``grace_s``."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)  # SIGTERM would make the ranks save first
    try:
        process.wait(timeout=grace_s)
    except subprocess.TimeoutExpired:
        process.kill()  # its ranks are killed with it
        process.wait()
