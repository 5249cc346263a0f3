"""``echelon runs``: lists, shows and compares recorded runs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from echelon.base.errors import UsageError
from echelon.base.messages.terminal import align_columns, pad
from echelon.base.messages.translation import gettext as _, gettext_noop as N_
from echelon.base.printable import printable
from echelon.cli.help.completion import complete_folders, complete_runs
from echelon.report.run_folder import RecordedRun, find_run, read_run, runs_below
from echelon.status.run_files import DEFAULT_PARENT, event_text
from echelon.status.strict_json import dumps

if TYPE_CHECKING:
    from echelon.report.comparison import ComparedFact
    from echelon.report.step_series import StepSeries


@click.group("runs")
def command() -> None:
    """List, show and compare recorded runs.

    FOLDER contains the folders of runs; RUN is the folder of a run, or a folder that contains runs, of which the newest is
    chosen. The default is ./echelon-runs, where echelon launch writes without --log_dir.
    """


@command.command("ls")
@click.argument("folder", metavar="[FOLDER]", default=DEFAULT_PARENT, shell_complete=complete_folders)
@click.option("--json", "is_json", is_flag=True, help="Print JSON.")
def list_runs(folder: str, is_json: bool) -> None:
    """List the runs in FOLDER, oldest first: when, what, how far, and how they ended."""
    from echelon.report.comparison import commit, duration_s, format_duration, format_time, steps_text  # noqa: PLC0415 - imports numpy
    from echelon.report.step_series import last_step  # noqa: PLC0415

    find_run(folder)
    rows: list[dict[str, Any]] = []
    for path in runs_below(folder) or [find_run(folder)]:
        run = read_run(path)
        step, loss = last_step(run)
        rows.append(
            {
                "run": run.name,
                "began": run.facts.get("began"),
                "duration_s": duration_s(run),
                "ranks": run.facts.get("num_processes"),
                "step": step,
                "resumed_at": run.resumed_at,
                "loss": loss,
                "outcome": run.outcome,
                "commit": None if commit(run) == "-" else commit(run),
                "script": run.facts.get("script"),
                "arguments": run.facts.get("arguments"),
            }
        )
    if is_json:
        click.echo(dumps(rows, indent=2))
        return
    head = (N_("run"), N_("began"), N_("took"), N_("ranks"), N_("steps"), N_("last loss"), N_("ended"), N_("commit"))
    table = [(*map(_, head), _("script and arguments"))]
    for row in rows:
        arguments = shlex.join(map(str, row["arguments"] or []))
        table.append(
            (
                row["run"],
                format_time(row["began"]),
                format_duration(row["duration_s"]),
                _text(row["ranks"]),
                steps_text(row["step"], resumed_at=row["resumed_at"]),
                "-" if row["loss"] is None else f"{row['loss']:.4g}",
                _(row["outcome"]),
                row["commit"] or "-",
                f"{row['script'] or '-'} {arguments}".rstrip(),
            )
        )
    _print_table(table)
    if any("+" in row[7] for row in table):
        click.echo("\n" + _("+ after a commit: there were uncommitted changes"))


@command.command("show")
@click.argument("folder", metavar="[RUN]", default=DEFAULT_PARENT, shell_complete=complete_runs)
def show_run(folder: str) -> None:
    """Show a run: its command, code, machine, results, settings and events."""
    from echelon.report.comparison import (  # noqa: PLC0415 - imports numpy
        describe_run,
        format_time,
    )

    run = read_run(find_run(folder))
    group = ""
    facts = describe_run(run, _series(run))
    width = max((len(fact.name) for fact in facts), default=0) + 2
    for fact in facts:
        if fact.group != group:
            click.echo("\n" * bool(group) + _(fact.group))
            group = fact.group
        name, (value,) = _translated(fact)
        click.echo(printable(f"  {pad(name, width)}{value}"))
    shown = [event for event in run.events if event.get("kind") != "checkpoint"][-_MAX_EVENTS:]
    if shown:
        click.echo("\n" + _("events"))
    for event in shown:
        click.echo(printable(f"  {format_time(event['time'])}  {event_text(event)}"))
    page = _("a page with plots: echelon report {folder}", folder=printable(shlex.quote(str(run.folder))))
    click.echo(f"\n  {page}")


_MAX_EVENTS = 20


@command.command("compare")
@click.argument("folders", metavar="[RUN RUN ... | FOLDER]", nargs=-1, shell_complete=complete_runs)
def compare(folders: tuple[str, ...]) -> None:
    """Compare runs, or the two newest runs in FOLDER: results, and each setting, version or fact that differs."""
    from echelon.report.comparison import compare_runs  # noqa: PLC0415 - imports numpy

    if len(folders) > 1:
        paths = [find_run(folder) for folder in folders]
    else:
        parent = Path(*folders) if folders else Path(DEFAULT_PARENT)
        if not parent.is_dir():
            find_run(parent)  # raises an error that says what is missing, unless it is the name of a run
        paths = runs_below(parent)[-2:]
        if len(paths) < 2:
            raise UsageError(
                _("{parent} contains one run, and a comparison needs two", parent=parent)
                if paths
                else _("{parent} contains no run, and a comparison needs two", parent=parent),
                where=str(parent.absolute()),
                do=_("pass two run folders, or a folder that contains at least two runs"),
            )
    runs = [read_run(path) for path in paths]
    facts = compare_runs(runs, [_series(run) for run in runs])
    group = ""
    table: list[tuple[str, ...]] = [("", *(run.name for run in runs))]
    for fact in facts:
        if fact.group != group:
            table.append((_(fact.group), *[""] * len(runs)))
            group = fact.group
        mark = " " if fact.is_equal else "*"
        name, values = _translated(fact)
        table.append((f" {mark} {name}", *values))
    _print_table(table)
    click.echo("\n" + _("* differs"))


def _translated(fact: ComparedFact) -> tuple[str, tuple[str, ...]]:
    """Return the name and the values in the user's language, unless they are names in the program."""
    if fact.group in ("versions", "settings"):
        return fact.name, fact.values
    return _(fact.name), tuple(map(_, fact.values)) if fact.group == "results" else fact.values


def _series(run: RecordedRun) -> StepSeries | None:
    from echelon.report.step_series import step_series  # noqa: PLC0415 - imports numpy

    return step_series(run)


def _text(value: object) -> str:
    return "-" if value is None else str(value)


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    for line in align_columns([[printable(cell) for cell in row] for row in rows]):
        click.echo(line)
