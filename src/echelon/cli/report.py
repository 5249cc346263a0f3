"""``echelon report``: writes a page that shows one run, or compares several."""

from __future__ import annotations

from pathlib import Path

import click

from echelon.base.errors import UsageError
from echelon.base.messages.translation import gettext as _
from echelon.base.printable import printable
from echelon.cli.help.completion import complete_paths, complete_runs
from echelon.report.run_folder import find_run, read_run


@click.command("report")
@click.argument("runs", metavar="[RUN]...", nargs=-1, shell_complete=complete_runs)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    shell_complete=complete_paths,
    help="File to write (default: report.html in the run's folder; for several runs, in the folder that contains the first).",
)
def command(runs: tuple[str, ...], output: str | None) -> None:
    """Write an HTML page with plots of a run, or of several runs to compare.

    RUN is the folder of a run, or a folder that contains runs, of which the newest is shown (default: ./echelon-runs). The page
    is a single file that loads nothing from elsewhere: why a run failed, loss and metrics, speed, time by phase and by rank,
    memory, goodput, restarts and checkpoints, output, hyperparameters, settings and versions.
    """
    from echelon.report.page import render_page  # noqa: PLC0415 - numpy takes 0.1 s, which --help does not need
    from echelon.report.page_data import page_data  # noqa: PLC0415

    folders = [find_run(run) for run in runs] or [find_run()]
    path = (
        Path(output) if output else (folders[0] if len(folders) == 1 else folders[0].resolve().parent) / "report.html"
    )
    page = render_page(page_data([read_run(folder) for folder in folders]))
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            _("cannot write {path}: {strerror}", path=path, strerror=error.strerror),
            where="flag --output" if output else "the run's folder",
            do=_("pass a file that you can write: -o FILE"),
        ) from error
    click.echo(_("report: {path}", path=printable(str(path.resolve()))))
