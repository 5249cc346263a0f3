"""The names of ``accelerate.utils.rich``, so that its scripts run: re-exports only."""

from __future__ import annotations

from echelon.base.rich_errors import install

__all__ = [
    "install",
]
