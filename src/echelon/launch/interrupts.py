"""Signals to the launcher (Ctrl-C, SIGTERM, SIGUSR1, SIGHUP): raised at once before processes run, and at ``check`` after that."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from echelon.status.stop_barrier import SIGNALS

__all__ = ["Interrupted", "Interrupts", "watch"]

_SIGNALS = (signal.SIGINT, *SIGNALS, *((signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ()))


class Interrupted(BaseException):  # not an Exception: no caller may take it for a failure
    """The signal ``number`` asked the launcher to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Interrupts:
    """The signals received so far."""

    def __init__(self) -> None:
        self._received: list[int] = []
        self._held = False

    @property
    def count(self) -> int:
        """Number of signals: the second one means at once."""
        return len(self._received)

    @property
    def first(self) -> int | None:
        """The first signal; None: none."""
        return self._received[0] if self._received else None

    def check(self) -> None:
        """Raise ``Interrupted`` if there was a signal."""
        if self._received:
            raise Interrupted(self._received[0])

    def hold(self) -> None:
        """From now on raise in ``check`` only: an exception while a process is started would lose it."""
        self._held = True
        self.check()

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Handle the signal ``number``."""
        self._received.append(number)
        if not self._held:
            raise Interrupted(number)


@contextmanager
def watch() -> Iterator[Interrupts]:
    """Handle the signals inside the ``with`` block; an ignored one (nohup, a shell's ``&``) stays ignored."""
    interrupts = Interrupts()
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    taken = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in taken:
        signal.signal(number, interrupts.on_signal)
    try:
        yield interrupts
    finally:
        for number, handler in taken.items():
            signal.signal(number, handler)
