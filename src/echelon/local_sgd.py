"""The names of ``accelerate.local_sgd``, so that its scripts run: re-exports only."""

from __future__ import annotations

from echelon.accelerator.update.local_sgd import LocalSGD

__all__ = [
    "LocalSGD",
]
