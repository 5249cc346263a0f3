"""The names of tensors in a checkpoint: of models, and of the states of optimizers by parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from echelon.checkpoint.read import Checkpoint

__all__ = ["model_prefix", "state_keys", "state_name", "state_values"]


def model_prefix(index: int) -> str:
    """Return what the names of a model's tensors begin with."""
    return f"models.{index}."


def state_name(index: int, parameter: str, key: str) -> str:
    """Return the name of a tensor in the state of an optimizer."""
    return f"optimizers.{index}.{parameter}.{key}"


def state_keys(checkpoint: Checkpoint, index: int, parameters: Sequence[str]) -> dict[str, list[str]]:
    """Return which tensors the saved state of each parameter has."""
    prefix = f"optimizers.{index}."
    found: dict[str, list[str]] = {name: [] for name in parameters}
    for name in checkpoint.names():
        if name.startswith(prefix):
            parameter, _, key = name.removeprefix(prefix).rpartition(".")
            found.setdefault(parameter, []).append(key)
    return found


def state_values(checkpoint: Checkpoint, index: int) -> dict[str, dict[str, Any]]:
    """Return what is no tensor in the state of the parameters, of whichever rank had it."""
    found: dict[str, dict[str, Any]] = {}
    for rank in range(checkpoint.manifest.world_size):
        values = (checkpoint.rank_objects(rank) or {}).get("optimizer_values")
        if values is None:
            break  # nobody has such values
        found = {**values[index], **found}
    return found
