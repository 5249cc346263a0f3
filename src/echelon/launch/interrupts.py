"""Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP to the launcher: raised while nothing runs, kept for the next look once processes do."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from echelon.status.stop_barrier import SIGNALS

__all__ = ["Interrupted", "Interrupts", "watch"]

_SIGNALS = (signal.SIGINT, *SIGNALS, *((signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ()))


class Interrupted(BaseException):  # not an Exception: nobody on the way up may take it for a failure
    """The launcher was told to stop by the signal ``number``."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Interrupts:
    """The signals that came so far."""

    def __init__(self) -> None:
        self._came: list[int] = []
        self._held = False

    @property
    def count(self) -> int:
        """How many came: at the second the user has no patience left."""
        return len(self._came)

    @property
    def first(self) -> int | None:
        """The number of the first; None: none came."""
        return self._came[0] if self._came else None

    def check(self) -> None:
        """Raise ``Interrupted`` if a signal came."""
        if self._came:
            raise Interrupted(self._came[0])

    def hold(self) -> None:
        """From now on only keep them for ``check``: an exception in the middle of a start would lose a process."""
        self._held = True
        self.check()

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Note the signal ``number`` (a handler for ``signal.signal``)."""
        self._came.append(number)
        if not self._held:
            raise Interrupted(number)


@contextmanager
def watch() -> Iterator[Interrupts]:
    """Take over the signals inside the ``with`` block. One that is ignored (nohup, a shell's ``&``) stays ignored."""
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
