"""The names of ``accelerate.big_modeling``, so that its scripts run: re-exports only."""

from __future__ import annotations

from echelon.accelerator.models.load_pretrained import init_empty_weights, init_on_device, load_checkpoint_and_dispatch
from echelon.compat.accelerate_unsupported import (
    attach_layerwise_casting_hooks,
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
)

__all__ = [
    "attach_layerwise_casting_hooks",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
]
