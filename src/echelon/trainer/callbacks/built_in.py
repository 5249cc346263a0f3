"""The callbacks that a Trainer adds automatically: trackers, the time limit and progress output."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from echelon.accelerator import Accelerator
from echelon.base.logging import get_logger
from echelon.base.messages.translation import gettext_noop as N_
from echelon.trainer.arguments.enums import IntervalStrategy, SaveStrategy
from echelon.trainer.arguments.training_arguments import TrainingArguments
from echelon.trainer.callbacks.callback_handler import DefaultFlowCallback, TrainerCallback
from echelon.trainer.callbacks.notebook_progress import NotebookProgressCallback
from echelon.trainer.callbacks.progress_bars import PrinterCallback, ProgressCallback
from echelon.trainer.callbacks.trackers import CSVCallback, TrackerCallback, run_folder

logger = get_logger(__name__)


def built_in_callbacks(
    args: TrainingArguments, accelerator: Callable[[], Accelerator]
) -> list[TrainerCallback | type[TrainerCallback]]:
    """Return the callbacks that run before the user's callbacks."""
    found: list[TrainerCallback | type[TrainerCallback]] = [DefaultFlowCallback]
    if args.report_to:
        folder = run_folder(args)
        if list(args.report_to) != ["csv"]:
            found.append(TrackerCallback(accelerator, folder))
        if "csv" in args.report_to:
            found.append(CSVCallback(folder))
    if args.max_time is not None:
        assert isinstance(args.max_time, timedelta), args.max_time
        found.append(TimeLimitCallback(args.max_time, accelerator()))
    return found


def progress_callback(args: TrainingArguments) -> type[TrainerCallback]:
    """Return the callback that shows progress as plain text, a terminal progress bar or a notebook progress bar."""
    if args.disable_tqdm:
        return PrinterCallback
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    in_notebook = shell is not None and "IPKernelApp" in shell.config  # False for IPython in a terminal
    return NotebookProgressCallback if in_notebook else ProgressCallback


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
        logger.warning(
            N_("max_time has expired, so training stops at step %d of %d"), state.global_step, state.max_steps
        )
        control.should_training_stop = True
        control.should_evaluate |= args.eval_strategy == IntervalStrategy.STEPS
        control.should_save |= args.save_strategy == SaveStrategy.STEPS
