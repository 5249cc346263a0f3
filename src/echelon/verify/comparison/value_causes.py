"""Why outputs, norms, learning rates, weights or buffers of a layout are not the reference's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from echelon.distributed.checks.sketch import Sketch
from echelon.verify.comparison.alignment import AlignedRun
from echelon.verify.comparison.cause_catalogue import LikelyCause, likely_cause
from echelon.verify.comparison.differences import Comparison, RunDifference, failed_values
from echelon.verify.comparison.gradient_causes import are_tied, ratio_between, scale_between
from echelon.verify.comparison.invariants import rates_of
from echelon.verify.comparison.wording import listed, named_ranks, per_rank
from echelon.verify.trace import OptimizerStep


def initial_cause(comparison: Comparison, differences: Sequence[RunDifference]) -> LikelyCause:
    """Explain weights that differ before the first update."""
    unequal = [one for one in differences if one.kind == "unequal ranks"]
    names = [one.tensor for one in unequal or differences]
    if unequal:
        ranks = sorted({rank for one in unequal for rank in one.ranks})
        return likely_cause(
            "ranks begin with different weights",
            why=f"unequal on {named_ranks(ranks)} before the first update: {listed(names)}",
            ranks=ranks,
        )
    return likely_cause(
        "different initial weights",
        why=f"on all ranks alike, but with different values than in the reference run: {listed(names)}",
    )


def structure_cause(differences: Sequence[RunDifference]) -> LikelyCause:
    """Explain parameters that only one of the runs has, or that are tied in only one of them."""
    is_tied = any("parameter of its own" in one.values for one in differences)
    names = [one.tensor for one in differences]
    return likely_cause("tied weights" if is_tied else "different parameters", why=differences[0].values, tensors=names)


def drawn_numbers(comparison: Comparison) -> str:
    """Return what the models draw from their generators, in words."""
    classes = (name for model in comparison.layout.models.values() for name in model.module_classes.values())
    return "dropout masks" if any("Dropout" in name for name in classes) else "random numbers"


def rng_cause(comparison: Comparison, difference: RunDifference) -> LikelyCause:
    """Explain generators."""
    drawn = drawn_numbers(comparison)
    if difference.kind == "equal generators":
        return likely_cause(
            f"same {drawn} on every rank",
            "Trainer" if difference in comparison.remarks else "",
            why=f"torch's random number generator has the same state on {named_ranks(difference.ranks)}, so the different samples of these "
            f"ranks get the same {drawn}",
            ranks=difference.ranks,
        )
    if difference.kind == "repeated generator":
        return likely_cause(
            f"{drawn} repeat",
            why=f"torch's random number generator has the same state in updates {difference.values} and {difference.update}, so the {drawn} "
            "are the same",
        )
    return likely_cause(
        "generators not restored",
        why=f"torch's random number generator is not in the state of the run without interruption, on {named_ranks(difference.ranks)}",
    )


def forward_cause(comparison: Comparison, differences: Sequence[RunDifference]) -> LikelyCause:
    """Explain an output that differs although the weights before it are equal."""
    difference = next((one for one in differences if one.kind == "untrained forward"), differences[0])
    if difference.kind == "untrained forward":
        return likely_cause(
            "not in training mode",
            why=f"{difference.values}, unlike the other ranks: the model is in evaluation mode there",
            ranks=difference.ranks,
            line=difference.line,
        )
    index, _, module = difference.tensor.partition(":")
    same = [one for one in differences if one.tensor == difference.tensor]
    everywhere = all(one.share > 0.5 for one in same) and {rank for one in same for rank in one.ranks} == set(
        range(comparison.layout.world_size)
    )
    model = comparison.layout.models.get(int(index))
    class_name = model.module_classes.get(module, "") if model else ""
    parents = {name: kind for name, kind in (model.module_classes if model else {}).items() if "BatchNorm" in kind}
    if "BatchNorm" in class_name and "Sync" not in class_name:
        return likely_cause(
            "batch statistics per rank",
            why=f"{module} ({class_name}) normalizes by the mean and variance of each rank's own samples, not of all samples of the update",
        )
    theirs = comparison.reference.models.get(int(index))
    if model and theirs and model.training != theirs.training:
        return likely_cause(
            "training mode differs",
            why=f"the model is in {_mode(model.training)} mode, in the reference run in {_mode(theirs.training)} mode",
        )
    if parents and not module and any("Sync" not in kind for kind in parents.values()):
        return likely_cause(
            "batch statistics per rank",
            why=f"the outputs differ, and the BatchNorm layers normalize by the mean and variance of each rank's own samples: {listed(list(parents))}",
            tensors=[f"{index}:{name}" for name in parents],
        )
    relative = difference.relative or 0.0
    if everywhere and 2.0**-12 < relative < 2.0**-6 and difference.allowed < 2.0**-4 * difference.distance:
        return likely_cause(
            "lower precision",
            why=f"the relative difference of {relative:.1e} is as large as rounding errors of float16 (2^-11) or bfloat16 (2^-8)",
        )
    return likely_cause("no known cause: forward", why="")


def clip_cause(comparison: Comparison, update: int, differences: Sequence[RunDifference]) -> LikelyCause:
    """Explain norms and clipped gradients."""
    layout, reference = comparison.layout, comparison.reference
    kinds = {one.kind for one in differences}
    calls = [layout.at(rank, update).clips for rank in range(layout.world_size)]
    line = next((one.line for each in calls for one in each if one.line), "")
    if "num clips" in kinds:
        return likely_cause(
            "clipped a different number of times",
            why=next(one.values for one in differences if one.kind == "num clips"),
            line=line,
        )
    if "max norm" in kinds:
        return likely_cause(
            "different clipping threshold",
            why=next(one.values for one in differences if one.kind == "max norm"),
            line=line,
        )
    norms = [each[0].norm for each in calls if each]
    if not norms:
        return likely_cause("no known cause: gradients", why="")
    theirs = [one.norm for one in reference.at(0, update).clips]
    tensors = layout.tensors(update, "reduced")
    local = layout.local_gradients(update)
    sums = {
        rank: _norm_of_sum([one for (owner, _), one in local.items() if owner == rank])
        for rank in range(layout.world_size)
    }
    is_sharded = any(one.is_sharded for one in tensors.values())
    shard = [
        math.sqrt(sum(one.by_rank[rank].square_sum for one in tensors.values() if rank in one.by_rank))
        for rank in range(layout.world_size)
    ]
    if (
        is_sharded
        and len(shard) == len(norms)
        and all(abs(a - b) <= 1e-3 * b for a, b in zip(norms, shard, strict=True))
    ):
        return likely_cause(
            "norm of one shard",
            why=f"each rank clips by the norm of its own shard (norm on {per_rank(norms)})",
            line=line,
        )
    whole = math.sqrt(sum(one.whole.square_sum for one in tensors.values()))
    if len(set(norms)) > 1 or (
        all(sums.values())
        and all(abs(n - sums[r]) <= 0.05 * n for r, n in enumerate(norms))
        and abs(norms[0] - whole) > 0.05 * whole
    ):
        return likely_cause(
            "clipped before the reduction",
            why=f"each rank clips its own gradient (norm on {per_rank(norms)}); the gradient averaged over the ranks has the norm {whole:.4g}",
            line=line,
        )
    return _norm_cause(norms[0], whole, theirs[0] if theirs else 0.0, line)


def _norm_cause(norm: float, whole: float, theirs: float, line: str) -> LikelyCause:
    """Explain a norm that is equal on all ranks, by the norm of the whole gradient."""
    ratio = norm / theirs if theirs else None
    if ratio is not None and whole and abs(norm - whole) > 1e-3 * whole:
        power = math.log2(norm / whole) if norm > 0 else 0.5
        if power > 3 and abs(power - round(power)) < 1e-3:
            return likely_cause(
                "clipped while scaled",
                why=f"the clipping function returned {norm:.6g}, which is {norm / whole:.6g} times the norm of the gradient: the loss scale",
                ratio=ratio,
                line=line,
            )
        return likely_cause(
            "norm of the wrong tensors",
            why=f"the clipping function returned {norm:.6g}, but the norm of the gradient is {whole:.6g} (they may differ by 0.1 %)",
            ratio=ratio,
            line=line,
        )
    return likely_cause(
        "wrong coefficient",
        why=f"the norm {norm:.6g} is right, but the gradients are not multiplied by min(1, max_norm / norm)",
        line=line,
    )


def rate_cause(comparison: Comparison, update: int) -> LikelyCause:
    """Explain learning rates."""
    layout, reference, size = comparison.layout, comparison.reference, comparison.layout.world_size
    own, other = _first_step(layout, update), _first_step(reference, update)
    if own is None or other is None:
        return likely_cause("no known cause: learning rates", why="")
    by_update = {one: step.lrs for one in reference.updates if (step := _first_step(reference, one)) is not None}
    first = reference.first_update
    found = [one for one, rates in by_update.items() if one != update and _equal_rates(rates, own.lrs)]
    text = f"the learning rate is {rates_of(own)}, in the reference run {rates_of(other)}"
    if (
        size > 1
        and first + size * (update - first) in found
        and _follows(comparison, update, lambda one: first + size * (one - first))
    ):
        why = (
            f"{text}, where it is that of update {first + size * (update - first)}: the scheduler makes {size} steps per update, one for each "
            "rank"
        )
        return likely_cause("scheduler stepped num_processes times", why=why)
    ratios = [a / b for a, b in zip(own.lrs, other.lrs, strict=False) if b]
    if ratios and max(ratios) - min(ratios) <= 1e-9 * abs(ratios[0]):
        value = ratios[0]
        known = {
            float(size): "the number of ranks",
            1 / size: "1 / the number of ranks",
            math.sqrt(size): "the square root of the number of ranks",
        }
        word = next((word for target, word in known.items() if size > 1 and abs(value - target) < 1e-6 * target), "")
        if word:
            why = f"{text}: it is multiplied by {word}"
            return likely_cause("learning rate scaled by the number of ranks", why=why, ratio=value)
    for one in sorted(found, key=lambda candidate: abs(candidate - update)):
        if abs(one - update) <= max(3, size):
            word = "ahead" if one > update else "behind"
            why = f"{text}, where it is that of update {one}: the schedule is {abs(one - update)} update(s) {word}"
            return likely_cause(f"schedule {word}", why=why)
    return likely_cause("different schedule", why=text, ratio=ratios[0] if ratios else None)


def _follows(comparison: Comparison, update: int, mapping: Callable[[int], int]) -> bool:
    """Return whether the rates of later updates follow the mapping, too, as far as they are known."""
    for one in range(update, min(update + 3, comparison.layout.updates.stop)):
        own, other = _first_step(comparison.layout, one), _first_step(comparison.reference, mapping(one))
        if own and other and not _equal_rates(own.lrs, other.lrs):
            return False
    return True


def optimizer_cause(comparison: Comparison, update: int, differences: Sequence[RunDifference]) -> LikelyCause:
    """Explain weights and optimizer states that differ although the gradients that the optimizer received are equal."""
    own = _first_step(comparison.layout, update)
    line = own.line if own else ""
    by_kind = {one.kind: one for one in reversed(differences)}
    names_of_kinds = {
        "skipped": "step skipped",
        "num steps": "stepped a different number of times",
        "settings": "different optimizer settings",
        "parameters": "parameters not in the optimizer",
    }
    if "num steps" in by_kind and _steps_without_forward(comparison.layout, update):
        return likely_cause(
            "not in training mode",
            stage="forward",
            why=f"in update {update}, the optimizer steps without a forward pass of a model in training mode before it",
            line=line,
        )
    for kind, name in names_of_kinds.items():
        if kind in by_kind:
            return likely_cause(name, why=by_kind[kind].values, ranks=by_kind[kind].ranks, line=line)
    names = [one.tensor for one in failed_values(differences)]
    changed = [name for name in names if "/" not in name.partition(":")[2]]
    trained = comparison.reference.tensors(update, "reduced")
    weights = [name for name in changed if name in trained]
    if changed and not weights and trained and len(changed) == len(names):
        return likely_cause(
            "averaged weights",
            why=f"only weights without gradients differ, such as those of an averaged model: {listed(changed)}",
            line=line,
        )
    unequal = [one for one in differences if one.kind == "unequal ranks"]
    frozen = [
        name
        for name in weights
        if _has_moved(comparison.reference, update, name) and not _has_moved(comparison.layout, update, name)
    ]
    if frozen and len(frozen) == len(weights):
        return likely_cause(
            "weights not updated",
            why=f"unchanged in update {update}, but not in the reference run: {listed(frozen)}",
            tensors=frozen,
            line=line,
        )
    if weights and are_tied(comparison.layout, weights):
        return likely_cause(
            "tied weights",
            why=f"only {listed(weights)} differs, which several modules share: they no longer use the same parameter",
            tensors=weights,
            line=line,
        )
    if unequal:
        return likely_cause(
            "ranks step apart",
            why=f"the {comparison.layout.world_size} ranks have equal gradients before the step, but unequal weights or states after it",
            ranks=sorted({rank for one in unequal for rank in one.ranks}),
            line=line,
        )
    return _step_cause(comparison, update, names, weights, line)


def _step_cause(comparison: Comparison, update: int, names: list[str], weights: list[str], line: str) -> LikelyCause:
    swapped = _swapped_states(comparison, update, [name for name in names if "/" in name])
    if swapped:
        return likely_cause(
            "optimizer state of another parameter",
            why=f"the state of {swapped[0].removeprefix('0:')} is that of {swapped[1].removeprefix('0:')} in the reference run",
            line=line,
        )
    ours, theirs = _moves(comparison.layout, update), _moves(comparison.reference, update)
    limits = {name: 2 * value for name, value in comparison.allowed.get((update, "weights"), {}).items()}
    common = [name for name in weights if name in ours and name in theirs]
    ratio = scale_between(ours, theirs, limits, common) if common else None
    if ratio is not None:
        return likely_cause(
            "step scaled",
            why=f"with equal gradients, the step changes the weights {ratio:.6g} times as much as in the reference run",
            ratio=ratio,
            line=line,
        )
    earlier = _moves(comparison.reference, update - 1)
    if common and ratio_between(ours, earlier, limits, [name for name in common if name in earlier]) is not None:
        return likely_cause(
            "step with old gradients",
            why=f"the step changes the weights as update {update - 1} of the reference run does",
            line=line,
        )
    return likely_cause(
        "no known cause: optimizer",
        why="the gradients before the step are equal, but the weights or states after it are not",
        line=line,
    )


def buffer_cause(comparison: Comparison, differences: Sequence[RunDifference]) -> LikelyCause:
    """Explain buffers."""
    unequal = [one for one in differences if one.kind == "unequal ranks"]
    names = [one.tensor for one in unequal or differences]
    if unequal:
        return likely_cause(
            "buffers differ between ranks",
            why=f"the ranks have different values of {listed(names)}",
            ranks=sorted({rank for one in unequal for rank in one.ranks}),
        )
    if all(name.partition(":")[2].startswith(("averaged.", "averaged ")) for name in names):
        return likely_cause("averaged weights", why=f"only averages of the weights differ: {listed(names)}")
    return likely_cause(
        "stale buffers", why=f"outputs and weights are those of the reference run, but not {listed(names)}"
    )


def _steps_without_forward(run: AlignedRun, update: int) -> bool:
    """Return whether a backward pass of the update belongs to no forward pass in training mode."""
    one = run.at(0, update)
    seen = {forward.micro_step for forward in one.forwards}
    return bool(seen) and any(loss.micro_step not in seen for loss in one.losses)


def _first_step(run: AlignedRun, update: int) -> OptimizerStep | None:
    return next((one for rank in run.ranks_at(update) for one in rank.steps), None)


def _equal_rates(first: Sequence[float], second: Sequence[float]) -> bool:
    return len(first) == len(second) and all(
        math.isclose(a, b, rel_tol=1e-9) for a, b in zip(first, second, strict=True)
    )


def _norm_of_sum(gradients: Sequence[dict[str, Sketch]]) -> float:
    sums: dict[str, Sketch] = {}
    for one in gradients:
        for name, sketch in one.items():
            sums[name] = sums[name] + sketch if name in sums else sketch
    return math.sqrt(sum(float(np.sum(one.projection**2)) for one in sums.values()))


def _has_moved(run: AlignedRun, update: int, name: str) -> bool:
    before, after = run.tensors(update - 1, "weights").get(name), run.tensors(update, "weights").get(name)
    return before is not None and after is not None and before.whole.bits != after.whole.bits


def _moves(run: AlignedRun, update: int) -> dict[str, np.ndarray]:
    before, after = run.tensors(update - 1, "weights"), run.tensors(update, "weights")
    return {name: after[name].whole.projection - before[name].whole.projection for name in after if name in before}


def _swapped_states(comparison: Comparison, update: int, names: Sequence[str]) -> tuple[str, str] | None:
    ours = comparison.layout.tensors(update, "optimizer_state")
    theirs = comparison.reference.tensors(update, "optimizer_state")
    allowed = comparison.allowed.get((update, "optimizer_state"), {})
    for name in names:
        for other, tensor in theirs.items():
            if other == name or name not in ours or other.rpartition("/")[2] != name.rpartition("/")[2]:
                continue
            same_size = ours[name].whole.num_elements == tensor.whole.num_elements > 1
            if (
                same_size
                and tensor.whole.norm > 0
                and ours[name].whole.distance(tensor.whole) <= allowed.get(other, 0.0)
            ):
                return name, other
    return None


def _mode(training: bool) -> str:
    return "training" if training else "evaluation"
