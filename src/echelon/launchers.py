"""The names of ``accelerate.launchers``, so that its scripts run: re-exports only."""

from __future__ import annotations

from echelon.launch.notebook import debug_launcher, notebook_launcher

__all__ = [
    "debug_launcher",
    "notebook_launcher",
]
