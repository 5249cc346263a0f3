"""The names of model and optimizer tensors in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from echelon.checkpoint.read import Checkpoint


def model_prefix(index: int) -> str:
    """Return the prefix that a model's tensor names have in a checkpoint."""
    return f"models.{index}."


def state_name(index: int, parameter: str, key: str) -> str:
    """Return the name that a tensor in an optimizer's state has in a checkpoint."""
    return f"optimizers.{index}.{parameter}.{key}"


def average_name(index: int, optimizer: int, parameter: str) -> str:
    """Return the name that the average of a parameter of an optimizer has in a checkpoint."""
    return f"averages.{index}.{optimizer}.{parameter}"


def averages_of(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the names of the first averages of the weights, by the weights' names (each of the names of tied weights)."""
    aliases = checkpoint.manifest.aliases
    found: dict[str, str] = {}
    for name in checkpoint.names():
        if name.startswith("averages.0."):
            weight = name.split(".", maxsplit=3)[3]
            found[aliases.get(weight, weight)] = name
    return {name: found[first] for name in checkpoint.names() if (first := aliases.get(name, name)) in found}


def rest_of_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an optimizer's state dict has beside its groups and its state by parameter.

    ``state`` of the result is the state under keys that are no parameters, if there is any. (Torch numbers the parameters, and
    FSDP's full state dicts name them.)
    """
    parameters = {parameter for group in state["param_groups"] for parameter in group["params"]}
    others = {key: value for key, value in state["state"].items() if key not in parameters}
    rest = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
    return {**rest, "state": others} if others else rest


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
