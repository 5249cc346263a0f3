"""``echelon.distributed.log``: writes values of a run to its folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from echelon.distributed.record.recorder import recorder_of_process


def log(values: Mapping[str, Any], step: int | None = None) -> None:
    """Record numbers such as losses in the run's folder, where ``echelon report`` finds them (``metrics.jsonl``).

    Rank 0's values are recorded; on the other ranks, and in a run that is not recorded, this function does nothing. A tensor
    on a device is read, which waits for the device. Not a collective: average values over the ranks yourself, with
    ``mean_over_ranks``.

    Args:
        values: numbers, or tensors with one element, by name; anything else is ignored.
        step: the optimizer step that they belong to (default: the last one).
    """
    recorder = recorder_of_process()
    if recorder is not None:
        recorder.log(values, step=step)
