"""The fsdp2 engine's options, as plain data."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from echelon.base.errors import ConfigError
from echelon.config.schema import ActivationMode
from echelon.engines.tensor_parallel.options import TensorParallelOptions


def wrap_nothing(module: nn.Module) -> bool:
    """Return False. As ``wrap_fn``, this makes the whole model one unit."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingOptions:
    """Options for sharding a model.

    A unit is a module whose parameters are all-gathered together. At most one of ``wrap_classes``, ``min_num_params`` and
    ``wrap_fn`` selects the units (default: the classes in the model's ``_no_split_modules``). The model itself is always a
    unit.

    Raises:
        ConfigError: values are invalid or conflict with each other.
    """

    reshard_after_forward: bool | int = True
    """True reshards parameters after the forward pass (ZeRO stage 3), False keeps them unsharded until the backward pass
    (ZeRO stage 2), and an integer reshards them across this number of ranks."""
    replicas: int = 1
    """Number of sharded model replicas (the size of the mesh axis ``dp_replicate``)."""
    cpu_offload: bool = False
    """Whether to keep parameters, gradients and optimizer states on the CPU when they are not in use."""
    pin_memory: bool | None = None
    """Whether to pin offloaded tensors. None pins them if there is an accelerator."""
    param_dtype: torch.dtype | None = None
    """Dtype of parameters and inputs in forward and backward passes, but not in the optimizer. None keeps the model's dtype."""
    reduce_dtype: torch.dtype | None = None
    """Dtype in which gradients are reduced. None uses ``param_dtype``."""
    output_dtype: torch.dtype | None = None
    """Dtype that a unit's outputs are cast to. None does not cast them."""
    cast_forward_inputs: bool = True
    """Whether to cast floating-point inputs to ``param_dtype``."""
    wrap_classes: tuple[str | type[nn.Module], ...] = ()
    """Classes (or class names) of the modules that become units."""
    min_num_params: int = 0
    """Minimum number of parameters in a unit, excluding units inside it."""
    wrap_fn: Callable[[nn.Module], bool] | None = None
    """Function that returns whether a module is a unit."""
    activation_checkpointing: ActivationMode = "none"
    """What each unit keeps for the backward pass, in which it is recomputed."""
    ignored: tuple[nn.Module | nn.Parameter, ...] | str | Callable[[nn.Module], bool] = ()
    """Modules and parameters that are not sharded: the objects, a regular expression for their full names, or a function that
    returns whether to ignore a module."""
    ram_efficient_loading: bool = False
    """Whether only rank zero has the weights until ``prepare`` sends them to the other ranks."""
    mesh: DeviceMesh | None = None
    """The mesh over whose last axis parameters are sharded, and over whose first of two axes they are replicated. It is a part of a
    larger mesh if there are other axes (``ParallelismConfig``). None: all ranks, in ``replicas`` groups."""
    exchanges_activations: bool = False
    """Whether ranks with different items exchange activations (context, sequence or expert parallelism), so that a rank's parameters
    also get gradients from the other ranks' losses."""
    expert_mesh: DeviceMesh | None = None
    """The mesh (dp_replicate, efsdp, ep) of the parameters of experts. None: they are sharded like the others."""
    tensor_parallel: TensorParallelOptions | None = None
    """How layers are split over another axis of the larger mesh. None: they are not."""

    def __post_init__(self) -> None:
        if self.reshard_after_forward < 0 or self.replicas < 1 or self.min_num_params < 0:
            raise ConfigError(
                f"at least one of reshard_after_forward={self.reshard_after_forward}, replicas={self.replicas} and "
                f"min_num_params={self.min_num_params} is out of range",
                do="set replicas to at least 1 and the other two to at least 0",
            )
        chosen = [name for name in ("wrap_classes", "min_num_params", "wrap_fn") if getattr(self, name)]
        if len(chosen) > 1:
            raise ConfigError(
                f"{', '.join(chosen)} cannot be combined, because each of them selects the FSDP units",
                do="set only one of them",
            )
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype: torch.dtype | None = getattr(self, name)
            if dtype is not None and not dtype.is_floating_point:
                raise ConfigError(
                    f"expected {name} to be a floating-point dtype, but got {dtype}",
                    do="set a floating-point dtype or None",
                )
        if isinstance(self.ignored, str):
            try:
                re.compile(self.ignored)
            except re.error as error:
                raise ConfigError(
                    f"ignored={self.ignored!r} is not a valid regular expression: {error}",
                    do="pass a valid regular expression, or the modules themselves",
                ) from None
        elif isinstance(self.ignored, tuple):
            strange = {type(one).__name__ for one in self.ignored if not isinstance(one, nn.Module | nn.Parameter)}
            if strange:
                raise ConfigError(
                    f"expected modules and parameters in ignored, but got {min(strange)}",
                    do="pass modules and parameters, or a regular expression",
                )
