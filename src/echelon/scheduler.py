"""The names of ``accelerate.scheduler``, so that its scripts run: re-exports only."""

from __future__ import annotations

from echelon.accelerator.update.scheduler import AcceleratedScheduler

__all__ = [
    "AcceleratedScheduler",
]
