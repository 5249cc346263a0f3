"""Put what was found in one stage of one update into words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from echelon.distributed.checks.finding import Finding, Stage
from echelon.verify.comparison.alignment import RankUpdate
from echelon.verify.comparison.cause_catalogue import LikelyCause, likely_cause
from echelon.verify.comparison.differences import Comparison, RunDifference, failed_values
from echelon.verify.comparison.gradient_causes import GradientCauses
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
    structure_cause,
)
from echelon.verify.comparison.wording import named_ranks

_SUBJECTS: dict[Stage, str] = {
    "initial weights": "the weights before the first update differ",
    "forward": "outputs in the forward pass differ",
    "backward": "gradients differ",
    "loss weight": "gradients differ",
    "reduce": "gradients before the optimizer step differ",
    "clip": "gradients after clipping differ",
    "optimizer": "weights or optimizer states after the step differ",
    "buffers": "buffers after the update differ",
    "load": "the training state after loading differs",
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
        what=_sentence(comparison, final, shown, worst),
        tensors=tensors,
        ranks=ranks,
        difference=worst.relative,
        measured=_measured(comparison, stage, worst) if worst.relative is not None else "",
        allowed=worst.allowed / worst.norm if worst.norm > 0 and worst.relative is not None else None,
        ratio=cause.ratio,
        cause=cause.name,
        why=cause.why,
        do=cause.do,
        line=cause.line
        or next((one.line for one in differences if one.line), "")
        or _line_of(comparison, update, final, tensors),
        may_be_rounding=ours
        and (cause.ratio is None or abs(cause.ratio - 1) < _NEARLY_EQUAL)
        and stage not in ("initial weights", "data", "rng", "scheduler", "save"),
    )


def _line_of(comparison: Comparison, update: int, stage: Stage, tensors: Sequence[str]) -> str:
    """Return the line of the user's code to which the differing values belong, if they have no line of their own."""
    if update < 0:
        return ""
    ranks = comparison.layout.ranks_at(update)
    if stage in ("reduce", "buffers"):
        return next((step.line for one in ranks for step in one.steps if step.line), "")
    if stage in ("loss weight", "backward"):
        return next((loss.line for one in ranks for loss in one.losses if loss.line), "")
    if stage == "data":
        return next((batch.line for one in ranks for batch in one.batches if batch.line), "")
    if stage == "forward" and tensors:
        return _line_of_module(comparison, tensors[0])
    return ""


def _line_of_module(comparison: Comparison, name: str) -> str:
    """Return the line of the user's ``forward`` that calls the module, or the module in which it is."""
    index, colon, module = name.rpartition(":")
    model = comparison.layout.models.get(int(index) if colon else 0)
    if model is None:
        return ""
    module = "" if module == "model" else module
    while module and module not in model.lines:
        module = module.rpartition(".")[0]
    return model.lines.get(module, "")


def _cause(
    comparison: Comparison, order: SampleComparison, update: int, stage: Stage, differences: Sequence[RunDifference]
) -> LikelyCause:
    if stage == "data":
        if differences[0].kind == "num updates":
            return likely_cause("different number of updates", why=differences[0].values)
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
            return likely_cause("different optimizer settings", why=differences[0].values)
        if differences[0].ranks:
            return likely_cause("learning rates differ between ranks", why=differences[0].values)
        return rate_cause(comparison, update)
    if stage == "optimizer":
        return optimizer_cause(comparison, update, differences)
    if stage == "buffers":
        return buffer_cause(comparison, differences)
    return load_cause(comparison, list(differences)) if stage == "load" else save_cause(list(differences))


def _gradient_cause(comparison: Comparison, update: int, differences: Sequence[RunDifference]) -> LikelyCause:
    cause = GradientCauses(
        comparison,
        update,
        differences,
        loss_ratio=_loss_ratio(comparison, update),
        is_loss_right=_is_loss_right(comparison, update),
    ).cause()
    if cause is None:
        cause = likely_cause("no known cause: gradients", why="")
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
            exact = [one.value for run in comparison.twins for rank in run.ranks_at(update) for one in rank.losses]
            error = abs(sum(exact) / len(exact) - expected) if exact else 0.0
            if abs(mean - expected) <= 16 * max(roundoff * abs(expected), error):
                return True
    return False


def _num_items(rank: RankUpdate, micro_step: int) -> int | None:
    return next((one.num_items for one in rank.batches if one.micro_step == micro_step and one.num_items), None)


def _sentence(comparison: Comparison, stage: Stage, differences: Sequence[RunDifference], worst: RunDifference) -> str:
    """Return what differs; the size of the difference and its bound are values of their own."""
    drawn = drawn_numbers(comparison)
    if worst.kind == "equal generators":
        return f"{named_ranks(worst.ranks)} draw the same {drawn}"
    if worst.kind == "repeated generator":
        return f"updates {worst.values} and {worst.update} draw the same {drawn}"
    if worst.kind == "generators":
        return "the random number generators have other states than in the run without interruption"
    count = len({one.tensor for one in differences})
    tensors = f"{count} tensors" if count > 1 else worst.tensor or "the norm"
    size = comparison.layout.world_size
    processes = "1 process" if size == 1 else f"{size} processes"
    if worst.kind == "loaded":
        return f"{tensors} on {processes}: other values after loading than were saved"
    if worst.kind == "saved":
        return f"{tensors} on {processes}: other values in the checkpoint than in the run"
    if worst.kind == "missing" and stage in ("load", "save"):
        return f"{tensors} on {processes}: {'not loaded' if stage == 'load' else 'not in the checkpoint'}"
    if worst.kind == "missing":
        return f"{tensors} on {processes}: missing, unlike in the reference run"
    if worst.kind == "nonfinite":
        return f"{worst.tensor} on {processes}: {worst.values or 'inf or nan, unlike in the reference run'}"
    if worst.kind in ("values", "unequal ranks") and stage in _SUBJECTS:
        if worst.kind == "unequal ranks":
            return f"{_SUBJECTS[stage]} between {named_ranks(worst.ranks)}: {tensors}"
        return f"{_SUBJECTS[stage]} between {processes} and the reference run (one process): {tensors}"
    return worst.values or f"{worst.tensor} differs"


def _measured(comparison: Comparison, stage: Stage, worst: RunDifference) -> str:
    """Return of what, and on which ranks, the relative difference is."""
    size = comparison.layout.world_size
    name = worst.tensor or {"clip": "the clipping norm", "scheduler": "the learning rate"}.get(stage, "the value")
    if worst.kind == "unequal ranks" or (worst.kind == "norm" and len(worst.ranks) > 1):
        return f"{name} between {named_ranks(worst.ranks)}"
    if len(worst.ranks) == 1 and size > 1:
        return f"{name} on rank {worst.ranks[0]} of {size}"
    return f"{name} on {'1 process' if size == 1 else f'{size} processes'}"


def _shown(comparison: Comparison, difference: RunDifference) -> RunDifference:
    return replace(difference, tensor=_short(comparison, difference.tensor))


def _short(comparison: Comparison, name: str) -> str:
    """Return a tensor's name without the index of the model if there is only one model; the root's output is ``model``."""
    if len(comparison.reference.models) > 1 and name:
        return name
    prefix = "buffer " if name.startswith("buffer ") else ""
    rest = name.removeprefix(prefix)
    return prefix + (rest.removeprefix("0:") if rest != "0:" else "model")
