"""The one-process runs that layouts are compared with: one for each number of merged batches, and its twin in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from echelon.base.errors import UsageError
from echelon.verify.command.run_layouts import LayoutRun, RunFailure, RunRequest
from echelon.verify.compare import gradient_errors
from echelon.verify.trace import (
    VERSION,
    Batch,
    Model,
    OptimizerStep,
    Trace,
    read_trace,
    recorded_version,
)

_NUM_PERTURBED = 4
"""Two pairs of runs that are perturbed in opposite directions: a value close to a kink (relu, the sign of a gradient in Adam) crosses it
in one run of a pair."""


@dataclass(slots=True, kw_only=True)
class Reference:
    """A run on one process, and others of it that ``References`` has run so far."""

    batch_factor: int
    trace: Trace
    has_float64: bool = False
    """Whether the run in float64 was tried."""
    float64: Trace | None = None
    """The same run in float64; None if it was not run, or failed."""
    float64_failure: RunFailure | None = None
    perturbed: list[Trace] | None = None
    """The same run with initial weights that differ by one rounding; None: not run yet."""


class MergeError(Exception):
    """The updates of a layout and of one process do not have the same number of samples, whatever batches are merged."""


class References:
    """Runs each reference when it is first needed.

    Args:
        base: the request of the run on one process, whose folder contains the folders of all references.
        record: runs a request.
        saved: folder of a reference that was recorded earlier; nothing is run then.
    """

    def __init__(
        self, base: RunRequest, record: Callable[[RunRequest], LayoutRun], *, saved: Path | None = None
    ) -> None:
        self._base, self._record = base, record
        self._saved = {} if saved is None else saved_traces(saved)
        self._found: dict[int, Reference | LayoutRun] = {}

    @property
    def runs_nothing(self) -> bool:
        """Whether the references were recorded earlier."""
        return bool(self._saved)

    def first(self) -> Reference | LayoutRun:
        """Return the reference without merged batches, or the run that failed."""
        return self.find(min(self._saved, default=1))

    def find(self, factor: int) -> Reference | LayoutRun:
        """Return the reference in which ``factor`` batches of the loader are one, or the run that failed.

        Raises:
            MergeError: the saved references have none with this factor.
        """
        if factor not in self._found:
            self._found[factor] = self._load(factor) if self._saved else self._run(factor)
        return self._found[factor]

    def add_float64(self, reference: Reference) -> None:
        """Run ``reference`` in float64, if it was not tried yet."""
        if not reference.has_float64 and not self._saved:
            request = self._request(reference.batch_factor, name="reference in float64", suffix="-float64")
            run = self._record(replace(request, run=replace(request.run, is_float64=True)))
            reference.float64_failure = run.failure
            reference.float64 = read_trace(request.folder) if run.failure is None else None
        reference.has_float64 = True

    def add_perturbations(self, reference: Reference) -> None:
        """Run ``reference`` with initial weights that differ by one rounding, if that was not done yet."""
        if reference.perturbed is None:
            reference.perturbed = [] if self._saved else list(self._run_perturbed(reference))

    def repeat(self, reference: Reference) -> Trace | LayoutRun:
        """Run ``reference`` once more, to see whether the script repeats itself."""
        request = self._request(reference.batch_factor, name="reference, repeated", suffix="-again")
        run = self._record(request)
        return run if run.failure is not None else read_trace(request.folder)

    def _load(self, factor: int) -> Reference:
        if factor not in self._saved:
            known = ", ".join(map(str, sorted(self._saved)))
            raise MergeError(
                f"this layout needs a reference with {factor} merged batches, and the recorded run has {known}; "
                f"record one with echelon verify --keep, or leave out --against_run"
            )
        own, float64 = self._saved[factor]
        trace = None if float64 is None else read_trace(float64)
        return Reference(batch_factor=factor, trace=read_trace(own), float64=trace)

    def _run(self, factor: int) -> Reference | LayoutRun:
        name = "reference (one process)" if factor == 1 else f"reference, {factor} batches of the loader in one"
        run = self._record(self._request(factor, name=name))
        if run.failure is not None:
            return run
        return Reference(batch_factor=factor, trace=read_trace(run.request.folder))

    def _run_perturbed(self, reference: Reference) -> Iterator[Trace]:
        factor = reference.batch_factor
        errors = gradient_errors(reference.trace, reference.float64)
        for seed in range(1, _NUM_PERTURBED + 1):
            name = f"reference, rounding check {seed}/{_NUM_PERTURBED}"
            request = self._request(factor, name=name, suffix=f"-perturbed-{seed}")
            perturbed = replace(request.run, perturbation=seed, gradient_errors=errors)
            if self._record(replace(request, run=perturbed)).failure is None:
                yield read_trace(request.folder)

    def _request(self, factor: int, *, name: str, suffix: str = "") -> RunRequest:
        folder = self._base.folder / f"reference-{factor}{suffix}"
        return replace(self._base, name=name, folder=folder, run=replace(self._base.run, batch_factor=factor))


def saved_traces(folder: Path) -> dict[int, tuple[Path, Path | None]]:
    """Return the references in ``folder``, which ``--keep`` wrote, by the number of merged batches: own dtype, float64.

    Raises:
        UsageError: there are none, or another version of echelon has recorded them.
    """
    found: dict[int, tuple[Path, Path | None]] = {}
    for path in folder.glob("reference-*"):
        number = path.name.removeprefix("reference-")
        if number.isdigit() and _has_traces(path):
            _require_version(path)
            twin = path.with_name(f"{path.name}-float64")
            found[int(number)] = (path, twin if _has_traces(twin) else None)
    if not found:
        raise UsageError(
            f"{folder} contains no recorded run",
            where="flag --against_run",
            do="pass a folder that echelon verify --keep FOLDER wrote",
        )
    return found


def _require_version(folder: Path) -> None:
    version = recorded_version(folder)
    if version is not None and version != VERSION:
        raise UsageError(
            f"{folder} was recorded by another version of echelon (format {version}, this one is {VERSION}), whose numbers have another meaning",
            where="flag --against_run",
            do="record it again with this version: echelon verify --keep FOLDER ...",
        )


def _has_traces(folder: Path) -> bool:
    return any(folder.glob("rank_*.trace.jsonl"))


def batch_factor(layout: Trace, one_process: Trace) -> int:
    """Return how many batches one process must take as one, so that each update has the samples of all ranks.

    Raises:
        MergeError: no whole number does.
    """
    models = [event for events in layout.ranks for event in events if isinstance(event, Model)]
    is_global = any(model.parity in ("exact", "bitwise") for model in models)
    update = min(_updates(one_process) & _updates(layout), default=None)
    if update is None:
        raise MergeError("no update was recorded on both")
    in_layout, in_one = (_num_samples(trace, update, distinct=is_global) for trace in (layout, one_process))
    if not in_layout or not in_one:
        return 1  # no batch was seen; the other stages can be compared
    factor = Fraction(in_layout, in_one)
    if is_global and factor.denominator != 1:
        return 1  # the loader's batch is the global one; samples that fill it up have no weight
    if factor.denominator != 1:
        raise MergeError(
            f"update {update} has {in_layout} samples on {len(layout.ranks)} processes and {in_one} on one process, "
            "and merging a whole number of batches does not make them equal"
        )
    return factor.numerator


def _updates(trace: Trace) -> set[int]:
    return {event.update for events in trace.ranks for event in events if isinstance(event, OptimizerStep)}


def _num_samples(trace: Trace, update: int, *, distinct: bool) -> int:
    """Return the number of samples in an update; ``distinct`` leaves out the repeated ones that fill up a global batch."""
    events = [event for events in trace.ranks for event in events]
    batches = [event for event in events if isinstance(event, Batch) and event.update == update]
    sources = {batch.source for batch in batches}
    source = "loader" if "loader" in sources else "inputs"
    rows = [row.whole for batch in batches if batch.source == source for row in batch.rows]
    return len(set(rows)) if distinct else len(rows)
