"""The names of ``accelerate.utils.tqdm``, so that its scripts run: re-exports only."""

from __future__ import annotations

from echelon.accelerator.progress_bar import tqdm

__all__ = [
    "tqdm",
]
