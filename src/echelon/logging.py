"""The names of ``accelerate.logging``, so that its scripts run: re-exports only."""

from __future__ import annotations

from echelon.accelerator.logging import MultiProcessAdapter, get_logger

__all__ = [
    "MultiProcessAdapter",
    "get_logger",
]
