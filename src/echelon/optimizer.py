"""The names of ``accelerate.optimizer``, so that its scripts run: re-exports only."""

from __future__ import annotations

from echelon.accelerator.update.optimizer import AcceleratedOptimizer
from echelon.distributed.structure import send_to_device as move_to_device

__all__ = [
    "AcceleratedOptimizer",
    "move_to_device",
]
