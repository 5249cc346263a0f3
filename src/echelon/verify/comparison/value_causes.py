"""Why outputs, norms, learning rates, weights or buffers of a layout are not the reference's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from echelon.verify.comparison.alignment import AlignedRun, TensorKind
from echelon.verify.comparison.differences import Comparison, RunDifference, failed_values
from echelon.verify.comparison.gradient_causes import ratio_between, scale_between
from echelon.verify.comparison.likely_cause import LikelyCause
from echelon.verify.sketch import Sketch
from echelon.verify.trace import OptimizerStep

__all__ = [
    "buffer_cause",
    "clip_cause",
    "drawn_numbers",
    "forward_cause",
    "initial_cause",
    "optimizer_cause",
    "rate_cause",
    "rng_cause",
]


def initial_cause(comparison: Comparison, differences: Sequence[RunDifference]) -> LikelyCause:
    """Explain weights that differ before the first update."""
    unequal = [one for one in differences if one.kind == "unequal ranks"]
    names = [one.tensor for one in unequal or differences]
    if unequal:
        ranks = sorted({rank for one in unequal for rank in one.ranks})
        return LikelyCause(
            name="ranks begin with different weights",
            why=f"{_listed(names)} differ between the ranks before the first update",
            do="build the model with the same seed on every rank, or broadcast it from rank 0 (DDP and prepare() do)",
            ranks=ranks,
        )
    return LikelyCause(
        name="other initial weights",
        why=f"{_listed(names)} begin with other values than in the reference",
        do="seed all ranks equally before the model is built, and load checkpoints before it is wrapped",
    )


def drawn_numbers(comparison: Comparison) -> str:
    """Return what the models draw from their generators, in words."""
    classes = (name for model in comparison.layout.models.values() for name in model.module_classes.values())
    return "dropout masks" if any("Dropout" in name for name in classes) else "random numbers"


def rng_cause(comparison: Comparison, difference: RunDifference) -> LikelyCause:
    """Explain generators."""
    drawn = drawn_numbers(comparison)
    if difference.kind == "equal generators":
        return LikelyCause(
            name=f"same {drawn} on every rank",
            why=f"these ranks draw their {drawn} from equal generators, so different samples get the same {drawn.split()[-1]}",
            do="after the model and a Trainer are built, seed each rank differently: from echelon import set_seed; "
            "set_seed(seed, device_specific=True) (or torch.manual_seed(seed + rank))",
        )
    if difference.kind == "repeated generator":
        return LikelyCause(
            name=f"{drawn} repeat",
            why=f"the generator is in the state of update {difference.values} again: the {drawn.split()[-1]} repeat",
            do="seed once, outside the training loop, and let a resume restore the generators",
        )
    return LikelyCause(
        name="generators not restored",
        why="the generators are not in the state of the run that was not interrupted",
        do="save and restore the generators of torch, numpy and python of each rank with the checkpoint",
    )


def forward_cause(comparison: Comparison, differences: Sequence[RunDifference]) -> LikelyCause:
    """Explain an output that differs although the weights before it are equal."""
    difference = next((one for one in differences if one.kind == "untrained forward"), differences[0])
    if difference.kind == "untrained forward":
        return LikelyCause(
            name="not in training mode",
            why=f"{difference.values}, which the other ranks make: the model is in evaluation mode there",
            do="call model.train() before the training loop and after each evaluation, on every rank",
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
        return LikelyCause(
            name="batch statistics per rank",
            why=f"{module} ({class_name}) normalizes by the statistics of each rank's own samples",
            do="convert the model with torch.nn.SyncBatchNorm.convert_sync_batchnorm before wrapping it (echelon verify runs it on the "
            "CPU, training needs GPUs), or use GroupNorm",
        )
    theirs = comparison.reference.models.get(int(index))
    if model and theirs and model.training != theirs.training:
        return LikelyCause(
            name="training mode differs",
            why=f"the model is in {_mode(model.training)} mode, in the reference in {_mode(theirs.training)} mode",
            do="call model.train() before the training loop and after each evaluation, on every rank",
        )
    if parents and not module and any("Sync" not in kind for kind in parents.values()):
        return LikelyCause(
            name="batch statistics per rank",
            why=f"the outputs differ, and {_listed(list(parents))} normalize by the statistics of each rank's own samples",
            do="convert the model with torch.nn.SyncBatchNorm.convert_sync_batchnorm before wrapping it (echelon verify runs it on the "
            "CPU, training needs GPUs), or use GroupNorm",
            tensors=[f"{index}:{name}" for name in parents],
        )
    relative = difference.relative or 0.0
    if everywhere and 2.0**-12 < relative < 2.0**-6 and difference.allowed < 2.0**-4 * difference.distance:
        return LikelyCause(
            name="lower precision",
            why=f"the relative difference of {relative:.1e} is that of a float16 or bfloat16 computation",
            do="use the same mixed_precision on this layout, and cast after wrapping as before it",
        )
    return LikelyCause(name="", why="", do="compare this module's inputs, mode and buffers on the ranks named")


def clip_cause(comparison: Comparison, update: int, differences: Sequence[RunDifference]) -> LikelyCause:
    """Explain norms and clipped gradients."""
    layout, reference = comparison.layout, comparison.reference
    kinds = {one.kind for one in differences}
    calls = [layout.at(rank, update).clips for rank in range(layout.world_size)]
    line = next((one.line for each in calls for one in each if one.line), "")
    if "num clips" in kinds:
        return LikelyCause(
            name="clipped another number of times",
            why=next(one.values for one in differences if one.kind == "num clips"),
            do="clip once per update, after the last backward and before the step, on every rank",
            line=line,
        )
    if "max norm" in kinds:
        return LikelyCause(
            name="other clipping threshold",
            why=next(one.values for one in differences if one.kind == "max norm"),
            do="use the same max_norm on every layout; do not scale it by the number of ranks or micro-steps",
            line=line,
        )
    norms = [each[0].norm for each in calls if each]
    if not norms:
        return LikelyCause(
            name="", why="", do="compare what changes the gradients between their reduction and the step"
        )
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
        return LikelyCause(
            name="norm of one shard",
            why="each rank clips by the norm of its own shard of the gradient",
            do="use accelerator.clip_grad_norm_ (or the engine's own function), which adds up the squares of all shards",
            line=line,
        )
    whole = math.sqrt(sum(one.whole.square_sum for one in tensors.values()))
    if len(set(norms)) > 1 or (
        all(sums.values())
        and all(abs(n - sums[r]) <= 0.05 * n for r, n in enumerate(norms))
        and abs(norms[0] - whole) > 0.05 * whole
    ):
        return LikelyCause(
            name="clipped before the reduction",
            why=f"the norms are those of each rank's own gradient ({', '.join(f'{one:.4g}' for one in norms)}), not of the reduced one",
            do="clip after the gradients are reduced: outside no_sync(), after the last backward of the update",
            line=line,
        )
    return _norm_cause(norms[0], whole, theirs[0] if theirs else 0.0, line)


def _norm_cause(norm: float, whole: float, theirs: float, line: str) -> LikelyCause:
    """Explain a norm that is equal on all ranks, by the norm of the whole gradient."""
    ratio = norm / theirs if theirs else None
    if ratio is not None and whole and abs(norm - whole) > 1e-3 * whole:
        power = math.log2(norm / whole) if norm > 0 else 0.5
        if power > 3 and abs(power - round(power)) < 1e-3:
            return LikelyCause(
                name="clipped while scaled",
                why=f"the norm is {norm / whole:.6g} times that of the gradient: the loss scale",
                do="call scaler.unscale_(optimizer) before clipping, or accelerator.clip_grad_norm_",
                ratio=ratio,
                line=line,
            )
        return LikelyCause(
            name="norm of other tensors",
            why=f"the norm returned is {norm:.6g}, that of the gradient is {whole:.6g}",
            do="clip all parameters of the model at once, after the gradients are reduced",
            ratio=ratio,
            line=line,
        )
    return LikelyCause(
        name="wrong coefficient",
        why="the norm is right, but the gradients are not multiplied by min(1, max_norm / norm)",
        do="check what changes the gradients between clipping and the step",
        line=line,
    )


def rate_cause(comparison: Comparison, update: int) -> LikelyCause:
    """Explain learning rates."""
    layout, reference, size = comparison.layout, comparison.reference, comparison.layout.world_size
    own, other = _first_step(layout, update), _first_step(reference, update)
    if own is None or other is None:
        return LikelyCause(name="", why="", do="compare the schedulers")
    by_update = {one: step.lrs for one in reference.updates if (step := _first_step(reference, one)) is not None}
    first = reference.first_update
    found = [one for one, rates in by_update.items() if one != update and _equal_rates(rates, own.lrs)]
    text = f"the learning rate is {_rates(own)}, in the reference {_rates(other)}"
    do = "step the scheduler once per update, on all ranks alike"
    if (
        size > 1
        and first + size * (update - first) in found
        and _follows(comparison, update, lambda one: first + size * (one - first))
    ):
        why = f"{text}, which it has in update {first + size * (update - first)}: the scheduler is stepped {size} times per update, once for each rank"
        return LikelyCause(
            name="scheduler stepped num_processes times",
            why=why,
            do=f"{do} (step_scheduler_with_optimizer=False, or an unprepared scheduler)",
        )
    ratios = [a / b for a, b in zip(own.lrs, other.lrs, strict=False) if b]
    if ratios and max(ratios) - min(ratios) <= 1e-9 * abs(ratios[0]):
        value = ratios[0]
        known = {
            float(size): "the number of ranks",
            1 / size: "1 / the number of ranks",
            math.sqrt(size): "its square root",
        }
        word = next((word for target, word in known.items() if size > 1 and abs(value - target) < 1e-6 * target), "")
        if word:
            why = f"{text}: it is multiplied by {word}"
            return LikelyCause(
                name="learning rate scaled by the number of ranks",
                why=why,
                do="scale it by nothing, or in the one-process run, too",
                ratio=value,
            )
    for one in sorted(found, key=lambda candidate: abs(candidate - update)):
        if abs(one - update) <= max(3, size):
            word = "ahead" if one > update else "behind"
            why = f"{text}, which it has in update {one}: the schedule is {abs(one - update)} update(s) {word}"
            return LikelyCause(name=f"schedule {word}", why=why, do=f"{do}; restore its position when the run resumes")
    return LikelyCause(name="other schedule", why=text, do=do, ratio=ratios[0] if ratios else None)


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
    texts = {
        "skipped": (
            "step skipped",
            "let all ranks decide together whether to skip: all_reduce found_inf over the ranks",
        ),
        "num steps": ("stepped another number of times", "step once per update, on every rank"),
        "settings": ("other optimizer settings", "build the optimizer with the same settings on every layout"),
        "parameters": (
            "parameters not in the optimizer",
            "build the optimizer from the parameters of the wrapped model, after it is wrapped",
        ),
    }
    if "num steps" in by_kind and _steps_without_forward(comparison.layout, update):
        return LikelyCause(
            name="not in training mode",
            stage="forward",
            why=f"the optimizer steps again after update {update}, but no forward pass of a model in training mode came before",
            do="call model.train() before the training loop and after each evaluation, on every rank",
            line=line,
        )
    for kind, (name, do) in texts.items():
        if kind in by_kind:
            return LikelyCause(name=name, why=by_kind[kind].values, do=do, ranks=by_kind[kind].ranks, line=line)
    names = [one.tensor for one in failed_values(differences)]
    changed = [name for name in names if "/" not in name.partition(":")[2]]
    trained = comparison.reference.tensors(update, "reduced")
    weights = [name for name in changed if name in trained]
    if changed and not weights and trained and len(changed) == len(names):
        return LikelyCause(
            name="averaged weights",
            why=f"only {_listed(changed)} differ, which have no gradients: an averaged model or another copy of the weights",
            do="update the average once per update, after the step, from weights that are complete, on every rank",
            line=line,
        )
    unequal = [one for one in differences if one.kind == "unequal ranks"]
    frozen = [
        name
        for name in weights
        if _has_moved(comparison.reference, update, name) and not _has_moved(comparison.layout, update, name)
    ]
    if frozen and len(frozen) == len(weights):
        return LikelyCause(
            name="weights not updated",
            why=f"{_listed(frozen)} did not change in this update, but does in the reference",
            do="build the optimizer from the parameters of the wrapped model, after it is wrapped",
            tensors=frozen,
            line=line,
        )
    model = (
        comparison.layout.models.get(int(names[0].partition(":")[0]))
        if names and names[0].partition(":")[0].isdigit()
        else None
    )
    tied = {*model.tied, *model.tied.values()} if model else set()
    if weights and tied and all(name.partition(":")[2] in tied for name in weights):
        return LikelyCause(
            name="tied weights",
            why=f"only {_listed(weights)} differs, which several modules share: its uses are updated apart",
            do="tie the weights again after wrapping, sharding or loading the model",
            tensors=weights,
            line=line,
        )
    if unequal:
        return LikelyCause(
            name="ranks step apart",
            why="the ranks had equal gradients, but have different weights after the step",
            do="step on all ranks alike: same optimizer state, same settings, no change of weights on one rank",
            ranks=sorted({rank for one in unequal for rank in one.ranks}),
            line=line,
        )
    return _step_cause(comparison, update, names, weights, line)


def _step_cause(comparison: Comparison, update: int, names: list[str], weights: list[str], line: str) -> LikelyCause:
    swapped = _swapped_states(comparison, update, [name for name in names if "/" in name])
    if swapped:
        return LikelyCause(
            name="optimizer state of another parameter",
            why=f"the state of {swapped[0]} is that of {swapped[1]} in the reference",
            do="map optimizer states by parameter name when they are loaded, not by position",
            line=line,
        )
    ours, theirs = _moves(comparison.layout, update), _moves(comparison.reference, update)
    limits = {name: 2 * value for name, value in comparison.allowed.get((update, "weights"), {}).items()}
    common = [name for name in weights if name in ours and name in theirs]
    ratio = scale_between(ours, theirs, limits, common) if common else None
    if ratio is not None:
        return LikelyCause(
            name="step scaled",
            why=f"the weights move {ratio:.6g} times as far as in the reference, by equal gradients",
            do="step once per update, with the same learning rate; look for a second optimizer or a second step",
            ratio=ratio,
            line=line,
        )
    earlier = _moves(comparison.reference, update - 1)
    if common and ratio_between(ours, earlier, limits, [name for name in common if name in earlier]) is not None:
        return LikelyCause(
            name="step with old gradients",
            why="the weights move as in the reference's previous update",
            do="step after the gradients of the update are complete",
            line=line,
        )
    return LikelyCause(
        name="",
        why="the gradients that the optimizer received are equal, the weights or states after the step are not",
        do="compare optimizer settings, weight decay groups and what else changes weights (an averaged model, a copy) on this layout",
        line=line,
    )


def buffer_cause(comparison: Comparison, differences: Sequence[RunDifference]) -> LikelyCause:
    """Explain buffers."""
    unequal = [one for one in differences if one.kind == "unequal ranks"]
    names = [one.tensor for one in unequal or differences]
    if unequal:
        return LikelyCause(
            name="buffers differ between ranks",
            why=f"{_listed(names)} have other values on different ranks",
            do="use SyncBatchNorm, or broadcast the buffers from rank 0 (DDP: broadcast_buffers=True)",
            ranks=sorted({rank for one in unequal for rank in one.ranks}),
        )
    if all(name.partition(":")[2].startswith("averaged.") for name in names):
        return LikelyCause(
            name="averaged weights",
            why=f"only {_listed(names)} differ, which are averages of the weights",
            do="update the average once per update, after the step, from weights that are complete, on every rank",
        )
    return LikelyCause(
        name="stale buffers",
        why=f"{_listed(names)} are not those of the reference, although outputs and weights are",
        do="load and update buffers on every rank together with the weights",
    )


def _steps_without_forward(run: AlignedRun, update: int) -> bool:
    """Return whether a backward pass of the update belongs to no forward pass in training mode."""
    one = run.at(0, update)
    seen = {forward.micro_step for forward in one.forwards if forward.is_training}
    return bool(seen) and any(loss.micro_step not in seen for loss in one.losses)


def _first_step(run: AlignedRun, update: int) -> OptimizerStep | None:
    return next((one for rank in run.ranks_at(update) for one in rank.steps), None)


def _rates(step: OptimizerStep) -> str:
    return ", ".join(f"{rate:.6g}" for rate in dict.fromkeys(step.lrs))


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
    kind: TensorKind = "weights"
    before, after = run.tensors(update - 1, kind), run.tensors(update, kind)
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


def _listed(names: Sequence[str], limit: int = 4) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
