"""The main process's console output: a progress bar, the logged metrics, and a summary table at the end."""

from __future__ import annotations

import sys
from typing import Any

from tqdm.auto import tqdm

from echelon.base.progress import shows_bars
from echelon.trainer.arguments.enums import IntervalStrategy
from echelon.trainer.callbacks.callback_handler import TrainerCallback
from echelon.trainer.callbacks.loss_table import loss_table

__all__ = ["PrinterCallback", "ProgressCallback"]


class PrinterCallback(TrainerCallback):
    """Prints the logged metrics and, at the end of training, a table of all evaluations."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print the metrics."""
        if state.is_local_process_zero and logs:
            print(_line(logs), flush=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Print the table."""
        if state.is_world_process_zero and (table := _table(args, state)):
            print(table, flush=True)


class ProgressCallback(TrainerCallback):
    """Shows a progress bar with the latest loss and prints the logged metrics above it.

    The bar goes to stderr if that is a terminal or a notebook; metrics go to stdout.

    Args:
        max_str_len: longer strings are truncated when printed.
    """

    def __init__(self, max_str_len: int = 100) -> None:
        self.max_str_len = max_str_len
        self.training_bar: Any = None
        self.prediction_bar: Any = None
        self._shown = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the bar."""
        if state.is_world_process_zero:
            self._close("training_bar")
            self.training_bar = tqdm(total=state.max_steps, dynamic_ncols=True, disable=not shows_bars())
        self._shown = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Advance the bar."""
        if self.training_bar is not None:
            self.training_bar.update(state.global_step - self._shown)
            self._shown = state.global_step

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Advance the evaluation progress bar, which is removed afterwards."""
        if not state.is_world_process_zero or not shows_bars():
            return
        if self.prediction_bar is None:
            try:
                total = len(eval_dataloader)
            except TypeError:
                total = None  # no length: the bar only counts
            self.prediction_bar = tqdm(total=total, leave=self.training_bar is None, dynamic_ncols=True)
        self.prediction_bar.update(1)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the evaluation progress bar."""
        self._close("prediction_bar")

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Close the prediction progress bar."""
        self._close("prediction_bar")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print the metrics above the bar and show the loss in it."""
        if not state.is_world_process_zero or not logs:
            return
        if self.training_bar is not None and "loss" in logs:
            self.training_bar.set_postfix(loss=f"{logs['loss']:.4g}", refresh=False)
        tqdm.write(_line(logs, self.max_str_len))
        sys.stdout.flush()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the bar and print the table."""
        self._close("training_bar")
        if state.is_world_process_zero and (table := _table(args, state)):
            print(table, flush=True)

    def _close(self, name: str) -> None:
        bar = getattr(self, name)
        if bar is not None:
            bar.close()
        setattr(self, name, None)


def _line(logs: dict[str, Any], max_str_len: int = 100) -> str:
    return str({name: _short(value, max_str_len) for name, value in logs.items() if name != "total_flos"})


def _short(value: Any, max_str_len: int) -> Any:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str) and len(value) > max_str_len:
        return f"[text of {len(value)} characters: {value[:max_str_len]} ...]"
    return value


def _table(args: Any, state: Any) -> str | None:
    by = "step" if args.eval_strategy == IntervalStrategy.STEPS else "epoch"
    return loss_table(state.log_history, by=by)
