"""Summarizes runs in one line each, and lists what differs between several runs."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from echelon.base.errors import ConfigError
from echelon.base.messages.translation import gettext as _, gettext_noop as N_
from echelon.config.origin import SettingSource
from echelon.config.resolve import Resolved
from echelon.config.run_record import of_run
from echelon.config.schema import RunConfig, field_names
from echelon.diagnose.goodput import goodput_of
from echelon.report.run_folder import RecordedRun
from echelon.report.step_series import StepSeries
from echelon.status.hyperparameters import Hyperparameter

UNKNOWN = "-"
NO_GOODPUT = N_("not measured (no training loop recorded)")


HYPERPARAMETER_GROUPS = MappingProxyType(
    {"logged": N_("hyperparameters"), "training": N_("training"), "arguments": N_("training arguments")}
)
_GROUPS = ["results", *HYPERPARAMETER_GROUPS.values(), "command", "code", "machine", "versions", "settings"]
AS_IS = frozenset({"versions", "settings", *HYPERPARAMETER_GROUPS.values()})
"""Groups whose names and values are names in programs, which are not translated."""
_MACHINE_FACTS = MappingProxyType({"num_cores": "CPU cores", "memory_mb": "memory (MB)"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedFact:
    """A fact of several runs."""

    group: str
    name: str
    values: tuple[str, ...]
    """The fact in each run."""

    @property
    def is_equal(self) -> bool:
        """Whether all runs have the same value."""
        return len(set(self.values)) == 1


def compare_runs(runs: Sequence[RecordedRun], series: Sequence[StepSeries | None]) -> list[ComparedFact]:
    """Return the results of the runs, and what differs between them: hyperparameters, command, commit, machine, versions, settings."""
    tables = [_facts(run, one) for run, one in zip(runs, series)]
    rows = []
    defaults = [_defaults_of(run) for run in runs]
    for group, name in dict.fromkeys(key for table in tables for key in table):
        # Of two Trainers' runs, what differs; beside another run, not the Trainer's hundred defaults.
        if all((group, name) in known for known, table in zip(defaults, tables) if (group, name) in table):
            continue
        row = ComparedFact(group=group, name=name, values=tuple(table.get((group, name), UNKNOWN) for table in tables))
        if group == "results" or not row.is_equal:
            rows.append(row)
    return sorted(rows, key=lambda row: _GROUPS.index(row.group))


def describe_run(run: RecordedRun, series: StepSeries | None) -> list[ComparedFact]:
    """Return the facts about one run, without those that are unknown, and without settings and arguments that have their defaults."""
    settings = settings_of(run)
    defaults = _defaults_of(run)
    origins = {} if isinstance(settings, str) else settings.origins
    rows = []
    for (group, name), text in _facts(run, series).items():
        if (group, name) in defaults:
            continue
        if group == "settings":
            if origins[name].source is SettingSource.DEFAULT:
                continue
            text = f"{text} ({origins[name]})"
        if text != UNKNOWN:
            rows.append(ComparedFact(group=group, name=name, values=(text,)))
    return sorted(rows, key=lambda row: _GROUPS.index(row.group))


def results(run: RecordedRun, series: StepSeries | None) -> dict[str, str]:
    """Return a run's results as text: how it ended, steps, last loss, rates, goodput and last metrics."""
    found = {"outcome": run.outcome, "duration": format_duration(duration_s(run)), "restarts": _restarts(run)}
    if series is None and run.resumed_at is not None:
        found["steps"] = steps_text(None, resumed_at=run.resumed_at)
    if series is not None:
        found["steps"] = f"{series.last_step:,}"
        found["last loss"] = _significant(series.last_loss)
        found["samples/s"] = _significant(_median(series.samples_per_s.tolist()))
        found[N_("time of a step")] = f"{_significant(_median(series.step_ms.tolist()))} ms"
        found["largest memory of a rank"] = f"{_significant(max(series.rank_memory_mb.tolist()))} MB"
    if run.goodput is not None:
        goodput = goodput_of(run.goodput["parts"], wall_s=run.goodput["wall_s"])
        found["goodput"] = _(NO_GOODPUT) if goodput is None else f"{goodput:.1%}"
    found = {name: UNKNOWN if text.startswith("nan") else text for name, text in found.items()}
    if series is not None and series.not_finite_from is not None:
        found["last loss"] = _(
            "{loss}, nan or infinite from step {not_finite_from:,} on",
            loss=found["last loss"],
            not_finite_from=series.not_finite_from,
        )
    # A metric that is nan is known, unlike the numbers above.
    return found | {name: _significant(value) for name, value in other_metrics(run, series).items()}


def other_metrics(run: RecordedRun, series: StepSeries | None) -> dict[str, float]:
    """Return the last values of the logged metrics without those that the step records contain, too, and without FLOPs of 0."""
    metrics = last_metrics(run)
    if not metrics.get("total_flos", 1.0):  # the Trainer cannot count those of this model
        del metrics["total_flos"]
    return {name: value for name, value in metrics.items() if name not in recorded_twice(series)}


def recorded_twice(series: StepSeries | None) -> set[str]:
    """Return the names of metrics that programs log and that are in the step records, too."""
    if series is None:
        return set()
    columns = {
        ("loss",): series.loss.mean,
        ("learning_rate", "lr"): series.lr,
        ("grad_norm",): series.grad_norm.mean,
    }
    return {name for names, column in columns.items() if not np.isnan(column).all() for name in names}


def steps_text(step: int | None, *, resumed_at: int | None) -> str:
    """Return the run's last step as text, or that it took none after it resumed from a finished training's checkpoint."""
    if step is None:
        return UNKNOWN if resumed_at is None else _("0 (already at step {resumed_at})", resumed_at=resumed_at)
    return str(step)


def last_metrics(run: RecordedRun) -> dict[str, float]:
    """Return the last value of each logged metric."""
    found: dict[str, float] = {}
    for line in run.metrics:
        found.update({name: float(v) for name, v in line["values"].items() if isinstance(v, (int, float))})
    return found


def command_line(run: RecordedRun) -> str:
    """Return the command that started the run; "-" if it is unknown."""
    command = run.facts.get("command")
    return shlex.join(map(str, command)) if isinstance(command, list) and command else UNKNOWN


def commit(run: RecordedRun) -> str:
    """Return the short hash of the git commit, with ``+`` if there were uncommitted changes; "-" if it is unknown."""
    git = run.facts.get("git")
    if not isinstance(git, Mapping) or not git.get("commit"):
        return UNKNOWN
    return f"{str(git['commit'])[:9]}{'+' if git.get('is_dirty') else ''}"


def duration_s(run: RecordedRun) -> float | None:
    """Return the seconds from the start of the run to its end, or until now if it is running."""
    began, ended = run.facts.get("began"), run.facts.get("ended")
    if not isinstance(began, (int, float)):
        return None
    if isinstance(ended, (int, float)):
        return float(ended - began)
    return time.time() - began if run.outcome == "running" else None


def settings_of(run: RecordedRun) -> Resolved[RunConfig] | str:
    """Return the settings of a run, or why they are unknown."""
    try:
        return of_run(run.folder)
    except ConfigError:
        return _("The settings are unknown, because config.json is missing or damaged.")


def format_duration(seconds: float | None) -> str:
    """Return a duration as text, such as "2 h 05 min", with two units at most."""
    if seconds is None:
        return UNKNOWN
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return _("{minutes} min {rest:02d} s", minutes=minutes, rest=rest)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def format_time(unix: object) -> str:
    """Return a time in the local time zone; "-" if it is unknown."""
    if not isinstance(unix, (int, float)):
        return UNKNOWN
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix))


def _facts(run: RecordedRun, series: StepSeries | None) -> dict[tuple[str, str], str]:
    facts = run.facts
    found = {("results", name): text for name, text in results(run, series).items()}
    git: Mapping[str, Any] = facts.get("git") or {}
    machine: Mapping[str, Any] = facts.get("machine") or {}
    found |= {(_group_of(one), one.name): hyperparameter_text(one.value) for one in run.hyperparameters}
    found |= {
        ("command", "name"): str(facts.get("name") or UNKNOWN),
        ("command", "tags"): ", ".join(run.tags) or UNKNOWN,
        ("command", "script"): str(facts.get("script") or UNKNOWN),
        ("command", "arguments"): shlex.join(map(str, facts.get("arguments") or [])) or UNKNOWN,
        ("command", "command"): command_line(run),
        ("command", "launcher"): str(facts.get("launcher") or UNKNOWN),
        ("command", "working directory"): str(facts.get("cwd") or UNKNOWN),
        ("code", "commit"): commit(run),
        ("code", "branch"): str(git.get("branch") or UNKNOWN),
        ("machine", "processes"): str(facts.get("num_processes") or UNKNOWN),
        ("machine", "machines"): str(facts.get("num_machines") or UNKNOWN),
    }
    found |= {("machine", _MACHINE_FACTS.get(str(name), str(name))): _text(value) for name, value in machine.items()}
    found |= {("versions", str(name)): str(value) for name, value in (facts.get("versions") or {}).items()}
    settings = settings_of(run)
    if not isinstance(settings, str):
        found |= {("settings", name): repr(getattr(settings.value, name)) for name in field_names(RunConfig)}
    return found


def _group_of(one: Hyperparameter) -> str:
    return HYPERPARAMETER_GROUPS[one.group]


def _defaults_of(run: RecordedRun) -> set[tuple[str, str]]:
    return {(_group_of(one), one.name) for one in run.hyperparameters if one.is_default}


def hyperparameter_text(value: object) -> str:
    """Return a hyperparameter's value as Python writes it, but a text without quotes."""
    return value if isinstance(value, str) and value else repr(value)


def _restarts(run: RecordedRun) -> str:
    number = run.facts.get("num_restarts")
    return str(number) if isinstance(number, int) else UNKNOWN


def _text(value: object) -> str:
    return ", ".join(map(str, value)) or UNKNOWN if isinstance(value, list) else str(value)


def _significant(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:.5g}"


def _median(values: Sequence[float]) -> float:
    known = sorted(value for value in values if value == value)
    return known[len(known) // 2] if known else float("nan")
