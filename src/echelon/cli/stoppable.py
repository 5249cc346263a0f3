"""Commands that start processes, and that a signal stops: they say so, and exit with the code of the signal."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import click

from echelon.base.messages.terminal import say
from echelon.base.messages.translation import gettext as _
from echelon.launch.interrupts import Interrupted, Interrupts, handle_signals


@contextmanager
def stoppable(ctx: click.Context) -> Iterator[Interrupts]:
    """Yield the received signals; if one stops the block, whose processes have then ended, exit with its code."""
    try:
        with handle_signals() as interrupts:
            yield interrupts
    except Interrupted as stop:
        say(_("stopped by {name}; all processes have ended", name=signal.Signals(stop.number).name))
        ctx.exit(128 + stop.number)
