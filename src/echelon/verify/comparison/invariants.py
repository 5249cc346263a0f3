"""What must hold between the ranks of one layout, whatever the reference did."""

from __future__ import annotations

import math
from collections.abc import Iterator

from echelon.verify.comparison.alignment import AlignedRun
from echelon.verify.comparison.differences import RunDifference
from echelon.verify.comparison.sample_comparison import SampleComparison
from echelon.verify.comparison.tolerance import unit_roundoff
from echelon.verify.comparison.wording import named_ranks, per_rank
from echelon.verify.trace import OptimizerStep


class GeneratorHistory:
    """The states from which dropout masks were drawn so far."""

    def __init__(self, layout: AlignedRun, order: SampleComparison) -> None:
        self._layout = layout
        self._order = order
        self._seen: list[dict[int, int]] = [{} for _ in range(layout.world_size)]
        # Under these parities echelon draws masks by sample, from no rank's generator.
        self._by_sample = any(one.parity in ("exact", "bitwise") for one in layout.models.values())
        self.num_compared = 0

    def differences(self, update: int) -> Iterator[RunDifference]:
        """Yield what is wrong with the generators of ``update``."""
        if self._by_sample:
            return
        states: dict[tuple[int, int], list[int]] = {}
        repeated: dict[int, int] = {}
        for rank in range(self._layout.world_size):
            drawing = [one for one in self._layout.at(rank, update).rngs if one.draws_masks]
            self.num_compared += len(drawing)
            for one in drawing:
                states.setdefault((one.micro_step, one.torch), []).append(rank)
            # A recorded run draws from the generator once in each update that has masks, after the first forward pass with masks.
            if drawing and self._seen[rank].setdefault(drawing[0].torch, update) != update:
                repeated[rank] = self._seen[rank][drawing[0].torch]
        for ranks in states.values():
            others = [
                rank
                for rank in ranks[1:]
                if self._order.is_recorded(update) and not self._order.same_samples(update, ranks[0], rank)
            ]
            if others:
                yield RunDifference("rng", update, "equal generators", ranks=[ranks[0], *others])
                break
        if repeated and update == self._layout.resumed_at:
            yield RunDifference("rng", update, "generators", ranks=sorted(repeated))
        elif repeated:
            earlier = min(repeated.values())
            yield RunDifference("rng", update, "repeated generator", ranks=sorted(repeated), values=str(earlier))


def unequal_clips(layout: AlignedRun, update: int) -> RunDifference | None:
    """Return a difference if ranks clipped by different norms."""
    num_elements = max(1, sum(one.whole.num_elements for one in layout.tensors(update, "reduced").values()))
    clips = [layout.at(rank, update).clips for rank in range(layout.world_size)]
    for calls in zip(*clips, strict=False):
        norms = [one.norm for one in calls]
        if not any(math.isfinite(norm) for norm in norms):
            continue  # clipped by value, or gradients that have overflowed
        # A norm is a sum over all elements; ranks that add it up in a different order than their neighbor differ in the last bits.
        spread = max(norms) - min(norms)
        if not math.isfinite(spread) or spread > unit_roundoff("float32") * math.sqrt(num_elements) * max(norms):
            bound = unit_roundoff("float32") * math.sqrt(num_elements)
            return RunDifference(
                "clip",
                update,
                "norm",
                ranks=list(range(len(norms))),
                distance=spread,
                norm=max(abs(norm) for norm in norms),
                allowed=bound * max(norms),
                values=f"the clipping function returns unequal norms ({per_rank(norms, 6)}); they must be equal on all ranks, up to a "
                f"relative difference of {bound:.1e}",
                line=calls[0].line,
            )
    if len({len(one) for one in clips}) > 1:
        values = f"the ranks call clipping functions a different number of times (calls on {per_rank([len(one) for one in clips])})"
        return RunDifference("clip", update, "num clips", values=values)
    return None


def unequal_steps(layout: AlignedRun, update: int) -> Iterator[RunDifference]:
    """Yield a difference if only some ranks skipped a step, or if ranks step with different learning rates."""
    steps = [layout.at(rank, update).steps for rank in range(layout.world_size)]
    for calls in zip(*steps, strict=False):
        skipped = [rank for rank, one in enumerate(calls) if one.is_skipped]
        if 0 < len(skipped) < len(calls):
            yield RunDifference(
                "optimizer",
                update,
                "skipped",
                ranks=skipped,
                values=f"a loss scaler skipped the step on {named_ranks(skipped)} of {len(calls)} ranks",
                line=calls[0].line,
            )
        rates = [one.lrs for one in calls]
        unequal = [rank for rank, one in enumerate(rates) if str(one) != str(rates[0])]  # nan is equal to nan
        if unequal:
            yield RunDifference(
                "scheduler",
                update,
                "rates",
                ranks=[0, *unequal],
                values=f"the learning rate is {rates_of(calls[0])} on rank 0 and {rates_of(calls[unequal[0]])} on rank {unequal[0]}",
                line=calls[unequal[0]].line,
            )


def rates_of(step: OptimizerStep) -> str:
    """Return the learning rates of a step in words."""
    return ", ".join(f"{rate:.6g}" for rate in dict.fromkeys(step.lrs))


def untrained_ranks(layout: AlignedRun, update: int) -> RunDifference | None:
    """Return a difference if only some ranks call ``backward`` without a forward pass in training mode before it."""
    lines = {rank: line for rank in range(layout.world_size) if (line := _untrained_line(layout, rank, update))}
    if not 0 < len(lines) < layout.world_size:
        return None
    ranks = list(lines)
    return RunDifference(
        "forward",
        update,
        "untrained forward",
        ranks=ranks,
        values=f"{named_ranks(ranks)} {'calls' if len(ranks) == 1 else 'call'} backward without a forward pass in training mode",
        line=lines[ranks[0]],
    )


def unequal_progress(layout: AlignedRun) -> RunDifference | None:
    """Return a difference if in the first update that is not complete on all ranks, some rank goes on without a step."""
    update = layout.updates.stop
    untrained = untrained_ranks(layout, update)
    if untrained is not None:
        return untrained
    passes = [len(one.losses) for one in layout.ranks_at(update)]
    steps = [one.steps for one in layout.ranks_at(update)]
    enough = min((count for count, own in zip(passes, steps, strict=True) if own), default=None)
    if enough is None:
        return None
    idle = [rank for rank, own in enumerate(steps) if not own and passes[rank] > enough]
    if not idle:
        return None  # they may be about to step
    first: OptimizerStep = next(own[0] for own in steps if own)
    return RunDifference(
        "optimizer",
        update,
        "num steps",
        ranks=idle,
        values=f"{named_ranks(idle)} made {max(passes[rank] for rank in idle)} backward passes without an optimizer step, "
        f"while other ranks stepped after {enough}",
        line=first.line,
    )


def _untrained_line(layout: AlignedRun, rank: int, update: int) -> str:
    """Return the line of the first ``backward`` that belongs to no forward pass in training mode."""
    return next((loss.line or "?" for loss in layout.at(rank, update).losses if loss.is_in_evaluation_mode), "")
