"""Saves a checkpoint when an error ends training (``save_on_exception``)."""

from __future__ import annotations

from datetime import timedelta

from echelon.accelerator.checkpoint.folders import same_on_all_ranks
from echelon.base.logging import get_logger
from echelon.trainer.loop import TrainingLoop

__all__ = ["save_checkpoint_after_error"]

logger = get_logger(__name__)

_TIMEOUT = timedelta(seconds=10)  # for the other ranks to fail as well


def save_checkpoint_after_error(error: BaseException, loop: TrainingLoop) -> None:
    """Save a checkpoint of the last completed step if possible; otherwise log the reason.

    If only some ranks fail, no checkpoint can be saved, because the other ranks are waiting in a collective.

    Collective: call on every rank that failed.
    """
    accelerator, step = loop.hooks.accelerator, loop.hooks.state.global_step
    why = None
    if loop.is_stepping:
        why = "the error occurred during the optimizer step"
    elif not step or loop.last_saved_step == step:
        return  # nothing to save, or already saved
    elif accelerator.num_processes > 1 and not same_on_all_ranks(
        f"step {step}: {type(error).__name__}", within=_TIMEOUT
    ):
        why = "the other ranks did not fail with the same error in this step"
    if why is not None:
        logger.error("%s: cannot save a checkpoint of step %d: %s", type(error).__name__, step, why)
        return
    try:
        loop.save_last_step()
    except Exception as problem:  # noqa: BLE001 - the caller raises the original error
        logger.error("saving a checkpoint of step %d failed: %s", step, problem)
    else:
        logger.error("%s: saved a checkpoint of step %d", type(error).__name__, step)
