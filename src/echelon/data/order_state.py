"""Reads the position in a pass from a loader's saved ``order_state``, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def is_within_training_pass(state: Mapping[str, Any]) -> bool:
    """Return whether a loader's ``order_state`` was saved during a training pass."""
    record = state.get("pass")
    if record is not None:
        return bool(record["is_within"] and record["trains"])
    exact = state.get("exact")
    return bool(state.get("is_within")) if exact is None else bool(exact["position"])


def is_of_evaluation(state: Mapping[str, Any]) -> bool:
    """Return whether the latest pass in a loader's ``order_state`` was an evaluation pass."""
    record = state.get("pass")
    return record is not None and not record["trains"]


def position_in_epoch(state: Mapping[str, Any], *, num_ranks: int) -> dict[str, Any]:
    """Return where a loader's saved ``order_state`` continues.

    Args:
        num_ranks: number of ranks that saved it.

    Returns:
        ``epoch``; ``batches``, the number of batches that each rank has read in this epoch (None in exact modes, where it depends on
        the number of ranks); ``samples``, the number that all ranks together have read; ``num_samples``, the number of samples of an
        epoch; ``trains``, whether the loader's last pass was a training pass. Numbers that are unknown are None.
    """
    facts, record, exact = state.get("data") or {}, state.get("pass"), state.get("exact")
    total = facts.get("num_samples") if facts.get("num_drawn") is None else facts["num_drawn"]
    found = {"num_samples": total, "trains": None if record is None else bool(record["trains"])}
    if exact is not None:
        return {"epoch": exact["epoch"], "batches": None, "samples": exact["position"], **found}
    if not state.get("is_within"):
        return {"epoch": state["iteration"], "batches": 0, "samples": 0, **found}
    if record is None:  # a checkpoint was loaded, and no pass has started since
        return {"epoch": state["iteration"], "batches": None, "samples": None, **found}
    batch_size, split_batches, given = facts.get("batch_size"), facts.get("split_batches", False), record["num_given"]
    size = samples_of_a_step(batch_size, split_batches=split_batches, num_ranks=num_ranks)
    return {
        "epoch": record["epoch"],
        "batches": given,
        "samples": None if size is None else given * size,
        **found,
    }


def samples_of_a_step(batch_size: int | None, *, split_batches: bool, num_ranks: int) -> int | None:
    """Return the number of samples that all ranks together read in a step, or None if it is unknown."""
    if batch_size is None:
        return None
    return batch_size if split_batches else batch_size * num_ranks
