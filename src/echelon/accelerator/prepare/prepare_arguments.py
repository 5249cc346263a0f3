"""Finds objects of known types in the (possibly nested) arguments of ``prepare``; also nested tensors, for the Trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from echelon.accelerator.update.scheduler import AcceleratedScheduler
from echelon.accelerator.weight_average import WeightAverage
from echelon.base.errors import UsageError
from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import user_line, warn
from echelon.distributed.tree import contents, is_record, leaves, map_tensors, rebuild_like
from echelon.engines.deepspeed.options import DummyOptim, DummyScheduler

__all__ = [
    "check_unprepared_data",
    "contents",
    "is_record",
    "known_objects",
    "leaves",
    "map_tensors",
    "rebuild_like",
    "replace_prepared",
]

_KNOWN = (
    nn.Module,
    Optimizer,
    LRScheduler,
    DataLoader,
    AcceleratedScheduler,
    DummyOptim,
    DummyScheduler,
    WeightAverage,
)


def known_objects(
    arguments: Sequence[Any], placement: Sequence[bool | None] | None, *, default: bool
) -> list[tuple[Any, bool]]:
    """Return each object of a known type in ``arguments`` once, and whether to move it to the device.

    Raises:
        UsageError: there is no such object even though an argument is not None (a script's scheduler may be None), or
            ``placement`` does not have one entry per argument.
    """
    if placement and len(placement) != len(arguments):
        raise UsageError(
            _(
                "device_placement has {num_placement} entries for {num_arguments} arguments",
                num_placement=len(placement),
                num_arguments=len(arguments),
            ),
            do=_("pass one entry per argument"),
        )
    found: list[tuple[Any, bool]] = []
    for argument, place in zip(arguments, placement or [None] * len(arguments)):
        _collect(argument, default if place is None else place, found)
    if not found and not (arguments and all(argument is None for argument in arguments)):
        kinds = ", ".join(type(argument).__name__ for argument in arguments) or "no argument"
        raise UsageError(
            _("prepare() got no object that it can prepare: {kinds}", kinds=kinds),
            do=_("pass a torch.nn.Module, a torch Optimizer, a learning-rate scheduler or a DataLoader"),
        )
    return found


def _collect(argument: Any, place: bool, found: list[tuple[Any, bool]]) -> None:
    if isinstance(argument, _KNOWN):
        if all(argument is not known for known, _ in found):
            found.append((argument, place))
    elif isinstance(argument, (tuple, list)):
        for item in argument:
            _collect(item, place, found)
    elif isinstance(argument, Mapping):
        for item in argument.values():
            _collect(item, place, found)


def check_unprepared_data(arguments: Sequence[Any], *, num_processes: int, is_exact: bool) -> None:
    """Warn if ``prepare`` returns an argument with data unchanged, because every process then reads all of it.

    Other unchanged objects, such as text or configs, cause no warning, because they do not affect training.

    Raises:
        UsageError: an argument contains data in an exact mode.
    """
    if num_processes == 1:
        return
    found: list[tuple[Any, bool]] = []
    for argument in arguments:
        _collect(argument, False, found)
    has_loader = any(isinstance(known, DataLoader) for known, _ in found)
    for number, argument in enumerate(arguments, 1):
        if isinstance(argument, Iterator) or (not has_loader and _holds_data(argument)):
            kind = type(argument).__name__
            what = _(
                "argument {number} of prepare(), a {kind}, stays unchanged: each of the {num_processes} processes reads all "
                "of it",
                number=number,
                kind=kind,
                num_processes=num_processes,
            )
            do = _(
                "pass a DataLoader; if each process already reads different data, do not pass this object to prepare()"
            )
            if is_exact:
                raise UsageError(what, where=str(user_line()), do=do)
            warn(_("{what}. To fix it: {do}", what=what, do=do))


def _holds_data(argument: Any) -> bool:
    """Return whether ``argument`` is a dataset or contains plain tensors, such as a list of batches."""
    while isinstance(argument, (tuple, list, Mapping)) and len(argument):
        argument = next(iter(argument.values() if isinstance(argument, Mapping) else argument))
    is_dataset = isinstance(argument, Dataset) and not isinstance(argument, _KNOWN)
    return is_dataset or (isinstance(argument, torch.Tensor) and not isinstance(argument, nn.Parameter))


def replace_prepared(argument: Any, originals: Mapping[int, tuple[object, Any]]) -> Any:
    """Return ``argument`` with prepared objects in place of their originals."""
    if id(argument) in originals:
        return originals[id(argument)][1]
    if isinstance(argument, (tuple, list)) and not isinstance(argument, nn.Module):
        return rebuild_like(argument, [replace_prepared(item, originals) for item in argument])
    if isinstance(argument, Mapping) and not isinstance(argument, nn.Module):
        return rebuild_like(argument, {key: replace_prepared(item, originals) for key, item in argument.items()})
    return argument
