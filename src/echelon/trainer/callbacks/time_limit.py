"""The training time limit, ``max_time``."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from echelon.base.logging import get_logger
from echelon.trainer.arguments.enums import IntervalStrategy, SaveStrategy
from echelon.trainer.callbacks.callback_handler import TrainerCallback

if TYPE_CHECKING:
    from echelon.accelerator import Accelerator

__all__ = ["TimeLimitCallback"]

logger = get_logger(__name__)


class TimeLimitCallback(TrainerCallback):
    """Ends training after the step in which the limit expires, with the usual final evaluation and checkpoint."""

    def __init__(
        self, limit: timedelta, accelerator: Accelerator, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit_s = limit.total_seconds()
        self._accelerator = accelerator
        self._clock = clock
        self._started_at = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the start time."""
        self._started_at = self._clock()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop training if the limit has expired on any rank.

        Collective: call on every rank.
        """
        if self._clock() - self._started_at >= self._limit_s:
            self._accelerator.set_trigger()
        if not self._accelerator.check_trigger() or state.global_step >= state.max_steps:
            return
        logger.warning("max_time has expired, so training stops at step %d of %d", state.global_step, state.max_steps)
        control.should_training_stop = True
        control.should_evaluate |= args.eval_strategy == IntervalStrategy.STEPS
        control.should_save |= args.save_strategy == SaveStrategy.STEPS
