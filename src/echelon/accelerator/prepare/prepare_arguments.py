"""The arguments of ``prepare``: objects of known kinds, nested as the user likes; and nested tensors, for the Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from echelon.accelerator.update.scheduler import AcceleratedScheduler
from echelon.distributed.tree import contents, is_record, leaves, map_tensors, rebuild_like
from echelon.engines.deepspeed.options import DummyOptim, DummyScheduler

__all__ = [
    "collect_known",
    "contents",
    "is_record",
    "leaves",
    "map_tensors",
    "rebuild_like",
    "replace_prepared",
]

_KNOWN = (nn.Module, Optimizer, LRScheduler, DataLoader, AcceleratedScheduler, DummyOptim, DummyScheduler)


def collect_known(argument: Any, place: bool, found: list[tuple[Any, bool]]) -> None:
    """List every object of a known kind in ``argument``, each once."""
    if isinstance(argument, _KNOWN):
        if all(argument is not known for known, _ in found):
            found.append((argument, place))
    elif isinstance(argument, (tuple, list)):
        for item in argument:
            collect_known(item, place, found)
    elif isinstance(argument, Mapping):
        for item in argument.values():
            collect_known(item, place, found)


def replace_prepared(argument: Any, originals: Mapping[int, tuple[object, Any]]) -> Any:
    """Return ``argument`` with every prepared object in the place of what it was made from."""
    if id(argument) in originals:
        return originals[id(argument)][1]
    if isinstance(argument, (tuple, list)) and not isinstance(argument, nn.Module):
        return rebuild_like(argument, [replace_prepared(item, originals) for item in argument])
    if isinstance(argument, Mapping) and not isinstance(argument, nn.Module):
        return rebuild_like(argument, {key: replace_prepared(item, originals) for key, item in argument.items()})
    return argument
