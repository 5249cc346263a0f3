"""Progress display for notebooks: a bar, and a loss table that gains a row with each evaluation."""

from __future__ import annotations

import html
import time
from collections.abc import Callable
from typing import Any

from echelon.base.lengths import length_of
from echelon.trainer.arguments.enums import IntervalStrategy
from echelon.trainer.callbacks.callback_handler import TrainerCallback
from echelon.trainer.callbacks.progress_bars import loss_rows

# Minimum time between two redraws.
_EVERY_S = 0.2


class NotebookProgressCallback(TrainerCallback):
    """Draws the bar and the table as one HTML block and updates it in place.

    Args:
        show: displays HTML and returns a function that replaces it (default: IPython's display).
    """

    def __init__(self, show: Callable[[str], Callable[[str], None]] | None = None) -> None:
        self._show = show or _display
        self._replace: Callable[[str], None] | None = None
        self._history: list[dict[str, Any]] = []
        self._by = "epoch"
        self._evaluated: tuple[int, int | None] | None = None
        self._drawn = self._started_at = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Draw an empty bar."""
        self._by = "step" if args.eval_strategy == IntervalStrategy.STEPS else "epoch"
        self._started_at = time.time()
        self._history, self._replace, self._evaluated = [], None, None
        self._draw(state, at_once=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Advance the bar."""
        self._draw(state)

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Count the evaluation batches."""
        if self._evaluated is None:
            total = length_of(eval_dataloader)  # below 0 without a length: only the count is shown
            self._evaluated = (0, total if total >= 0 else None)
        self._evaluated = (self._evaluated[0] + 1, self._evaluated[1])
        self._draw(state)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add the metrics to the table."""
        if logs:
            self._history.append({"step": state.global_step, **logs})
            self._draw(state, at_once=True)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove the evaluation progress bar."""
        self._evaluated = None
        self._draw(state, at_once=True)

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Remove the prediction progress bar."""
        self.on_evaluate(args, state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Draw the final state; later output goes into a new block."""
        self._draw(state, at_once=True)
        self._replace = None
        self._history = []

    def _draw(self, state: Any, *, at_once: bool = False) -> None:
        now = time.time()
        if not state.is_world_process_zero or (not at_once and now - self._drawn < _EVERY_S):
            return
        self._drawn = now
        text = f"<div>{self._bar(state, now)}{self._table()}</div>"
        if self._replace is None:
            self._replace = self._show(text)
        else:
            self._replace(text)

    def _bar(self, state: Any, now: float) -> str:
        if not state.max_steps:
            done, total = self._evaluated or (0, None)
            return f"<progress value='{done}' max='{total or max(done, 1)}'></progress> [{done}/{total or '?'}]"
        done, total = state.global_step, state.max_steps
        label = f"[{done}/{total} {_clock(now - self._started_at)}"
        if done:
            label += f" &lt; {_clock((now - self._started_at) / done * (total - done))}"
        label += f", epoch {state.epoch or 0:.2f}]"
        if self._evaluated is not None:
            label += f" evaluation {self._evaluated[0]}/{self._evaluated[1] or '?'}"
        return f"<progress value='{done}' max='{total}' style='width: 300px; height: 20px;'></progress> {label}"

    def _table(self) -> str:
        rows = loss_rows(self._history, by=self._by)
        if rows is None:
            rows = [["step", "training loss"]] + [
                [str(entry["step"]), f"{entry['loss']:.6g}"] for entry in self._history if "loss" in entry
            ]
            if len(rows) == 1:
                return ""
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in rows[0])
        body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:])
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


def _display(text: str) -> Callable[[str], None]:
    from IPython import display as ipython  # noqa: PLC0415 - only available in notebooks

    display: Any = ipython
    handle = display.display(display.HTML(text), display_id=True)
    return lambda new: handle.update(display.HTML(new))
