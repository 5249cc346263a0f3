"""The names of ``accelerate.utils.torch_xla``, so that its scripts run: re-exports only."""

from __future__ import annotations

from echelon.compat.accelerate_unsupported import install_xla

__all__ = [
    "install_xla",
]
