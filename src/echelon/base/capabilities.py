"""What a caller may know about an engine: data, never its class."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Capabilities"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Facts of one engine that the levels above act on."""

    name: str
    """As in the registry and in messages."""
    distributed_type: str | None = None
    """What ``Accelerator.distributed_type`` says if not NO or MULTI_<device>; for scripts that read it, never branched on."""
    replicates: bool
    """Several ranks hold the whole model and meet in the gradients."""
    shards_parameters: bool = False
    """A rank holds a part of each parameter: whole state dicts need every rank."""
    shards_optimizer_state: bool = False
    """A rank holds a part of the optimizer state: whole states need every rank, and only rank zero gets them."""
    joins_uneven: bool = True
    """Ranks may run out of batches at different steps inside ``join``."""
    replaces_parameters: bool = False
    """``prepare`` swaps the parameter objects: optimizers made before it are re-pointed by name."""
    owns_loss_scaling: bool = False
    """The engine scales an fp16 loss itself; no GradScaler around it."""
    num_devices: int = 1
    """Devices of one rank that a forward pass runs on: a model that returns its loss returns one for each of them."""
    exposes_state: bool = True
    """Groups and state of the optimizers are torch's, by the model's own parameters, whole or as DTensors."""
    supports_multiple_models: bool = True
    """Several models may be prepared together."""
    takes_closures: bool = True
    """``step`` takes a closure."""
    sums_shards: bool = False
    """``build_sharded_update``: gradients can be summed in an order that does not depend on the number of ranks."""
    keeps_float64: bool = True
    """A float64 model is trained in float64, its optimizer state included."""
