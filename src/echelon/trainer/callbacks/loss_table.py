"""A run's summary table: each evaluation's epoch or step, training loss and metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["loss_rows", "loss_table"]

_NOT_SHOWN = ("_runtime", "_per_second", "_time")


def loss_table(log_history: Sequence[Mapping[str, Any]], *, by: str) -> str | None:
    """Return ``loss_rows`` formatted as a text table, or None if there are no evaluations."""
    table = loss_rows(log_history, by=by)
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
