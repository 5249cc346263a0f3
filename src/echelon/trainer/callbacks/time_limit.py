"""The end of a training by the clock: ``max_time``."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from echelon.base.errors import ConfigError
from echelon.base.logging import get_logger
from echelon.trainer.arguments.enums import IntervalStrategy, SaveStrategy
from echelon.trainer.callbacks.callback_handler import TrainerCallback

if TYPE_CHECKING:
    from echelon.accelerator import Accelerator

__all__ = ["TimeLimitCallback", "duration"]

logger = get_logger(__name__)

_CLOCK = re.compile(r"(?:(?:(\d+):)?(\d+):)?(\d+):(\d+)")  # days:hours:minutes:seconds
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def duration(given: timedelta | float | str) -> timedelta:
    """Return a duration from seconds, ``"1:30:00"`` (hours, or days before them), or ``"90m"`` (s, m, h, d).

    Raises:
        ConfigError: it is none of these, or not positive.
    """
    seconds: float | None = None
    text = str(given).strip()
    if isinstance(given, timedelta):
        seconds = given.total_seconds()
    elif match := _CLOCK.fullmatch(text):
        days, hours, minutes, rest = (int(part or 0) for part in match.groups())
        seconds = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    else:
        number, unit = (text[:-1], _UNITS[text[-1]]) if text[-1:] in _UNITS else (text, 1.0)
        try:
            seconds = float(number) * unit
        except ValueError:
            seconds = None
    if seconds is None or not seconds > 0:
        raise ConfigError(
            f"max_time={given!r} is no duration",
            where="TrainingArguments.max_time",
            do="give seconds, 'hours:minutes:seconds', 'days:hours:minutes:seconds', or such as '90m' or '12h'",
        )
    return timedelta(seconds=seconds)


class TimeLimitCallback(TrainerCallback):
    """Ends the training after the step in which the time is over, with the evaluation and the checkpoint of an end."""

    def __init__(
        self, limit: timedelta, accelerator: Accelerator, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit_s = limit.total_seconds()
        self._accelerator = accelerator
        self._clock = clock
        self._began = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the time."""
        self._began = self._clock()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look at the clock.

        Collective: the ranks stop after the same step, when the time is over on one of them.
        """
        if self._clock() - self._began >= self._limit_s:
            self._accelerator.set_trigger()
        if not self._accelerator.check_trigger() or state.global_step >= state.max_steps:
            return
        logger.warning("max_time is over: the training ends at step %d of %d", state.global_step, state.max_steps)
        control.should_training_stop = True
        control.should_evaluate |= args.eval_strategy == IntervalStrategy.STEPS
        control.should_save |= args.save_strategy == SaveStrategy.STEPS
