"""Checks that callbacks change the flags of a Trainer's control on every rank."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from echelon.accelerator.process import require_all_ranks
from echelon.trainer.callbacks.callback_handler import CLEARED_FLAGS, DefaultFlowCallback, TrainerCallback
from echelon.trainer.state import TrainerControl

__all__ = ["require_agreement", "usual_flags"]

_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
# Evaluations may have another number of batches on each rank.
_UNCHECKED = frozenset({"on_init_end", "on_prediction_step", "on_predict", "on_push_begin", "on_train_end"})
_ADVICE = (
    "Decide from what is equal on all ranks, such as state.global_step and metrics, and not from state.is_world_process_zero, a "
    "clock or this rank's own data; or share one rank's decision first (echelon.distributed.agree)"
)


def usual_flags(
    listeners: list[TrainerCallback], event: str, args: Any, state: Any, control: TrainerControl
) -> Mapping[str, bool] | None:
    """Return the flags after ``event`` if no callback but the default one changed them; None if there is no other callback.

    All ranks have these flags, because they follow from the arguments and the step.
    """
    if event in _UNCHECKED or all(type(one) is DefaultFlowCallback for one in listeners):
        return None
    usual = copy.copy(control)
    for flag in CLEARED_FLAGS.get(event, ()):
        setattr(usual, flag, False)
    for listener in listeners:
        if type(listener) is DefaultFlowCallback:
            usual = getattr(listener, event)(args, state, usual) or usual
    return {flag: getattr(usual, flag) for flag in _FLAGS}


def require_agreement(event: str, usual: Mapping[str, bool], control: TrainerControl) -> None:
    """If callbacks have changed flags in ``event``, wait for the ranks whose callbacks did the same.

    Logging, evaluating, saving and stopping need all ranks: a rank that does so alone would wait for the others forever, and they for
    it in the next step.

    Collective: on the ranks where flags were changed.

    Raises:
        DesyncError: the callbacks of another rank did not change the same flags.
    """
    changed = [f"{flag} = {getattr(control, flag)}" for flag in _FLAGS if getattr(control, flag) != usual[flag]]
    if changed:
        require_all_ranks(f"setting control.{', control.'.join(changed)} in {event}", advice=_ADVICE)
