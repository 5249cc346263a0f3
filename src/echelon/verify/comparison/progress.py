"""Whether all ranks take part in an update, which shows in the trace of a run that has failed or hung, too."""

from __future__ import annotations

from echelon.verify.comparison.alignment import AlignedRun
from echelon.verify.comparison.differences import RunDifference
from echelon.verify.comparison.wording import named_ranks
from echelon.verify.trace import OptimizerStep

__all__ = ["unequal_progress", "untrained_ranks"]


def untrained_ranks(layout: AlignedRun, update: int) -> RunDifference | None:
    """Return a difference if only some ranks call ``backward`` without a forward pass in training mode before it."""
    lines = {rank: line for rank in range(layout.world_size) if (line := _untrained_line(layout, rank, update))}
    if not 0 < len(lines) < layout.world_size:
        return None
    ranks = list(lines)
    return RunDifference(
        stage="forward",
        update=update,
        kind="untrained forward",
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
        stage="optimizer",
        update=update,
        kind="num steps",
        ranks=idle,
        values=f"{named_ranks(idle)} made {max(passes[rank] for rank in idle)} backward passes without an optimizer step, "
        f"while other ranks stepped after {enough}",
        line=first.line,
    )


def _untrained_line(layout: AlignedRun, rank: int, update: int) -> str:
    """Return the line of the first ``backward`` that belongs to no forward pass in training mode."""
    return next((loss.line or "?" for loss in layout.at(rank, update).losses if loss.is_in_evaluation_mode), "")
