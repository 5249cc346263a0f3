"""Describes engines to callers that must not depend on an engine's class."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Facts about one engine that higher layers rely on."""

    name: str
    """The engine's name in the registry and in messages."""
    distributed_type: str | None = None
    """Value of ``Accelerator.distributed_type``, if it is not NO or MULTI_<device>."""
    replicates: bool
    """Every rank holds the whole model, and gradients are reduced across ranks."""
    shards_parameters: bool = False
    """Each rank holds a shard of each parameter, so building a full state dict requires all ranks."""
    shards_optimizer_state: bool = False
    """Each rank holds a shard of the optimizer state, so building the full state requires all ranks; rank zero receives it."""
    joins_uneven: bool = True
    """Ranks may run out of batches at different steps inside ``join``."""
    replaces_parameters: bool = False
    """``prepare`` replaces the parameter objects; existing optimizers are updated with the new ones, matched by name."""
    owns_master_weights: bool = False
    """The engine itself keeps float32 copies of low-precision weights, which its optimizer steps."""
    owns_loss_scaling: bool = False
    """The engine scales an fp16 loss itself, without a GradScaler."""
    num_devices: int = 1
    """Number of devices that one rank uses in a forward pass. A model that returns its loss returns one loss per device."""
    exposes_state: bool = True
    """Optimizers have torch's ``param_groups`` and ``state`` for the model's parameters, as full tensors or DTensors."""
    supports_multiple_models: bool = True
    """Several models may be passed to one ``prepare`` call."""
    takes_closures: bool = True
    """``step`` takes a closure."""
    sums_shards: bool = False
    """The engine has ``build_sharded_update``, which sums gradients in an order that does not depend on the number of ranks."""
    keeps_float64: bool = True
    """A float64 model is trained in float64, including its optimizer state."""
