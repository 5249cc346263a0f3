"""Names the training state entries in a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from echelon.accelerator.update.optimizer import AcceleratedOptimizer
from echelon.base.errors import CheckpointError, UsageError
from echelon.base.messages.translation import gettext as _, gettext_noop as N_
from echelon.base.warnings import warn
from echelon.checkpoint.read import Checkpoint
from echelon.checkpoint.tensor_names import model_prefix
from echelon.engines.base import Engine
from echelon.engines.state_dicts import plain_parameters

KERNEL_OPTIONS = ("foreach", "fused")
"""Options of optimizers that choose how a step is computed: this run's are used, not the checkpoint's."""

_PIECE = re.compile(r"(model|optimizer|scheduler|loader|average|custom|scaler)(\[\d+\](\..+)?)?")


START_OVER = N_("to start over, use another folder for the checkpoints, or delete this checkpoint")
"""The end of an error's advice, in English."""


class Allowed:
    """The entries that may be missing from a checkpoint or from this run.

    Args:
        names: ``"scheduler"`` (all of them), ``"loader[0]"``, ``"model[0].head"`` (weights with this prefix), ...
        is_argument: whether the function that the user called takes ``allow_missing=`` and ``strict=``, for error messages.

    Raises:
        UsageError: a name is invalid.
    """

    def __init__(self, names: Collection[str] = (), *, is_argument: bool = True) -> None:
        if isinstance(names, str):
            names = (names,)
        wrong = [name for name in names if not _PIECE.fullmatch(name)]
        if wrong:
            raise UsageError(
                f"allow_missing={wrong[0]!r} is not a checkpoint entry name",
                do="use names such as 'model[0].head', 'optimizer[1]', 'scheduler', 'loader[0]', 'average[0]', 'custom[0]', 'scaler'",
            )
        self._names = tuple(names)
        self.is_argument = is_argument

    def __bool__(self) -> bool:
        return bool(self._names)

    def covers(self, piece: str) -> bool:
        """Return whether ``piece`` (``"loader[0]"``, ``"model[0].head.weight"``) may be missing."""
        return any(piece == name or piece.startswith((f"{name}[", f"{name}.")) for name in self._names)


def names_of(models: Sequence[nn.Module]) -> dict[int, str]:
    """Return the name of each parameter of all models, keyed by its id."""
    return {
        id(parameter): f"{model_prefix(i)}{name}"
        for i, model in enumerate(models)
        for name, parameter in plain_parameters(model)
    }


def frozen_names(models: Sequence[nn.Module]) -> set[str]:
    """Return the names of the parameters that do not require gradients."""
    return {
        f"{model_prefix(i)}{name}"
        for i, model in enumerate(models)
        for name, parameter in plain_parameters(model)
        if not parameter.requires_grad
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedOptimizer:
    """An optimizer with named parameters; a parameter that belongs to no model is named by its position."""

    inner: Any
    parameters: Sequence[tuple[str, torch.Tensor]]
    """Parameters in group order, which defines their numbers in torch's state dicts."""
    groups: Sequence[dict[str, Any]]
    """Parameter groups with names in place of parameters."""

    @staticmethod
    def of(optimizer: Any, names: Mapping[int, str], engine: Engine) -> NamedOptimizer:
        """Name the parameters of ``optimizer``, prepared or not, using the result of ``names_of``."""
        inner = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
        by_group = engine.parameter_groups(inner)
        flat = [parameter for group in by_group for parameter in group]
        named = [(names.get(id(parameter), f"parameter.{i}"), parameter) for i, parameter in enumerate(flat)]
        counted = iter(named)
        groups = [
            {**group, "params": [next(counted)[0] for _ in own]} for group, own in zip(inner.param_groups, by_group)
        ]
        return NamedOptimizer(inner=inner, parameters=named, groups=groups)

    def matching(
        self, saved: Sequence[dict[str, Any]], frozen: Collection[str], index: int, checkpoint: Checkpoint
    ) -> list[dict[str, Any]]:
        """Return the saved group for each group; both must contain the same parameters, in any order.

        Frozen parameters are ignored, because some engines leave them out of the groups. A group that has no others keeps its
        settings only if the saved run had no such group.

        Raises:
            CheckpointError: the groups differ.
        """

        def trained(groups: Sequence[dict[str, Any]]) -> list[set[str]]:
            return [{*group["params"]} - {*frozen} for group in groups]

        ours, theirs = trained(self.groups), trained(saved)
        if [names for names in ours if names] != [names for names in theirs if names]:
            sizes = [[len(names) for names in groups] for groups in (theirs, ours)]
            differing = sorted(set().union(*ours) ^ set().union(*theirs)) or ["the same parameters in different groups"]
            raise CheckpointError(
                f"optimizer {index} of {checkpoint.folder} has groups of {sizes[0]} parameters, but this run has groups of "
                f"{sizes[1]}; they differ in {', '.join(differing[:3])}",
                do=_(
                    "create the optimizer with the parameter groups of the saved run; {start_over}",
                    start_over=_(START_OVER),
                ),
            )
        settings = iter([group for group, names in zip(saved, theirs) if names])
        frozen_groups = _matching_frozen(
            [group for group, names in zip(self.groups, ours) if not names],
            [group for group, names in zip(saved, theirs) if not names],
        )
        found = [next(settings) if names else next(frozen_groups) for names in ours]
        for number, (own, kept) in enumerate(zip(self.groups, found)):
            self._compare_options(own, kept, number, index, checkpoint)
        return found

    def _compare_options(
        self, own: Mapping[str, Any], saved: Mapping[str, Any], number: int, index: int, checkpoint: Checkpoint
    ) -> None:
        """Raise an error if a group is that of another class of optimizer; warn of options that the checkpoint changes."""
        missing = sorted(own.keys() - saved.keys() - {"initial_lr"})
        others = sorted(saved.keys() - own.keys() - {"initial_lr"})
        kind = type(getattr(self.inner, "optim", self.inner)).__name__
        if len(missing) > 1 and len(others) > 1:  # a newer torch, or the user, may have added one
            raise CheckpointError(
                _(
                    "optimizer {index} of {folder} is of a different class: it has the options {others}, but the {kind} of "
                    "this run has {missing}",
                    index=index,
                    folder=checkpoint.folder,
                    others=", ".join(others),
                    kind=kind,
                    missing=", ".join(missing),
                ),
                do=_(
                    "create the optimizer of the saved run; to continue with a different one, load only the weights "
                    "(echelon checkpoint merge writes them to a file), and save to a different folder"
                ),
            )
        # Schedules change these in each step; most of torch's keep the learning rate of the script in initial_lr.
        scheduled = {"lr", *(("momentum", "betas") if "max_momentum" in saved else ())}
        for name in sorted(own.keys() & saved.keys() - {"params", *scheduled, *KERNEL_OPTIONS}):
            # JSON has lists for tuples.
            value, used = (list(one) if isinstance(one, tuple) else one for one in (own[name], saved[name]))
            if isinstance(value, (bool, int, float, str, list)) and value != used:
                warn(
                    _(
                        "loading the checkpoint sets {name}={used} in parameter group {number} of the {kind}, in place "
                        "of this run's {name}={value}. To change it, set optimizer.param_groups[{number}][{name!r}] "
                        "after loading",
                        name=name,
                        used=used,
                        number=number,
                        kind=kind,
                        value=value,
                    )
                )


def _matching_frozen(ours: Sequence[dict[str, Any]], saved: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the settings of each of ``ours``: of the saved group with the same parameters, else of the next other one.

    Some engines save neither frozen parameters nor their groups. Then it is unknown which of the groups are left, and the
    others of ``ours`` keep their settings.
    """
    left = list(saved)
    same: list[dict[str, Any] | None] = []
    for group in ours:
        found = next((one for one in left if {*one["params"]} == {*group["params"]}), None)
        same.append(found)
        if found is not None:
            left.remove(found)
    others = iter(left if len(left) == same.count(None) else [group for group, one in zip(ours, same) if one is None])
    for one in same:
        yield next(others) if one is None else one
