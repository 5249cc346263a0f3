"""The main process's console output: a progress bar, the logged metrics, and a summary table at the end."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm.auto import tqdm

from echelon.base.lengths import length_of
from echelon.base.progress import shows_bars
from echelon.trainer.arguments.enums import IntervalStrategy
from echelon.trainer.callbacks.callback_handler import TrainerCallback

_NOT_SHOWN = ("_runtime", "_per_second", "_time")


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
            total = length_of(eval_dataloader)  # below 0 without a length: the bar only counts
            self.prediction_bar = tqdm(
                total=total if total >= 0 else None, leave=self.training_bar is None, dynamic_ncols=True
            )
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
    """Return ``loss_rows`` formatted as a text table, or None if there are no evaluations."""
    table = loss_rows(state.log_history, by="step" if args.eval_strategy == IntervalStrategy.STEPS else "epoch")
    if table is None:
        return None
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in table)


def loss_rows(log_history: Sequence[Mapping[str, Any]], *, by: str) -> list[list[str]] | None:
    """Return the table's rows, headings first, or None if there are no evaluations.

    Args:
        log_history: log entries; each row shows the last training loss logged before its evaluation. Evaluations after the
            end of training have no row.
        by: the first column, ``epoch`` or ``step``.
    """
    rows: dict[Any, dict[str, Any]] = {}
    training: Any = None
    for entry in log_history:
        if "train_loss" in entry:  # the run's summary
            break
        training = entry.get("loss", training)
        found = {k.removeprefix("eval_"): v for k, v in entry.items() if k.startswith("eval_")}
        found = {k: v for k, v in found.items() if not any(part in f"_{k}" for part in _NOT_SHOWN)}
        if found:
            row = rows.setdefault(entry.get(by), {"training loss": training})
            row.update({_heading(name): value for name, value in found.items()})
    if not rows:
        return None
    # Sorted, because a checkpoint stores the log with sorted keys: a resumed run has the same columns as one that was not.
    losses = {"training loss": None, "validation loss": None}
    names = {name for row in rows.values() for name in row}
    headings = [*(name for name in losses if name in names), *sorted(names - losses.keys())]
    table = [[by, *headings]]
    table += [[_text(key), *(_text(row.get(name)) for name in headings)] for key, row in rows.items()]
    return table


def _heading(name: str) -> str:
    return "validation loss" if name == "loss" else name.replace("_", " ")


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
