"""The names of ``accelerate.parallelism_config``, so that its scripts run: re-exports only."""

from __future__ import annotations

from echelon.accelerator.plugins.parallelism_config import ParallelismConfig

__all__ = [
    "ParallelismConfig",
]
