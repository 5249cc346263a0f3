"""Facts about engines, for callers that must not depend on the class of an engine."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Capabilities"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Facts about one engine for the layers above."""

    name: str
    """The name in the registry and in messages."""
    distributed_type: str | None = None
    """``Accelerator.distributed_type`` if it is not NO or MULTI_<device>."""
    replicates: bool
    """Several ranks hold the whole model and reduce gradients."""
    shards_parameters: bool = False
    """A rank holds a shard of each parameter: every rank takes part in a full state dict."""
    shards_optimizer_state: bool = False
    """A rank holds a shard of the optimizer state: every rank takes part in a full state, and rank zero gets it."""
    joins_uneven: bool = True
    """Ranks may run out of batches at different steps inside ``join``."""
    replaces_parameters: bool = False
    """``prepare`` replaces the parameter objects: existing optimizers get the new ones, matched by name."""
    owns_loss_scaling: bool = False
    """The engine scales an fp16 loss itself, without a GradScaler."""
    num_devices: int = 1
    """Number of devices of one rank in a forward pass; a model that returns its loss returns one per device."""
    exposes_state: bool = True
    """The optimizers have torch's param groups and state for the model's parameters, whole or as DTensors."""
    supports_multiple_models: bool = True
    """Several models may be prepared together."""
    takes_closures: bool = True
    """``step`` takes a closure."""
    sums_shards: bool = False
    """It has ``build_sharded_update``, which sums gradients in an order that does not depend on the number of ranks."""
    keeps_float64: bool = True
    """A float64 model trains in float64, including its optimizer state."""
