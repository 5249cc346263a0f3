"""The names of ``accelerate.state``, so that its scripts run: re-exports only."""

from __future__ import annotations

from echelon.accelerator.gradient_state import GradientState
from echelon.accelerator.state import AcceleratorState, PartialState, is_initialized

__all__ = [
    "AcceleratorState",
    "GradientState",
    "PartialState",
    "is_initialized",
]
