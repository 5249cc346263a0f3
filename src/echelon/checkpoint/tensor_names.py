"""The names of model and optimizer tensors in a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from echelon.checkpoint.read import Checkpoint

__all__ = ["model_prefix", "state_keys", "state_name", "state_values"]


def model_prefix(index: int) -> str:
    """Return the prefix that a model's tensor names have in a checkpoint."""
    return f"models.{index}."


def state_name(index: int, parameter: str, key: str) -> str:
    """Return the name that a tensor in an optimizer's state has in a checkpoint."""
    return f"optimizers.{index}.{parameter}.{key}"


def state_keys(checkpoint: Checkpoint, index: int, parameters: Sequence[str]) -> dict[str, list[str]]:
    """Return the keys of the tensors in each parameter's saved optimizer state."""
    prefix = f"optimizers.{index}."
    found: dict[str, list[str]] = {name: [] for name in parameters}
    for name in checkpoint.names():
        if name.startswith(prefix):
            parameter, _, key = name.removeprefix(prefix).rpartition(".")
            found.setdefault(parameter, []).append(key)
    return found


def state_values(checkpoint: Checkpoint, index: int) -> dict[str, dict[str, Any]]:
    """Return the entries in each parameter's optimizer state that are not tensors, merged across all ranks."""
    found: dict[str, dict[str, Any]] = {}
    for rank in range(checkpoint.manifest.world_size):
        values = (checkpoint.rank_objects(rank) or {}).get("optimizer_values")
        if values is None:
            break  # no rank has such values
        found = {**values[index], **found}
    return found
