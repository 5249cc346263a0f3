"""States of a model and of optimizers whose parameters are on the stages of a pipeline, as one process would have them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from echelon.distributed.small_messages import gather_bytes
from echelon.engines.gather_state import gather_state
from echelon.engines.state_dicts import plain_parameters

if TYPE_CHECKING:
    from echelon.engines.pipeline_parallel.pipeline import PipelineStages


def has_rank_zero(group: dist.ProcessGroup) -> bool:
    """Return whether global rank zero is in ``group``; it is the first of it then."""
    return dist.get_global_rank(group, 0) == 0


def gather_model(stages: PipelineStages, state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the whole model's state dict on rank zero; None on other ranks.

    Args:
        stages: the pipeline with rank zero.
        state: the unsharded state dict of this rank's stages.

    Collective: call on every rank of the pipeline.
    """
    found = _gather(stages.group, state)
    if found is None:
        return None
    for name, first in stages.aliases.items():
        found[name] = found[first]
    return {name: found[name] for name in stages.state_names if name in found}


def gather_optimizer(stages: PipelineStages, optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the state of an optimizer of the whole model in torch's format on rank zero; None on other ranks.

    Args:
        stages: the pipeline with rank zero.
        optimizer: the optimizer of this rank's stages.
        state: its unsharded state in torch's format.

    Collective: call on every rank of the pipeline.
    """
    groups = group_names(stages, optimizer)
    own = [name for group in _own_names(stages, optimizer) for name in group]
    flat = {
        json.dumps([own[number], key]): value
        for number, entries in state["state"].items()
        for key, value in entries.items()
    }
    found = _gather(stages.group, flat)
    if found is None:
        return None
    numbers = {name: number for number, name in enumerate(name for group in groups for name in group)}
    values: dict[int, dict[str, Any]] = {}
    for key, value in found.items():
        name, entry = json.loads(key)
        values.setdefault(numbers[name], {})[entry] = value
    return {
        **state,
        "state": dict(sorted(values.items())),
        "param_groups": [
            {**group, "params": [numbers[name] for name in names]}
            for group, names in zip(state["param_groups"], groups)
        ],
    }


def own_optimizer_state(stages: PipelineStages, optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of ``gather_optimizer``'s result that is for this rank's stages. Collective, as ``group_names``."""
    numbers: dict[str, int] = {}
    for group, names in zip(state["param_groups"], group_names(stages, optimizer)):
        numbers |= dict(zip(names, group["params"]))
    own = _own_names(stages, optimizer)
    flat = [name for group in own for name in group]
    counted = iter(range(len(flat)))
    return {
        **state,
        "state": {i: state["state"][numbers[name]] for i, name in enumerate(flat) if numbers[name] in state["state"]},
        "param_groups": [
            {**group, "params": [next(counted) for _ in names]} for group, names in zip(state["param_groups"], own)
        ],
    }


def group_names(stages: PipelineStages, optimizer: Optimizer) -> list[list[str]]:
    """Return the parameter names in each group of an optimizer of the whole model, in the model's order.

    Collective: call on every rank of the pipeline.
    """
    texts = gather_bytes(json.dumps(_own_names(stages, optimizer)).encode(), group=stages.group)
    parts: list[list[list[str]]] = [json.loads(text) for text in texts]
    place = {name: number for number, name in enumerate(stages.names)}
    return [sorted({name for names in group for name in names}, key=place.__getitem__) for group in zip(*parts)]


def _own_names(stages: PipelineStages, optimizer: Optimizer) -> list[list[str]]:
    names = {id(parameter): name for name, parameter in plain_parameters(stages.model)} | stages.copied_names()
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def _gather(group: dist.ProcessGroup, values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the values of all ranks of ``group`` on its first rank; of values with one name, the first rank's."""
    if dist.get_rank(group) == 0:
        nothing: dict[str, Any] = {}
        found = gather_state(nothing, group=group)
        assert found is not None
        return {**found, **values}
    return gather_state({name: value for name, value in values.items() if _is_sent(value)}, group=group)


def _is_sent(value: Any) -> bool:
    return value is None or isinstance(value, torch.Tensor | bool | int | float | str)
