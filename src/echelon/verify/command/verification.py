"""Verifies a script: records it on one process and on each layout, and compares each layout with one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from echelon.distributed.checks.finding import Finding
from echelon.verify.command.layouts import Layout
from echelon.verify.command.references import MergeError, Reference, References, batch_factor
from echelon.verify.command.run_layouts import LayoutRun, RunFailure, RunRequest
from echelon.verify.compare import CompareOptions, compare
from echelon.verify.comparison.alignment import AlignedRun
from echelon.verify.comparison.invariants import unequal_progress
from echelon.verify.finding import Verdict
from echelon.verify.trace import Event, Model, RecordingSettings, Trace, read_trace

Outcome = Literal["same", "different", "not comparable", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyPlan:
    """What to verify."""

    script: str
    arguments: tuple[str, ...]
    layouts: tuple[Layout, ...]
    steps: int
    folder: Path
    """Where the traces are written."""
    against: str | None = None
    """Script of the reference; None: the same script."""
    against_run: Path | None = None
    """Folder of a recorded reference."""
    resume_after: int | None = None
    """Number of updates after which each layout is started again."""
    resume_arguments: tuple[str, ...] = ()
    """Arguments of the script that is started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutResult:
    """What was found on one layout."""

    layout: Layout
    outcome: Outcome
    num_updates: int
    seconds: float
    batch_factor: int = 1
    """How many batches one process took as one."""
    verdict: Verdict | None = None
    failure: RunFailure | None = None
    """Why the run failed; ``verdict`` is then that of the updates before."""
    phase: str = ""
    """Of a resumed run: which part of it failed."""
    has_engine: bool = True
    """Whether the script uses an engine of echelon. Without one, all engines are the same layout."""
    is_copy: bool = False
    """Whether it was not run, because it is the same layout as another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What was found on all layouts."""

    plan: VerifyPlan
    layouts: tuple[LayoutResult, ...]
    seconds: float
    reference_failure: LayoutRun | None = None
    """The run on one process, if it failed; nothing was compared then."""
    repeated: Finding | None = None
    """The first difference between two runs on one process, if the script does not repeat itself."""
    float64_failure: RunFailure | None = None
    """Why the reference could not be run in float64, if it could not."""

    @property
    def exit_code(self) -> int:
        """Return 0 if all layouts are the same run, 1 if one differs, 2 if none differs but not all could be compared.

        It is also 2 if the script does not repeat itself.
        """
        outcomes = {one.outcome for one in self.layouts}
        if "different" in outcomes:
            return 1 if self.repeated is None else 2
        return 0 if outcomes == {"same"} else 2

    def as_json(self) -> dict[str, Any]:
        """Return the results as values that ``json`` writes."""
        plan = self.plan
        return {
            "format": "echelon-verify",
            "version": 1,
            "result": {0: "same", 1: "different", 2: "could not run"}[self.exit_code],
            "script": plan.script,
            "arguments": list(plan.arguments),
            "steps": plan.steps,
            "against": plan.against or (None if plan.against_run is None else str(plan.against_run)),
            "resume_after": plan.resume_after,
            "seconds": round(self.seconds, 1),
            "reference_failure": _failure_json(
                None if self.reference_failure is None else self.reference_failure.failure
            ),
            "not_repeatable": None if self.repeated is None else asdict(self.repeated),
            "float64_failure": _failure_json(self.float64_failure),
            "layouts": [
                {
                    "num_processes": one.layout.num_processes,
                    "engine": one.layout.engine,
                    "result": one.outcome,
                    "updates": one.num_updates,
                    "seconds": round(one.seconds, 1),
                    "batch_factor": one.batch_factor,
                    "failure": _failure_json(one.failure),
                    "verdict": None if one.verdict is None else one.verdict.as_json(),
                }
                for one in self.layouts
            ],
        }


def _failure_json(failure: RunFailure | None) -> dict[str, Any] | None:
    return None if failure is None else {**asdict(failure), "details": list(failure.details)}


def verify(
    plan: VerifyPlan, record: Callable[[RunRequest], LayoutRun], *, compare: Callable[..., Verdict] = compare
) -> Verification:
    """Record the script on all layouts with ``record``, and compare each with one process.

    Args:
        plan: what to verify.
        record: runs a script and records its steps.
        compare: compares two traces; see ``echelon.verify.compare``.
    """
    began = time.monotonic()
    base = RunRequest(
        name="reference (one process)",
        layout=Layout(num_processes=1),
        script=plan.against or plan.script,
        arguments=plan.arguments,
        folder=plan.folder,
        run=RecordingSettings(steps=plan.steps),
    )
    references = References(base, record, saved=plan.against_run)
    first = references.first()
    if isinstance(first, LayoutRun):
        return Verification(plan=plan, layouts=(), seconds=time.monotonic() - began, reference_failure=first)
    work = _Work(plan, references, first, record, compare)
    results = work.verify_layouts()
    return Verification(
        plan=plan,
        layouts=results,
        seconds=time.monotonic() - began,
        repeated=work.find_repetition(results),
        float64_failure=work.float64_failure,
    )


class _Work:
    def __init__(
        self,
        plan: VerifyPlan,
        references: References,
        first: Reference,
        record: Callable[[RunRequest], LayoutRun],
        compare: Callable[..., Verdict],
    ) -> None:
        self._plan, self._references, self._first, self._record = plan, references, first, record
        self._compare_traces = compare
        self.float64_failure: RunFailure | None = None

    def verify_layouts(self) -> tuple[LayoutResult, ...]:
        """Verify all layouts. If the script uses no engine of echelon, each number of processes is run once."""
        results: list[LayoutResult] = []
        for layout in self._plan.layouts:
            equal = (one for one in results if one.layout.num_processes == layout.num_processes and not one.has_engine)
            known = next(equal, None)
            result = self._verify_layout(layout) if known is None else replace(known, layout=layout, is_copy=True)
            results.append(result)
        return tuple(results)

    def _verify_layout(self, layout: Layout) -> LayoutResult:
        runs: list[LayoutRun] = []
        for request in self._requests(layout):
            runs.append(self._record(request))
            if runs[-1].failure is not None:
                break
        trace = _joined([read_trace(run.request.folder) for run in runs])
        result = LayoutResult(
            layout=layout,
            outcome="failed",
            num_updates=sum(run.num_updates for run in runs),
            seconds=sum(run.seconds for run in runs),
            failure=runs[-1].failure,
            has_engine=runs[-1].failure is not None or any(model.engine for model in _models(trace)),
            phase=""
            if self._plan.resume_after is None
            else "before the resume"
            if len(runs) == 1
            else "after the resume",
        )
        if result.failure is not None:
            return self._find_in_failed(result, trace, is_resumed=len(runs) > 1)
        try:
            reference = self._references.find(batch_factor(trace, self._first.trace))
        except MergeError as error:
            return self._not_comparable(result, trace, f"{error}")
        if isinstance(reference, LayoutRun):
            return replace(result, failure=reference.failure, phase=f"in the reference ({reference.request.name})")
        must_be_equal = any(model.parity == "bitwise" for model in _models(trace)) or (
            layout.is_plain and self._plan.against is None
        )
        options = CompareOptions(is_resumed=self._plan.resume_after is not None)
        verdict = self._compare(trace, reference, options, must_be_equal=must_be_equal)
        return replace(
            result,
            outcome=verdict.result,
            verdict=verdict,
            batch_factor=reference.batch_factor,
        )

    def _find_in_failed(self, result: LayoutResult, trace: Trace, *, is_resumed: bool) -> LayoutResult:
        """Return the result of a failed run with the first difference before it failed, if there is one."""
        if len(trace.ranks) != result.layout.num_processes:
            return result
        reference: Reference | LayoutRun = self._first
        if unequal_progress(AlignedRun(trace, has_failed=True)) is None:
            try:
                reference = self._references.find(batch_factor(trace, self._first.trace))
            except MergeError:
                return result
        if isinstance(reference, LayoutRun):
            return result
        verdict = self._compare(
            trace, reference, CompareOptions(has_failed=True, is_resumed=is_resumed), must_be_equal=False
        )
        if verdict.finding is None:
            return result
        return replace(result, outcome="different", verdict=verdict, batch_factor=reference.batch_factor)

    def find_repetition(self, results: tuple[LayoutResult, ...]) -> Finding | None:
        """Return where two runs on one process differ. They are run only if a layout differs."""
        differing = [one for one in results if one.outcome == "different"]
        if not differing or self._references.runs_nothing:
            return None
        if any(one.layout.is_plain and one.outcome == "same" for one in results) and self._plan.against is None:
            return None
        reference = self._references.find(differing[0].batch_factor)
        again = None if isinstance(reference, LayoutRun) else self._references.repeat(reference)
        if not isinstance(again, Trace) or not isinstance(reference, Reference):
            return None
        # With the tolerance of the layouts: a sum in another order does not explain their difference.
        return self._compare(again, reference, CompareOptions(), must_be_equal=False).finding

    def _requests(self, layout: Layout) -> list[RunRequest]:
        plan = self._plan
        request = RunRequest(
            name=layout.name,
            layout=layout,
            script=plan.script,
            arguments=plan.arguments,
            folder=plan.folder / layout.slug,
            run=RecordingSettings(steps=plan.resume_after or plan.steps),
        )
        if plan.resume_after is None:
            return [request]
        resumed = replace(
            request,
            name=f"{layout.name}, resumed",
            arguments=plan.resume_arguments or plan.arguments,
            folder=plan.folder / f"{layout.slug}-resumed",
            run=RecordingSettings(steps=plan.steps - plan.resume_after, first_update=plan.resume_after),
        )
        return [request, resumed]

    def _compare(self, trace: Trace, reference: Reference, options: CompareOptions, *, must_be_equal: bool) -> Verdict:
        verdict = self._compare_traces(trace, reference.trace, options=replace(options, is_bitwise=True))
        if must_be_equal or verdict.result != "different":
            return verdict
        self._references.add_float64(reference)
        self.float64_failure = reference.float64_failure
        verdict = self._compare_traces(trace, reference.trace, reference.float64, options=options)
        if verdict.finding is None or not verdict.finding.may_be_rounding:
            return verdict
        self._references.add_perturbations(reference)
        return self._compare_traces(
            trace, reference.trace, reference.float64, perturbed=reference.perturbed, options=options
        )

    def _not_comparable(self, result: LayoutResult, trace: Trace, reason: str) -> LayoutResult:
        verdict = Verdict(result="not comparable", num_updates=0, world_size=len(trace.ranks), reason=reason)
        return replace(result, outcome="not comparable", verdict=verdict)


def _models(trace: Trace) -> Iterator[Model]:
    return (event for events in trace.ranks for event in events if isinstance(event, Model))


def _joined(traces: list[Trace]) -> Trace:
    """Return the parts of a resumed run as one trace."""
    if len(traces) == 1:
        return traces[0]
    num_ranks = max(len(trace.ranks) for trace in traces)
    ranks: list[list[Event]] = []
    for rank in range(num_ranks):
        parts = [trace.ranks[rank] if rank < len(trace.ranks) else [] for trace in traces]
        ranks.append([event for part in parts for event in part])
    return Trace(ranks=ranks)
