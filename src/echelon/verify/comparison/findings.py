"""Put what was found in one stage of one update into words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from echelon.verify.comparison.alignment import RankUpdate
from echelon.verify.comparison.differences import Comparison, RunDifference, failed_values
from echelon.verify.comparison.gradient_causes import GradientCauses
from echelon.verify.comparison.likely_cause import LikelyCause
from echelon.verify.comparison.model_structure import structure_cause
from echelon.verify.comparison.sample_comparison import SampleComparison
from echelon.verify.comparison.saved_states import load_cause, save_cause
from echelon.verify.comparison.value_causes import (
    buffer_cause,
    clip_cause,
    drawn_numbers,
    forward_cause,
    initial_cause,
    optimizer_cause,
    rate_cause,
    rng_cause,
)
from echelon.verify.finding import Finding, Stage

__all__ = ["finding_of"]

_SUBJECTS: dict[Stage, str] = {
    "initial weights": "before the first update",
    "forward": "the output",
    "backward": "the local gradient",
    "loss weight": "the gradient",
    "reduce": "the gradient that the optimizer receives",
    "clip": "the clipped gradient",
    "optimizer": "after the step",
    "buffers": "after the update",
    "load": "after loading",
    "save": "in the checkpoint",
}


_NEARLY_EQUAL = 1e-3
"""A ratio this close to 1 is no fault of scale: rounding may explain it."""


def finding_of(
    comparison: Comparison, order: SampleComparison, update: int, differences: Sequence[RunDifference]
) -> Finding:
    """Return the finding for the differences of one stage of one update."""
    stage = differences[0].stage
    shown = [_shown(comparison, one) for one in differences]
    cause = _cause(comparison, order, update, stage, differences)
    values = list(failed_values(shown))
    worst = values[0] if values else shown[0]
    tensors = [_short(comparison, one) for one in cause.tensors] or list(
        dict.fromkeys(one.tensor for one in values if one.tensor)
    )
    tensors = tensors or list(dict.fromkeys(one.tensor for one in shown if one.tensor))
    if stage == "forward":
        # Modules run in this order: the first one that differs is at fault, the others follow from it.
        tensors = list(dict.fromkeys(one.tensor for one in shown if one.tensor)) if not cause.tensors else tensors
    ranks = cause.ranks or sorted({rank for one in differences for rank in one.ranks})
    final = cause.stage or stage
    ours = any(one.kind == "values" for one in differences) and not comparison.perturbed and not comparison.is_bitwise
    return Finding(
        update=update,
        stage=final,
        what=_sentence(final, shown, worst, drawn=drawn_numbers(comparison)),
        tensors=tensors,
        ranks=ranks,
        difference=worst.relative,
        allowed=worst.allowed / worst.norm if worst.norm > 0 and worst.relative is not None else None,
        ratio=cause.ratio,
        cause=cause.name,
        why=cause.why,
        do=cause.do,
        line=cause.line
        or next((one.line for one in differences if one.line), "")
        or _line_of_step(comparison, update, final),
        may_be_rounding=ours
        and (cause.ratio is None or abs(cause.ratio - 1) < _NEARLY_EQUAL)
        and stage not in ("initial weights", "data", "rng", "scheduler", "save"),
    )


def _line_of_step(comparison: Comparison, update: int, stage: Stage) -> str:
    """Return the line of the step that used a reduced gradient, which has no line of its own."""
    if stage != "reduce" or update < 0:
        return ""
    return next((step.line for one in comparison.layout.ranks_at(update) for step in one.steps if step.line), "")


def _cause(
    comparison: Comparison, order: SampleComparison, update: int, stage: Stage, differences: Sequence[RunDifference]
) -> LikelyCause:
    if stage == "data":
        if differences[0].kind == "num updates":
            return LikelyCause(
                name="other number of updates",
                why=differences[0].values,
                do="compare the lengths of the loaders, and how many batches are skipped",
            )
        return order.cause(update)
    if stage == "rng":
        return rng_cause(comparison, differences[0])
    if stage == "initial weights":
        if any(one.kind == "structure" for one in differences):
            return structure_cause([one for one in differences if one.kind == "structure"])
        return initial_cause(comparison, differences)
    if stage == "forward":
        return forward_cause(comparison, differences)
    if stage == "reduce":
        return _gradient_cause(comparison, update, differences)
    if stage == "clip":
        return clip_cause(comparison, update, differences)
    if stage == "scheduler":
        if differences[0].kind == "settings":
            return LikelyCause(
                name="other optimizer settings",
                why=differences[0].values,
                do="use the same settings and schedule on every layout",
            )
        if differences[0].ranks:
            return LikelyCause(
                name="learning rates differ between ranks",
                why=differences[0].values,
                do="step the scheduler on every rank alike",
            )
        return rate_cause(comparison, update)
    if stage == "optimizer":
        return optimizer_cause(comparison, update, differences)
    if stage == "buffers":
        return buffer_cause(comparison, differences)
    return load_cause(comparison, list(differences)) if stage == "load" else save_cause(list(differences))


def _gradient_cause(comparison: Comparison, update: int, differences: Sequence[RunDifference]) -> LikelyCause:
    causes = GradientCauses(comparison, update, differences).with_loss(
        _loss_ratio(comparison, update), is_right=_is_loss_right(comparison, update)
    )
    cause = causes.cause()
    if cause is None:
        cause = LikelyCause(
            name="",
            why="",
            do="compare what is done to the gradients between backward and the step on this layout",
        )
    if comparison.layout.world_size == 1 and cause.stage is None and cause.name != "gradients not cleared":
        cause = replace(cause, stage="backward")
    return cause


def _loss_ratio(comparison: Comparison, update: int) -> float | None:
    """Return the mean over ranks of the sum of the losses, divided by the reference's."""
    sums = []
    for run in (comparison.layout, comparison.reference):
        losses = [[one.value * one.gradient_scale for one in rank.losses] for rank in run.ranks_at(update)]
        if not all(losses):
            return None
        sums.append(sum(sum(one) for one in losses) / len(losses))
    return sums[0] / sums[1] if sums[1] and math.isfinite(sums[0]) and math.isfinite(sums[1]) else None


def _is_loss_right(comparison: Comparison, update: int) -> bool:
    """Return False only if the outputs of the models were not compared, and the losses differ however they are averaged."""
    roots = [one for rank in comparison.layout.ranks_at(update) for one in rank.forwards if not one.module]
    compared = comparison.tallies.get((update, "forward"))
    if compared is not None and compared.num_compared and not comparison.skipped_outputs:
        return True
    theirs = [one.value for rank in comparison.reference.ranks_at(update) for one in rank.losses]
    if not roots or not theirs:
        return True
    ours = [
        (loss.value, loss.weight, len(rank.rows_of(loss.micro_step)), _num_items(rank, loss.micro_step))
        for rank in comparison.layout.ranks_at(update)
        for loss in rank.losses
    ]
    expected = sum(theirs) / len(theirs)
    roundoff = comparison.roundoff_of("") * math.sqrt(comparison.num_samples(update))
    for weights in ([one[1] for one in ours], [one[2] for one in ours], [one[3] for one in ours], [1] * len(ours)):
        known = [float(weight) for weight in weights if weight]
        if len(known) == len(ours):
            mean = sum(weight * one[0] for weight, one in zip(known, ours, strict=True)) / sum(known)
            twins = [run for run in (comparison.exact, *comparison.perturbed) if run is not None]
            exact = [one.value for run in twins for rank in run.ranks_at(update) for one in rank.losses]
            error = abs(sum(exact) / len(exact) - expected) if exact else 0.0
            if abs(mean - expected) <= 16 * max(roundoff * abs(expected), error):
                return True
    return False


def _num_items(rank: RankUpdate, micro_step: int) -> int | None:
    return next((one.num_items for one in rank.batches if one.micro_step == micro_step and one.num_items), None)


def _sentence(stage: Stage, differences: Sequence[RunDifference], worst: RunDifference, *, drawn: str) -> str:
    if worst.relative is None or stage not in _SUBJECTS:
        text = worst.values or f"{worst.tensor} differs"
        if worst.kind == "equal generators":
            text = f"ranks {', '.join(str(one) for one in worst.ranks)} draw {drawn} from equal generators"
        elif worst.kind == "repeated generator":
            text = f"the generator is in the state of update {worst.values} again"
        elif worst.kind == "missing":
            text = f"{worst.tensor} is missing"
        elif worst.kind == "nonfinite":
            text = f"{worst.tensor}: {worst.values or 'not finite'}"
        elif worst.kind == "generators":
            text = "the generators are in another state than in the run that was not interrupted"
        return text
    count = len({one.tensor for one in differences})
    names = worst.tensor or "the norm"
    more = f" and {count - 1} more" if count > 1 else ""
    if worst.kind == "norm":
        return worst.values
    between = "differ between the ranks" if worst.kind == "unequal ranks" else "differ from the reference"
    if count == 1:
        between = between.replace("differ ", "differs ", 1)
    rounding = (
        f"rounding explains {worst.allowed / worst.norm:.1e}" if worst.allowed else "they must be equal to the last bit"
    )
    return f"{_SUBJECTS[stage]}: {names}{more} {between} by up to {worst.relative:.2g} of the norm; {rounding}"


def _shown(comparison: Comparison, difference: RunDifference) -> RunDifference:
    return replace(difference, tensor=_short(comparison, difference.tensor))


def _short(comparison: Comparison, name: str) -> str:
    """Return a tensor's name without the index of the model if there is only one model; the root's output is ``model``."""
    if len(comparison.reference.models) > 1 and name:
        return name
    prefix = "buffer " if name.startswith("buffer ") else ""
    rest = name.removeprefix(prefix)
    return prefix + (rest.removeprefix("0:") if rest != "0:" else "model")
