"""``echelon runs``: lists, shows and compares recorded runs."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click

from echelon.base.errors import UsageError
from echelon.base.messages.terminal import align_columns, has_colour, pad
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
@click.option(
    "--sort", metavar="METRIC", help="Sort by the last value of a metric, largest last (default: by time, newest last)."
)
@click.option("--tag", "tags", metavar="TEXT", multiple=True, help="List only runs with this tag; repeatable.")
@click.option("--json", "is_json", is_flag=True, help="Print JSON.")
def list_runs(folder: str, sort: str | None, tags: tuple[str, ...], is_json: bool) -> None:
    """List the runs in FOLDER, newest last: when, what, how far, and how they ended.

    "last loss" is the training loss of the last step, mean over the ranks. METRIC is loss, or a metric that the program logs,
    such as eval_accuracy.
    """
    find_run(folder)
    runs = [read_run(path) for path in runs_below(folder) or [find_run(folder)]]
    rows = [_row(run, sort) for run in runs if set(tags) <= set(run.tags)]
    if tags and not rows:
        known = sorted({tag for run in runs for tag in run.tags})
        raise UsageError(
            _("no run in {folder} has the tag {tags}", folder=folder, tags=" ".join(tags)),
            where=_("flag {name}", name="--tag"),
            do=_("use one of these: {names}", names=", ".join(known))
            if known
            else _("give runs tags: echelon launch --tag TEXT"),
        )
    if sort is not None:
        _check_metric(sort, rows, runs)
        rows.sort(key=lambda row: -math.inf if row[sort] is None or math.isnan(row[sort]) else row[sort])
    if is_json:
        click.echo(dumps(rows, indent=2))
        return
    _print_runs(rows, sort)


def _row(run: RecordedRun, sort: str | None) -> dict[str, Any]:
    from echelon.report.comparison import commit, duration_s, last_metrics  # noqa: PLC0415 - imports numpy
    from echelon.report.step_series import last_step  # noqa: PLC0415

    step, loss = last_step(run)
    metrics = last_metrics(run)
    row = {
        "run": run.name,
        "name": run.facts.get("name"),
        "tags": run.tags,
        "began": run.facts.get("began"),
        "duration_s": duration_s(run),
        "ranks": run.facts.get("num_processes"),
        "step": step,
        "resumed_at": run.resumed_at,
        "loss": metrics.get("loss") if loss is None else loss,
        "outcome": run.outcome,
        "commit": None if commit(run) == "-" else commit(run),
        "script": run.facts.get("script"),
        "arguments": run.facts.get("arguments"),
    }
    return row if sort is None or sort == "loss" else {**row, sort: metrics.get(sort)}


def _check_metric(sort: str, rows: Sequence[dict[str, Any]], runs: Sequence[RecordedRun]) -> None:
    """Raise UsageError if no run has the metric."""
    from echelon.report.comparison import last_metrics  # noqa: PLC0415 - imports numpy

    if all(row[sort] is None for row in rows):
        known = list(dict.fromkeys(["loss", *(name for run in runs for name in last_metrics(run))]))
        raise UsageError(
            _("no run has a metric {name!r}", name=sort),
            where=_("flag {name}", name="--sort"),
            do=_("use one of these: {names}", names=", ".join(known)),
        )


def _print_runs(rows: Sequence[dict[str, Any]], sort: str | None) -> None:
    from echelon.report.comparison import format_duration, format_time, steps_text  # noqa: PLC0415 - imports numpy

    has_tags, has_metric = any(row["tags"] for row in rows), sort not in (None, "loss")
    head = [N_("run"), N_("began"), N_("took"), N_("ranks"), N_("steps"), N_("last loss"), N_("ended"), N_("commit")]
    titles = [*map(_, head), *([str(sort)] if has_metric else []), *([_("tags")] if has_tags else [])]
    table = [(*titles, _("script and arguments"))]
    for row in rows:
        arguments = shlex.join(map(str, row["arguments"] or []))
        table.append(
            (
                row["run"],
                format_time(row["began"]),
                format_duration(row["duration_s"]),
                _text(row["ranks"]),
                steps_text(row["step"], resumed_at=row["resumed_at"]),
                _number(row["loss"]),
                _(row["outcome"]),
                row["commit"] or "-",
                *([_number(row[str(sort)])] if has_metric else []),
                *([" ".join(row["tags"]) or "-"] if has_tags else []),
                f"{row['script'] or '-'} {arguments}".rstrip(),
            )
        )
    in_colour = has_colour(sys.stdout)
    lines = _table_lines(table)
    for line, style in zip(lines, ["", *(_STYLES.get(row["outcome"], "") for row in rows)], strict=True):
        click.echo(f"{style}{line}{_RESET}" if in_colour and style else line, color=True)
    if any(row["commit"] and "+" in row["commit"] for row in rows):
        click.echo("\n" + _("+ after a commit: there were uncommitted changes"))


_RESET, _RED, _GREEN = "\x1b[0m", "\x1b[31m", "\x1b[32m"
_STYLES = MappingProxyType(
    {"failed": _RED, "ended without a record": _RED, "interrupted": "\x1b[33m", "running": _GREEN}
)


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
    click.echo("\n".join([*_table_lines(table), "", _("* differs")]))


def _translated(fact: ComparedFact) -> tuple[str, tuple[str, ...]]:
    """Return the name and the values in the user's language, unless they are names in the program."""
    from echelon.report.comparison import AS_IS  # noqa: PLC0415 - imports numpy

    if fact.group in AS_IS:
        return fact.name, fact.values
    return _(fact.name), tuple(map(_, fact.values)) if fact.group == "results" else fact.values


def _series(run: RecordedRun) -> StepSeries | None:
    from echelon.report.step_series import step_series  # noqa: PLC0415 - imports numpy

    return step_series(run)


def _text(value: object) -> str:
    return "-" if value is None else str(value)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    return align_columns([[printable(cell) for cell in row] for row in rows])
