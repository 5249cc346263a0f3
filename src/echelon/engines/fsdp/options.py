"""How the parameters of a model are sharded over the ranks: the options of the sharding engine, plain data."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from echelon.base.errors import ConfigError

__all__ = ["ShardingOptions", "wrap_nothing"]


def wrap_nothing(module: nn.Module) -> bool:
    """Return False: a ``wrap_fn`` that leaves the whole model one unit."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingOptions:
    """What is sharded, over how many ranks, in which dtypes.

    A unit is a module whose parameters are gathered together. At most one of ``wrap_classes``, ``min_num_params`` and
    ``wrap_fn`` says which modules are units; none: the classes that the model names in ``_no_split_modules``, and the model
    itself is always one.

    Raises:
        ConfigError: values that mean nothing, or contradict each other.
    """

    reshard_after_forward: bool | int = True
    """Free the whole parameters after the forward pass (ZeRO stage 3), or keep them until the backward pass (False, stage 2);
    an integer: keep them sharded over that many ranks."""
    replicas: int = 1
    """Groups of ranks that each hold the whole model in shards (the axis ``dp_replicate``); 1: all ranks are one group."""
    cpu_offload: bool = False
    """Parameters, gradients and optimizer states live on the host between their uses."""
    pin_memory: bool | None = None
    """Of what is offloaded; None: where there is an accelerator."""
    param_dtype: torch.dtype | None = None
    """Of parameters and inputs in the forward and backward pass; the optimizer keeps the model's own. None: the model's."""
    reduce_dtype: torch.dtype | None = None
    """In which gradients are summed over the ranks; None: ``param_dtype``."""
    output_dtype: torch.dtype | None = None
    """To which what a unit returns is cast; None: it is not."""
    cast_forward_inputs: bool = True
    """Cast floating-point inputs to ``param_dtype``."""
    wrap_classes: tuple[str | type[nn.Module], ...] = ()
    """The classes of the units, or their names."""
    min_num_params: int = 0
    """A module is a unit when it has so many parameters that are in no smaller unit."""
    wrap_fn: Callable[[nn.Module], bool] | None = None
    """Tells whether a module is a unit."""
    activation_checkpointing: bool = False
    """Compute the activations of each unit again in the backward pass, instead of keeping them."""
    ignored: tuple[nn.Module | nn.Parameter, ...] | str | Callable[[nn.Module], bool] = ()
    """What stays whole on every rank: modules and parameters, a regular expression for their full names, or a function that
    tells whether a module does."""
    ram_efficient_loading: bool = False
    """Only rank zero has the weights before ``prepare``: the others get theirs from it."""

    def __post_init__(self) -> None:
        if self.reshard_after_forward < 0 or self.replicas < 1 or self.min_num_params < 0:
            raise ConfigError(
                f"reshard_after_forward={self.reshard_after_forward}, replicas={self.replicas} and "
                f"min_num_params={self.min_num_params} are counts",
                do="give one replica at least, and no negative number",
            )
        chosen = [name for name in ("wrap_classes", "min_num_params", "wrap_fn") if getattr(self, name)]
        if len(chosen) > 1:
            raise ConfigError(f"{' and '.join(chosen)} both say what is a unit", do="give one of them")
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype: torch.dtype | None = getattr(self, name)
            if dtype is not None and not dtype.is_floating_point:
                raise ConfigError(f"{name}={dtype} has no fractions", do="give a floating-point dtype, or None")
        if isinstance(self.ignored, str):
            try:
                re.compile(self.ignored)
            except re.error as error:
                raise ConfigError(
                    f"ignored={self.ignored!r} is no regular expression: {error}",
                    do="give one, or the modules themselves",
                ) from None
        elif isinstance(self.ignored, tuple):
            strange = {type(one).__name__ for one in self.ignored if not isinstance(one, nn.Module | nn.Parameter)}
            if strange:
                raise ConfigError(
                    f"ignored holds a {min(strange)}", do="give modules and parameters, or a regular expression"
                )
