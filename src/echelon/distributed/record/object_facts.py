"""What is recorded of the objects that a run trains with: optimizers, models and loaders."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from echelon.base.lengths import length_of

_NOT_OPTIONS = frozenset({"params", "param_names", "initial_lr", "decoupled_weight_decay"})


def optimizer_facts(optimizer: Optimizer) -> tuple[dict[str, Any], list[str]]:
    """Return the class of ``optimizer`` and its options, and the names of those that have their default values.

    The value of an option that differs between the parameter groups is a list.
    """
    groups = optimizer.param_groups
    facts: dict[str, Any] = {"class": type(optimizer).__name__}
    if len(groups) > 1:
        facts["num_groups"] = len(groups)
    for name in dict.fromkeys(name for group in groups for name in group):
        if name in _NOT_OPTIONS:
            continue
        # A schedule has already changed the rate of the first step.
        values = [
            _number(group.get("initial_lr", group.get(name)) if name == "lr" else group.get(name)) for group in groups
        ]
        if any(value is not None for value in values):
            facts[name] = values[0] if all(value == values[0] for value in values) else values
    preset = _preset_options(type(optimizer))
    return facts, [name for name, value in facts.items() if name != "lr" and name in preset and preset[name] == value]


def _preset_options(kind: type[Optimizer]) -> dict[str, Any]:
    try:
        parameters = inspect.signature(kind).parameters.values()
    except (TypeError, ValueError):  # a class whose constructor is not written in Python
        return {}
    return {one.name: one.default for one in parameters if one.default is not one.empty}


def _number(value: Any) -> Any:
    """Return a tensor on the CPU as a number. Reading one on a device would wait for it, so that it is unknown."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.item() if value.is_cpu and value.numel() == 1 else None


def parameter_counts(parameters: Iterable[torch.Tensor]) -> dict[str, int]:
    """Return the number of parameters, and of those that are trained; empty if the shape of one is not known yet."""
    found = list(parameters)
    if any(isinstance(one, UninitializedParameter) for one in found):
        return {}
    return {
        "num_parameters": sum(one.numel() for one in found),
        "num_trainable_parameters": sum(one.numel() for one in found if one.requires_grad),
    }


def model_facts(model: nn.Module) -> dict[str, Any]:
    """Return the class of ``model`` and its numbers of parameters. Call it before an engine shards them."""
    return {"class": type(model).__name__, **parameter_counts(model.parameters())}


def loader_facts(loader: DataLoader[Any], *, total_batch_size: int | None) -> dict[str, Any]:
    """Return the class and length of the dataset and the sizes of batches, as far as they are known.

    Args:
        loader: the user's loader.
        total_batch_size: samples of all ranks in one step.
    """
    length = length_of(loader.dataset)
    facts = {
        "dataset": type(loader.dataset).__name__,
        "dataset_length": None if length < 0 else length,
        "batch_size": loader.batch_size,
        "total_batch_size": total_batch_size,
    }
    return {name: value for name, value in facts.items() if value is not None}
