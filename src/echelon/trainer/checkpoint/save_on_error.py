"""The checkpoint that is saved when an error ends a training."""

from __future__ import annotations

from datetime import timedelta

from echelon.accelerator.checkpoint.folders import same_on_all_ranks
from echelon.base.logging import get_logger
from echelon.trainer.loop import TrainingLoop

__all__ = ["save_after"]

logger = get_logger(__name__)

_PATIENCE = timedelta(seconds=10)  # for the other ranks to fail, too


def save_after(error: BaseException, loop: TrainingLoop) -> None:
    """Save the training as it was after its last whole step, if that can be; why it cannot is logged.

    An error on one rank alone cannot be saved after: the others wait in a collective, and do not come here.

    Collective: every rank that can.
    """
    accelerator, step = loop.hooks.accelerator, loop.hooks.state.global_step
    why = None
    if loop.is_stepping:
        why = "it came while the optimizer was stepping"
    elif not step or loop.last_saved_step == step:
        return  # there is nothing to save, or it is saved
    elif accelerator.num_processes > 1 and not same_on_all_ranks(
        f"step {step}: {type(error).__name__}", within=_PATIENCE
    ):
        why = "the other ranks have not met it in the same step, and cannot save"
    if why is not None:
        logger.error("%s: no checkpoint is saved after step %d: %s", type(error).__name__, step, why)
        return
    try:
        loop.save_last_step()
    except Exception as problem:  # noqa: BLE001 - the error that brought us here is the one to raise
        logger.error("no checkpoint could be saved after step %d: %s", step, problem)
    else:
        logger.error("%s: the training is saved as it was after step %d", type(error).__name__, step)
