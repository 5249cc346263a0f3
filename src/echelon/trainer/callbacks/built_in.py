"""The callbacks that a Trainer adds automatically: trackers, the time limit and progress output."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta

from echelon.accelerator import Accelerator
from echelon.trainer.arguments.training_arguments import TrainingArguments
from echelon.trainer.callbacks.callback_handler import DefaultFlowCallback, TrainerCallback
from echelon.trainer.callbacks.notebook_progress import NotebookProgressCallback
from echelon.trainer.callbacks.progress_bars import PrinterCallback, ProgressCallback
from echelon.trainer.callbacks.time_limit import TimeLimitCallback
from echelon.trainer.callbacks.trackers import CSVCallback, TrackerCallback, run_folder

__all__ = ["built_in_callbacks", "progress_callback"]


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
