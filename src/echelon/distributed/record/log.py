"""``echelon.distributed.log`` and ``log_hyperparameters``: write values of a run to its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from echelon.distributed.record.recorder import recorder_of_process
from echelon.status.hyperparameters import checked_hyperparameters


def log(values: Mapping[str, Any], step: int | None = None) -> None:
    """Record numbers such as losses in the run's folder, where ``echelon report`` finds them (``metrics.jsonl``).

    Rank 0's values are recorded; on the other ranks, and in a run that is not recorded, this function does nothing. A tensor
    on a device is read, which waits for the device. Not a collective: average values over the ranks yourself, with
    ``mean_over_ranks``.

    Args:
        values: numbers, or tensors with one element, by name; anything else is ignored.
        step: the optimizer step that they belong to (default: the last one).

    Examples:
        >>> log({"loss": loss, "learning rate": 0.1}, step=10)
    """
    recorder = recorder_of_process()
    if recorder is not None:
        recorder.log(values, step=step)


def log_hyperparameters(values: Mapping[str, Any]) -> None:
    """Record what this run is run with, such as the arguments of its script, where ``echelon runs compare`` and the report show it.

    Rank 0's values are recorded (``hyperparameters.jsonl``); a later call adds names, or replaces the values of equal ones. Values
    whose names suggest a secret (token, key, password, ...) are replaced by ``***``. Optimizers, models and loaders are recorded
    without this call. Not a collective. In a run that is not recorded, only the check of the values takes place.

    Args:
        values: texts, numbers, booleans, None, and lists and dicts of these, by name; ``vars(args)`` of an argparse namespace.

    Raises:
        UsageError: a name is not a text, or a value is of another type.

    Examples:
        >>> log_hyperparameters({"learning_rate": 0.1, "optimizer": {"momentum": 0.9}})
    """
    checked = checked_hyperparameters(values, where="log_hyperparameters()")
    recorder = recorder_of_process()
    if recorder is not None:
        recorder.log_hyperparameters("logged", checked)


def record_object(kind: str, facts: Mapping[str, Any], defaults: Sequence[str] = ()) -> None:
    """Record the facts of an optimizer, a model or a loader; a second of its kind is named ``kind 2``."""
    recorder = recorder_of_process()
    if recorder is not None:
        recorder.add_object(kind, facts, defaults)
