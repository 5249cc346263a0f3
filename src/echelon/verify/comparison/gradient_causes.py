"""Why the reduced gradient of a layout is not the reference's.

Sketches are linear, so hypotheses about the reduction are tested on them: "the reference is the sum of the local gradients of all ranks,
weighted by their numbers of items, and the layout weighs them equally" is an equation between sketches.
"""

from __future__ import annotations

import linecache
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from echelon.distributed.checks.finding import Stage
from echelon.distributed.checks.sketch import Sketch
from echelon.verify.comparison.alignment import AlignedRun
from echelon.verify.comparison.cause_catalogue import LikelyCause, likely_cause
from echelon.verify.comparison.differences import Comparison, RunDifference
from echelon.verify.comparison.wording import listed, named_ranks, per_rank

Vector = Mapping[str, np.ndarray]
"""Projections of tensors by name, which stand for one vector."""

_Key = tuple[int, int]

_SHOWN = 1e-6
"""A ratio that differs less from 1 would be shown as 1."""


class GradientCauses:
    """Tests hypotheses about one update's gradients.

    Args:
        loss_ratio: the mean of the layout's losses, divided by the reference's; None if they cannot be compared.
        is_loss_right: False if outputs could not be compared, and no average of the losses is the reference's.
    """

    def __init__(
        self,
        comparison: Comparison,
        update: int,
        differences: Sequence[RunDifference],
        *,
        loss_ratio: float | None,
        is_loss_right: bool,
    ) -> None:
        self._run: AlignedRun = comparison.layout
        self._size = self._run.world_size
        self._update = update
        self._differences = [one for one in differences if one.stage == "reduce"]
        ours = self._run.tensors(update, "reduced")
        theirs = comparison.reference.tensors(update, "reduced")
        allowed = comparison.allowed.get((update, "reduced"), {})
        names = [name for name in theirs if name in ours and math.isfinite(theirs[name].whole.norm)]
        self._names = names
        self._scale = {
            name: max(allowed.get(name, 0.0), comparison.roundoff_of(name) * theirs[name].whole.norm) for name in names
        }
        self._roundoff = {
            name: comparison.roundoff_of(name) * math.sqrt(comparison.num_samples(update)) for name in names
        }
        self._theirs = _vector({name: theirs[name].whole for name in names})
        self._ours = _vector({name: ours[name].whole for name in names})
        self._of_rank = [
            _vector({name: ours[name].by_rank[rank] for name in names if rank in ours[name].by_rank})
            for rank in range(self._size)
        ]
        self._sharded = any(ours[name].is_sharded for name in names)
        local = self._run.local_gradients(update)
        self._local = {key: _vector({name: one[name] for name in names if name in one}) for key, one in local.items()}
        self._they_clip = bool(comparison.reference.at(0, update).clips)
        self._their_local = _sum((1.0, _vector(one)) for one in comparison.reference.local_gradients(update).values())
        self._weights, self._weight_word = self._item_weights()
        previous = self._run.tensors(update - 1, "reduced")
        self._previous = _vector({name: previous[name].whole for name in names if name in previous})
        self._clips = [self._run.at(rank, update).clips for rank in range(self._size)]
        self._mean = self._combined(dict.fromkeys(self._local, 1 / self._size))
        """Mean over the ranks of the sums of the local gradients."""
        self._limits = {
            name: self._scale[name]
            + self._roundoff[name]
            * sum(float(np.linalg.norm(one[name])) for one in self._local.values() if name in one)
            / self._size
            for name in names
        }
        """Allowed distances of a sum of local gradients, which may cancel."""
        self._loss_ratio = loss_ratio
        self._is_loss_right = is_loss_right
        self._is_half = any(comparison.roundoff_of(name) > 2.0**-12 for name in names)

    def cause(self) -> LikelyCause | None:
        """Return the cause that explains the gradients, if there is one."""
        if not self._names:
            return None
        checks = [
            self._clipped_early,
            self._clipped_before,
            self._clipped_by_hand,
            self._not_reduced,
            self._averaged_by_rank,
            self._scaled,
            self._micro_steps_lost,
            self._stale,
            self._some_tensors,
            self._clipped_by_shard,
        ]
        for check in (*checks, self._wrong_weights, self._low_precision, self._wrong_backward):
            cause = check()
            if cause is not None:
                return cause
        return None

    # hypotheses ----------------------------------------------------------------------------------------------------------------

    def _clipped_early(self) -> LikelyCause | None:
        """Explain gradients that were also clipped in micro-steps before the last one, when each rank had its own."""
        ranks = [self._run.at(rank, self._update) for rank in range(self._size)]
        last = max((clip.micro_step for one in ranks for clip in one.clips), default=0)
        early = [[clip for clip in one.clips if clip.micro_step < last] for one in ranks]
        if self._size < 2 or not all(early) or len({one[0].norm for one in early}) == 1:
            return None
        if all(clip.norm <= clip.max_norm for one in early for clip in one):
            return None
        norms = per_rank([one[0].norm for one in early])
        return likely_cause(
            "clipped before the reduction",
            stage="clip",
            why=f"gradients are clipped already after {early[0][0].micro_step} of the {last} backward passes of the update, before they are averaged over "
            f"the ranks: each rank clips its own (norm on {norms}; max_norm: {early[0][0].max_norm:.4g})",
            line=early[0][0].line,
        )

    def _clipped_before(self) -> LikelyCause | None:
        """Explain gradients that were clipped on each rank and then reduced."""
        clips = self._clips
        if self._size < 2 or not all(clips) or self._sharded:
            return None
        if all(ratio_between(one, self._of_rank[0], self._scale, self._names) is not None for one in self._of_rank):
            return None
        norms = [one[0].norm for one in clips]
        unequal = {one.tensor for one in self._differences if one.kind == "unequal ranks"}
        used = self._run.tensors(self._update, "clipped")
        reduced_later = (
            bool(unequal) and bool(used) and all(name in used and not used[name].unequal_ranks() for name in unequal)
        )
        factors = [min(1.0, one[0].max_norm / one[0].norm) if one[0].norm > 0 else 1.0 for one in clips]
        weighted = self._combined({key: factors[key[0]] / self._size for key in self._local})
        is_sum = min(factors) < 1.0 and self._ratio(self._ours, weighted) is not None
        if not reduced_later and not (is_sum and len(set(norms)) > 1):
            return None
        return likely_cause(
            "clipped before the reduction",
            stage="clip",
            why=f"each rank clips its own gradient (norm on {per_rank(norms)}; max_norm: {clips[0][0].max_norm:.4g}), and the clipped "
            "gradients are averaged over the ranks",
            line=clips[0][0].line,
        )

    def _clipped_by_hand(self) -> LikelyCause | None:
        """Find statements that scale the gradients between backward and the step, as the loop's own clipping does."""
        if any(self._clips) or not self._sharded or not self._their_local:
            return None
        scale = ratio_between(self._theirs, self._their_local, self._scale, self._names)
        mean = self._mean
        is_right = bool(mean) and self._ratio(self._theirs, mean) is not None
        if self._they_clip and is_right and not self._is_mean_of_local(self._names):
            return likely_cause(
                "clipped by other means",
                stage="clip",
                why="each rank's gradients are right after backward(), but not after the script has changed them before the step; on one "
                "process they are clipped there",
                ranks=list(range(self._size)),
            )
        if scale is None or scale > 0.999 or self._ratio(self._theirs, mean) is None:
            return None
        return likely_cause(
            "norm of one shard",
            stage="clip",
            why=f"on one process, the gradients are multiplied by {scale:.4g} before the step; the {self._size} ranks multiply their shards by "
            "other factors",
            ranks=list(range(self._size)),
        )

    def _clipped_by_shard(self) -> LikelyCause | None:
        """Find clipping that the recorder sees only by its norms, because it was given other tensors than the parameters."""
        clips = self._clips
        if not self._sharded or not all(clips) or len({one[0].norm for one in clips}) == 1:
            return None
        return likely_cause(
            "norm of one shard",
            stage="clip",
            why=f"each rank clips by the norm of its own shard (norm on {per_rank([one[0].norm for one in clips])})",
            line=clips[0][0].line,
            ranks=list(range(self._size)),
        )

    def _not_reduced(self) -> LikelyCause | None:
        unequal = [one for one in self._differences if one.kind == "unequal ranks"]
        if not unequal or self._sharded:
            return None
        names = [one.tensor for one in unequal]
        some = [name for name in names if name in self._names]
        own = [self._sum_of(rank) for rank in range(self._size)]
        alone = [
            rank
            for rank in range(self._size)
            if some
            and own[rank] is not None
            and ratio_between(self._of_rank[rank], own[rank] or {}, self._scale, some) is not None
        ]
        if alone or not self._local:
            ranks = alone or sorted({rank for one in unequal for rank in one.ranks})
            part = "" if len(some) == len(self._names) else f" of {listed(some)}"
            return likely_cause(
                "not reduced",
                why=f"each rank steps with its own gradient{part}, which was not averaged over the {self._size} ranks"
                if alone
                else f"the {self._size} ranks step with different gradients{part}",
                ranks=ranks,
                tensors=names if part else [],
            )
        reduced_step = self._partly_reduced(some)
        if reduced_step is not None:
            last = reduced_step == max(micro_step for _, micro_step in self._local)
            return likely_cause(
                "only the last micro-step reduced" if last else "only some micro-steps reduced",
                why=f"of {self._num_micro_steps()} micro-steps, only the gradients of micro-step {reduced_step + 1} are averaged over the ranks",
                ranks=list(range(self._size)),
            )
        scales = [ratio_between(one, self._of_rank[0], self._scale, some) for one in self._of_rank]
        apart = [scale_between(one, self._of_rank[0], self._scale, some) for one in self._of_rank]
        if 2 * len(some) > len(self._names) and all(one is not None for one in scales) and any(apart):
            return likely_cause(
                "scaled differently on each rank",
                why=f"the gradients of the ranks, divided by that of rank 0, are not 1 (on {per_rank([one for one in scales if one is not None])})",
                ranks=list(range(self._size)),
            )
        return likely_cause(
            "gradient changed after the reduction",
            why="the ranks step with different gradients, which are neither the average over the ranks nor what backward() gave each rank",
            ranks=sorted({rank for one in unequal for rank in one.ranks}),
        )

    def _partly_reduced(self, names: Sequence[str]) -> int | None:
        """Return the one micro-step whose gradients are averaged, if the others are each rank's own."""
        steps = sorted({micro_step for _, micro_step in self._local})
        for reduced in reversed(steps) if len(steps) > 1 else ():
            averaged = self._combined({(rank, reduced): 1 / self._size for rank in range(self._size)})
            own = [{(rank, one): 1.0 for one in steps if one != reduced} for rank in range(self._size)]
            sums = [_sum([(1.0, averaged), (1.0, self._combined(one))]) for one in own]
            if all(
                ratio_between(self._of_rank[rank], sums[rank], self._scale, names) is not None
                for rank in range(self._size)
            ):
                return reduced
        return None

    def _averaged_by_rank(self) -> LikelyCause | None:
        """Explain the reference as the sum weighted by items, and the layout as the sum with equal weights."""
        if not self._local or len(set(self._weights.values())) < 2 or not self._most_differ():
            return None
        total = sum(self._weights.values())
        by_items = self._combined({key: weight / total for key, weight in self._weights.items()})
        equal = self._combined(dict.fromkeys(self._local, 1 / len(self._local)))
        of_reference = self._ratio(self._theirs, by_items)
        of_layout = self._ratio(self._ours, equal)
        if of_reference is None:
            return None
        by_rank = {
            rank: sum(self._weights.get(key, 0.0) for key in self._local if key[0] == rank) for rank, _ in self._local
        }
        if of_layout is None:
            return None
        word = self._weight_word
        if len(set(by_rank.values())) > 1:
            name = "loss averaged per rank"
            why = (
                f"the loss is a mean over the {word} of one rank, but the ranks have different numbers of {word} ("
                f"{per_rank(list(by_rank.values()), 9)}). With equal weights, the mean of these means is not the mean over all {word}"
            )
        else:
            name = "loss averaged per micro-step"
            numbers = ", ".join(f"{count:g}" for count in self._weights.values())
            why = (
                f"the loss is a mean over the {word} of one micro-step, but the micro-steps have different numbers of {word} ({numbers}). "
                f"With equal weights, the mean of these means is not the mean over all {word}"
            )
        return likely_cause(
            name,
            self._case_of_items(),
            stage="loss weight",
            why=why,
            line=self._loss_line(),
        )

    def _scaled(self) -> LikelyCause | None:
        ratio = scale_between(self._ours, self._theirs, self._scale, self._names)
        if ratio is None:
            return None
        size, steps = self._size, self._num_micro_steps()
        mean = self._mean
        reduced = self._ratio(self._ours, mean) if mean else None
        expected = self._ratio(self._theirs, mean) if mean else None
        losses = self._loss_ratio
        scaled_loss = losses is not None and _is_close(losses, ratio, 0.01)
        text = f"the gradient on {self._processes()} is {ratio:.6g} times that of the reference run"
        if scaled_loss and (reduced is None or _is_close(reduced, 1.0, 0.01)):
            return self._scaled_loss(ratio, steps, text)
        local_is_right = expected is None or _is_close(expected, 1.0, 0.01)
        if not local_is_right and reduced is not None and _is_close(reduced, 1.0, 0.01):
            return likely_cause(
                "backward scaled",
                stage="backward",
                why=f"{text}, and so is each rank's own gradient before it is averaged, although the loss is right",
                ratio=ratio,
            )
        names = {
            size: "summed instead of averaged",
            1 / size: "averaged twice",
            1 / size**2: "averaged twice",
            size**2: "summed twice",
        }
        for value, name in names.items():
            if size > 1 and _is_close(ratio, value, 0.01):
                return likely_cause(name, why=f"{text}: it is {name} over the {size} ranks", ratio=ratio)
        if steps > 1 and (_is_close(ratio, steps, 0.01) or _is_close(ratio, 1 / steps, 0.01)):
            return self._scaled_loss(ratio, steps, text)
        return likely_cause("scaled", why=text, ratio=ratio)

    def _scaled_loss(self, ratio: float, steps: int, text: str) -> LikelyCause:
        line = self._loss_line()
        if steps > 1 and _is_close(ratio, steps, 0.01):
            case = "number_of_ranks" if steps == self._size else ""
            why = f"{text}: the loss is not divided by the {steps} micro-steps of the update"
            return likely_cause(
                "not divided by the micro-steps", case, stage="loss weight", why=why, ratio=ratio, line=line
            )
        if steps > 1 and _is_close(ratio, 1 / steps, 0.01):
            case = "number_of_ranks" if steps == self._size else ""
            why = f"{text}: the loss is divided by the {steps} micro-steps of the update twice"
            return likely_cause(
                "divided by the micro-steps twice", case, stage="loss weight", why=why, ratio=ratio, line=line
            )
        is_divided = self._size > 1 and _is_close(1 / ratio, self._size, 0.01)
        is_multiplied = self._size > 1 and _is_close(ratio, self._size, 0.01)
        why = f"{text}, and so is the loss"
        if is_divided or is_multiplied:
            why += f"; {self._size} is the number of ranks"
        return likely_cause(
            "loss scaled",
            "divided_by_ranks" if is_divided else "",
            stage="loss weight",
            why=why,
            ratio=ratio,
            line=line,
        )

    def _num_micro_steps(self) -> int:
        return max((micro_step for _, micro_step in self._local), default=0) + 1

    def _processes(self) -> str:
        return "1 process" if self._size == 1 else f"{self._size} processes"

    def _micro_steps_lost(self) -> LikelyCause | None:
        steps = sorted({micro_step for _, micro_step in self._local})
        ranks = sorted({rank for rank, _ in self._local})
        for kept in [steps[-1:], steps[:1], steps[1:], steps[:-1]] if len(steps) > 1 else []:
            chosen = {key: 1 / self._size for key in self._local if key[1] in kept}
            if chosen and self._ratio(self._ours, self._combined(chosen)) is not None:
                return likely_cause(
                    "micro-steps lost",
                    why=f"the gradient of the update contains only micro-steps {listed([str(one + 1) for one in kept])} of {len(steps)}",
                )
        for rank in ranks if len(ranks) > 1 else []:
            own = self._sum_of(rank)
            if own and self._ratio(self._ours, own) is not None:
                return likely_cause(
                    "only one rank's gradient",
                    why=f"all {self._size} ranks step with the gradient of rank {rank}: those of the other ranks are lost",
                    ranks=[rank],
                )
        return None

    def _stale(self) -> LikelyCause | None:
        if not self._previous:
            return None
        rest = {name: self._ours[name] - self._theirs[name] for name in self._names}
        ratio = ratio_between(
            rest, self._previous, self._scale, [name for name in self._names if name in self._previous]
        )
        if ratio is None or ratio <= 0:
            return None
        return likely_cause(
            "gradients not cleared",
            why=f"the gradient of update {self._update} contains that of update {self._update - 1}",
        )

    def _some_tensors(self) -> LikelyCause | None:
        failed = [one.tensor for one in self._differences]
        if len(failed) == len(self._names) or not failed:
            return None
        stage: Stage | None = "backward" if self._is_mean_of_local(failed) else None
        if are_tied(self._run, failed):
            return likely_cause(
                "tied weights",
                stage=stage,
                why=f"only {listed(failed)} differs, which several modules share: the gradients of the modules that use it are not added up",
                tensors=failed,
            )
        zero = [
            name
            for name in failed
            if name in self._ours and not np.any(self._ours[name]) and np.any(self._theirs[name])
        ]
        zero += [name for name in failed if name not in self._ours]
        if len(zero) == len(failed):
            return likely_cause(
                "gradient missing",
                stage=stage,
                why=f"no gradient on {self._processes()} for {listed(failed)}, but there is one in the reference run",
                tensors=failed,
            )
        absent = {key for key, one in self._local.items() if any(name not in one for name in failed)}
        if absent and len(absent) < len(self._local):
            ranks = sorted({rank for rank, _ in absent})
            return likely_cause(
                "unused on some ranks",
                why=f"not used on {named_ranks(ranks)} in this update, but on other ranks: {listed(failed)}",
                ranks=ranks,
                tensors=failed,
            )
        return None

    def _wrong_weights(self) -> LikelyCause | None:
        """Explain both gradients as sums of the local ones with free weights."""
        if len(self._local) < 2 or not self._most_differ():
            return None
        theirs, ours = self._fitted(self._theirs), self._fitted(self._ours)
        if theirs is None or ours is None:
            return None
        total, own_total = sum(theirs.values()), sum(ours.values())
        by_rank = {
            rank: [sum(w for key, w in fit.items() if key[0] == rank) for fit in (theirs, ours)]
            for rank, _ in self._local
        }
        if total <= 0 or own_total == 0:
            return None
        unequal = any(abs(one[0] / total - one[1] / own_total) > 1e-3 for one in by_rank.values())
        key_word = "ranks" if unequal else "micro-steps"
        right, own = (_shares(fit, 0 if unequal else 1) for fit in (theirs, ours))
        words = per_rank if unequal else _in_order
        return likely_cause(
            "loss averaged per rank" if unequal else "loss averaged per micro-step",
            self._case_of_items(),
            stage="loss weight",
            why=f"the {key_word} have the wrong weights in the gradient ({words(own)}): a mean over all items, as on one process, has the weights "
            f"{words(right)}",
            line=self._loss_line(),
        )

    def _low_precision(self) -> LikelyCause | None:
        if self._is_half or not self._local:
            return None
        mean = self._mean
        if self._ratio(self._theirs, mean) is None:
            return None
        relative = [
            float(np.linalg.norm(self._ours[name] - mean[name]) / np.linalg.norm(mean[name]))
            for name in self._names
            if name in mean and np.linalg.norm(mean[name]) > 0
        ]
        if not relative or not 2.0**-14 < float(np.median(relative)) < 2.0**-6:
            return None
        name = "bfloat16" if float(np.median(relative)) > 2.0**-10.5 else "float16"
        return likely_cause(
            "reduced in low precision",
            why=f"each rank's own gradients are right, but their average over the {self._size} ranks has a relative error of "
            f"{float(np.median(relative)):.1e}, as an average in {name} has",
        )

    def _wrong_backward(self) -> LikelyCause | None:
        """Find whether the local gradients already fail to add up to the reference, whatever their weights."""
        if not self._local:
            return None
        limits = self._limits
        failed = {one.tensor for one in self._differences}
        if not self._is_mean_of_local(self._names):
            ours, theirs = self._fitted(self._ours), self._fitted(self._theirs)
            if ours is None or theirs is not None:
                return None
        mean = self._mean
        wrong = [
            name
            for name in self._names
            if name in mean and np.linalg.norm(self._theirs[name] - mean[name]) > 2 * limits[name]
        ]
        wrong = [name for name in wrong if name in failed] or [name for name in self._names if name in failed]
        if not self._is_loss_right:
            return likely_cause(
                "no known cause: loss",
                stage="forward",
                why="the losses are not those of the reference run, whatever they are a mean over",
                line=self._loss_line(),
            )
        return likely_cause(
            "no known cause: backward",
            stage="backward",
            why=f"the average over the ranks is right, but the gradients that backward() gave the ranks for {listed(wrong)} do not average to "
            "that of the reference run",
            tensors=wrong,
        )

    # arithmetic ----------------------------------------------------------------------------------------------------------------

    def _combined(self, weights: Mapping[_Key, float]) -> dict[str, np.ndarray]:
        return _sum((weight, self._local.get(key, {})) for key, weight in weights.items())

    def _ratio(self, ours: Vector, theirs: Vector) -> float | None:
        """Return c if ``ours`` is c times ``theirs``, as exactly as sums of local gradients are known, else None."""
        return ratio_between(ours, theirs, self._limits, self._names)

    def _sum_of(self, rank: int) -> dict[str, np.ndarray] | None:
        return self._combined({key: 1.0 for key in self._local if key[0] == rank}) or None

    def _most_differ(self) -> bool:
        """Return whether most tensors differ, as they do if losses are weighed wrongly."""
        return 2 * len({one.tensor for one in self._differences}) > len(self._names)

    def _is_mean_of_local(self, names: Sequence[str]) -> bool:
        """Return whether these reduced gradients are the mean of the local ones, so that the reduction is not at fault."""
        mean = self._mean
        limits = self._limits
        return bool(mean) and all(
            name in mean and name in limits and np.linalg.norm(self._ours[name] - mean[name]) <= 2 * limits[name]
            for name in names
        )

    def _fitted(self, target: Vector) -> dict[_Key, float] | None:
        """Return the weights of the local gradients whose sum is ``target``, or None if it is no such sum."""
        keys = list(self._local)
        limits = self._limits
        names = [name for name in self._names if limits[name] > 0]
        blocks = [
            [self._local[key].get(name, np.zeros_like(target[name])) / limits[name] for name in names] for key in keys
        ]
        matrix = np.stack([np.concatenate(one) for one in blocks], axis=1)
        right = np.concatenate([target[name] / limits[name] for name in names])
        solution, _, rank, _ = np.linalg.lstsq(matrix, right, rcond=None)
        rest = right - matrix @ solution
        size = rest.size // len(names)
        worst = max(float(np.linalg.norm(rest[index : index + size])) for index in range(0, rest.size, size))
        return (
            dict(zip(keys, (float(one) for one in solution), strict=True)) if rank == len(keys) and worst <= 2 else None
        )

    def _item_weights(self) -> tuple[dict[_Key, float], str]:
        """Return the number of items that the loss of each micro-step is averaged over, and the word for them."""
        items: dict[_Key, float] = {}
        samples: dict[_Key, float] = {}
        for rank, micro_step in self._local:
            one = self._run.at(rank, self._update)
            given = [loss.weight for loss in one.losses if loss.micro_step == micro_step and loss.weight is not None]
            counted = [b.num_items for b in one.batches if b.micro_step == micro_step and b.num_items is not None]
            if given or counted:
                items[rank, micro_step] = float(given[0] if given else counted[0])
            samples[rank, micro_step] = float(len(one.rows_of(micro_step)))
        if items.keys() == samples.keys() and len(set(items.values())) > 1:
            return items, "tokens"
        return samples, "samples"

    def _loss_line(self) -> str:
        return next((one.line for one in self._run.at(0, self._update).losses if one.line), "")

    def _case_of_items(self) -> str:
        """Return which remedy makes each item count alike: it depends on the code that computes the loss."""
        codes = (one.trainer_code for one in self._run.at(0, self._update).losses)
        code = next(filter(None, codes), "")
        return code or ("num_items" if "num_items=" in _source_of(self._loss_line()) else "")


def ratio_between(ours: Vector, theirs: Vector, limits: Mapping[str, float], names: Sequence[str]) -> float | None:
    """Return c if ``ours`` is c times ``theirs`` within the limits, else None."""
    above = below = 0.0
    for name in names:
        if name in ours and name in theirs and limits.get(name, 0.0) > 0:
            above += float(ours[name] @ theirs[name]) / limits[name] ** 2
            below += float(theirs[name] @ theirs[name]) / limits[name] ** 2
    if below == 0.0 or not math.isfinite(above / below) or above == 0.0:
        return None
    ratio = above / below
    for name in names:
        if name not in ours or name not in theirs:
            return None
        # The ratio itself carries an error of the order of the tensors' own.
        if np.linalg.norm(ours[name] - ratio * theirs[name]) > 2 * max(1.0, abs(ratio)) * limits.get(name, 0.0):
            return None
    return ratio


def scale_between(ours: Vector, theirs: Vector, limits: Mapping[str, float], names: Sequence[str]) -> float | None:
    """Return c if ``ours`` is c times ``theirs``, and most of their difference is explained by it; None if c is nearly 1."""
    ratio = ratio_between(ours, theirs, limits, names)
    if ratio is None or not math.isfinite(ratio) or abs(ratio - 1) < _SHOWN:
        return None
    known = [name for name in names if limits.get(name, 0.0) > 0]
    total = sum(float(np.sum((ours[name] - theirs[name]) ** 2)) / limits[name] ** 2 for name in known)
    rest = sum(float(np.sum((ours[name] - ratio * theirs[name]) ** 2)) / limits[name] ** 2 for name in known)
    return ratio if rest < total / 2 else None


def are_tied(run: AlignedRun, names: Sequence[str]) -> bool:
    """Return whether several modules of the first one's model share each of these parameters (``"0:weight"``)."""
    index = names[0].partition(":")[0]
    model = run.models.get(int(index)) if index.isdigit() else None
    return model is not None and all(name.partition(":")[2] in {*model.tied, *model.tied.values()} for name in names)


def _vector(tensors: Mapping[str, Sketch]) -> dict[str, np.ndarray]:
    return {name: one.projection for name, one in tensors.items()}


def _in_order(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)


def _sum(terms: Iterable[tuple[float, Vector]]) -> dict[str, np.ndarray]:
    """Return the sum of vectors, each times its weight."""
    result: dict[str, np.ndarray] = {}
    for weight, vector in terms:
        for name, values in vector.items():
            result[name] = result[name] + weight * values if name in result else weight * values
    return result


def _is_close(value: float, target: float, relative: float) -> bool:
    return abs(value - target) <= relative * abs(target)


def _shares(fit: Mapping[_Key, float], part: int) -> list[float]:
    """Return the weight of each rank (part 0 of the keys) or micro-step (part 1), as a fraction of their sum."""
    sums: dict[int, float] = {}
    for key, weight in fit.items():
        sums[key[part]] = sums.get(key[part], 0.0) + weight
    total = sum(sums.values())
    return [value / total for _, value in sorted(sums.items())]


def _source_of(line: str) -> str:
    """Return the source of ``file:line``."""
    file, _, number = line.rpartition(":")
    return linecache.getline(file, int(number)) if number.isdigit() else ""
