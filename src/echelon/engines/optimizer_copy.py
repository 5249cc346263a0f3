"""Copies an optimizer without calling its constructor, to step other tensors than its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch.optim import Optimizer

from echelon.base.errors import UsageError


@runtime_checkable
class ShardsState(Protocol):
    """An optimizer that shards its state by parameter (ZeRO-1, and optimizers of whole matrices under FSDP2)."""

    rank: int

    def own_state(self) -> dict[str, Any]:
        """Return the state dict in torch's format with only this rank's part of the state."""
        ...

    def owner(self, parameter: torch.Tensor) -> int | None:
        """Return the rank that holds the whole state of ``parameter``; None if each rank has a part, as of the parameter."""
        ...


def copy_optimizer(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Return a copy of ``optimizer`` for the parameters in ``groups``, with its other attributes and its state for them.

    The copy has no hooks. Attributes are shared, and none of them may be a parameter (see ``why_not_copied``).
    """
    own = {parameter for group in groups for parameter in group["params"]}
    # Keys that are not parameters belong to the optimizer as a whole.
    state = {key: value for key, value in optimizer.state.items() if key in own or not isinstance(key, torch.Tensor)}
    # Hooks, and a scheduler's wrapper of ``step``, stay with the original.
    kept = {n: v for n, v in vars(optimizer).items() if n != "step" and not n.startswith("_optimizer_")}
    part: Optimizer = object.__new__(type(optimizer))
    Optimizer.__setstate__(part, {**kept, "param_groups": groups, "state": defaultdict(dict, state)})
    return part


def why_not_copied(optimizer: Optimizer) -> str | None:
    """Return why a copy of ``optimizer`` would not step other tensors as ``optimizer`` steps its own; None if nothing shows that."""
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        return "its step method was replaced on the instance"
    for name in ("train", "eval"):
        if hasattr(optimizer, name):
            return f"its {name}() modifies parameters"
    attribute = attribute_with_parameters(optimizer)
    if attribute is None:
        return None
    return f"its attribute {attribute!r} references parameters or an optimizer outside its groups"


def attribute_with_parameters(optimizer: Optimizer, *, or_optimizer: bool = True) -> str | None:
    """Return the name of an attribute that refers to parameters, or to another optimizer; None if there is none."""
    parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, value in vars(optimizer).items():
        if name in ("param_groups", "state"):
            continue
        items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else [value]
        if any((or_optimizer and isinstance(item, Optimizer)) or id(item) in parameters for item in items):
            return name
    return None


def load_own_state(
    optimizer: Optimizer, part: Optimizer, state_dict: Mapping[str, Any], own: Mapping[Any, Any]
) -> None:
    """Load ``own``, this rank's part of the state in ``state_dict``, by the method of the user's class, which may keep some dtypes.

    Args:
        optimizer: the optimizer that shards its state; its group dicts stay, because the user may hold references to them.
        part: the copy of the user's optimizer that steps on this rank.
        state_dict: in torch's format, with all parameter groups.
        own: by number of the parameter.
    """
    groups = part.param_groups
    part.param_groups = [dict(group) for group in optimizer.param_groups]
    try:
        part.load_state_dict({**state_dict, "state": dict(own)})
        for group, loaded in zip(optimizer.param_groups, part.param_groups):
            group.update({name: value for name, value in loaded.items() if name != "params"})
    finally:
        part.param_groups = groups
    optimizer.state = part.state


def no_full_state() -> UsageError:
    """Return the error for ``state_dict()`` of an optimizer that shards its state by parameter."""
    return UsageError(
        "state_dict() cannot return the full optimizer state, because this rank holds the state of only some parameters",
        do="use accelerator.save_state(), or call optimizer.full_state_dict() on every rank (only rank zero "
        "gets the state)",
    )
