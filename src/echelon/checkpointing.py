"""The names of ``accelerate.checkpointing``, so that its scripts run: re-exports only."""

from __future__ import annotations

from echelon.accelerator.checkpoint.accelerate_layout import (
    load_accelerator_state,
    load_custom_state,
    save_accelerator_state,
    save_custom_state,
)

__all__ = [
    "load_accelerator_state",
    "load_custom_state",
    "save_accelerator_state",
    "save_custom_state",
]
