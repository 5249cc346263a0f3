"""Turns recorded runs into the JSON data of the report page. A panel without data gets a sentence that says why."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from echelon._version import __version__
from echelon.base.messages.translation import gettext as _, gettext_noop as N_
from echelon.base.peak_flops import peak_flops
from echelon.config.origin import SettingSource
from echelon.config.schema import RunConfig, field_names
from echelon.diagnose.goodput import goodput_of
from echelon.report.comparison import (
    UNKNOWN,
    command_line,
    commit,
    compare_runs,
    duration_s,
    format_duration,
    format_time,
    hyperparameter_text,
    last_metrics,
    recorded_twice,
    settings_of,
)
from echelon.report.failure import recorded_output, why_it_failed
from echelon.report.run_folder import RecordedRun
from echelon.report.step_series import MAX_POINTS, Spread, StepSeries, step_series
from echelon.status.run_files import event_text

_MAX_MARKERS = 300
"""Largest number of checkpoints, and of other events, on the time line."""
_NO_RECORDS = N_(
    "The run has no step records: no optimizer step was finished, the script uses no prepared optimizer, "
    "or recording was turned off (--no_record)."
)
_PROGRAM_IS_WHOLE = N_(
    "The time of the program is not divided into parts, and its useful share is unknown: no training "
    "loop was recorded. The Accelerator and the Trainer record its phases."
)
_WHY_MISSING = MappingProxyType(
    {
        "loss": N_(
            "No loss was recorded, because no loss was passed to Accelerator.backward. Log it: "
            "Accelerator.log({'loss': loss}, step) or echelon.distributed.log({'loss': loss}, step=step)."
        ),
        "lr": N_("No learning rate was recorded, because the optimizer's first parameter group has none."),
        "grad_norm": N_(
            "No gradient norm was computed. Accelerator.clip_grad_norm_ and the Trainer's max_grad_norm compute it."
        ),
        "samples": N_(
            "No samples were counted. echelon counts them in loaders that are passed to prepare() or shard()."
        ),
        "items": N_("No tokens were counted. Pass their number: Accelerator.backward(loss, num_items=...)."),
        "parts": N_("The time of a step by phase is known from the second step on."),
        "memory": N_("No memory was recorded. It is measured once a second."),
        "stragglers": N_("There is one rank, and so nothing to compare."),
        "hyperparameters": N_(
            "No hyperparameters were recorded. The Trainer, Accelerator.prepare() and shard() at Level 1 record theirs; "
            "a script records its own with log_hyperparameters({...})."
        ),
        "output": N_(
            "What the ranks printed went to the terminal only. echelon launch --log_dir DIR also saves it, and it is then shown here."
        ),
        "metrics": N_(
            "No metric was logged. Accelerator.log, Trainer.log, evaluations and echelon.distributed.log write metrics."
        ),
    }
)


def page_data(runs: Sequence[RecordedRun]) -> dict[str, Any]:
    """Return the contents of the page for one run, or for several to compare."""
    series = [step_series(run) for run in runs]
    facts = compare_runs(runs, series) if len(runs) > 1 else []
    return {
        "echelon": __version__,
        "title": runs[0].title if len(runs) == 1 else _("{num_runs} runs", num_runs=len(runs)),
        "runs": [_run(run, one) for run, one in zip(runs, series)],
        "comparison": [[fact.group, fact.name, list(fact.values), fact.is_equal] for fact in facts],
    }


def _run(run: RecordedRun, series: StepSeries | None) -> dict[str, Any]:
    began = _began(run, series)
    missing: dict[str, str] = {}
    metrics, values = _metrics(run, series, began)
    if not metrics and not values:
        missing["metrics"] = _(_WHY_MISSING["metrics"])
    if not run.hyperparameters:
        missing["hyperparameters"] = _(_WHY_MISSING["hyperparameters"])
    output = recorded_output(run)
    if not output:
        missing["output"] = _(_WHY_MISSING["output"])
    timeline = _timeline(run, series, began)
    if timeline is None:
        missing["timeline"] = _("Neither events nor steps were recorded. echelon launch writes events.jsonl.")
    if run.goodput is None:
        missing["goodput"] = _why_no_goodput(run)
    elif goodput_of(run.goodput["parts"], wall_s=run.goodput["wall_s"]) is None:
        missing["goodput parts"] = _(_PROGRAM_IS_WHOLE)
    settings = settings_of(run)
    if isinstance(settings, str):
        missing["settings"] = settings
    return {
        "name": run.name,
        "script": str(run.facts.get("script") or run.name),
        "title": str(run.facts.get("name") or ""),
        "tags": run.tags,
        "failure": why_it_failed(run, output),
        "output": output,
        "hyperparameters": _hyperparameter_rows(run),
        "outcome": run.outcome,
        "began": format_time(run.facts.get("began")),
        "duration": format_duration(duration_s(run)),
        "command": command_line(run),
        "commit": commit(run),
        "branch": str((run.facts.get("git") or {}).get("branch") or ""),
        "num_ranks": run.facts.get("num_processes") or (len(series.ranks) if series else None),
        "folder": str(run.folder.resolve()),
        "tiles": _tiles(run, series),
        "warnings": _warnings(series),
        **_series(run, series, began, missing, {metric["name"] for metric in metrics}),
        "metrics": metrics,
        "values": values,
        "goodput": run.goodput,
        "timeline": timeline,
        "settings": [] if isinstance(settings, str) else _settings_rows(settings),
        "environment": _environment(run),
        "versions": [[str(name), str(value)] for name, value in (run.facts.get("versions") or {}).items()],
        "missing": missing,
    }


def _began(run: RecordedRun, series: StepSeries | None) -> float:
    began = run.facts.get("began")
    if isinstance(began, (int, float)):
        return float(began)
    times = [float(event["time"]) for event in run.events[:1]]
    if series is not None:
        times.append(float(np.nanmin(series.times)))
    return min(times, default=0.0)


def _series(
    run: RecordedRun, series: StepSeries | None, began: float, missing: dict[str, str], metric_names: set[str]
) -> dict[str, Any]:
    if series is None:
        names = ("loss", "lr", "grad_norm", "samples", "items", "parts", "memory", "stragglers")
        missing.update(dict.fromkeys(names, _(_NO_RECORDS)))
        if "loss" in metric_names:
            missing.pop("loss")
        return {"x": None, "series": {}, "ranks": None, "verdict": "", "mfu": _mfu(run, None)}
    found: dict[str, Any] = {
        "loss": _spread(series.loss),
        "lr": _floats(series.lr),
        "grad_norm": _spread(series.grad_norm),
        "samples": _floats(series.samples_per_s),
        "items": _floats(series.items_per_s),
        "parts": {name: _floats(ms) for name, ms in series.part_ms.items() if np.nansum(ms) > 0},
    }
    known = {
        "loss": series.loss.mean,
        "lr": series.lr,
        "grad_norm": series.grad_norm.mean,
        "samples": series.samples_per_s,
        "items": series.items_per_s,
        "parts": series.step_ms,
    }
    for name, column in known.items():
        if np.isnan(column).all():
            del found[name]
            if name == "loss" and series.not_finite_from is not None:
                missing[name] = _("All losses are nan or infinite.")
            elif name != "loss" or "loss" not in metric_names:
                missing[name] = _(_WHY_MISSING[name])
    if np.isnan(series.memory_mb).all():
        missing["memory"] = _(_WHY_MISSING["memory"])
    if len(series.ranks) == 1:
        missing["stragglers"] = _(_WHY_MISSING["stragglers"])
    elif not series.has_parts:
        missing["stragglers"] = _(
            "The time by phase, which shows who waits for whom, is recorded by the Accelerator and the Trainer."
        )
    ranks = {
        "ids": series.ranks,
        "x": {"step": _floats(series.rank_columns), "time": _floats(series.rank_times - began)},
        "memory": [_floats(row, digits=4) for row in series.memory_mb],
        "own": [_floats(row, digits=4) for row in series.own_ms] if len(series.ranks) > 1 else [],
        "parts": {name: _floats(ms) for name, ms in series.rank_part_ms.items() if np.nansum(ms) > 0},
        "max_memory": _floats(series.rank_memory_mb),
    }
    return {
        "x": {"step": _floats(series.steps), "time": _floats(series.times - began)},
        "series": found,
        "ranks": ranks,
        "verdict": series.verdict,
        "mfu": _mfu(run, series),
    }


def _tiles(run: RecordedRun, series: StepSeries | None) -> list[dict[str, str]]:
    tiles: list[tuple[str, str, str]] = []
    if series is not None:
        loss = series.last_loss if not math.isnan(series.last_loss) else last_metrics(run).get("loss", math.nan)
        if series.not_finite_from is None:
            tiles.append((_("last training loss"), _short(loss), _("of step {step:,}", step=series.last_step)))
        else:
            step = _("from step {step:,} on", step=series.not_finite_from)
            tiles.append((_("last training loss"), "nan", step))
    tiles += _evaluation_tiles(run, series)
    if series is not None:
        repeated = (
            _("{num_repeated:,} repeated", num_repeated=series.num_repeated)
            if series.num_repeated
            else _("optimizer steps")
        )
        tiles.append((_("steps"), f"{series.num_steps:,}", repeated))
    if duration_s(run) is not None:
        tiles.append((_("wall time"), format_duration(duration_s(run)), format_time(run.facts.get("began"))[:16]))
    if run.goodput is not None:
        goodput = goodput_of(run.goodput["parts"], wall_s=run.goodput["wall_s"])
        if goodput is not None:
            tiles.append((_("goodput"), f"{goodput:.1%}", _("useful time")))
    if series is not None:
        items = np.nanmedian(series.items_per_s) if not np.isnan(series.items_per_s).all() else math.nan
        samples = np.nanmedian(series.samples_per_s) if not np.isnan(series.samples_per_s).all() else math.nan
        if not math.isnan(samples):
            tiles.append((_("samples/s"), _short(float(samples)), _("median, all ranks")))
        if not math.isnan(items):
            tiles.append((_("tokens/s"), _short(float(items)), _("median, all ranks")))
        memory = series.rank_memory_mb
        if not np.isnan(memory).all():
            rank = series.ranks[int(np.nanargmax(memory))]
            where = _("largest") if len(series.ranks) == 1 else _("largest, rank {rank}", rank=rank)
            if predicted := _predicted_bytes(run):
                size = _memory(predicted / 2**20)
                where = _("{where}; predicted peak on a GPU: {size}", where=where, size=size)
            tiles.append((_("memory"), _memory(float(np.nanmax(memory))), where))
    if restarts := run.facts.get("num_restarts"):
        tiles.append((_("restarts"), str(restarts), _("see the time line")))
    return [{"name": name, "value": value, "note": note} for name, value, note in tiles]


def _predicted_bytes(run: RecordedRun) -> float | None:
    """Return the last predicted peak of the run (``launch --plan``, ``plan=True``, ``Accelerator.plan``)."""
    found = [one.value for one in run.hyperparameters if (one.group, one.name) == ("training", "plan.peak_bytes")]
    return found[-1] if found and isinstance(found[-1], (int, float)) else None


def _evaluation_tiles(run: RecordedRun, series: StepSeries | None) -> list[tuple[str, str, str]]:
    """Return a tile for each of the first metrics: those of evaluations before others."""
    points: dict[str, list[tuple[object, float]]] = {}
    for line in run.metrics:
        for name, value in line["values"].items():
            if isinstance(value, (int, float)) and is_result(name) and name not in recorded_twice(series):
                points.setdefault(name, []).append((line.get("step"), float(value)))
    tiles = []
    for name in sorted(points, key=lambda name: (_EVALUATION.match(name) is None, not is_loss(name)))[
        :_MAX_METRIC_TILES
    ]:
        values = [value for _step, value in points[name] if math.isfinite(value)]
        step, last = points[name][-1]
        best = (min if is_loss(name) else max)(values, default=math.nan)
        text = _("of step {step:,}", step=step) if isinstance(step, int) else _("last value")
        if values and best != last:
            lowest = _("{text}; lowest {value}", text=text, value=_short(best))
            text = lowest if is_loss(name) else _("{text}; highest {value}", text=text, value=_short(best))
        tiles.append((name, _short(last), text))
    return tiles


_MAX_METRIC_TILES = 4
_EVALUATION = re.compile(r"(?i)(eval|val|valid|validation|test|dev)(?=[_/. -]|$)")
_LOSS = re.compile(r"(?i)(^|[_/. -])loss$")
# Speeds and counts, which say nothing about the model.
_NO_RESULT = re.compile(
    r"(?i)(^|[_/. -])(runtime|(samples|steps|tokens)_per_second|jit_compilation_time|epoch|step|lr|learning_rate|mfu)$"
    r"|^(total_flos|num_input_tokens_seen|train_.*)$"
)


def is_result(name: str) -> bool:
    """Return whether the metric ``name`` says how good the model is, not how long something took."""
    return _NO_RESULT.search(name) is None


def is_loss(name: str) -> bool:
    """Return whether the metric ``name`` is a loss."""
    return _LOSS.search(name) is not None


def _warnings(series: StepSeries | None) -> list[str]:
    if series is None or series.not_finite_from is None:
        return []
    return [
        _(
            "The loss is not finite from step {not_finite_from:,} on (nan or infinite).",
            not_finite_from=series.not_finite_from,
        )
    ]


def _mfu(run: RecordedRun, series: StepSeries | None) -> str:
    """Return the model FLOPs utilization as a sentence, or why it is unknown."""
    last = last_metrics(run)
    if "mfu" in last:
        return _("MFU {last:.1%} (logged by the script)", last=last["mfu"])
    flops = last.get("total_flos", 0.0)
    if not flops or series is None:
        return _("MFU is unknown, because the FLOPs of a step are (the Trainer logs total_flos; scripts can log mfu).")
    accelerators = (run.facts.get("machine") or {}).get("accelerators") or []
    peak = peak_flops(str(accelerators[0])) if accelerators else None
    if peak is None:
        return _("{flops:.3g} FLOPs in total. MFU is unknown, because the peak FLOP/s of this device is.", flops=flops)
    # The total counts all steps, also those before this run resumed; this run's records have the time of its own steps.
    seconds = float(np.nanmean(series.step_ms)) / 1e3 * series.last_step
    return _(
        "MFU {value:.1%} of {peak:.0f} TFLOP/s per device",
        value=flops / seconds / peak / len(series.ranks),
        peak=peak / 1e12,
    )


def _metrics(
    run: RecordedRun, series: StepSeries | None, began: float
) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """Return the series of metrics that were logged more than once, and the last values of the others, such as runtimes."""
    points: dict[str, list[tuple[float | None, float, float]]] = {}
    for line in run.metrics:
        step = line.get("step")
        for name, value in line["values"].items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                at = _finite(float(step)) if isinstance(step, (int, float)) else None
                points.setdefault(str(name), []).append((at, float(line.get("time", began)) - began, float(value)))
    hidden = recorded_twice(series)
    found, single = [], []
    for name, rows in points.items():
        if name in hidden or name == "epoch" or (name == "total_flos" and not rows[-1][2]):
            continue
        is_drawn = is_loss(name) and is_result(name)  # in the plot of the loss, also if it has one value only
        if (len(rows) == 1 and not is_drawn) or not is_result(name):
            single.append((name, _short(rows[-1][2])))
            continue
        if len(rows) > MAX_POINTS:
            rows = _extremes(rows)
        steps = [at if at is not None else float(i + 1) for i, (at, _, _) in enumerate(rows)]
        found.append(
            {
                "name": name,
                "isLoss": is_drawn,
                "x": {"step": steps, "time": [_finite(at) for _, at, _ in rows]},
                "y": [_finite(value) for _, _, value in rows],
            }
        )
    return sorted(found, key=lambda metric: not str(metric["name"]).startswith("eval")), single


def _extremes(rows: Sequence[tuple[float | None, float, float]]) -> list[tuple[float | None, float, float]]:
    """Return the smallest and the largest value in each of ``MAX_POINTS / 2`` groups, in their order."""
    size = -(-len(rows) // (MAX_POINTS // 2))
    kept = []
    for start in range(0, len(rows), size):
        group = range(start, min(start + size, len(rows)))
        ends = {min(group, key=lambda i: rows[i][2]), max(group, key=lambda i: rows[i][2])}
        kept += [rows[i] for i in sorted(ends)]
    return kept


def _timeline(run: RecordedRun, series: StepSeries | None, began: float) -> dict[str, Any] | None:
    events = [{**event, "at": float(event["time"]) - began} for event in run.events]
    ends = [float(event["at"]) for event in events]
    if series is not None:
        ends.append(float(np.nanmax(series.times)) - began)
    if not ends:
        return None
    length = max(ends + [duration_s(run) or 0.0, run.goodput["wall_s"] if run.goodput else 0.0])
    starts = [event for event in events if event.get("kind") in ("start", "restart")]
    attempts = []
    for i, start in enumerate(starts):
        limit = starts[i + 1]["at"] if i + 1 < len(starts) else length
        stops = [e for e in events if e.get("kind") in ("failure", "end") and start["at"] < e["at"] <= limit]
        failed = bool(stops) and stops[0]["kind"] == "failure"
        end = stops[0]["at"] if stops else limit
        # The first attempt begins with the launcher.
        attempts.append([0.0 if i == 0 else start["at"], end, failed, _first_step(series, began, start["at"], end)])
    if not attempts and series is not None:
        first = float(np.nanmin(series.times)) - began
        attempts = [[0.0, float(np.nanmax(series.times)) - began, False, first]]
    for event in events:  # said at the end about the whole run; not after a failure
        if event.get("kind") == "straggler" and attempts:
            event["at"] = min(event["at"], attempts[-1][1])
    saves = [event for event in events if event.get("kind") == "checkpoint"]
    others = [event for event in events if event.get("kind") not in ("checkpoint", "start")]
    if run.outcome != "succeeded":  # no green mark; and where a failure is marked, no second mark at its end
        has_failure = attempts and attempts[-1][2]
        others = [
            {**e, "kind": "stop"} if e["kind"] == "end" else e for e in others if e["kind"] != "end" or not has_failure
        ]
    return {
        "length": length,
        "attempts": attempts,
        "checkpoints": [[event["at"], _event_text(event), event.get("duration_s") or 0.0] for event in _thinned(saves)],
        "events": [[event["at"], str(event.get("kind")), _event_text(event)] for event in _thinned(others)],
        "num_checkpoints": len(saves),
        "num_events": len(others),
    }


def _first_step(series: StepSeries | None, began: float, start: float, end: float) -> float:
    """Return when the first step between ``start`` and ``end`` was finished, or ``end`` if there is none."""
    times = [] if series is None else [time - began for time in series.attempt_began if start < time - began < end]
    return min(times, default=end)


def _event_text(event: Mapping[str, Any]) -> str:
    step = event.get("step")
    at = _("step {step:,}: ", step=step) if isinstance(step, int) else ""
    return f"{at}{event_text(event)}"


def _thinned(events: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    return events[:: -(-len(events) // _MAX_MARKERS) or 1]


def _why_no_goodput(run: RecordedRun) -> str:
    if run.outcome == "running":
        return _("Goodput is written when the run ends or restarts.")
    launcher = run.facts.get("launcher")
    if launcher not in (None, "echelon launch"):
        return _("Goodput is measured by echelon launch; this run was started with {launcher}.", launcher=launcher)
    return _("No goodput was written, because the launcher was killed before the run ended.")


def _settings_rows(settings: Any) -> list[list[Any]]:
    rows = []
    for name in field_names(RunConfig):
        origin = settings.origins[name]
        lost = [f"{s.value!r} ({s.origin})" for s in settings.shadowed if s.name == name]
        is_default = origin.source is SettingSource.DEFAULT
        rows.append([name, repr(getattr(settings.value, name)), str(origin), ", ".join(lost), is_default])
    return sorted(rows, key=lambda row: row[4])


def _hyperparameter_rows(run: RecordedRun) -> list[list[Any]]:
    """Return name, value, origin and whether it is the default; those that are not come first."""
    origins = {"logged": "log_hyperparameters", "arguments": "TrainingArguments", "training": _("recorded by echelon")}
    rows = [
        [one.name, hyperparameter_text(one.value), origins[one.group], one.is_default] for one in run.hyperparameters
    ]
    return sorted(rows, key=lambda row: bool(row[3]))


def _environment(run: RecordedRun) -> list[tuple[str, str]]:
    facts = run.facts
    machine: Mapping[str, Any] = facts.get("machine") or {}
    git: Mapping[str, Any] = facts.get("git") or {}
    no_branch = _("no branch")
    changes = _(" with uncommitted changes") if git.get("is_dirty") else ""
    memory = machine.get("memory_mb")
    rows = [
        ("command", command_line(run)),
        ("working directory", str(facts.get("cwd") or UNKNOWN)),
        (
            "git",
            f"{git['commit']} ({git.get('branch') or no_branch}){changes}" if git.get("commit") else UNKNOWN,
        ),
        ("launcher", str(facts.get("launcher") or UNKNOWN)),
        ("processes", str(facts.get("num_processes") or UNKNOWN)),
        ("machines", str(facts.get("num_machines") or UNKNOWN)),
        ("host", str(machine.get("host") or UNKNOWN)),
        ("system", str(machine.get("system") or UNKNOWN)),
        (
            "processor",
            _("{processor}, {number} cores", processor=machine.get("processor"), number=machine.get("num_cores"))
            if machine
            else UNKNOWN,
        ),
        ("memory", _memory(float(memory)) if isinstance(memory, (int, float)) else UNKNOWN),
        (
            "accelerators",
            ", ".join(map(str, machine.get("accelerators") or [])) or (_("none") if machine else UNKNOWN),
        ),
        ("began", format_time(facts.get("began"))),
        ("ended", format_time(facts.get("ended"))),
        ("exit code", UNKNOWN if facts.get("exit_code") is None else str(facts["exit_code"])),
        ("folder", ", ".join(str(folder.resolve()) for folder in run.folders)),
    ]
    return [(name, text) for name, text in rows if text != UNKNOWN]


def _spread(spread: Spread) -> dict[str, list[float | None]]:
    return {"least": _floats(spread.least), "mean": _floats(spread.mean), "most": _floats(spread.most)}


def _floats(values: npt.NDArray[np.float64], *, digits: int = 6) -> list[float | None]:
    """Return the values with ``digits`` significant digits; None for nan and infinity, which JSON does not have."""
    return [_finite(float(f"{value:.{digits}g}")) for value in values.tolist()]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _short(value: float) -> str:
    if math.isnan(value):
        return UNKNOWN
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e8 else f"{value:.4g}"


def _memory(mb: float) -> str:
    return f"{mb / 1024:.1f} GB" if mb >= 1024 else f"{mb:.0f} MB"
