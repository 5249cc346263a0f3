"""Compare the recorded steps of a layout with those of its reference, and name the first difference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from echelon.distributed.checks.finding import STAGES, Finding, Stage
from echelon.verify.comparison.alignment import AlignedRun
from echelon.verify.comparison.differences import Comparison, RunDifference, Tally, structure_differences
from echelon.verify.comparison.findings import finding_of
from echelon.verify.comparison.invariants import (
    GeneratorHistory,
    rates_of,
    unequal_clips,
    unequal_progress,
    unequal_steps,
    untrained_ranks,
)
from echelon.verify.comparison.sample_comparison import SampleComparison
from echelon.verify.comparison.saved_states import load_differences, resume_differences, save_differences
from echelon.verify.comparison.tolerance import Measurement, RoundingModel
from echelon.verify.finding import Cell, CellState, Coverage, Verdict
from echelon.verify.trace import OptimizerStep, Trace

_DOUBLE_ROUNDOFF = 2.0**-53


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """What is known of the two runs besides their traces."""

    is_bitwise: bool = False
    """Whether the layout promises the bits of the reference (parity bitwise, or the reference's own layout): tolerances are zero."""
    num_false_alarms_per_run: float = 1e-6
    """Greatest probability of reporting a difference where there is only rounding."""
    is_resumed: bool = False
    """Whether the layout is a run that was resumed: the trace of its second process, or of both as one."""
    has_failed: bool = False
    """Whether the layout failed or hung, so that the trace ends anywhere: only updates that all ranks have closed are compared."""


def compare(
    layout: Trace,
    reference: Trace,
    reference_float64: Trace | None = None,
    *,
    perturbed: Sequence[Trace] = (),
    options: CompareOptions | None = None,
) -> Verdict:
    """Return whether ``layout`` is the same run as ``reference``, with the first difference if it is not.

    Args:
        layout: the recorded run of all ranks.
        reference: the same run on one process, which takes the samples of all ranks in each update.
        reference_float64: ``reference`` in float64, from which the rounding error of each tensor is measured; without it bounds
            from dtype and depth are used.
        perturbed: runs of the reference whose initial weights were perturbed by one rounding, if a first comparison found a
            difference that may be rounding (``Finding.may_be_rounding``): functions with kinks (relu, max) amplify it now and then.
        options: defaults to ``CompareOptions()``.
    """
    options = options or CompareOptions()
    ours, theirs = AlignedRun(layout, has_failed=options.has_failed), AlignedRun(reference)
    exact = AlignedRun(reference_float64) if reference_float64 is not None else None
    unequal = unequal_progress(ours)
    reason = _why_not_comparable(ours, theirs, has_progress=unequal is not None)
    if reason:
        return Verdict(
            result="not comparable", num_updates=0, world_size=ours.world_size, reason=reason, notes=ours.notes()
        )
    begin = max(ours.first_update, theirs.first_update)
    updates = range(begin, min(ours.updates.stop, theirs.updates.stop))
    comparison = Comparison(
        ours,
        theirs,
        exact if exact is not None and exact.updates else None,
        [AlignedRun(one) for one in perturbed],
        probability=options.num_false_alarms_per_run / _num_comparisons(theirs, ours.world_size),
        is_bitwise=options.is_bitwise,
    )
    order = SampleComparison(ours, theirs, comparison.samples)
    generators = GeneratorHistory(ours, order)
    for difference in structure_differences(comparison):
        comparison.add(difference)
    _compare_begin(comparison, begin, is_resumed=ours.first_update > theirs.first_update)
    for update in updates:
        _compare_update(comparison, order, generators, update, is_resumed=options.is_resumed)
    if unequal is not None:
        comparison.add(unequal)
    elif not options.has_failed:
        _compare_ends(comparison, order, updates)
    if not options.has_failed:
        for difference in save_differences(comparison):
            comparison.add(difference)
    return _verdict(
        comparison, order, updates, notes=_notes(ours, theirs, exact, updates, is_bitwise=options.is_bitwise)
    )


def gradient_errors(reference: Trace, reference_float64: Trace | None, *, world_size: int = 1) -> dict[str, float]:
    """Return how far rounding may move the gradient of each parameter in one update, as a part of its norm.

    It is measured in the first update, in which no error has grown yet. What an optimizer makes of such an error is found by runs with
    perturbed gradients: the first step of Adam is ``g / (|g| + eps)``, whose sign is that of the error where g is close to zero.

    Args:
        reference: the run on one process.
        reference_float64: the same in float64, if it could be run.
        world_size: number of ranks of the layout.
    """
    theirs = AlignedRun(reference)
    if not theirs.updates:
        return {}
    comparison = Comparison(
        theirs,
        theirs,
        AlignedRun(reference_float64) if reference_float64 is not None else None,
        probability=CompareOptions().num_false_alarms_per_run / _num_comparisons(theirs, world_size),
        is_bitwise=False,
    )
    gradients = theirs.tensors(theirs.first_update, "reduced")
    allowed = comparison.explained_by_rounding(theirs.first_update, "reduced", gradients)
    return {name: allowed[name] / one.whole.norm for name, one in gradients.items() if one.whole.norm > 0}


def _why_not_comparable(ours: AlignedRun, theirs: AlignedRun, *, has_progress: bool) -> str:
    missing = [str(rank) for rank, one in enumerate(ours.processes) if one is None]
    if not ours.world_size or len(missing) == ours.world_size:
        return "no step was recorded"
    if missing:
        return f"no step was recorded on rank(s) {', '.join(missing)}"
    if not theirs.updates:
        return "the reference run made no optimizer step"
    if not ours.updates and not has_progress:
        return "the run made no optimizer step"
    if ours.first_update >= theirs.updates.stop:
        return f"the run begins at update {ours.first_update}, but the reference run ends at update {theirs.updates.stop - 1}"
    return ""


def _num_comparisons(reference: AlignedRun, world_size: int) -> int:
    """Return an upper bound of the number of comparisons: of tensors of all stages, and of the rows of all outputs."""
    count = 0
    for update in reference.updates:
        one = reference.at(0, update)
        count += sum(len(event.names) for event in one.tensors)
        count += sum(len(forward.rows) + world_size for forward in one.forwards)
    return max(1, count)


def _compare_begin(comparison: Comparison, begin: int, *, is_resumed: bool) -> None:
    stage: Stage = "load" if is_resumed else "initial weights"
    for difference in load_differences(comparison):
        comparison.add(difference)
    if comparison.layout.resumed_at is not None:
        for difference in resume_differences(comparison):
            comparison.add(difference)
    bitwise = comparison.is_bitwise
    comparison.is_bitwise = (
        bitwise or not is_resumed
    )  # no arithmetic has been done yet: the same seed gives the same bits
    comparison.compare_tensors(begin - 1, "weights", stage)
    comparison.compare_tensors(begin - 1, "buffers", stage)
    comparison.is_bitwise = bitwise
    if is_resumed:
        comparison.compare_tensors(begin - 1, "optimizer_state", stage)


def _compare_update(
    comparison: Comparison, order: SampleComparison, generators: GeneratorHistory, update: int, *, is_resumed: bool
) -> None:
    untrained = untrained_ranks(comparison.layout, update)
    if untrained is not None:
        comparison.add(untrained)  # samples of a forward pass in evaluation mode are not recorded
    elif order.differs(update):
        comparison.differ("data", update, "samples", values=order.summary(update))
    elif order.is_recorded(update):
        comparison.passed(update, "data", count=order.count(update))
    before = generators.num_compared
    found = []
    for one in generators.differences(update):
        if one.kind == "equal generators" and _is_in_trainer(comparison, update):
            comparison.remarks.append(one)
        else:
            found.append(one)
    if is_resumed:
        found += _generator_differences(comparison, update)
    for difference in found:
        comparison.add(difference)
    if generators.num_compared > before and not found:
        comparison.passed(update, "rng", count=generators.num_compared - before)
    comparison.compare_outputs(update)
    comparison.compare_tensors(update, "reduced", "reduce")
    _compare_loss_weights(comparison, update)
    _compare_clips(comparison, update)
    _compare_steps(comparison, update)
    comparison.compare_tensors(update, "weights", "optimizer")
    comparison.compare_tensors(update, "optimizer_state", "optimizer")
    comparison.compare_tensors(update, "buffers", "buffers")


def _is_in_trainer(comparison: Comparison, update: int) -> bool:
    """Return whether a Trainer trains, which gives all ranks one seed, as transformers' does."""
    return any(loss.trainer_code for one in comparison.layout.ranks_at(update) for loss in one.losses)


def _generator_differences(comparison: Comparison, update: int) -> list[RunDifference]:
    """Return the ranks of a resumed run whose generators are not those of the uninterrupted run on the same ranks."""
    if comparison.layout.world_size != comparison.reference.world_size:
        return []
    wrong = []
    for rank in range(comparison.layout.world_size):
        ours = [one.torch for one in comparison.layout.at(rank, update).rngs if one.draws_masks]
        theirs = [one.torch for one in comparison.reference.at(rank, update).rngs if one.draws_masks]
        if ours != theirs:
            wrong.append(rank)
    return [RunDifference("rng", update, "generators", ranks=wrong)] if wrong else []


def _compare_loss_weights(comparison: Comparison, update: int) -> None:
    """Count the losses as compared where their gradients are: what a loss is averaged over shows only there."""
    reduce = comparison.tallies.get((update, "reduce"))
    if reduce is None:
        return
    local = comparison.layout.local_gradients(update)
    if local and not reduce.differences:
        comparison.passed(
            update, "backward", largest=reduce.largest, equal_bits=reduce.equal_bits, count=reduce.num_compared
        )
    losses = sum(len(one.losses) for one in comparison.layout.ranks_at(update))
    if losses and not reduce.differences:
        comparison.passed(update, "loss weight", largest=reduce.largest, equal_bits=reduce.equal_bits, count=losses)
    if reduce.differences:
        # The cause tells these stages apart: they are compared, although which of them differs is said of one update only.
        comparison.num_told_apart["backward"] += reduce.num_compared + len(reduce.differences) if local else 0
        comparison.num_told_apart["loss weight"] += losses


def _compare_clips(comparison: Comparison, update: int) -> None:
    unequal = unequal_clips(comparison.layout, update)
    if unequal is not None:
        comparison.add(unequal)
    ours, theirs = comparison.layout.at(0, update).clips, comparison.reference.at(0, update).clips
    twins = [run.at(0, update).clips for run in comparison.twins]
    line = next((one.line for one in (*ours, *theirs) if one.line), "")
    if len(ours) != len(theirs):
        values = f"clipping functions are called {len(ours)} times in update {update}, in the reference run {len(theirs)} times"
        comparison.differ("clip", update, "num clips", values=values, line=line)
    together = math.sqrt(sum(value**2 for value in comparison.allowed.get((update, "reduced"), {}).values()))
    for index, (own, other) in enumerate(zip(ours, theirs, strict=False)):
        if not _are_close(own.max_norm, other.max_norm, 4 * _DOUBLE_ROUNDOFF):
            values = f"max_norm is {own.max_norm:g}, in the reference run {other.max_norm:g}"
            comparison.differ("clip", update, "max norm", values=values, line=line)
        errors = [abs(other.norm - twin[index].norm) for twin in twins if len(twin) > index]
        floor = comparison.roundoff_of("") * math.sqrt(comparison.num_samples(update)) * abs(other.norm)
        # By the triangle inequality two norms differ by no more than the tensors do.
        allowed = max(together, floor, 2 * max(errors, default=0.0))
        distance = abs(own.norm - other.norm)
        # Clipped by value, or gradients that have overflowed.
        have_no_norm = not math.isfinite(own.norm) and not math.isfinite(other.norm)
        if distance <= allowed or have_no_norm:
            comparison.passed(
                update, "clip", largest=distance / allowed if allowed else 0.0, equal_bits=distance == 0.0
            )
        else:
            values = (
                f"the norm that the clipping function returns is {own.norm:.6g}, in the reference run {other.norm:.6g}"
            )
            comparison.differ(
                "clip",
                update,
                "norm",
                distance=distance,
                norm=abs(other.norm),
                allowed=allowed,
                values=values,
                line=line,
            )
    comparison.compare_tensors(update, "clipped", "clip")


def _allowed_rate(comparison: Comparison, rate: float, exact: float, steps: float) -> float:
    """Return how far a rate may be from the reference's ``rate``, which is ``exact`` in the float64 run."""
    if abs(rate - exact) <= steps * abs(rate):
        return steps * abs(rate)
    # The schedule follows a measured value, such as the loss of an evaluation: its rounding errors are like those of the losses.
    floor = comparison.roundoff_of("")
    errors = [
        Measurement(norm=abs(one), error=abs(one - other), freedom=1, floor=floor)
        for one, other in _measured_rates(comparison)
        if one != other
    ]
    if errors:
        errors += [
            Measurement(norm=abs(one), error=abs(one - other), freedom=1, floor=floor)
            for one, other in _losses(comparison)
        ]
    own = Measurement(norm=abs(rate), error=abs(rate - exact), freedom=1, floor=floor)
    return RoundingModel(errors or [own], probability=comparison.tolerances.probability).allowed(own)


def _losses(comparison: Comparison) -> list[tuple[float, float]]:
    """Return the losses of the reference, each with those of its other runs."""
    return [
        (one.value, other.value)
        for update in comparison.reference.updates
        for run in comparison.twins
        for one, other in zip(comparison.reference.at(0, update).losses, run.at(0, update).losses, strict=False)
        if math.isfinite(one.value) and math.isfinite(other.value)
    ]


def _measured_rates(comparison: Comparison) -> list[tuple[float, float]]:
    """Return the different rates of the first parameter group in the reference, each with those of its other runs."""
    found: dict[tuple[float, float], None] = {}
    for update in comparison.reference.updates:
        steps = comparison.reference.at(0, update).steps
        for run in comparison.twins:
            for own, other in zip(steps, run.at(0, update).steps, strict=False):
                if own.lrs and other.lrs:
                    found.setdefault((own.lrs[0], other.lrs[0]))
    return list(found)


def _compare_steps(comparison: Comparison, update: int) -> None:
    for difference in unequal_steps(comparison.layout, update):
        comparison.add(difference)
    ours, theirs = comparison.layout.at(0, update).steps, comparison.reference.at(0, update).steps
    line = next((one.line for one in (*ours, *theirs) if one.line), "")
    if len(ours) != len(theirs):
        values = f"the optimizers step {len(ours)} times in update {update}, in the reference run {len(theirs)} times"
        comparison.differ("optimizer", update, "num steps", values=values, line=line)
        return
    for index, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        if own.is_skipped != other.is_skipped:
            values = (
                "a loss scaler skips the step, but not in the reference run"
                if own.is_skipped
                else "a loss scaler skips the step in the reference run only"
            )
            comparison.differ("optimizer", update, "skipped", values=values, line=line)
        twin = comparison.exact.at(0, update).steps if comparison.exact else []
        exact = twin[index].lrs if len(twin) == len(theirs) else other.lrs
        # A schedule may compute each rate from the one before it.
        steps = 16 * (update + 1) * _DOUBLE_ROUNDOFF
        pairs = _paired_groups(own, other)
        distances = [
            (abs(own.lrs[a] - other.lrs[b]), _allowed_rate(comparison, other.lrs[b], exact[b], steps), other.lrs[b])
            for a, b in pairs
        ]
        wrong = [one for one in distances if one[0] > one[1]]
        if wrong or (not pairs and own.lrs != other.lrs):
            values = f"the learning rate is {rates_of(own)}, in the reference run {rates_of(other)}"
            distance, allowed, rate = max(wrong, default=(math.inf, 0.0, 0.0))
            comparison.differ(
                "scheduler", update, "rates", distance=distance, norm=rate, allowed=allowed, values=values, line=line
            )
        else:
            comparison.passed(
                update, "scheduler", count=len(distances), equal_bits=all(one[0] == 0.0 for one in distances)
            )
        _compare_settings(
            comparison,
            update,
            [own.settings[a] for a, _ in pairs],
            [other.settings[b] for _, b in pairs],
            line,
        )
        known = comparison.layout.optimized(update)
        missing = [name for name in other.group_of if name not in known] if known else []
        if missing:
            values = f"{', '.join(missing[:4])} {'are' if len(missing) > 1 else 'is'} in no parameter group"
            for name in missing:
                comparison.differ("optimizer", update, "parameters", tensor=name, values=values, line=line)


def _paired_groups(own: OptimizerStep, other: OptimizerStep) -> list[tuple[int, int]]:
    """Return which parameter groups have the same parameters; two optimizers may group the same parameters in other ways."""
    if len(own.lrs) == len(other.lrs):
        return [(group, group) for group in range(len(own.lrs))]
    names = [name for name in own.group_of if name in other.group_of]
    return list(dict.fromkeys((own.group_of[name], other.group_of[name]) for name in names))


def _compare_settings(
    comparison: Comparison, update: int, ours: list[dict[str, object]], theirs: list[dict[str, object]], line: str
) -> None:
    scheduled = ("momentum", "betas", "beta1", "beta2")
    for group, (own, other) in enumerate(zip(ours, theirs, strict=False)):
        for name in own.keys() & other.keys() - {"foreach", "fused", "capturable", "differentiable"}:
            a, b = own[name], other[name]
            if a != b and not _close_settings(a, b, 16 * (update + 1) * _DOUBLE_ROUNDOFF):
                values = f"{name} of parameter group {group} is {a}, in the reference run {b}"
                stage: Stage = (
                    "scheduler" if name in scheduled and _changes(comparison.reference, name) else "optimizer"
                )
                comparison.differ(stage, update, "settings", values=values, line=line)


def _changes(run: AlignedRun, name: str) -> bool:
    """Return whether a schedule changes this setting, as some schedules of the learning rate change the momentum."""
    steps = [step for update in run.updates for step in run.at(0, update).steps]
    return len({str([group.get(name) for group in step.settings]) for step in steps}) > 1


def _are_close(first: float, second: float, relative: float) -> bool:
    return math.isclose(first, second, rel_tol=relative) or (math.isnan(first) and math.isnan(second))


def _close_settings(first: object, second: object, relative: float) -> bool:
    if isinstance(first, float) and isinstance(second, float):
        return _are_close(first, second, relative)
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)) and len(first) == len(second):
        return all(_close_settings(a, b, relative) or a == b for a, b in zip(first, second, strict=True))
    return False


def _compare_ends(comparison: Comparison, order: SampleComparison, updates: range) -> None:
    """Record a difference if one of two runs that ended by themselves made more updates than the other."""
    ours, theirs = comparison.layout.updates.stop, comparison.reference.updates.stop
    if ours < theirs:
        values = f"training ends after {ours} updates, the reference run after {theirs} or more"
        comparison.differ("data", updates.stop, "num updates", values=values)
    elif ours > theirs:
        values = f"training makes {ours} updates or more, the reference run ends after {theirs}"
        comparison.differ("data", updates.stop, "num updates", values=values)


def _verdict(comparison: Comparison, order: SampleComparison, updates: range, *, notes: list[str]) -> Verdict:
    failed = sorted(
        (
            (update, STAGES.index(stage), tally)
            for (update, stage), tally in comparison.tallies.items()
            if tally.differences
        ),
        key=lambda one: one[:2],
    )
    findings: list[Finding] = []
    # Masks are drawn by sample while a run is recorded, so wrong generators change nothing that follows: both are reported.
    for is_rng in (True, False):
        first = next(((update, tally) for update, stage, tally in failed if (STAGES[stage] == "rng") == is_rng), None)
        if first is not None and not (is_rng and _follows_from_data(first, failed)):
            findings.append(finding_of(comparison, order, first[0], first[1].differences))
    findings.sort(key=lambda one: (one.update, STAGES.index(one.stage)))
    return Verdict(
        result="different" if findings else "same",
        num_updates=len(updates),
        world_size=comparison.layout.world_size,
        finding=findings[0] if findings else None,
        also=findings[1:],
        remarks=_remarks(comparison, order),
        coverage=_coverage(comparison),
        cells=_cells(comparison, updates, findings),
        notes=notes,
    )


def _remarks(comparison: Comparison, order: SampleComparison) -> list[Finding]:
    first = next(iter(comparison.remarks), None)
    if first is None:
        return []
    return [finding_of(comparison, order, first.update, [first])]


def _follows_from_data(first: tuple[int, Tally], failed: Sequence[tuple[int, int, Tally]]) -> bool:
    """Return whether generators have other states because other samples were read before (or drawn in another order)."""
    update, tally = first
    is_kept = any(one.kind in ("equal generators", "repeated generator") for one in tally.differences)
    return not is_kept and any(STAGES[stage] == "data" and earlier <= update for earlier, stage, _ in failed)


def _cells(comparison: Comparison, updates: range, findings: Sequence[Finding]) -> list[Cell]:
    result = []
    for update in sorted({*updates, *(update for update, _ in comparison.tallies)}):
        for stage in STAGES:
            tally = comparison.tallies.get((update, stage), Tally())
            found = any(one.update == update and one.stage == stage for one in findings)
            state: CellState
            if tally.differences or found:
                state = "different"
            elif not tally.num_compared:
                state = "not compared"
            else:
                state = "equal bits" if tally.equal_bits else "within rounding"
            largest = tally.largest if math.isfinite(tally.largest) else 0.0
            result.append(
                Cell(update=update, stage=stage, state=state, largest=largest, num_compared=tally.num_compared)
            )
    return result


_ABSENT: dict[Stage, str] = {
    "load": "no checkpoint was loaded",
    "initial weights": "the weights before the first update were not recorded",
    "data": "no samples were recorded",
    "rng": "no random numbers per rank; dropout masks are drawn by sample here, and depend on the ranks in other runs",
    "forward": "no module has an output with one row per sample",
    "loss weight": "no call of backward() was recorded",
    "backward": "the gradients of a rank before the average over the ranks were not recorded, so faults there are reported as reduce",
    "reduce": "no gradients at an optimizer step were recorded",
    "clip": "gradients are not clipped",
    "scheduler": "no learning rates were recorded",
    "optimizer": "no weights were recorded",
    "buffers": "the model has no buffers",
    "save": "no checkpoint was saved",
}


def _why_absent(comparison: Comparison, stage: Stage) -> str:
    updates = [one for update in comparison.layout.updates for one in comparison.layout.ranks_at(update)]
    is_recorded = (stage == "loss weight" and any(one.losses for one in updates)) or (
        stage == "backward" and any(event.content == "local" for one in updates for event in one.tensors)
    )
    # What a loss is averaged over, and what backward adds, show in the gradient that the optimizer receives.
    return _ABSENT["reduce"] if is_recorded else _ABSENT[stage]


def _coverage(comparison: Comparison) -> list[Coverage]:
    result = []
    for stage in STAGES:
        tallies = [tally for (_, other), tally in comparison.tallies.items() if other == stage]
        count = sum(one.num_compared + len(one.differences) for one in tallies) + comparison.num_told_apart[stage]
        missing = [] if count else [_why_absent(comparison, stage)]
        if stage == "forward":
            missing += sorted(comparison.skipped_outputs)
        result.append(Coverage(stage=stage, num_compared=count, missing=missing))
    return result


def _notes(
    ours: AlignedRun, theirs: AlignedRun, exact: AlignedRun | None, updates: range, *, is_bitwise: bool
) -> list[str]:
    notes = [*ours.notes(), *(text for text in theirs.notes() if text not in ours.notes())]
    if is_bitwise:
        return notes  # there are no tolerances
    if exact is None or not exact.updates:
        notes.append(
            "The bounds for rounding errors are computed from the dtype and the number of additions, because there is no reference run in "
            "float64."
        )
    elif exact.updates.stop < updates.stop:
        notes.append(
            f"From update {exact.updates.stop} on, the bounds for rounding errors are computed from the dtype and the number of additions, "
            "because the reference run in float64 ended there."
        )
    return notes
