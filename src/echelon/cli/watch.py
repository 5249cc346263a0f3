"""``echelon watch``: shows a run while it is live, in the terminal or in a browser."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from echelon.base.messages.translation import gettext as _
from echelon.cli.help.completion import complete_runs
from echelon.report.live_run import LiveRun
from echelon.report.run_folder import find_run

_DRAW_EVERY_S = 0.5
_PIPE_WIDTH = 120


@click.command("watch")
@click.argument("run", required=False, shell_complete=complete_runs)
@click.option("--once", is_flag=True, help="Print the current state once (default if the output is not a terminal).")
@click.option("--web", is_flag=True, help="Show the run's report in a browser on this machine, and keep it up to date.")
@click.option(
    "--port", metavar="N", type=click.IntRange(0, 65535), default=0, help="Port for --web (default: a free one)."
)
def command(run: str | None, once: bool, web: bool, port: int) -> None:
    """Show what a run is doing: progress, rates, loss, and a line for each rank.

    RUN is a run's folder, or a folder that contains runs: then the newest is shown (default: ./echelon-runs). Ranks that
    differ from the others come first: stopped, silent, slow, behind, or in another phase. Of a run on several machines, the
    ranks of this machine are shown.

    The view only reads; it does not slow down the run. The key q or Ctrl-C closes the view, which does not end the run.
    """
    live = LiveRun(find_run(run))
    try:
        if web:
            from echelon.report.web_server import serve  # noqa: PLC0415 - needed only for --web

            serve(live, port=port, announce=click.echo)
        else:
            _watch(live, is_once=once or not sys.stdout.isatty())
    except KeyboardInterrupt:
        pass  # the usual end of the view
    finally:
        live.close()


def _watch(live: LiveRun, *, is_once: bool) -> None:
    from rich.console import Console  # noqa: PLC0415 - takes 0.1 s to import
    from rich.live import Live  # noqa: PLC0415

    from echelon.report.terminal import draw  # noqa: PLC0415

    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    snapshot = live.read()
    if not is_once:
        hint = _("q closes this view; the run goes on") if _keyboard() is not None else ""
        view = Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop")
        with _key_waiter() as wait_for_key, view as screen:
            try:
                while True:
                    screen.update(draw(snapshot, console, height=console.height, hint=hint), refresh=True)
                    if snapshot.outcome != "running" or wait_for_key(_DRAW_EVERY_S) in ("q", "Q"):
                        break
                    snapshot = live.read()
            except KeyboardInterrupt:
                pass
    console.print(draw(snapshot, console))


@contextmanager
def _key_waiter() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits some seconds for a key and returns it, or an empty text if none was pressed.

    The terminal passes each key on at once, without showing it, until the block ends. Ctrl-C still interrupts.
    """
    descriptor = _keyboard()
    if descriptor is None:

        def wait(seconds: float) -> str:
            time.sleep(seconds)
            return ""

        yield wait
        return
    import termios  # noqa: PLC0415 - not on Windows
    import tty  # noqa: PLC0415 - not on Windows

    def wait_for_key(seconds: float) -> str:
        ready, _writable, _failed = select.select([descriptor], [], [], seconds)
        return os.read(descriptor, 1).decode(errors="replace") if ready else ""

    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor, termios.TCSANOW)
        yield wait_for_key
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)


def _keyboard() -> int | None:
    """Return the descriptor of standard input if it is a terminal whose keys this process gets."""
    if sys.platform == "win32" or not sys.stdin.isatty():
        return None
    descriptor = sys.stdin.fileno()
    try:  # a process in the background would be stopped if it changed the terminal
        return descriptor if os.tcgetpgrp(descriptor) == os.getpgrp() else None
    except OSError:  # not the terminal that controls this process, so nothing stops it
        return descriptor
