"""Runs a script with some settings for a limited time, and measures its steps from the run's record."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from echelon.base.errors import EchelonError
from echelon.base.messages.translation import gettext as _
from echelon.launch.environment import inherited
from echelon.launch.interrupts import end_launcher
from echelon.report.run_folder import find_run, read_run
from echelon.report.step_series import StepSeries, step_series
from echelon.tune.candidates import Candidate
from echelon.world.launch_variables import NO_RECORD_VARIABLE

_FEWEST = 6
"""Number of steps that must be measured."""
_WARM_UP = 0.3
"""Fraction of the recorded steps that is not measured: caches, compilation, worker processes."""
_GRACE_S = 20.0
START_S = 300.0
"""Longest time until the first step: imports, reading data, compiling."""
_POLL_S = 0.2
_NUM_LOSSES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedRun:
    """The steps of a run with a candidate's settings, or why there are none."""

    candidate: Candidate
    step_ms: float = float("nan")
    """Median time of an optimizer step."""
    samples_per_s: float = float("nan")
    """Samples of all processes per second."""
    memory_mb: float = float("nan")
    """Largest memory in use of a process."""
    num_steps: int = 0
    series: StepSeries | None = None
    failure: str = ""


def measure(candidate: Candidate, script: str, args: Sequence[str], *, seconds: float, folder: Path) -> TriedRun:
    """Run ``script`` with the candidate's settings for ``seconds``, or until it ends; everything is stopped then.

    Args:
        seconds: time limit from the first recorded step on. The start may take ``START_S`` more.
    """
    folder.mkdir(parents=True)
    command = [
        sys.executable,
        "-m",
        "echelon",
        "launch",
        "--quiet",
        "--max_restarts",
        "0",
        "--log_dir",
        str(folder / "run"),
    ]
    command += [*candidate.flags, script, *args]
    with open(folder / "output", "wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=_environment()
        )
        try:
            code = _wait(process, folder / "run", seconds=seconds)
        finally:
            stop(process)
    if code not in (0, None):
        return TriedRun(candidate=candidate, failure=f"ended with exit code {code}: {_last_line(folder / 'output')}")
    return _of_record(candidate, folder / "run", seconds=None if code == 0 else seconds)


def _environment() -> dict[str, str]:
    """Return this program's environment, in which runs are recorded."""
    return inherited(without=lambda name: name == NO_RECORD_VARIABLE)


def _wait(process: subprocess.Popen[bytes], folder: Path, *, seconds: float) -> int | None:
    """Wait until the process ends or its time is over; return its exit code, or None if it still runs."""
    end, has_begun = time.monotonic() + START_S, False
    while time.monotonic() < end:
        if not has_begun and any(folder.glob("*/records/*/rank_0.steps")):
            end, has_begun = time.monotonic() + seconds, True
        try:
            return process.wait(timeout=min(_POLL_S, max(end - time.monotonic(), 0.0)))
        except subprocess.TimeoutExpired:
            continue
    return None


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop the launcher and its ranks. The second signal prevents a checkpoint, which would take time and room."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)  # two signals at once could be seen in the other order
    end_launcher(process, grace_s=_GRACE_S)


def too_few_steps(number: int, *, seconds: float | None) -> str:
    """Return why ``number`` steps cannot be measured: they took all ``seconds``, or (None) the script ended by itself."""
    if seconds is None:
        return _(
            "the script ended after {number} steps, too few to measure; pass arguments with which it trains longer",
            number=number,
        )
    return _("only {number} steps within {seconds:.0f} s; add --seconds", number=number, seconds=seconds)


def _of_record(candidate: Candidate, folder: Path, *, seconds: float | None) -> TriedRun:
    try:
        series = step_series(read_run(find_run(folder)))
    except EchelonError:
        series = None
    if series is None:
        why = "no step was recorded: the script uses neither echelon's Accelerator nor its Trainer, or made no optimizer step"
        return TriedRun(candidate=candidate, failure=why)
    if series.num_steps < _FEWEST + 2:
        return TriedRun(candidate=candidate, failure=too_few_steps(series.num_steps, seconds=seconds))
    first = int(len(series.steps) * _WARM_UP)
    steps, times = series.steps[first:], series.times[first:]
    step_s = float(np.median(np.diff(times) / np.diff(steps)))
    return TriedRun(
        candidate=candidate,
        step_ms=1e3 * step_s,
        samples_per_s=series.num_samples / series.num_steps / step_s,
        memory_mb=float(np.nanmax(series.rank_memory_mb)) if np.isfinite(series.rank_memory_mb).any() else float("nan"),
        num_steps=series.num_steps,
        series=series,
    )


def relative_loss(one: TriedRun, other: TriedRun) -> float | None:
    """Return the relative difference of the mean loss over the last common steps; None if the batches differ, or it is unknown."""
    if one.series is None or other.series is None or one.candidate.num_processes != other.candidate.num_processes:
        return None
    last = min(one.series.last_step, other.series.last_step)
    means = []
    for series in (one.series, other.series):
        end = int(np.searchsorted(series.steps, last, side="right"))
        losses = series.loss.mean[max(0, end - _NUM_LOSSES) : end]
        means.append(float(np.nanmean(losses)) if np.isfinite(losses).any() else float("nan"))
    difference = abs(means[0] - means[1]) / max(abs(means[1]), 1e-12)
    return difference if np.isfinite(difference) else None


def _last_line(path: Path) -> str:
    lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    starts = [line for line in lines if line.startswith("echelon: ")]
    return (starts or lines or ["no output"])[-1][:200]
